"""What the workflow asks about a study: its files in one order, its figures and tables, arguments."""

from __future__ import annotations

import itertools
import re
from typing import Any

import click
import pytest
from conftest import COMPARISON, DOMAINS, EXPORT, GENERATION, REPOSITORY, SCREENING, SHARED, STUDY

from kvstages.analysis.entries import Entry, Input, entries
from kvstages.cli import main
from kvstages.export.engines import ENGINES
from kvstages.study.arguments import options_of
from kvstages.study.layout import Studies, Study
from kvstages.study.paths import EXPORT_FILES

FIGURES, TABLES = entries("kvstages.figures"), entries("kvstages.tables")
FILES = {name: {"path": f"deep/{name}.bin", "sha256": 64 * "0"} for name in ("checkpoint", "shard")}
PLAIN = {**STUDY, "artifacts": {"source": "local", "location": "/models", "files": FILES}}
COMPARED = {**PLAIN, "comparison": COMPARISON}
FULL = {**COMPARED, "screening": SCREENING, "export": EXPORT, "generation": GENERATION, "domains": DOMAINS}


def study(settings: dict[str, Any] = PLAIN, **more: Any) -> Study:
    return Study("small", {**settings, **more}, SHARED, FIGURES, TABLES)


def adaptation(**more: Any) -> dict[str, Any]:
    return {**STUDY["adaptation"], **more}


def taken(*words: Any) -> dict[str, Any]:
    """What a command makes of its words; click.UsageError where it does not take them."""
    command, context, rest = main, click.Context(main, resilient_parsing=False), list(map(str, words))
    while isinstance(command, click.Group):
        _, command, rest = command.resolve_command(context, rest)
        context = click.Context(command)
    return command.make_parser(context).parse_args(rest)[0]


@pytest.mark.parametrize("name", ["budgets", "allocators"])
def test_the_order_of_the_configuration_changes_no_list(name: str) -> None:
    settings = {**COMPARED, "budgets": [0.5, 1e-6, "900B"], "allocators": ["exact", "greedy", "by-layer"]}
    first = study(settings)
    for values in itertools.permutations(settings[name]):
        other = study(settings, **{name: list(values)})
        assert other.all_files == first.all_files
        assert all(other.figure_arguments(figure) == first.figure_arguments(figure) for figure in first.figure_names)
        assert all(other.table_arguments(table) == first.table_arguments(table) for table in first.table_names)


def test_the_order_of_seeds_and_arms_changes_no_list() -> None:
    arms = STUDY["adaptation"]["arms"]
    several = {**arms, "noise": {**arms["noise"], "seeds": [7, 3, 11]}}
    first = study(adaptation=adaptation(arms=several))
    noise = [("noise", 3), ("noise", 7), ("noise", 11)]
    assert first.adapted_models == [("chosen-control", 1337), ("control", 1337), *noise, ("straight-through", 1337)]
    for names in itertools.permutations(several):
        for seeds in itertools.permutations([3, 7, 11]):
            other = {
                name: {**several[name], "seeds": list(seeds)} if name == "noise" else several[name] for name in names
            }
            assert study(adaptation=adaptation(arms=other)).all_files == first.all_files


def test_an_arm_takes_its_own_settings_or_those_that_another_chose() -> None:
    own = study()
    noise, control = (own.training_arguments(name, "1337") for name in ("noise", "chosen-control"))
    chosen = "results/small/adaptation/straight-through/settings.csv"
    assert noise[noise.index("--steps") + 1] == 2 and "--settings" not in noise and "--control" in noise
    assert control[control.index("--settings") + 1] == chosen and "--steps" not in control
    assert chosen in own.adapt_inputs([("chosen-control", "1337")]) and chosen in own.output_files
    assert own.adapt_inputs([("noise", "1337")]) == [own.model, own.windows]
    (grid,) = own.grid_commands(own.grid_runs)
    assert [value for word, value in itertools.pairwise(grid) if word == "--beta"] == [1.0, 3.0]
    assert grid[-1] == chosen and "validation" not in grid


def test_policies_of_the_adaptation_are_precisions_or_files_of_the_study() -> None:
    own = study()
    policy = "results/small/policies/greedy-1e-06/policy.json"
    words = own.adapted_evaluation_commands([("original", "0")])[0]
    given = [value for word, value in itertools.pairwise(words) if word == "--policy"]
    assert given == [policy, "int4", "int2", "bf16"] and words[words.index("--model") + 1] == own.model
    assert own.adapted_evaluation_inputs([("original", "0")]) == [own.model, own.windows, own.reference, policy]


