"""Readers meet hostile files, configurations that try to reach the shell, and paths that climb out of their folder.

`make fuzz` gives 100,000 files to the readers; by default they get one of two hundred of that.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from conftest import SHAPE, SHARED, STUDY, Project, bundle, decoder, published_bundle, study_of
from fuzzing import Target, as_bytes, attack, little_memory, mutated_structure, torch_bytes
from models import identified
from published_study import HEAD_WIDTH, SENSITIVITY, write_study
from signed_study import FOLDER, make_study

from kvstages.cli import main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.files.read import read_columns, read_json, read_tensors
from kvstages.models.checkpoints import read_checkpoint
from kvstages.models.config import GPTConfig, read_config
from kvstages.models.identity import ModelIdentity
from kvstages.policies.record import read_policy
from kvstages.provenance.manifest import read_manifest
from kvstages.provenance.reproduction import Judge, compare_records, compare_tables, compare_tensors
from kvstages.provenance.tolerances import kinds
from kvstages.provenance.verify import listed
from kvstages.scores.table import read_scores, read_setting
from kvstages.study.configuration import check_shared, check_study, load_study
from kvstages.study.shards import read_shard, write_shard
from kvstages.study.text import Tokenizer
from kvstages.study.windows import load_window

COUNT = 100_000
CONFIG = GPTConfig(**SHAPE).shape
# The shape of what write_study makes here.
ONE_LAYER = replace(CONFIG, layers=1, key_width=HEAD_WIDTH, value_width=HEAD_WIDTH)
MODEL = ModelIdentity(ONE_LAYER, "a" * 64)


def sample(folder: Path) -> dict[str, Path]:
    """Right files of every kind, by name."""
    paths = bundle(folder / "bundle")
    published = published_bundle(folder / "published")
    write_study(folder / "study", layers=1, heads=2, budgets=("0.01",))
    policy = folder / "study" / "policies" / "greedy-0.01" / "policy.json"
    write_json(policy, identified(json.loads(policy.read_text()), MODEL))
    write_tensors(folder / "windows.safetensors", {"validation": np_tokens()}, {"block": 8})
    folder.joinpath("project").mkdir()
    make_study(folder / "project")
    study = study_of({"source": "bundled", "location": "resources/bundled/x"}, folder / "bundle", paths)
    (folder / "small.yaml").write_text(json.dumps(study))  # windows keep their order
    (folder / "config.yaml").write_text(json.dumps(SHARED))
    return {name: folder / "bundle" / path for name, path in paths.items()} | {
        "vocabulary": folder / "bundle" / "vocab.json",
        "merges": folder / "bundle" / "merges.json",
        "final.pt": folder / "published" / published["checkpoint"],
        "policy": policy,
        "windows": folder / "windows.safetensors",
        "sensitivity": folder / "study" / SENSITIVITY,
        "positions": folder / "study" / "policies" / "int8" / "positions.csv",
        "evaluation": folder / "study" / "policies" / "int8" / "evaluation.json",
        "study": folder / "small.yaml",
        "shared": folder / "config.yaml",
        "manifest": folder / "project" / FOLDER / "manifest.json",
        "sums": folder / "project" / FOLDER / "SHA256SUMS",
    }


def np_tokens() -> Any:
    import torch

    return torch.arange(32).reshape(4, 8) % SHAPE["vocab_size"]


def small(text: bytes, rows: int = 12) -> bytes:
    """The first rows of a table."""
    return b"\n".join(text.splitlines()[: rows + 1]) + b"\n"


def read_whole_shard(path: Path) -> None:
    read_shard(path).sum()


def read_sensitivity(path: Path) -> None:
    read_scores(path, ONE_LAYER, 8)
    read_setting(path)


def read_study(path: Path) -> None:
    check_study("small", load_study(path))


def read_shared(path: Path) -> None:
    """As Snakemake reads it; what is no YAML never reaches this project."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        check_shared(config)


def encode(vocabulary: Path, merges: Path) -> None:
    """Load a tokenizer and use it; what its vocabulary lacks is refused without the name of a file."""
    tokenizer = Tokenizer.load(vocabulary, merges)
    try:
        tokenizer.decode(tokenizer.encode("the cache holds what the head has seen"))
    except ValueError as error:
        raise ValueError(f"vocab.json, merges.json: {error}") from None


