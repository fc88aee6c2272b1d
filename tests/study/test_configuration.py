import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY
from published import PUBLISHED

from kvstages.files.read import read_json
from kvstages.study.configuration import check_shared, check_study, load_studies, load_study, shown

DRAWN = {"documents": 4, "blocks": 8, "seed": 0}
COMPARISON = {"budgets": [0.01], "precisions": ["int4"], "random": 9, "draws": 99, "frontier": 3}
DOMAINS = {
    "texts": {"old": ["18*"], "new": ["19*"]},
    "lengths": [64, 256],
    **{name: {"documents": 4, "blocks": 4, "seed": 0} for name in ("calibration", "validation")},
    "probes": 4,
    "budgets": ["5bits"],
}
SHARED = {
    "studies": ["demo", "gpt2-nano"],
    "device": "auto",
    "threads": 1,
    "runs_a_job": 100,
    "memory_mb": 2048,
    "container": "kvstages.sif",
}
STUDY = """\
title: A study
layers: 12
artifacts:
  source: hub
  location: ada/nano
  revision: ee547b4112bce2d2557dd0975038035bab6c86eb
  files:
    checkpoint: {path: checkpoints/final.pt, sha256: 9a293ff319e7e11e7c5c553a5e4957a996493311d04b097933c1e2fcb49bf86e}
    shard: {path: train_000000.bin, sha256: f08410ea036cc56b78ffc3f6edbf94f5a1d469aeb7c708bb56e4ce544623a69e}
block: 64
windows:
  calibration: [0, 512]
  adaptation: [512, 4096]
  reserved: [4096, 5120]
  validation: [8192, 10240]
execution: one-pass
compute_dtype: float32
sensitivity: measured
probes: 32
unit: head
precisions: [int8, int4]
allocators: [greedy]
budgets: [0.01, 0.05, 0.1, 0.25, 0.5]
adaptation:
  batch: 4
  weight_decay: 0.01
  clip: 1.0
  policies: [greedy-0.01, int4, int3]
  arms:
    noise:
      {weights: bfloat16, order: sequential, noise: int4, steps: 50, learning_rate: 1e-6, beta: 1, seeds: [1, 2],
       control: control}
    control: {weights: bfloat16, order: sequential, steps: 50, learning_rate: 1e-6, beta: 1, seeds: [1]}
    straight:
      {weights: float32, order: shuffled, straight-through: int3, steps: [14, 50], learning_rate: 1e-5, beta: [1, 10],
       seeds: [1, 2], control: still}
    still: {weights: float32, order: shuffled, settings_of: straight, seeds: [2, 1]}
"""
GONE = object()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "demo.yaml"
    path.write_text(STUDY, encoding="utf-8")
    return load_study(path)


def changed(config, key, value):
    """A copy with one key (a.b.0) replaced, added or, for GONE, removed."""
    config = copy.deepcopy(config)
    *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
    inner = config
    for part in path:
        inner = inner[part]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return config


def test_a_right_study(study):
    check_study("demo", study)
    check_study("demo", changed(study, "published", "gpt2-nano"))
    assert study["adaptation"]["arms"]["noise"]["learning_rate"] == 1e-6
    check_study("demo", changed(study, "adaptation.arms.noise.control", GONE))


@pytest.mark.parametrize("name", ["gpt2-nano", "adaptation", "demo"])
def test_the_published_arm_of_a_shipped_study_is_the_published_recipe(name):
    adaptation = load_study(REPOSITORY / "config" / "studies" / f"{name}.yaml")["adaptation"]
    recipe = read_json(PUBLISHED / "config.json")["experiment_config"]["noise_finetune"]
    arm = adaptation["arms"]["published"]
    assert (arm["weights"], arm["order"], arm["noise"]) == ("bfloat16", "sequential", f"int{recipe['noise_bits']}")
    assert (arm["steps"], arm["learning_rate"], arm["beta"]) == (recipe["num_steps"], recipe["lr"], recipe["kl_beta"])
    assert adaptation["batch"] == recipe["batch_size"]
    if name == "demo":
        assert set(arm["seeds"]) < set(recipe["seeds"])
    else:
        assert arm["seeds"][: len(recipe["seeds"])] == recipe["seeds"]


