"""The command line as a whole: help of every stage, a quick start, and errors as one line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from command_lines import check_call, stage
from conftest import REPOSITORY
from models import random_model

from benchmarks import start_up
from kvstages import __version__
from kvstages.cli import main, out_of_memory
from kvstages.commands.arguments import asked
from kvstages.files.atomic import write_tensors
from kvstages.models.checkpoints import save_model
from kvstages.stages import STAGES

COMMANDS = STAGES


def test_the_version_is_known_where_the_package_is_not_installed(monkeypatch):
    """In the image there is only the repository."""

    def nowhere(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nowhere)
    result = CliRunner().invoke(main, ["--version"], prog_name="kvstages")
    assert (result.exit_code, result.output) == (0, f"kvstages, version {__version__}\n")


def test_help_lists_a_stage_for_every_file_of_commands():
    files = {
        path.stem.replace("_", "-")
        for path in (REPOSITORY / "kvstages" / "commands").glob("*.py")
        if "@click." in path.read_text()
    }
    listed = re.findall(r"^  ([a-z][a-z-]*)  +\S", CliRunner().invoke(main, ["--help"]).output, re.MULTILINE)
    assert sorted(listed) == sorted(files)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_stage_says_what_it_writes_and_how_to_call_it(name):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(r"\b[Ww]rit(e|es|ten)\b", result.output) or isinstance(stage(name), click.Group)
    assert f"Example: kvstages {name} " in " ".join(result.output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_stage_is_a_call_that_it_takes(name):
    """Every option of the example is known, and none that is required is missing."""
    text = stage(name).help.split("Example:")[1].replace("\\\n", " ")
    words = shlex.split(text)
    assert words[:2] == ["kvstages", name]
    # `several` takes the calls of other stages, parted by a plus sign.
    calls = " ".join(words[2:]).split(" + ") if name == "several" else [" ".join(words[1:])]
    for call in calls:
        check_call(call.split())


def test_the_benchmark_of_start_up_calls_stages_as_they_are():
    for name, words in start_up.stages():
        if name == "figure":
            asked(main, [name, *words.split()])  # it takes a file's name without an option
        else:
            check_call([name, *words.split()])


@pytest.mark.parametrize("group", ["figure", "table"])
def test_help_of_every_figure_and_table(group):
    for name in stage(group).list_commands(click.Context(stage(group))):
        result = CliRunner().invoke(main, [group, name, "--help"])
        assert result.exit_code == 0 and "written beside it" in " ".join(result.output.split()), name


def test_help_starts_without_torch():
    script = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from kvstages.cli import main\nfrom kvstages.stages import STAGES\n"
        "for words in (['--help'], *([name, '--help'] for name in STAGES)):\n"
        "    assert CliRunner().invoke(main, words).exit_code == 0, words\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'snakemake'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def imports_of_stages(stages: list[list[object]], folder: Path, modules: list[str]) -> str:
    """Those of ``modules`` that a process has imported once it has run ``stages`` in ``folder``, as one line."""
    script = (
        "import json, sys\n"
        "from click.testing import CliRunner\n"
        "from kvstages.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(main, words)\n"
        "    assert result.exit_code == 0, (words, result.output)\n"
        "print(*[name for name in sys.argv[2:] if name in sys.modules])\n"
    )
    words = json.dumps([[str(word) for word in stage] for stage in stages])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script, words, *modules], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_stages_start_without_what_they_do_not_need(artifacts, tmp_path):
    """Neither torch where nothing is computed, nor ever PyTorch's compiler, which takes as long again as torch."""
    source, paths = artifacts
    model, window = source / paths["checkpoint"], ["--window", "validation"]
    shard = ["--shard", source / paths["shard"], "--model", model, "--block", 8]
    windows = ["windows", *shard, "--window", "adaptation=0:16", "--window", "validation=64:96"]
    windows += ["--output", "windows", "--places", "windows.csv"]
    sensitivity = ["gather", "0.csv", "1.csv", "--source", "mine", "--output", "sensitivity.csv"]
    policy = ["--policy", "int8", "--allocator", "uniform", "--precision", "int8", "--sensitivity", "sensitivity.csv"]
    allocate = ["allocate", *policy, "--model", model, "--output", "int8.json", "--steps", "steps.csv"]
    decoder = ["--model", "model.safetensors", "--windows", "windows", "--device", "cpu"]
    files = ["--policy", "int8.json", "--reference", "reference", "--output", "int8", "--positions", "positions.csv"]
    arm = ["--seed", 1, "--steps", 2, "--learning-rate", 1e-3, "--beta", 1, "--output", "adapted"]
    arm += ["--curve", "curve.csv", "--record", "training.json"]
    adapted = ["--policy", "int8.json", "--policy", "int2", "--reference", "reference", "--output", "evaluation.csv"]
    stages = [
        windows,
        ["convert", "--checkpoint", model, "--output", "model.safetensors"],
        ["reference", *decoder, *window, "--output", "reference"],
        *(["sweep", *decoder, *window, "--layer", layer, "--output", f"{layer}.csv"] for layer in range(2)),
        sensitivity,
        allocate,
        ["evaluate", *decoder, *window, *files],
        ["adapt", *decoder, *arm, "--noise", "int4", "--compute-dtype", "bfloat16"],
        ["adapt", *decoder, *arm, "--straight-through", "int2"],
        ["evaluate-adapted", *decoder, *window, *adapted],
    ]
    assert imports_of_stages(stages, tmp_path, ["torch", "torch._dynamo", "torch._inductor", "sympy"]) == "torch"
    assert imports_of_stages([windows, sensitivity, allocate], tmp_path, ["torch"]) == ""


def test_an_unknown_stage_is_a_usage_error():
    result = CliRunner().invoke(main, ["sweeep"])
    assert result.exit_code == 2 and "No such command 'sweeep'" in result.output


def cpu_allocation_error() -> Exception:
    """What PyTorch raises where the CPU's memory does not do."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), cpu_allocation_error()])
def test_memory_that_runs_out_is_one_line_with_what_to_do(error, tmp_path, monkeypatch):
    model = random_model()
    save_model(tmp_path / "model.safetensors", model.config, model.state_dict())
    write_tensors(tmp_path / "windows.safetensors", {"validation": torch.zeros(2, 8, dtype=torch.int64)})

    def fail(*_):
        raise error

    monkeypatch.setattr("kvstages.models.load.open_decoder", fail)
    words = ["reference", "--model", tmp_path / "model.safetensors", "--windows", tmp_path / "windows.safetensors"]
    words += ["--window", "validation", "--device", "cpu", "--output", tmp_path / "out.safetensors"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1 and "give a smaller --memory-mb" in result.output
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "words", ["mat1 and mat2 shapes cannot be multiplied", "could not create a primitive descriptor for a matmul"]
)
def test_a_fault_of_the_code_is_not_taken_for_a_lack_of_memory(words):
    assert not out_of_memory(RuntimeError(words))