def compared(with_what: Path, compare: Any) -> Any:
    """A comparer of results, with a right file on the other side."""
    kind = kinds(f"policies/int8/{with_what.name}") or kinds("reference/validation.safetensors")
    return lambda path: compare(with_what, path, Judge(kind))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    folder = tmp_path_factory.mktemp("seeds")
    right = sample(folder)
    data = {name: path.read_bytes() for name, path in right.items()}
    beside = {"merges": right["merges"], "vocabulary": right["vocabulary"]}
    shards = [data["shard"], as_bytes(lambda path: write_shard(path, np.zeros(0, int)), folder / "empty.bin")]
    positions, sensitivity = small(data["positions"]), data["sensitivity"]
    return [
        Target("shard", "shard.bin", shards, read_whole_shard, 12),
        Target("policy", "policy.json", [data["policy"]], lambda path: read_policy(path, MODEL), 16, "json"),
        Target("study", "small.yaml", [data["study"]], read_study, 6, "json"),
        Target("shared", "config.yaml", [data["shared"]], read_shared, 4, "json"),
        Target("tensors", "x.safetensors", [data["windows"]], read_tensors, 12),
        Target("windows", "x.safetensors", [data["windows"]], lambda path: load_window(path, "validation", CONFIG), 6),
        Target("shape", "x.safetensors", [data["checkpoint"]], read_config, 6),
        Target("weights", "x.safetensors", [data["checkpoint"]], read_checkpoint, 4),
        Target("checkpoint", "final.pt", [data["final.pt"]], read_checkpoint, 4),
        Target(
            "columns", "x.csv", [positions], lambda path: read_columns(path, ["kl", "position"], ["agrees"]), 3, "csv"
        ),
        Target(
            "scores",
            "x.csv",
            [sensitivity],
            lambda path: (read_scores(path, ONE_LAYER, 8), read_setting(path)),
            2,
            "csv",
        ),
        Target(
            "vocabulary", "vocab.json", [data["vocabulary"]], lambda path: encode(path, beside["merges"]), 6, "json"
        ),
        Target("merges", "merges.json", [data["merges"]], lambda path: encode(beside["vocabulary"], path), 6, "json"),
        Target("manifest", "manifest.json", [data["manifest"]], read_manifest, 4, "json"),
        Target("checksums", "SHA256SUMS", [data["sums"]], lambda path: list(listed(path, [])), 4),
        Target("compared table", "x.csv", [positions], compared(right["positions"], compare_tables), 2, "csv"),
        Target(
            "compared record", "x.json", [data["evaluation"]], compared(right["evaluation"], compare_records), 4, "json"
        ),
        Target("compared tensors", "x.safetensors", [data["windows"]], compared(right["windows"], compare_tensors), 2),
    ]