@pytest.mark.parametrize("source", ["local", "bundled"])
def test_a_right_study_from_a_folder(study, source):
    folder = changed(changed(study, "artifacts.source", source), "artifacts.revision", GONE)
    check_study("demo", changed(folder, "artifacts.location", "resources/bundled/sotu-12x8"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        # unknown and missing keys, at every level
        ("budget", [0.1], "budget: unknown key; did you mean budgets?"),
        ("colour", 1, "colour: unknown key; expected one of title, layers, artifacts, block,"),
        ("artifacts.sorce", "hub", "artifacts.sorce: unknown key; did you mean source?"),
        ("artifacts.files.shards", {}, "artifacts.files.shards: unknown key; did you mean shard?"),
        ("artifacts.files.shard.sha", "", "artifacts.files.shard.sha: unknown key; did you mean"),
        ("windows.test", [0, 64], "windows.test: unknown key; expected one of calibration, adaptation,"),
        ("adaptation.lr", 1.0, "adaptation.lr: unknown key; expected one of batch,"),
        ("adaptation.arms.noise.bits", 4, "adaptation.arms.noise.bits: unknown key"),
        ("title", GONE, "title: missing"),
        ("windows.reserved", GONE, "windows.reserved: missing"),
        ("artifacts.files.shard", GONE, "artifacts.files.shard: missing"),
        ("artifacts.revision", GONE, "artifacts.revision: missing"),
        # wrong types
        ("title", "", "title: the text '', expected a text"),
        ("artifacts", None, "artifacts: nothing, expected the keys source, location, files"),
        ("artifacts.files", [1], "artifacts.files: a list, expected the keys checkpoint,"),
        ("layers", GONE, "layers: missing"),
        ("layers", 0, "layers: 0, expected at least 1 (layers of the decoder)"),
        ("block", 64.0, "block: 64.0, expected a whole number (tokens)"),
        ("block", True, "block: true or false, expected a whole number (tokens)"),
        ("block", 1, "block: 1, expected at least 2 (tokens)"),
        ("windows", [0], "windows: a list, expected the keys calibration,"),
        ("adaptation", 3, "adaptation: 3, expected the keys batch,"),
        # artifacts
        ("artifacts.source", "ftp", "artifacts.source: the text 'ftp', expected one of bundled, hub, local"),
        (
            "artifacts.source",
            "local",
            "artifacts (checkpoint): revision 'ee547b4112bce2d2557dd0975038035bab6c86eb': only",
        ),
        ("artifacts.revision", "main", "artifacts.revision: the text 'main', expected a text of 40 lower-case hex"),
        ("artifacts.revision", 10**39, f"artifacts.revision: {10**39}, expected a text of 40 lower-case hex"),
        ("artifacts.location", "nano", "artifacts (checkpoint): location 'nano': expected a hub repository as owner"),
        ("artifacts.files.shard.sha256", "ab", "artifacts.files.shard.sha256: the text 'ab', expected a text of 64"),
        ("artifacts.files.shard.path", "../x", "artifacts (shard): path '../x': expected a path inside its folder"),
        ("artifacts.files.checkpoint.path", "x.bin", "artifacts.files.checkpoint.path: x.bin, expected a .pt or"),
        (
            "published",
            "nano",
            "published: published figures 'nano': no such folder, and none that ships with the project",
        ),
        # windows
        ("windows.calibration", [0], "windows.calibration: a list, expected [start, end] in token positions"),
        ("windows.calibration", {"documents": 4}, "windows.calibration.blocks: missing"),
        ("windows.calibration", DRAWN | {"text": 1}, "windows.calibration.text: unknown key"),
        ("windows.calibration", DRAWN | {"blocks": 0}, "windows.calibration.blocks: 0, expected at least 1 (blocks of"),
        ("windows.calibration", DRAWN | {"seed": -1}, "windows.calibration.seed: -1, expected at least 0 (a seed)"),
        (
            "windows.calibration",
            DRAWN | {"blocks": 3},
            "window calibration: 3 blocks of 4 documents, expected at least",
        ),
        ("windows.calibration", DRAWN, "windows.calibration: drawn from documents, but artifacts.files.documents is"),
        ("windows.calibration", [-64, 0], "windows.calibration[0]: -64, expected at least 0 (a token position)"),
        ("windows.calibration", [0, 1.5], "windows.calibration[1]: 1.5, expected a whole number (a token position)"),
        ("windows.calibration", [0, 0], "window calibration (0 to 0) is empty"),
        ("windows.calibration", [0, 500], "window calibration (0 to 500) holds 500 tokens, not a multiple of the"),
        ("windows.adaptation", [448, 4096], "window adaptation (448 to 4096) starts before calibration ends at 512"),
        ("windows.validation", [0, 64], "window validation (0 to 64) starts before reserved ends at 5120"),
        # choices
        ("execution", "fast", "execution: the text 'fast', expected one of one-pass, token-by-token"),
        ("compute_dtype", "bf16", "compute_dtype: the text 'bf16', expected one of float32, bfloat16, float64"),
        ("sensitivity", "gradient", "sensitivity: the text 'gradient', expected one of measured, gradients"),
        ("probes", 0, "probes: 0, expected at least 1 (backward passes of the scores from gradients)"),
        ("unit", "model", "unit: the text 'model', expected one of head, keys-values, layer"),
        ("precisions", ["int8", "int7"], "precisions[1]: precision 'int7': 'int7' has 7 bits; expected 8, 6, 5, 4"),
        ("precisions", ["int8", "int8"], "precisions[1]: int8 repeats precisions[0]"),
        ("precisions", ["int4", "int8"], "precisions: int4, int8; expected them from most bytes to fewest: int8, int4"),
        ("allocators", ["best"], "allocators[0]: the text 'best', expected one of greedy, exact, by-layer, by-dep"),
        ("comparison", {}, "comparison.budgets: missing"),
        ("generation", {"prompts": 4}, "generation.tokens: missing"),
        ("generation", {"prompts": 0, "tokens": 3}, "generation.prompts: 0, expected at least 1 (prompts)"),
        ("generation", {"prompts": 10**6, "tokens": 3}, "generation.prompts: 1000000, expected at most "),
        ("generation", {"prompts": 1, "tokens": 10**6}, "generation.tokens: 1000000, expected at most "),
        (
            "generation",
            {"prompts": 1, "tokens": 60, "prompt": 5},
            "generation.prompt: 5, expected at most 4 (tokens of",
        ),
        ("domains", {}, "domains.texts: missing"),
        ("domains", DOMAINS, "domains: drawn from documents, but artifacts.files.documents is missing"),
        ("domains", DOMAINS | {"texts": {}}, "domains.texts: empty, expected texts by name"),
        (
            "domains",
            DOMAINS | {"texts": {"Old": ["a"]}},
            "domains.texts: the text 'Old', expected a name of lower-case",
        ),
        ("domains", DOMAINS | {"texts": {1800: ["a"]}}, "domains.texts: 1800, expected a name of lower-case"),
        ("domains", DOMAINS | {"texts": {"a": "b"}}, "domains.texts.a: the text 'b', expected a list of names of doc"),
        ("domains", DOMAINS | {"texts": {"a": ["b|c"]}}, "domains.texts.a[0]: the text 'b|c', expected a document's"),
        ("domains", DOMAINS | {"lengths": [64, 1]}, "domains.lengths[1]: 1, expected at least 2 (tokens of a block)"),
        ("domains", DOMAINS | {"lengths": [64, 24]}, "domains.lengths[1]: 24, expected a divisor of the longest, 64"),
        ("domains", DOMAINS | {"budgets": [0.01]}, "domains.budgets[0]: 0.01, expected bits an element, such as 5bits"),
        ("domains", DOMAINS | {"validation": DRAWN | {"block": 8}}, "domains.validation.block: unknown key; "),
        (
            "domains",
            DOMAINS | {"calibration": DRAWN | {"blocks": 3}},
            "window domains.calibration: 3 blocks of 4 documents, expected at least",
        ),
        ("export", {"policy": "greedy-0.01"}, "export.engines: missing"),
        ("export", {"policy": "greedy-7", "engines": ["vllm"]}, "export.policy: greedy-7, expected an allocated one: "),
        ("export", {"policy": "int8", "engines": ["vllm"]}, "export.policy: int8, expected an allocated one: greedy"),
        ("export", {"policy": 3, "engines": ["vllm"]}, "export.policy: 3, expected the name of a policy, such as"),
        ("export", {"policy": "greedy-0.01", "engines": ["tgi"]}, "export.engines[0]: the text 'tgi', expected one of"),
        ("comparison", COMPARISON | {"frontier": 1}, "comparison.frontier: 1, expected at least 2 (byte totals"),
        ("comparison", COMPARISON | {"random": 0}, "comparison.random: 0, expected at least 1 (random policies"),
        ("comparison", COMPARISON | {"budgets": ["9K"]}, "comparison.budgets[0]: the text '9K' is not a number"),
        ("precisions", [], "precisions: empty, expected at least one of precisions"),
        # budgets
        ("budgets.1", -0.1, "budgets[1]: -0.1 is negative; expected a KL budget of 0 or more, in nats"),
        ("budgets.0", float("nan"), "budgets[0]: nan is not finite; expected a KL budget of 0 or more, in nats"),
        ("budgets.0", float("inf"), "budgets[0]: inf is not finite"),
        ("budgets.0", -0.0, "budgets[0]: -0.0 does not name a folder"),
        ("budgets.2", "0.1", "budgets[2]: the text '0.1' is not a number; expected a KL budget"),
        ("budgets.2", True, "budgets[2]: true or false is not a number"),
        ("budgets.2", None, "budgets[2]: nothing is not a number"),
        ("budgets.4", 0.10, "budgets[4]: 0.1 repeats budgets[2]"),
        ("budgets", [1, 0.5, 1.0], "budgets[2]: 1.0 repeats budgets[0]"),
        ("budgets.0", 10**299, f"budgets[0]: {shown(10**299)} does not name a folder; expected a KL budget"),
        ("title", "a\nb", "title: the text 'a\\nb' holds a control character or line end, expected one line of text"),
        ("budgets", [], "budgets: empty, expected at least one of budgets: nats of KL, bytes such as 400000B, or bits"),
        ("budgets", 0.1, "budgets: 0.1, expected a list of budgets: nats of KL, bytes such as 400000B, or bits"),
        # adaptation
        ("adaptation.policies", [], "adaptation.policies: empty, expected at least one of policies"),
        ("adaptation.policies", [4], "adaptation.policies[0]: 4, expected the name of a policy, such as greedy-0.01"),
        ("adaptation.policies", ["bf16"], "adaptation.policies[0]: bf16, expected a policy that quantizes; BF16 is"),
        (
            "adaptation.policies",
            ["greedy-7", "int4", "int3"],
            "adaptation.policies[0]: greedy-7, expected a precision or one of greedy-0.01",
        ),
        ("adaptation.clip", float("nan"), "adaptation.clip: nan, expected a number above 0"),
        ("adaptation.arms", {}, "adaptation.arms: empty, expected arms by name"),
        ("adaptation.arms.original", {}, "adaptation.arms: the text 'original', expected an arm's name"),
        ("adaptation.arms.noise.weights", "fp8", "adaptation.arms.noise.weights: the text 'fp8', expected one of"),
        ("adaptation.arms.noise.order", "random", "adaptation.arms.noise.order: the text 'random', expected one of s"),
        ("adaptation.arms.noise.order", GONE, "adaptation.arms.noise.order: missing"),
        ("adaptation.arms.noise.order", "shuffled", "adaptation.arms.noise.control: control has other weights, order"),
        ("adaptation.arms.straight.seeds", [1], "adaptation.arms.straight.control: still has other seeds, expected th"),
        ("adaptation.arms.still.order", "sequential", "adaptation.arms.still.seeds: 2 of them, but nothing is drawn"),
        ("adaptation.arms.noise.steps", 0, "adaptation.arms.noise.steps: 0, expected at least 1 (training steps)"),
        ("adaptation.arms.noise.steps", [], "adaptation.arms.noise.steps: empty, expected at least one of numbers of"),
        ("adaptation.arms.noise.learning_rate", 0, "adaptation.arms.noise.learning_rate: 0, expected a number above"),
        ("adaptation.arms.noise.learning_rate", "1e-6", "adaptation.arms.noise.learning_rate: the text '1e-6', expec"),
        ("adaptation.arms.noise.beta", -1, "adaptation.arms.noise.beta: -1, expected a number of 0 or more"),
        ("adaptation.arms.straight.beta", [1, -1], "adaptation.arms.straight.beta[1]: -1, expected a number of 0 or"),
        ("adaptation.arms.noise.beta", GONE, "adaptation.arms.noise.beta: missing"),
        ("adaptation.arms.noise.seeds", GONE, "adaptation.arms.noise.seeds: missing"),
        ("adaptation.arms.noise.seeds", [1, 2, 1], "adaptation.arms.noise.seeds[2]: 1 repeats adaptation.arms.noise."),
        ("adaptation.arms.noise.seeds", [1.5], "adaptation.arms.noise.seeds[0]: 1.5, expected a whole number (a seed)"),
        ("adaptation.arms.noise.seeds", [-1], "adaptation.arms.noise.seeds[0]: -1, expected at least 0 (a seed)"),
        ("adaptation.arms.noise.seeds", [2**64], f"adaptation.arms.noise.seeds[0]: {2**64}, expected less than 2^63"),
        ("adaptation.arms.control.seeds", [1, 2], "adaptation.arms.control.seeds: 2 of them, but nothing is drawn"),
        ("adaptation.arms.noise.noise", "int5", "adaptation.arms.noise.noise: int5, expected one of adaptation.polici"),
        ("adaptation.arms.noise.noise", "bf16", "adaptation.arms.noise.noise: bf16, expected a policy that quantizes"),
        ("adaptation.arms.noise.straight-through", "int4", "adaptation.arms.noise: noise and straight-through, expec"),
        ("adaptation.arms.noise.noise", GONE, "adaptation.arms.noise.seeds: 2 of them, but nothing is drawn without"),
        ("adaptation.arms.noise.control", "straight", "adaptation.arms.noise.control: straight, expected an arm with"),
        ("adaptation.arms.noise.control", "nobody", "adaptation.arms.noise.control: nobody, expected an arm with nei"),
        ("adaptation.arms.noise.steps", 51, "adaptation.arms.noise.control: control has other weights, order or sett"),
        ("adaptation.arms.control.weights", "float32", "adaptation.arms.noise.control: control has other weights, ord"),
        ("adaptation.arms.control.control", "still", "adaptation.arms.control.control: still, but an arm with neither"),
        ("adaptation.arms.still.settings_of", "nobody", "adaptation.arms.still.settings_of: nobody, expected an arm"),
        ("adaptation.arms.still.steps", 3, "adaptation.arms.still: settings_of beside settings of its own, expected"),
        ("adaptation.arms.still", GONE, "adaptation.arms.straight.control: still, expected an arm with neither noise"),
        (
            "adaptation.arms.control.steps",
            [1, 2],
            "adaptation.arms.control: several settings, but a control has no policy to choose them by",
        ),
    ],
)
def test_a_wrong_study(study, key, value, expected):
    with pytest.raises(ValueError) as caught:
        check_study("demo", changed(study, key, value))
    assert str(caught.value).startswith(f"config/studies/demo.yaml: {expected}")
    assert "\n" not in str(caught.value)


