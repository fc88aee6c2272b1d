"""memory_mb is a promise: every stage that runs a decoder keeps to it, or says in one line what it needs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from models import identified, identity_of, random_model, random_tokens

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.cli import NO_MEMORY, main
from kvstages.files.atomic import write_json, write_tensors
from kvstages.measure.setting import Setting
from kvstages.models.checkpoints import save_model
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record

# Narrow, with so large a vocabulary that the logits of two blocks (72 MB in FP32) are far above the memory that stages
# are given, and with what is computed from them far above all that they may take.
VOCABULARY, BLOCK, HEAD_DIM, MEMORY_MB = 36_864, 256, 4, 24
# Beside it: weights as they are read, laid out anew, and trained (with gradients and two averages), and what libraries
# keep for themselves.
WEIGHTS = 2 * VOCABULARY * 2 * HEAD_DIM * 4
BESIDE = 8 * WEIGHTS + (40 << 20)
# Runs stages one after the other, each in a copy of one process, whose data may grow by so many bytes once libraries
# are imported: what a stage leaves in pieces is no matter of the next. What each says, and its exit status,
# is in the file of its limit; of one that a signal ended, which signal.
LIMITED = """
import json, os, resource, sys
import torch
from kvstages.cli import main
import kvstages.measure.adaptation, kvstages.measure.evaluation, kvstages.measure.gradients, kvstages.measure.policy_set
import kvstages.measure.sweep, kvstages.models.load, safetensors.torch

torch.ones(64, 64) @ torch.ones(64, 64)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
for limit, arguments in json.load(sys.stdin):
    if process := os.fork():
        status = os.waitpid(process, 0)[1]
        if os.WIFSIGNALED(status):
            with open(f"{limit}.said", "a") as said:
                print(arguments[0], "ended by signal", os.WTERMSIG(status), file=said)
        continue
    os.dup2(os.open(f"{limit}.said", os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
    try:
        main(arguments)
    except SystemExit as end:
        print(arguments[0], end.code, file=sys.stderr, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of one layer and two heads, two blocks of tokens, and a policy."""
    folder = tmp_path_factory.mktemp("large-vocabulary")
    model = random_model(1, 2, HEAD_DIM, vocab=VOCABULARY, context=BLOCK)
    save_model(folder / "model.safetensors", model.config, model.state_dict())
    write_tensors(folder / "windows.safetensors", {"validation": random_tokens(2, BLOCK, VOCABULARY)}, {"block": BLOCK})
    grid = PrecisionGrid.uniform(1, 2, "int4")
    record = policy_record(
        "int4",
        "greedy",
        Budget(1.0, "nats"),
        grid,
        0.5,
        1,
        (HEAD_DIM, HEAD_DIM),
        BLOCK,
        unit="head",
        ladder=BITS,
        sensitivity="made-up",
    )
    identity = identity_of(model)
    write_json(folder / "policy.json", identified(record, identity))
    policies = [{**record, "recipe": "int4", "limit": record["bytes"]["total"]}]
    write_json(folder / "policies.json", identified({"policies": policies}, identity))
    return folder


def stages(memory_mb: int) -> list[list[str]]:
    """Arguments of every stage that runs the decoder."""
    common = ["--model", "model.safetensors", "--windows", "windows.safetensors", "--window", "validation"]
    common += ["--device", "cpu", "--memory-mb", str(memory_mb)]
    measured = [*common, "--reference", "reference.safetensors"]
    training = ["--seed", "0", "--batch", "1", "--steps", "1", "--learning-rate", "1e-6", "--beta", "1"]
    written = {
        "reference": [*common, "--output", "reference.safetensors"],
        "sweep": [*common, "--layer", "0", "--precision", "int4", "--output", "sweep.csv"],
        "evaluate": [*measured, "--policy", "policy.json", "--output", "figures.json", "--positions", "positions.csv"],
        "evaluate-set": [*measured, "--policies", "policies.json", "--output", "joint.csv"],
        "gradients": [*common, "--probes", "1", "--output-table", "scores.csv", "--projections", "projections"],
        "evaluate-adapted": [*measured, "--policy", "policy.json", "--output", "evaluation.csv"],
        "adapt": [
            *(*common, *training, "--straight-through", "int4"),
            *("--output", "adapted", "--curve", "curve.csv", "--record", "training.json"),
        ],
    }
    return [[stage, *arguments] for stage, arguments in written.items()]


ENOUGH, PLENTY = (MEMORY_MB << 20) + BESIDE, 1 << 40
# Reading, laying out and multiplying fail in libraries of their own, each with its own words for it.
TOO_FEW = [megabytes << 20 for megabytes in (1, 5, 8, 14)]


@pytest.fixture(scope="module")
def said(folder) -> dict[int, list[str]]:
    """What all stages say under each limit, by line, each with its exit status after it."""
    runs = [(ENOUGH, arguments) for arguments in stages(MEMORY_MB)]
    runs += [(PLENTY, stages(512)[0])]  # another memory_mb needs another reference
    runs += [(limit, arguments) for limit in TOO_FEW for arguments in stages(512)]
    subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=folder, input=json.dumps(runs), text=True, timeout=300, check=True
    )
    return {limit: (folder / f"{limit}.said").read_text().splitlines() for limit in (ENOUGH, *TOO_FEW)}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts private memory on Linux alone")
def test_every_stage_keeps_to_its_memory_whatever_the_vocabulary(said):
    assert said[ENOUGH] == [f"{stage} 0" for stage, *_ in stages(MEMORY_MB)]


@pytest.mark.parametrize("number", range(6))
def test_less_than_the_least_is_one_line_that_says_how_much_is_needed(folder, number, monkeypatch):
    monkeypatch.chdir(folder)
    if number in (2, 3):
        write_tensors(
            folder / "reference.safetensors",
            {"logits": torch.zeros(1, 1, 1)},
            {**Setting("one-pass", "float32").as_dict(), "device": "cpu", "threads": 1, "memory_mb": 1}
            | {"window": "validation"},
        )
    result = CliRunner().invoke(main, stages(1)[number])
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: memory_mb 1: this model and these blocks need at least \d+\n", result.output)


@pytest.mark.parametrize("limit", TOO_FEW)
def test_memory_that_runs_out_all_the_same_is_one_line(said, limit):
    """But where it runs out as oneDNN asks for a few bytes, which it then does not look for: about one run of a
    thousand ends so, by a signal, which no Python code can catch."""
    ended = [line.split()[0] for line in said[limit] if line.endswith(f"ended by signal {int(signal.SIGSEGV)}")]
    assert len(ended) <= 1
    assert said[limit] == [
        line
        for stage, *_ in stages(512)
        for line in (
            [f"{stage} ended by signal {int(signal.SIGSEGV)}"]
            if stage in ended
            else [f"Error: {NO_MEMORY}", f"{stage} 1"]
        )
    ]