@pytest.mark.parametrize(
    ("budgets", "ordered"),
    [([0.02, 0.003, 0.01], ("0.003", "0.01", "0.02")), (["500B", "900B", "70B"], ("900B", "500B", "70B"))],
)
def test_the_comparison_budget_that_quantizes_most_comes_last(budgets: list[Any], ordered: tuple[str, ...]) -> None:
    """Each in the study's own arithmetic first, then in BF16."""
    compared = study(COMPARED, comparison={**COMPARISON, "budgets": budgets})
    assert compared.comparison_files == [
        f"results/small/comparison/{budget}/{place}joint.csv" for budget in ordered for place in ("", "bfloat16/")
    ]
    assert compared.joint_files == [
        *(f"results/small/comparison/{budget}/joint.csv" for budget in ordered),
        "results/small/frontier/joint.csv",
    ]
    assert compared.predicted_joint_files[-1] == f"results/small/comparison/{ordered[-1]}/joint.csv"


def test_windows_are_drawn_from_the_documents_that_are_pinned() -> None:
    pinned = {**FILES, "documents": {"path": "deep/documents.json", "sha256": 64 * "0"}}
    windows = {"validation": {"documents": 4, "blocks": 8, "seed": 1}, "calibration": [0, 16]}
    drawn = study(artifacts={"source": "local", "location": "/models", "files": pinned}, windows=windows)
    assert drawn.window_arguments == [
        *("--block", 8, "--window", "validation=documents:4,blocks:8,seed:1", "--window", "calibration=0:16"),
        *("--documents", "resources/small/documents/documents.json"),
    ]
    assert drawn.document_files[0] in drawn.input_files and study().document_files == []
    assert "--documents" not in study().window_arguments


def test_a_study_has_the_figures_and_tables_whose_inputs_it_has() -> None:
    assert study(FULL).figure_names == list(FIGURES) and study(FULL).table_names == list(TABLES)
    compared = {"equal-bytes", "frontier", "frontier-reduction", "proxy-joint", "gradients", "generation"}
    assert set(study().figure_names) == set(FIGURES) - compared - {"screening", "domains"}
    others = {"prediction", "engines", "screening", "second-order", "domains"}
    assert set(study().table_names) == set(TABLES) - compared - others
    assert "greedy-path" not in study(allocators=["exact"]).figure_names
    gradients = study(sensitivity="gradients")
    assert "floor" not in gradients.figure_names and "sensitivity" in gradients.figure_names


def test_no_two_files_are_the_same_and_all_lie_in_the_folders_of_the_study() -> None:
    for settings in (
        PLAIN,
        COMPARED,
        FULL,
        {**COMPARED, "compute_dtype": "bfloat16"},
        {**PLAIN, "sensitivity": "gradients"},
    ):
        files = study(settings).all_files
        assert len(set(files)) == len(files)
        assert all(path.startswith(("results/small/", "resources/small/", "benchmarks/small/")) for path in files)


@pytest.mark.parametrize(("package", "entries"), [("figure", FIGURES), ("table", TABLES)])
def test_every_figure_and_table_is_made_of_files_of_the_study_and_its_command_takes_them(
    package: str, entries: dict[str, Entry]
) -> None:
    full = study(FULL, published="gpt2-nano")
    made = set(full.all_files)
    for name, entry in entries.items():
        assert set(full.entry_files(entry)) <= made
        arguments = (full.figure_arguments if package == "figure" else full.table_arguments)(name)
        found = taken(package, name, *arguments, "--output", "out")
        for word, given in entry.inputs.items():
            files = full.files(given.files)
            assert found[word] == (
                tuple(files) if isinstance(found[word], tuple) else files if given.several else files[0]
            )
        assert (found.get("published") == "gpt2-nano") == entry.published


def test_only_the_measuring_of_finished_models_reads_the_validation_window_and_once_a_model() -> None:
    """Whatever chooses settings or trains is told of other windows, and has no files of that one."""
    own = study()
    choosing = [*own.grid_commands(own.grid_runs), *own.adapt_commands(own.adapted_runs)]
    read = [*own.grid_inputs(own.grid_runs), *own.adapt_inputs(own.adapted_runs)]
    assert choosing and not [word for word in [*itertools.chain(*choosing), *read] if "validation" in str(word)]
    measuring = own.adapted_evaluation_commands(own.adapted_evaluation_runs)
    assert all(line[line.index("--window") + 1] == "validation" for line in measuring)
    models = [line[line.index("--model") + 1] for line in measuring]
    assert len(models) == len(set(models)) == 1 + len(own.adapted_models)


