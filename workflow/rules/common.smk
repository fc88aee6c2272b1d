"""What the other files ask about a study: its policies, arms, seeds, files and command line arguments.

Needs: the checked configuration (`config`, `STUDIES`).
Makes: nothing; functions only.
"""

import json

from kvstages.digests import stage_digest
from kvstages.names import budget_text, greedy_policy, layer_name


def code(stage):
    """Digest of the modules that a stage imports, so that an edit reruns what it affects and nothing else."""
    return stage_digest(stage)


def study_config(study):
    """The configuration of a study, as its file in config/studies says."""
    return STUDIES[study]


def layers(study):
    """Names of the decoder's layers: 00, 01, ..."""
    return [layer_name(layer) for layer in range(STUDIES[study]["layers"])]


def greedy_policies(study):
    """Names of the greedy policies, one a budget, in the order of the configuration."""
    return [greedy_policy(budget) for budget in STUDIES[study]["budgets"]]


def policies(study):
    """Names of all policies: dense, uniform, greedy."""
    return ["bf16", *STUDIES[study]["precisions"], *greedy_policies(study)]


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
    """Policies that every adapted model is evaluated with: the first budget's, and dense."""
    return [greedy_policies(study)[0], "bf16"]


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


def precision_arguments(wildcards):
    """The quantized precisions of a study, as arguments of `sweep`."""
    return [part for precision in STUDIES[wildcards.study]["precisions"] for part in ("--precision", precision)]


def allocation_arguments(wildcards):
    """How a policy comes to be, as arguments of `allocate`."""
    budget = budget_text(wildcards.policy)
    if budget is None:
        return ["--allocator", "uniform", "--precision", wildcards.policy]
    return ["--allocator", "greedy", "--budget", budget]


def device_arguments():
    """Device and thread count of the torch stages; the count is fixed, for sums depend on it."""
    return ["--device", config["device"], "--threads", config["threads"]]


def execution_arguments(wildcards):
    """How the decoder runs: path, arithmetic, storage of dense heads, device, threads, working memory."""
    study = STUDIES[wildcards.study]
    return [
        *("--execution", study["execution"], "--arithmetic", study["arithmetic"]),
        *("--dense-storage", study["dense_storage"], *device_arguments(), "--memory-mb", config["memory_mb"]),
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
        *("--arithmetic", study["arithmetic"], *device_arguments()),
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
        *(f"sweep/layer-{layer}.csv" for layer in layers(study)),
        "sensitivity.csv",
        *(f"policies/{policy}/{name}" for policy in policies(study) for name in policy_files),
        *(f"{folder}/{name}" for folder in adapted for name in ("model.safetensors", "curve.csv")),
        *(
            f"{folder}/{policy}/{name}"
            for folder in adapted
            for policy in adapted_policies(study)
            for name in ("evaluation.json", "positions.csv")
        ),
    ]
    return [*(f"results/{study}/{name}" for name in files), *figure_files(study), *table_files(study)]


def manifest_files(study):
    """The record of a study and the checksums of its results."""
    return [f"results/{study}/manifest.json", f"results/{study}/SHA256SUMS"]
