"""What the stages cost before they compute: each is run by its command line on a decoder of next to nothing.

Processor time of whole processes, so that a busy machine does not count; stages take turns, and the least of several
rounds is kept. The first row is ``import torch`` alone, the least that a stage which computes can take.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvstages
from kvstages.provenance.environment import processor

ROUNDS = 5


def prepare(folder: Path) -> None:
    """A random decoder of 2 layers x 2 heads as final.safetensors, and a shard of its tokens as shard.bin."""
    import numpy as np
    import torch

    from kvstages.models.checkpoints import save_model
    from kvstages.models.config import GPTConfig
    from kvstages.models.gpt2_nano import GPT
    from kvstages.study.shards import write_shard

    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, context_len=16, embedding_dim=16, num_layers=2, num_heads=2)
    save_model(folder / "final.safetensors", config, GPT(config).state_dict())
    write_shard(folder / "shard.bin", np.random.default_rng(0).integers(config.vocab_size, size=128))


def stages() -> list[tuple[str, str]]:
    """Name and words of the stages, in an order in which each finds what those before it have written."""
    decoder = "--model model.safetensors --windows windows --device cpu"
    measured = f"{decoder} --window validation"
    cut = "--shard shard.bin --model model.safetensors --block 8 --window adaptation=0:16 --window validation=64:96"
    policy = "--policy int8 --allocator uniform --precision int8 --sensitivity sensitivity.csv"
    return [
        ("convert", "--checkpoint final.safetensors --output model.safetensors"),
        ("windows", f"{cut} --output windows --places windows.csv"),
        ("reference", f"{measured} --output reference"),
        ("sweep", f"{measured} --layer 0 --output 0.csv"),
        ("sweep", f"{measured} --layer 1 --output 1.csv"),
        ("gather", "0.csv 1.csv --source measured-float32 --output sensitivity.csv"),
        ("allocate", f"{policy} --model model.safetensors --output int8.json --steps steps.csv"),
        ("evaluate", f"{measured} --policy int8.json --reference reference --output int8 --positions positions.csv"),
        (
            "adapt",
            f"{decoder} --noise int4 --seed 1 --steps 1 --learning-rate 1e-6 --beta 1 --output adapted"
            " --curve curve.csv --record training.json",
        ),
        ("figure", "sensitivity sensitivity.csv --output sensitivity.svg"),
    ]


def processor_seconds(words: list[str], folder: str) -> float:
    """User and system time of Python with ``words``, run in ``folder`` with the package that this process imports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(kvstages.__file__).parents[1])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows() -> Iterator[dict[str, Any]]:
    """A row for each stage, after that of torch."""
    runs = [("import torch", ["-c", "import torch"])]
    runs += [(name, ["-m", "kvstages", name, *text.split()]) for name, text in stages()]
    least = {name: math.inf for name, _ in runs}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for _ in range(ROUNDS):
            for name, words in runs:
                least[name] = min(least[name], processor_seconds(words, folder))
    for name, spent in least.items():
        row = {"stage": name, "processor_seconds": spent, "over_torch": spent / least["import torch"]}
        print(*row.values(), flush=True)
        yield {**row, "processor": processor()}