def test_an_arm_without_noise_trains_without() -> None:
    assert study().training_arguments("control", "1337")[:6] == [
        *("--arm", "control", "--order", "sequential", "--seed", "1337"),
    ]
    assert study().training_arguments("noise", "1337")[2:6] == ["--control", "control", "--noise", "int4"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"source": "local", "location": "/models"}, ["--source", "local", "--location", "/models"]),
        (
            {"source": "hub", "location": "a/b", "revision": 40 * "1"},
            ["--source", "hub", "--location", "a/b", "--revision", 40 * "1"],
        ),
    ],
)
def test_artifacts_are_fetched_from_where_they_are_pinned(source: dict[str, str], expected: list[str]) -> None:
    arguments = study(artifacts={**source, "files": FILES}).fetch_arguments("shard", "shard.bin")
    assert arguments == [*expected, "--path", "deep/shard.bin", "--sha256", 64 * "0"]


def test_rules_ask_the_study_of_their_job() -> None:
    class Wildcards(dict):
        __getattr__ = dict.__getitem__

    studies = Studies(small=study(), other=Study("other", PLAIN, SHARED))
    wildcards = Wildcards(study="other", policy="int8")
    assert studies.ask("own_score_files")(wildcards) == ["results/other/scores/measured-float32.csv"]
    assert studies.ask("artifact", "shard")(wildcards) == "resources/other/shard/shard.bin"
    assert studies.ask("allocation_arguments", wildcards="policy")(wildcards)[:4] == [
        *("--allocator", "uniform"),
        *("--precision", "int8"),
    ]


NEEDY = {"int4": False, "rotated4": False, "debiased4": False, "centred4": True, "fp8_e4m3": True, "nvfp4": True}


@pytest.mark.parametrize(("name", "needed"), NEEDY.items())
def test_a_study_calibrates_for_its_own_precisions_where_one_needs_it(name: str, needed: bool) -> None:
    own = study(COMPARED, precisions=["int8", name], generation=GENERATION)
    expected = ["results/small/calibration.safetensors"] if needed else []
    assert own.calibration_files == expected and set(expected) <= set(own.output_files)
    assert own.calibrates == needed
    swept = [*own.sweep_commands(own.layer_runs, "float32"), *own.move_commands(own.move_runs)]
    trained = [*own.adapt_commands(own.adapted_runs), *own.grid_commands(own.grid_runs)]
    measured = [
        *own.adapted_evaluation_commands(own.adapted_evaluation_runs),
        *own.uniform_commands(own.uniform_runs),
        *own.joint_commands(own.joint_runs),
    ]
    here = ["--model", "m", "--windows", "w", "--window", "validation", "--output", "o"]
    shells = [
        ["evaluate", *here, "--policy", "p", "--reference", "r", "--positions", "q", *own.measuring_arguments()],
        ["gradients", *here[:4], *own.gradient_arguments, "--output-table", "t", "--projections", "p"],
        ["generate", *here, *own.generation_arguments],
    ]
    for command in [*swept, *trained, *measured, *shells]:
        assert taken(*command).get("calibration") == (expected[0] if needed else None), command[0]
    for inputs in (
        own.adapt_inputs(own.adapted_runs),
        own.grid_inputs(own.grid_runs),
        own.adapted_evaluation_inputs(own.adapted_evaluation_runs),
        own.uniform_inputs(own.uniform_runs),
        own.joint_inputs(own.joint_runs),
    ):
        assert (inputs.count("results/small/calibration.safetensors") == 1) == needed
    assert "--calibration" not in own.execution_arguments()  # of stages that quantize nothing


def test_recipes_and_adapted_policies_ask_for_the_calibration_too_and_a_sample_gets_it() -> None:
    assert study(adaptation=adaptation(policies=["int4", "centred3"])).needs_calibration
    assert not study(FULL).needs_calibration and study(FULL).calibrates  # the screening's, and the export's
    more = "centred=exact:gradients:keys-values:int8,centred4"
    own = study(HUGGINGFACE, comparison={**COMPARISON, "recipes": [more]})
    assert own.needs_calibration and not study(HUGGINGFACE).needs_calibration
    for command in own.sample_commands(own.sample_runs):
        assert taken(*command)["calibration"] == "results/small/calibration.safetensors"
    assert len(set(own.all_files)) == len(own.all_files)


