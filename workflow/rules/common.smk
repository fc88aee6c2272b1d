"""What the other files ask about a study: its policies, arms, seeds, files and command line arguments.

Needs: the checked configuration (`config`, `STUDIES`).
Makes: nothing; functions only.
"""

import json

from kvstages.provenance.code import stage_digest
from kvstages.cache.precision_grid import PARTS, UNITS
from kvstages.policies.names import layer_name, policy_name, split_policy
from kvstages.cache.precisions import by_size
from kvstages.scores.columns import BF16_STEP, FLOOR

# Name of the source of scores from gradients.
GRADIENTS = "gradients"


def code(stage):
    """Digest of the modules that a stage imports, so that an edit reruns what it affects and nothing else."""
    return stage_digest(stage)


def study_config(study):
    """The configuration of a study, as its file in config/studies says."""
    return STUDIES[study]


def layers(study):
    """Names of the decoder's layers: 00, 01, ..."""
    return [layer_name(layer) for layer in range(STUDIES[study]["layers"])]


def source(study):
    """The sensitivities that the study's policies come from."""
    settings = STUDIES[study]
    return GRADIENTS if settings["sensitivity"] == GRADIENTS else f"measured-{settings['compute_dtype']}"


def sensitivity_sources(study):
    """All sources of a study's sensitivities: its own; a comparison has gradients and measurements, in BF16 too."""
    measured = [f"measured-{dtype}" for dtype in sweep_dtypes(study)]
    return [*measured, GRADIENTS] if "comparison" in STUDIES[study] or not measured else measured


def source_file(wildcards):
    """Path of the sensitivity table that the study's policies come from."""
    return f"results/{wildcards.study}/scores/{source(wildcards.study)}.csv"


def sweep_dtypes(study):
    """Arithmetics that sensitivities are measured in: the study's own (none where it takes its scores from gradients);
    a comparison needs them all, and BF16, as published."""
    own = STUDIES[study]["compute_dtype"]
    if "comparison" in STUDIES[study]:
        return list(dict.fromkeys([own, "bfloat16"]))
    return [] if source(study) == GRADIENTS else [own]


def allocated_policies(study):
    """Names of the policies of every allocator and budget, in the order of the configuration."""
    settings = STUDIES[study]
    return [policy_name(allocator, budget) for allocator in settings["allocators"] for budget in settings["budgets"]]


def greedy_policies(study):
    """Names of the greedy policies among them."""
    return [policy for policy in allocated_policies(study) if split_policy(policy)[0] == "greedy"]


def policies(study):
    """Names of all policies: dense, uniform, allocated."""
    return ["bf16", *STUDIES[study]["precisions"], *allocated_policies(study)]


def arms(study):
    """Names of the adaptation's arms."""
    return list(STUDIES[study]["adaptation"]["arms"])


def adapted_models(study):
    """Folders of the adapted models; an arm without noise draws nothing at random and runs with the first seed only."""
    settings = STUDIES[study]["adaptation"]
    return [
        f"adaptation/{arm}/seed-{seed}"
        for arm, options in settings["arms"].items()
        for seed in (settings["seeds"] if options["noise_bits"] else settings["seeds"][:1])
    ]


def adapted_policies(study):
    """Policies that every adapted model is evaluated with: the first allocator's of the first budget, and dense."""
    return [allocated_policies(study)[0], "bf16"]


def artifact(study, name):
    """Path of a pinned artifact once fetched, under the file name that it has at its source."""
    filename = Path(STUDIES[study]["artifacts"]["files"][name]["path"]).name
    return f"resources/{study}/{name}/{filename}"


def artifact_sha256(wildcards):
    """The pinned sha256 of an artifact."""
    return STUDIES[wildcards.study]["artifacts"]["files"][wildcards.artifact]["sha256"]


def artifact_arguments(wildcards):
    """Where an artifact comes from and which sha256 it must have, as arguments of `fetch`."""
    artifacts = STUDIES[wildcards.study]["artifacts"]
    pinned = artifacts["files"][wildcards.artifact]
    revision = ["--revision", artifacts["revision"]] if artifacts["source"] == "hub" else []
    return [
        *("--source", artifacts["source"], "--location", artifacts["location"], *revision),
        *("--path", pinned["path"], "--sha256", pinned["sha256"]),
    ]


def window_arguments(wildcards):
    """The windows of a study, as arguments of `windows`."""
    windows = STUDIES[wildcards.study]["windows"]
    return [part for name, (start, end) in windows.items() for part in ("--window", f"{name}={start}:{end}")]