def fuzz(targets: list[Target], count: int, folder: Path) -> dict[str, dict[str, int]]:
    """How many files each reader took and refused; AssertionError tells the first problem of each that has one."""
    total = sum(target.share for target in targets)
    outcome, problems = {}, []
    for number, target in enumerate(targets):
        try:
            outcome[target.name] = attack(target, -(-count * target.share // total), folder / str(number))
        except AssertionError as problem:
            problems.append(str(problem))
    assert not problems, "\n\n".join(problems)
    return outcome


def test_every_reader_takes_the_files_that_are_mutated(targets: list[Target], tmp_path: Path) -> None:
    for target in targets:
        for seed in target.seeds:
            (tmp_path / target.file).write_bytes(seed)
            target.read(tmp_path / target.file)


def test_no_reader_crashes_hangs_or_writes(targets: list[Target], tmp_path: Path) -> None:
    outcome = fuzz(targets, COUNT // 200, tmp_path)
    # A list of checksums takes anything, and says which lines are none; a comparison of tables says what differs.
    assert {name for name, counts in outcome.items() if not counts["refused"]} <= {"checksums", "compared table"}


@pytest.mark.fuzz
def test_no_reader_crashes_hangs_or_writes_a_hundred_thousand_times(
    targets: list[Target], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = fuzz(targets, COUNT, tmp_path)
    with capsys.disabled():
        print()
        for name, counts in outcome.items():
            print(f"{name:18} {sum(counts.values()):7,} files, {counts['refused']:7,} refused")
        print(f"{sum(sum(counts.values()) for counts in outcome.values()):26,} files in all, no crash, hang or write")
    assert sum(sum(counts.values()) for counts in outcome.values()) >= COUNT


def test_the_watch_sees_what_it_looks_for(tmp_path: Path) -> None:
    """So that a clean result means something."""
    from fuzzing import watched

    with watched() as seen:
        (tmp_path / "x").write_text("x")
        os.mkdir(tmp_path / "y")
        subprocess.run(["true"], check=True)
    assert [entry.split("(")[0].split(":")[0] for entry in seen][:3] == [
        "open for writing",
        "os.mkdir",
        "subprocess.Popen",
    ]
    with little_memory(64), pytest.raises(MemoryError):
        bytearray(1 << 30)


def safetensors_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LIES = {
    "beyond the file": ({"a": entry(0, 400, [100])}, b"\0" * 8, None),
    "gigabytes": ({"a": entry(0, 1 << 42, [1 << 40])}, b"\0" * 8, None),
    "overlapping": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12, None),
    "backwards": ({"a": entry(8, 0, [2])}, b"\0" * 8, None),
    "a hole": ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"\0" * 12, None),
    "another shape": ({"a": entry(0, 8, [3])}, b"\0" * 8, None),
    "a shape that overflows": ({"a": entry(0, 8, [1 << 62, 1 << 62])}, b"\0" * 8, None),
    "a negative shape": (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"\0" * 4, None),
    "an unknown type": ({"a": entry(0, 8, [2], "F33")}, b"\0" * 8, None),
    "a header of exabytes": ({}, b"", (1 << 63) - 1),
    "a header longer than the file": ({}, b"", 1 << 20),
    "a header of 2^64 - 1": ({}, b"", (1 << 64) - 1),
    "a deep header": (b"[" * 100_000, b"", None),
    "no header": (b"", b"", 0),
    "data behind the tensors": ({"a": entry(0, 4, [1])}, b"\0" * 64, None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_safetensors_file_with_a_lying_header_is_one_line_and_little_memory(tmp_path: Path, lie: str) -> None:
    path = safetensors_file(tmp_path / "x.safetensors", *LIES[lie])
    for read in (read_tensors, read_checkpoint, read_config):
        with little_memory(256), pytest.raises(ValueError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "size", [{"num_layers": 10**9}, {"embedding_dim": 10**9}, {"vocab_size": 10**18}, {"context_len": 10**30}]
)
def test_a_configuration_of_a_giant_model_is_refused_without_building_it(tmp_path: Path, size: dict[str, int]) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, decoder().state_dict(), {"config": SHAPE | size})
    with little_memory(256), pytest.raises(ValueError) as caught:
        read_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


class Runs:
    """Unpickled carelessly, starts a program."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("content", [Runs(), {"config": SHAPE, "model_state_dict": Runs()}, [Runs()] * 3])
def test_a_checkpoint_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pt").write_bytes(torch_bytes(content))
    result = CliRunner().invoke(main, ["convert", "--checkpoint", "evil.pt", "--output", "out.safetensors"])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert (
        "evil.pt: holds more than tensors" in result.output and "is refused: loading it could run code" in result.output
    )
    assert os.listdir() == ["evil.pt"]


CLIMBING = [
    "../outside.bin", "a/../../outside.bin", "/etc/hostname", "..", "a/..", "", ".", "\\..\\x", "a\0b", "~/x",
]  # fmt: skip


@pytest.mark.parametrize("path", CLIMBING)
@pytest.mark.parametrize("source", ["local", "hub", "bundled"])
def test_paths_of_artifacts_stay_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.bin").write_bytes(b"secret")
    (tmp_path / "files").mkdir()
    location = {"hub": "owner/name"}.get(source, "files")
    revision = ["--revision", "a" * 40] if source == "hub" else []
    words = [
        "--source",
        source,
        "--location",
        location,
        *revision,
        "--path",
        path,
        "--sha256",
        "0" * 64,
        "--output",
        "out",
    ]
    result = CliRunner().invoke(main, ["fetch", *words], env={"HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 1 and result.output.count("\n") == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "out").exists() and "secret" not in result.output
    study = {**STUDY, "artifacts": artifacts_at(path, source, location)}
    if path != "~/x":  # a plain name inside the folder; it is not there, which only the fetch can say
        with pytest.raises(ValueError, match=r"^config/studies/small\.yaml: artifacts"):
            check_study("small", study)


def artifacts_at(path: str, source: str, location: str) -> dict[str, Any]:
    files = {name: {"path": "x.pt", "sha256": "0" * 64} for name in ("checkpoint", "shard")}
    files["shard"] = {"path": path, "sha256": "0" * 64}
    revision = {"revision": "a" * 40} if source == "hub" else {}
    return {"source": source, "location": location, **revision, "files": files}


@pytest.mark.parametrize(
    "location", ["../up", "/etc", "a/../..", "..", "owner/..", "owner/name/more", "https://x/y", "o/n?x"]
)
def test_locations_stay_where_they_belong(location: str) -> None:
    for source in ("bundled", "hub"):
        if (source, location) == ("bundled", "owner/name/more") or (
            source == "bundled" and location in ("https://x/y", "o/n?x")
        ):
            continue  # odd names of folders, but below the working directory
        with pytest.raises(ValueError, match=r"^config/studies/small\.yaml: artifacts"):
            check_study("small", {**STUDY, "artifacts": artifacts_at("x.bin", source, location)})


def test_a_link_in_place_of_an_output_is_replaced_not_followed(tmp_path: Path) -> None:
    """What is written goes to a new file that takes the link's name."""
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "out.json").symlink_to(target)
    write_json(tmp_path / "out.json", {"a": 1})
    assert target.read_text() == "kept" and not (tmp_path / "out.json").is_symlink()
    assert read_json(tmp_path / "out.json") == {"a": 1}


def arm(**settings: object) -> dict[str, object]:
    """An adaptation with other settings of its arm noise."""
    arms = STUDY["adaptation"]["arms"]
    return {"adaptation": {**STUDY["adaptation"], "arms": {**arms, "noise": {**arms["noise"], **settings}}}}


HUGE = [
    ({"budgets": [float("inf")]}, "budgets"),
    ({"budgets": [10**400]}, "budgets"),
    ({"layers": 10**9}, "layers"),
    ({"layers": 10**30}, "layers"),
    ({"block": 10**30}, "block"),
    ({"windows": {**STUDY["windows"], "validation": [64, 10**30]}}, "windows"),
    (arm(steps=10**30), "adaptation.arms.noise.steps"),
    ({"adaptation": {**STUDY["adaptation"], "batch": 10**30}}, "adaptation.batch"),
    (arm(learning_rate=10**400), "adaptation.arms.noise.learning_rate"),
    (arm(seeds=[10**30]), "adaptation.arms.noise.seeds"),
]


@pytest.mark.parametrize(("change", "key"), HUGE)
def test_huge_numbers_are_refused_by_the_checks(change: dict[str, Any], key: str) -> None:
    study = {**STUDY, "artifacts": artifacts_at("x.bin", "local", "files"), **change}
    with pytest.raises(ValueError) as caught:
        check_study("small", study)
    assert str(caught.value).startswith(f"config/studies/small.yaml: {key}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("key", "value"), [("threads", 10**30), ("memory_mb", 10**30), ("threads", 10**5)])
def test_huge_shared_numbers_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^config/config\.yaml: {key}: "):
        check_shared({**SHARED, key: value})


def test_budgets_as_yaml_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    for text in ("1e400", "-1e400", ".inf", ".nan", "1e-400000", "0x10", "1:30", "1_000"):
        adaptation = {**STUDY["adaptation"], "policies": ["int4", "int2"]}  # policies whatever the budgets are
        artifacts = artifacts_at("x.bin", "local", "files")
        study = {**STUDY, "artifacts": artifacts, "adaptation": adaptation, "budgets": [0.125]}
        path.write_text(json.dumps(study).replace("0.125", text))
        loaded = load_study(path)
        try:
            check_study("small", loaded)
        except ValueError as error:
            assert str(error).startswith("config/studies/small.yaml: budgets")
        else:
            assert loaded["budgets"][0] in (0, 16, 90, 1000), text


def test_aliases_that_grow_are_no_bomb(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30))
    path.write_text(f"l0: &l0 [x]\n{levels}\n")
    with little_memory(256), pytest.raises(ValueError) as caught:
        check_study("small", load_study(path))
    assert len(str(caught.value)) < 2000


SHELL = "a; touch ran $(touch ran) `touch ran` ' \" & | > ran * ? # ~ \\ %s"


def hostile_files(folder: Path, name: str) -> tuple[Path, dict[str, str]]:
    """The small study's artifacts in a folder and under names that a shell would mind."""
    place = folder / f"in {name}"
    paths = bundle(place)
    renamed = {}
    for artifact, path in paths.items():
        stem, suffix = path.split(".")
        renamed[artifact] = f"{stem} {name}.{suffix}"
        (place / path).rename(place / renamed[artifact])
    return place, renamed


def test_a_dry_run_prints_odd_names_quoted(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    text = SHELL.replace("\\", "")
    study = {
        **STUDY,
        "title": f"Title {SHELL} {{input}}",
        "artifacts": artifacts_at(f"shard {text}.bin", "local", "x {y}"),
    }
    project.configure(study)
    output = project.run("--dry-run", "--printshellcmds")
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("path", ["{input}.bin", "a\nb.bin", "a{{x}}", "a\tb", "a\x7f"])
def test_names_that_snakemake_or_a_log_would_take_for_something_else_are_refused(path: str) -> None:
    with pytest.raises(
        ValueError, match=r"^config/studies/small\.yaml: artifacts \(shard\): path .* without braces and"
    ):
        check_study("small", {**STUDY, "artifacts": artifacts_at(path, "local", "files")})


def test_a_real_run_with_odd_names_runs_nothing_but_the_stages(tmp_path: Path) -> None:
    """Spaces, quotes, semicolons, backticks and $() in title, folder and file names, through the shell and back."""
    text = SHELL.replace("\\", "")
    folder, paths = hostile_files(tmp_path / "files", text)
    project = Project(tmp_path / "project")
    study = study_of({"source": "local", "location": str(folder)}, folder, paths)
    project.configure({**study, "title": f"Title {SHELL} {{input}}"})
    project.run("results/small/windows.safetensors", "results/small/policies/bf16/policy.json", "--cores", "2")
    fetched = [path.name for path in (project.folder / "resources" / "small" / "shard").iterdir()]
    assert fetched == [paths["shard"]]
    assert not list(tmp_path.rglob("ran"))


NAMES = ["a;touch ran", "a b", "$(touch ran)", "`touch ran`", "..", "-x", "A", "small/../x", "ü", "a\n", ""]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_of_studies_are_refused(name: str) -> None:
    message = "expected a name of lower-case letters, digits and hyphens"
    with pytest.raises(ValueError, match=message):
        check_shared({**SHARED, "studies": [name]})
    with pytest.raises(ValueError, match=message):
        check_study(name, {**STUDY, "artifacts": artifacts_at("x.bin", "local", "files")})


def test_odd_names_of_studies_are_refused_by_the_workflow(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    project.configure({**STUDY, "artifacts": artifacts_at("x.bin", "local", "files")})
    (project.folder / "config" / "studies" / "a;touch ran.yaml").write_text("{}")
    output = project.run("--dry-run")
    assert "config/studies: the text 'a;touch ran', expected a name of lower-case letters" in output
    output = project.run("--dry-run", "--config", "studies=[$(touch ran)]", status=1)
    assert "expected a name of lower-case letters" in output and "Traceback" not in output
    assert not list(tmp_path.rglob("ran"))


def test_hostile_manifests_do_not_leave_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest with a right checksum of its own that names other people's files: nothing of them is read."""
    from kvstages.provenance.manifest import own_digest

    monkeypatch.chdir(tmp_path)
    make_study(tmp_path)
    path = FOLDER / "manifest.json"
    record = read_json(path)
    chance = random.Random(3)
    for name in ("/etc/passwd", "../../../etc/passwd", "resources/../../x"):
        changed = {**record, "outputs": {**record["outputs"], name: {"sha256": "0" * 64, "rule": "x"}}}
        write_json(path, {**changed, "sha256": own_digest(changed)})
        result = CliRunner().invoke(main, ["verify", str(FOLDER)])
        assert result.exit_code == 1 and f"'{name}': expected a path inside its folder" in result.output
    for _ in range(100):
        changed = mutated_structure({key: value for key, value in record.items() if key != "sha256"}, chance)
        if isinstance(changed, dict):
            try:
                write_json(path, {**changed, "sha256": own_digest(changed)})
            except ValueError:
                continue  # no JSON: NaN or a lone surrogate
            result = CliRunner().invoke(main, ["verify", str(FOLDER)])
            assert result.exception is None or isinstance(result.exception, SystemExit), changed