def test_every_reference_and_set_of_policies_is_made_and_measured_once() -> None:
    """By the commands of all runs, which read files of the study or what others of them make."""
    own = study(FULL)
    made = {
        "reference": own.reference_commands(own.reference_runs),
        "allocate": own.base_commands(own.base_runs),
        "policy-set": own.set_commands(own.set_runs),
        "evaluate": own.uniform_commands(own.uniform_runs),
        "evaluate-set": own.joint_commands(own.joint_runs),
    }
    outputs = [words["output"] for stage, commands in made.items() for words in (taken(*each) for each in commands)]
    assert len(set(outputs)) == len(outputs) and set(outputs) <= set(own.output_files)
    places = ("comparison/0.0003", "comparison/0.0003/bfloat16", "frontier", "frontier/bfloat16")
    assert own.joint_runs == [(name,) for name in (*places, "gradients", "screening", "export")]
    assert set(own.joint_inputs(own.joint_runs)) | set(own.uniform_inputs(own.uniform_runs)) <= set(own.all_files)
    for (name,), words in zip(own.joint_runs, made["evaluate-set"], strict=True):
        found = taken(*words)
        other = "bfloat16/" if name.endswith("bfloat16") else ""
        window = "calibration" if name == "gradients" else "validation"
        assert found["reference"] == f"results/small/reference/{other}{window}.safetensors"
        assert found["compute_dtype"] == ("bfloat16" if other else "float32")
        assert (found.get("truth") is not None) == (name in places)
        assert bool(found.get("without")) == bool(other)


def test_one_set_alone_asks_for_its_own_files_only() -> None:
    own = study(FULL)
    policies = [f"results/small/comparison/0.0003/{name}.json" for name in ("policy-set", "refined")]
    references = [f"results/small/reference/{name}.safetensors" for name in ("validation", "exact-cache/validation")]
    found = own.joint_inputs([("comparison/0.0003",)])
    assert sorted(found) == sorted([own.model, own.windows, *policies, *references])


def documented() -> list[str]:
    """Patterns of the results that docs/files.md names; a name without a folder lies beside the first of its row."""
    found = []
    for cell in re.findall(r"^\| (`results[^|]+)\|", (REPOSITORY / "docs" / "files.md").read_text(), re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", cell)
        folder, stem = first.rstrip("/").rpartition("/")[0], first.rpartition(".")[0]
        names = [first, *(f"{stem}{name}" if name.startswith(".") else f"{folder}/{name}" for name in others)]
        names += others
        found += [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(name)) + ".*" * name.endswith("/") for name in names]
    return found


def test_the_page_of_files_names_every_result() -> None:
    """In a folder of another arithmetic, too, where it says that there are some."""
    patterns = documented()
    for path in study(FULL).output_files:
        plain = re.sub(r"/(bfloat16|exact-cache)/", "/", path)
        assert any(re.fullmatch(each, name) for each in patterns for name in (path, plain)), path


def test_options_of() -> None:
    assert options_of("--x", ["a", "b"]) == ["--x", "a", "--x", "b"]