def test_windows_out_of_order(study):
    windows = dict(reversed(study["windows"].items()))
    with pytest.raises(ValueError, match=r"window reserved \(4096 to 5120\) starts before validation ends at 10240"):
        check_study("demo", changed(study, "windows", windows))


def test_windows_are_stretches_or_drawn_from_documents(study):
    pin = {"path": "documents.json", "sha256": 64 * "0"}
    drawn = changed(study, "artifacts.files.documents", pin)
    check_study("demo", changed(drawn, "windows.validation", DRAWN))
    check_study("demo", changed(drawn, "domains", DOMAINS))
    check_study("demo", changed(study, "comparison", COMPARISON | {"budgets": ["250000B", 0.01]}))


@pytest.mark.parametrize("name", ["Embedded", "a_b", "a/b", "", "-a", "a.b"])
def test_study_names(study, name):
    with pytest.raises(ValueError, match="expected a name of lower-case letters, digits and hyphens"):
        check_study(name, study)


def test_right_shared_keys():
    check_shared(SHARED)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("device", "gpu", "device: the text 'gpu', expected one of auto, cpu, cuda"),
        ("threads", 0, "threads: 0, expected at least 1 (a number of CPU threads)"),
        ("threads", "2", "threads: the text '2', expected a whole number (a number of CPU threads)"),
        ("memory_mb", 16, "memory_mb: 16, expected at least 256 (megabytes)"),
        ("memory_mb", GONE, "memory_mb: missing"),
        ("memory", 1, "memory: unknown key; did you mean memory_mb?"),
        ("studies", [], "studies: empty, expected at least one of names of files in config/studies"),
        ("studies", "demo", "studies: the text 'demo', expected a list of names of files in config/studies"),
        ("studies", ["a", "a"], "studies[1]: a repeats studies[0]"),
        ("studies", ["A b"], "studies[0]: the text 'A b', expected a name of lower-case letters, digits and hyphens"),
        (
            "studies",
            ["bundled-model"],
            "studies[0]: the text 'bundled-model', a name that a folder of the workflow has already",
        ),
        ("runs_a_job", 0, "runs_a_job: 0, expected at least 1 (sweeps, or adapted models, of one job)"),
        ("studies", [1], "studies[0]: 1, expected a name of lower-case letters, digits and hyphens"),
    ],
)
def test_wrong_shared_keys(key, value, expected):
    with pytest.raises(ValueError) as caught:
        check_shared(changed(SHARED, key, value))
    assert str(caught.value) == f"config/config.yaml: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("title: a\nblock: 64\ntitle: b\n", "line 3: key title appears again (first in line 1)"),
        ("windows:\n  a: [0, 64]\n  a: [64, 128]\n", "line 3: key a appears again (first in line 2)"),
        ("title: [a\nblock: 64\n", "line 2: "),
        ("title: 'a\n", "line 2: "),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor for the tag"),
        ("- a\n", "holds a list, expected keys and values"),
        ("", "holds nothing, expected keys and values"),
        ("[a]: b\n", "line 1: found unhashable key"),
        ("title: \x00\n", "not a YAML file"),
    ],
)
def test_wrong_yaml(tmp_path, text, expected):
    path = tmp_path / "demo.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_missing_study_names_its_file(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read \(No such file or directory\)"):
        load_study(tmp_path / "none.yaml")