def trial_arguments(wildcards):
    """What a sweep tries on every head, as arguments of `sweep`: parts, precisions, and the null interventions.

    A comparison needs every part of a head at all of its precisions, in BF16 arithmetic whole heads.
    """
    study = STUDIES[wildcards.study]
    parts, precisions = UNITS[study["unit"]], set(study["precisions"])
    if "comparison" in study:
        parts = PARTS if wildcards.dtype == study["compute_dtype"] else UNITS["head"]
        precisions |= {"int8", "int4", *study["comparison"]["precisions"]}
    tried = by_size(precisions)
    return [
        *(word for part in parts for word in ("--part", part)),
        *(word for precision in [*tried, FLOOR, BF16_STEP] for word in ("--precision", precision)),
    ]


def allocation_arguments(wildcards):
    """How a policy comes to be, as arguments of `allocate`."""
    study = STUDIES[wildcards.study]
    allocator, budget = split_policy(wildcards.policy)
    if budget is None:
        return ["--allocator", "uniform", "--precision", wildcards.policy, "--unit", study["unit"]]
    precisions = ",".join(study["precisions"])
    return ["--allocator", allocator, "--budget", budget, "--unit", study["unit"], "--precisions", precisions]


def device_arguments():
    """Device and thread count of the torch stages; the count is fixed, for sums depend on it."""
    return ["--device", config["device"], "--threads", config["threads"]]


def execution_arguments(wildcards):
    """How the decoder runs: path, arithmetic (a sweep's own, where it has one), device, threads, working memory."""
    study = STUDIES[wildcards.study]
    dtype = dict(wildcards.items()).get("dtype", study["compute_dtype"])
    return [
        *("--execution", study["execution"], "--compute-dtype", dtype),
        *(*device_arguments(), "--memory-mb", config["memory_mb"]),
    ]


def training_arguments(wildcards):
    """The adaptation's settings for one arm and seed, as arguments of `adapt`."""
    study = STUDIES[wildcards.study]
    settings = study["adaptation"]
    bits = settings["arms"][wildcards.arm]["noise_bits"]
    return [
        *(["--no-noise"] if bits is None else ["--noise-bits", bits]),
        *("--seed", wildcards.seed, "--steps", settings["steps"], "--batch", settings["batch"]),
        *("--learning-rate", settings["learning_rate"], "--weight-decay", settings["weight_decay"]),
        *("--clip", settings["clip"], "--beta", settings["beta"]),
        *("--compute-dtype", study["compute_dtype"], *device_arguments()),
    ]


def manifest_settings(wildcards):
    """The configuration used for a study, as JSON for the manifest."""
    shared = {key: value for key, value in config.items() if key != "studies"}
    return json.dumps({"shared": shared, "study": STUDIES[wildcards.study]}, sort_keys=True)


def study_inputs(study):
    """Every pinned artifact of a study, and the converted weights."""
    return [*(artifact(study, name) for name in ARTIFACTS), f"resources/{study}/model.safetensors"]


def pinned_arguments(wildcards):
    """The pinned artifacts of a study, as arguments of `manifest`."""
    return [part for name in ARTIFACTS for part in ("--artifact", f"{name}={artifact(wildcards.study, name)}")]


def made_arguments(wildcards):
    """Everything else that rules made of a study, each with its rule, as arguments of `manifest`."""
    pinned = {artifact(wildcards.study, name) for name in ARTIFACTS}
    files = [path for path in study_inputs(wildcards.study) + study_outputs(wildcards.study) if path not in pinned]
    return [f"{rule_of(path)}={path}" for path in files]


def rule_of(path):
    """Name of the rule that makes a file."""
    return next(rule.name for rule in workflow.rules if rule.is_producer(path))


def study_outputs(study):
    """Every result of a study but its manifest: the outputs of all stages, not only of the last."""
    policy_files = ["policy.json", "steps.csv", "evaluation.json", "positions.csv"]
    adapted = adapted_models(study)
    files = [
        "windows.safetensors",
        "reference/validation.safetensors",
        *(f"sweep/{dtype}/layer-{layer}.csv" for dtype in sweep_dtypes(study) for layer in layers(study)),
        *(f"scores/{name}.csv" for name in sensitivity_sources(study)),
        *(["gradients/projections.safetensors"] if GRADIENTS in sensitivity_sources(study) else []),
        *(f"policies/{policy}/{name}" for policy in policies(study) for name in policy_files),
        *(f"{folder}/{name}" for folder in adapted for name in ("model.safetensors", "curve.csv")),
        *(
            f"{folder}/{policy}/{name}"
            for folder in adapted
            for policy in adapted_policies(study)
            for name in ("evaluation.json", "positions.csv")
        ),
        *comparison_files(study),
    ]
    return [*(f"results/{study}/{name}" for name in files), *figure_files(study), *table_files(study)]


def manifest_files(study):
    """The record of a study and the checksums of its results."""
    return [f"results/{study}/manifest.json", f"results/{study}/SHA256SUMS"]
