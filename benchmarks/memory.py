"""Peak memory of each stage that runs a decoder, beside what ``--memory-mb`` promises.

A random decoder with a large vocabulary and long blocks, so that logits are most of what a careless stage would hold.
Each stage runs in a process of its own, whose peak is what the system says. The same stage on a decoder of next to
nothing tells what the libraries take; weights are what is on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS
from kvstages.files.atomic import write_json, write_table, write_tensors, write_text
from kvstages.models.checkpoints import save_model
from kvstages.models.gpt2_nano import GPT, GPTConfig
from kvstages.models.identity import read_identity
from kvstages.policies.budgets import Budget
from kvstages.policies.identity import identity_record
from kvstages.policies.making import policy_record
from kvstages.provenance.environment import processor

LAYERS, HEADS, WIDTH, BLOCKS = 2, 4, 16, 2
LARGE, NOTHING = (262_144, 1_024), (64, 8)
# Runs a stage and says the peak of its process; a peak that getrusage gives would be the parent's where that is larger.
PEAK = """
import sys
from kvstages.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def prepare(folder: Path, vocabulary: int, block: int) -> None:
    """Write a random decoder, two blocks of tokens, and a policy."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary, block, HEADS * WIDTH, LAYERS, HEADS))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    save_model(folder / "model.safetensors", model.config, model.state_dict())
    tokens = torch.randint(vocabulary, (BLOCKS, block))
    write_tensors(folder / "windows.safetensors", {"validation": tokens}, {"block": block})
    grid = PrecisionGrid.uniform(LAYERS, HEADS, "int4")
    limit = Budget(1.0, "nats")
    shape = {"unit": "head", "ladder": BITS, "sensitivity": "random"}
    record = policy_record("int4", "greedy", limit, grid, 0.5, 1, WIDTH, block, **shape)
    identified = identity_record(read_identity(folder / "model.safetensors").as_record(), BITS, {"random": "0" * 64})
    write_json(folder / "policy.json", record | identified)
    policies = [{**record, "recipe": "int4", "limit": record["bytes"]["total"]}]
    write_json(folder / "policies.json", {"policies": policies, **identified})


def stages(memory_mb: int) -> dict[str, list[str]]:
    """The arguments of each stage that runs a decoder."""
    opened = ["--model", "model.safetensors", "--windows", "windows.safetensors", "--device", "cpu"]
    opened += ["--memory-mb", str(memory_mb), "--window", "validation"]
    measured = [*opened, "--reference", "reference.safetensors"]
    training = ["--seed", "0", "--batch", "1", "--steps", "2", "--learning-rate", "1e-6", "--beta", "1"]
    return {
        "reference": [*opened, "--output", "reference.safetensors"],
        "sweep": [*opened, "--layer", "0", "--output", "sweep.csv"],
        "evaluate": [*measured, "--policy", "policy.json", "--output", "figures.json", "--positions", "positions.csv"],
        "evaluate-set": [*measured, "--policies", "policies.json", "--output", "joint.csv"],
        "evaluate-adapted": [*measured, "--policy", "policy.json", "--output", "evaluation.csv"],
        "gradients": [*opened, "--probes", "2", "--output-table", "scores.csv", "--projections", "projections"],
        "adapt": [
            *(*opened, *training, "--straight-through", "int4"),
            *("--output", "adapted", "--curve", "curve.csv", "--record", "training.json"),
        ],
    }


def peak(folder: Path, stage: str, arguments: list[str]) -> int:
    """Peak memory of a stage's process, in bytes."""
    command = [sys.executable, "-c", PEAK, stage, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1]) * 1024


def rows(memory_mb: int) -> list[dict[str, Any]]:
    """Peaks of every stage in MB: with the large decoder, with one of next to nothing, and what lies between."""
    found = []
    with TemporaryDirectory() as large, TemporaryDirectory() as nothing:
        for folder, size in ((large, LARGE), (nothing, NOTHING)):
            prepare(Path(folder), *size)
        weights = (Path(large) / "model.safetensors").stat().st_size
        for stage, arguments in stages(memory_mb).items():
            whole, libraries = (peak(Path(folder), stage, arguments) for folder in (large, nothing))
            row = {"peak": whole, "libraries": libraries, "weights": weights, "beside_them": whole - libraries}
            row = {name: round(value / 2**20) for name, value in row.items()}
            found.append({"stage": stage, "memory_mb": memory_mb, **row})
            print(json.dumps(found[-1]), flush=True)
    return found


def page(found: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    head = ("stage", "--memory-mb", "peak of the process", "libraries", "weights", "peak − libraries")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in found]
    about = (
        f"MB. Vocabulary {LARGE[0]:,}, {BLOCKS} blocks of {LARGE[1]:,} tokens, {LAYERS} layers of {HEADS} heads of "
        f"width {WIDTH}, FP32, random weights; {processor()}, one thread. Logits of one block in FP32: "
        f"{LARGE[0] * LARGE[1] * 4 >> 20:,} MB. Libraries: the peak of the same stage on a decoder of next to nothing."
    )
    return "\n".join([about, "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--memory-mb", type=int, default=512, help="Memory for one pass.")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="Folder to write to.")
    arguments = parser.parse_args()
    found = rows(arguments.memory_mb)
    write_table(arguments.output / "memory.csv", {name: [row[name] for row in found] for name in found[0]})
    write_text(arguments.output / "memory.md", page(found))


if __name__ == "__main__":
    main()