@pytest.fixture
def folder(tmp_path, study):
    """Studies, and what editors, file systems and people leave beside them."""
    for name in ("one.yaml", "two.yaml", "one copy.yaml", "bundled.yaml", ".two.yaml.swp", "._two.yaml"):
        (tmp_path / name).write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    (tmp_path / "draft.yaml").write_text("title: A draft\n", encoding="utf-8")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "link.yaml").symlink_to("nowhere")
    (tmp_path / ".#one.yaml").symlink_to("user@host.1234:5678")
    return tmp_path


def test_files_that_are_no_studies_are_told_and_stop_nobody(folder):
    studies, wrong = load_studies(folder, ["two"])
    assert list(studies) == ["one", "two"]
    assert [line.partition("config/studies")[2] for line in wrong[:1]] == [
        ": the text 'bundled', a name that a folder of the workflow has already"
    ]
    ends = ["layers: missing", "cannot be read (Is a directory)", "cannot be read (No such file or directory)"]
    assert [any(line.endswith(end) for line in wrong) for end in ends] == [True] * 3
    assert len(wrong) == 5


@pytest.mark.parametrize("name", ["draft", "folder", "link", "bundled"])
def test_a_study_that_is_asked_for_has_to_be_right(folder, name):
    with pytest.raises(ValueError, match=name):
        load_studies(folder, ["one", name])


def test_a_study_that_is_asked_for_has_to_be_there(folder):
    with pytest.raises(ValueError, match=r"studies: no file config/studies/none\.yaml; there are: one, two"):
        load_studies(folder, ["none"])


def test_numbers_with_exponents_are_numbers(tmp_path):
    (tmp_path / "a.yaml").write_text("budgets: [1e-3, 0.10, 2E+1, 1.5e2, 1]\ncommit: 1e2a\n", encoding="utf-8")
    assert load_study(tmp_path / "a.yaml") == {"budgets": [0.001, 0.1, 20.0, 150.0, 1], "commit": "1e2a"}


def test_checking_imports_nothing_heavy():
    program = (
        "import sys, kvstages.study.configuration; print({'torch', 'pandas', 'snakemake', 'click'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", program]
    assert subprocess.run(arguments, cwd=root, capture_output=True, text=True, check=True).stdout == "set()\n"
