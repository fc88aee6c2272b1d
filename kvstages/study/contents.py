"""What there is in a study: its policies, budgets, arms, runs and sources of scores, from its configuration.

Lists of names come in one order, whatever the order of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvstages.cache.precision_grid import LAYER, UNITS
from kvstages.cache.precisions import by_size
from kvstages.cache.schemes import precision
from kvstages.policies.budgets import Budget
from kvstages.policies.names import ENGINES, layer_name, policy_name, policy_order, split_policy
from kvstages.policies.recipes import parse_recipe
from kvstages.study import arms
from kvstages.study.pinned import is_gguf

# Names of sources of scores: from gradients; of a sample of units, measured; measured in BF16, as published.
GRADIENTS = "gradients"
SAMPLE = "sample"
PUBLISHED = "measured-bfloat16"
# Folder of the references of the FP32 model that stores keys and values exactly.
EXACT_CACHE = "exact-cache"
# Folder of the model before training, among those of the adapted ones.
BEFORE = (arms.ORIGINAL, "0")


@dataclass(frozen=True)
class Contents:
    """One study: ``settings`` are those of its file in config/studies, ``shared`` those of config/config.yaml."""

    name: str
    settings: Mapping[str, Any]
    shared: Mapping[str, Any]

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
    def identifier(self) -> str:
        """The study's name, as part of the name of a rule."""
        return self.name.replace("-", "_")

    @property
    def scored_precisions(self) -> list[str]:
        """Precisions that units are scored at: the study's own, and those of a comparison."""
        precisions = set(self.settings["precisions"])
        if self.compares:
            precisions |= {"int8", "int4", *self.settings["comparison"]["precisions"]}
            precisions.update(name for recipe in self.more_recipes for name in parse_recipe(recipe).precisions)
        return by_size(precisions)

    @property
    def more_recipes(self) -> list[str]:
        """The recipes that the study's comparison adds."""
        return list(self.settings["comparison"].get("recipes", ()))