def test_two_entries_with_one_number_are_refused(tmp_path, monkeypatch) -> None:
    package = tmp_path / "drawings"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("x = 1\n")
    text = 'from kvstages.analysis.entries import Entry, Input\nFIGURE = Entry({}, "T", {{"a": Input("f", "A")}})\n'
    (package / "one_word.py").write_text(text.format(2))
    (package / "first.py").write_text(text.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    assert {name: entry.label for name, entry in entries("drawings").items()} == {"first": "1 T", "one-word": "2 T"}
    assert entries("drawings")["first"].inputs == {"a": Input("f", "A")}
    (package / "third.py").write_text(text.format(2))
    with pytest.raises(ValueError, match="drawings: two entries have the number 2"):
        entries("drawings")


def test_engines_are_asked_for_in_one_order_and_each_has_its_file() -> None:
    first = study(FULL, export={**EXPORT, "engines": ["kvtuner", "vllm", "modelopt"]})
    other = study(FULL, export={**EXPORT, "engines": ["modelopt", "kvtuner", "vllm"]})
    assert first.engine_arguments == ["--engine", "vllm", "--engine", "modelopt", "--engine", "kvtuner"]
    assert other.all_files == first.all_files and other.export_commands == first.export_commands
    assert {name: ("policy.json", "export.json", engine.file) for name, engine in ENGINES.items()} == EXPORT_FILES
    assert study(COMPARED).engines == [] and study(COMPARED).export_output_files == []


def test_engines_formats_are_scored_with_the_schemes_of_a_screening() -> None:
    both, alone = study(FULL), study({**COMPARED, "export": EXPORT})
    assert both.engine_score_files == ["results/small/screening/gradients.csv"]
    assert alone.engine_score_files == ["results/small/export/scores.csv"] and study().engine_score_files == []
    assert [set(each.engine_score_files) <= set(each.output_files) for each in (both, alone)] == [True, True]
    assert "results/small/export/scores.csv" not in both.all_files
    assert both.screens_for_engines and not both.screens_alone and not alone.screens_for_engines
    words = ["score-engines", *both.engine_arguments, *both.screened_precision_arguments]
    assert set(taken(*words)["precisions"]) == set(both.screened_precision_arguments[1::2])


def test_the_order_of_domains_lengths_and_budgets_changes_nothing_and_all_are_crossed() -> None:
    first = study(FULL, domains={**DOMAINS, "budgets": ["9bits", "12bits"]})
    texts = dict(reversed(DOMAINS["texts"].items()))
    other = study(FULL, domains={**DOMAINS, "texts": texts, "lengths": [8, 4], "budgets": ["12bits", "9bits"]})
    for question in ("all_files", "domain_window_arguments", "domain_set_files"):
        assert getattr(other, question) == getattr(first, question)
    assert first.domain_runs == [("early", "4"), ("early", "8"), ("late", "4"), ("late", "8")]
    recipes = [word for word in first.domain_set_arguments("9bits") if "=" in word]
    assert recipes[0] == "early-4-9bits=exact:early-4:head:int8,int4" and len(recipes) == 4
    windows = taken("windows", *first.domain_window_arguments)["windows"]
    assert windows[0] == "validation-early=documents:2,blocks:4,seed:0,of:text-0|text-16|text-32|text-48"
    for command in first.domain_score_commands(first.domain_runs):
        assert taken(*command)["window"] == f"calibration-{taken(*command)['source']}"
    for (domain, length), command in zip(
        first.domain_runs, first.domain_evaluation_commands(first.domain_runs), strict=True
    ):
        found = taken(*command)
        assert found["window"] == f"validation-{domain}-{length}" and "reference" not in found
        assert list(found["policies"]) == first.domain_set_files
    assert study(COMPARED).domain_output_files == [] and study(COMPARED).domain_runs == []


# --- A study of a Hugging Face model ---

DRAWN = {name: {"documents": 2, "blocks": 4, "seed": 0} for name in ("calibration", "validation")}
MODEL_FILES = [{"path": f"deep/{name}", "sha256": 64 * "0"} for name in ("config.json", "model.safetensors")]
HUGGINGFACE = {
    **{key: value for key, value in STUDY.items() if key != "adaptation"},
    "heads": 2,
    "model": {"family": "huggingface", "source": "local", "location": "/models", "files": MODEL_FILES},
    "text": {"source": "local", "location": "/texts", "files": [{"path": "a.txt", "sha256": 64 * "0"}], "parts": 4},
    "windows": DRAWN,
    "sensitivity": "gradients",
    "sample": 3,
    "comparison": COMPARISON,
}
A_GGUF_FILE = {**HUGGINGFACE["model"], "files": [{"path": "tiny.gguf", "sha256": 64 * "0"}]}


@pytest.mark.parametrize("model", [HUGGINGFACE["model"], A_GGUF_FILE])
def test_a_hugging_face_model_has_its_folder_and_tokens_of_its_texts(model: dict[str, Any]) -> None:
    own, gguf = study(HUGGINGFACE, model=model), model is A_GGUF_FILE
    folder = f"resources/small/{'dequantized' if gguf else 'model'}"
    assert own.model == f"{folder}/decoder.json" and own.model in own.model_files
    assert own.checkpoint == ("resources/small/checkpoint/tiny.gguf" if gguf else "resources/small/model")
    assert {f"{folder}/config.json", f"{folder}/model.safetensors"} <= set(own.input_files)
    assert {own.shard, *own.document_files, *own.tokenizer_files} == set(own.token_files) <= set(own.all_files)
    assert len(set(own.all_files)) == len(own.all_files)
    assert taken("tokenize", *own.text_files, *own.text_arguments)["parts"] == "4"
    assert own.window_arguments[-2:] == ["--tokenizer", "resources/small/tokens/tokenizer.json"]


def test_what_needs_every_score_or_an_adaptation_is_left_out_where_scores_come_from_gradients() -> None:
    own = study(HUGGINGFACE)
    assert own.sweep_dtypes == own.adapted_models == own.adapted_policies == own.move_runs == own.prediction_files == []
    assert own.sources == ["gradients"] and own.score_files == ["results/small/scores/gradients.csv"]
    assert own.checked_score_files == own.sample_score_files == ["results/small/scores/sample.csv"]
    optional = {"adaptation", "screening", "generation", "domains"}
    assert set(FIGURES) - set(own.figure_names) == optional | {"adaptation-curves", "floor"}
    left_out = optional | {"adaptation-settings", "prediction", "engines", "second-order"}
    assert set(TABLES) - set(own.table_names) == left_out
    assert own.set_files("0.0003") == ["results/small/comparison/0.0003/policy-set.json"]
    recipes = [own.equal_bytes_arguments, own.frontier_arguments]
    assert all(":measured" not in word for arguments in recipes for word in map(str, arguments))
    measured = study({key: value for key, value in HUGGINGFACE.items() if key != "sample"}, sensitivity="measured")
    assert set(own.figure_names) | {"floor"} == set(measured.figure_names)
    assert measured.set_files("0.0003")[1:] == ["results/small/comparison/0.0003/refined.json"]


def test_a_larger_sample_holds_a_smaller_one() -> None:
    samples = [study(HUGGINGFACE, layers=9, sample=count).sampled_units for count in (1, 5, 12, 18, 99)]
    assert [len(sample) for sample in samples] == [1, 5, 12, 18, 18]
    assert all(set(one) < set(more) for one, more in itertools.pairwise(samples[:4]))
    own = study(HUGGINGFACE, layers=9, sample=12)
    commands = own.sample_commands(own.sample_runs)
    swept = [(int(command[6]), head) for command in commands for head in taken(*command)["heads"]]
    assert swept == [(layer, str(head)) for layer, head in own.sampled_units]
    assert len(commands) == len({layer for layer, _ in own.sampled_units}) < 9


def test_a_layer_is_measured_as_a_whole_and_sampled_by_its_heads() -> None:
    own = study({key: value for key, value in STUDY.items() if key != "comparison"}, unit="layer")
    (command, *others) = own.sweep_commands(own.layer_runs, "float32")
    assert len(others) == own.number_of_layers - 1 and taken(*command)["parts"] == ["layer"]
    assert own.allocation_arguments("greedy-0.01")[-4:-2] == ["--unit", "layer"]
    compared = study(COMPARED, unit="layer").sweep_commands([("00",)], "float32")[0]
    assert taken(*compared)["parts"] == ["kv", "k", "v", "layer"]
    sampled = study(HUGGINGFACE, unit="layer", sample=2)
    assert all(taken(*command)["parts"] == ["kv"] for command in sampled.sample_commands(sampled.sample_runs))


def test_recipes_of_a_study_are_measured_beside_the_others_and_their_precisions_scored() -> None:
    more = "centred=exact:gradients:keys-values:int8,centred4"
    own = study(HUGGINGFACE, comparison={**COMPARISON, "recipes": [more]})
    assert more in own.equal_bytes_arguments and more in own.frontier_arguments
    assert "centred4" in own.gradient_arguments and "centred4" not in study(HUGGINGFACE).gradient_arguments


@pytest.mark.parametrize("most", [1, 2, 100])
def test_each_set_of_policies_of_a_hugging_face_model_is_a_job_of_its_own(most: int) -> None:
    """Of every number of runs that a job takes; and each run of each study is done by one job."""
    shared = {**SHARED, "runs_a_job": most}
    small = Study("small", COMPARED, shared, FIGURES, TABLES)
    large = Study("large", HUGGINGFACE, shared, FIGURES, TABLES)
    jobs = Studies(small=small, large=large).jobs("measure", "joint_runs", "measured", apart="is_huggingface")
    if most == 1:
        assert [(job.studies, job.runs) for job in jobs] == [("small|large", [("{measured}",)])]
        return
    assert [job.runs for job in jobs if job.studies == "large"] == [[run] for run in large.joint_runs]
    of_small = [job.runs for job in jobs if job.studies == "small"]
    assert [run for runs in of_small for run in runs] == small.joint_runs
    assert [len(runs) for runs in of_small] == ([2, 2, 1] if most == 2 else [5])
    assert len({job.name for job in jobs}) == len({(job.studies, job.place) for job in jobs}) == len(jobs)
