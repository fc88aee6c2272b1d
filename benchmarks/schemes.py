"""``python -m benchmarks.schemes``: what quantizer schemes cost in time, beside INT4, and write results/schemes.csv.

A decoder of SmolLM2-135M's shape (30 layers, 9 query and 3 KV heads of width 64, width 576, vocabulary 49,152) with
random weights, one thread, FP32. Decoding: tokens one by one through the packed cache with its working copy, batch 1;
every scheme takes each step in turn. Sweep: one head of one layer at a time, one-pass, in turn. Ratios are of processor
time, which a busy neighbour lengthens less than the time on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.files.atomic import write_table
from kvstages.measure.calibration import calibrate
from kvstages.measure.execution import packed_cache
from kvstages.measure.setting import Setting, prepare
from kvstages.measure.sweep import sweep_layer
from kvstages.models.huggingface import HuggingFaceDecoder

RESULTS = Path(__file__).parent / "results"
PUBLISHED = "int4"
SCHEMES = (PUBLISHED, "int4-hadamard+mse", "lloyd4-hadamard+mse", "centred4")
STEPS, WARM_UP, LAYER = 48, 8, 15


def smollm2() -> HuggingFaceDecoder:
    """The shape, with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    return HuggingFaceDecoder(model, "SmolLM2's shape", 2048, "the model's context")


def spent(function: Callable[[], Any]) -> float:
    """Seconds of this process's processor time."""
    start = time.process_time()
    function()
    return time.process_time() - start


@torch.no_grad()
def decoding(model: HuggingFaceDecoder, tokens: torch.Tensor) -> dict[str, list[float]]:
    """Seconds of each decoding step of each scheme."""
    caches = {
        name: packed_cache(model, PrecisionGrid.uniform(model.shape.layers, model.shape.heads, name), 1, STEPS)
        for name in SCHEMES
    }

    def step(cache: Any, position: int) -> None:
        x = model.run_layers(model.embed(tokens[:1, position : position + 1], position), cache)
        model.logits(x)

    found: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for position in range(STEPS):
        for name, cache in caches.items():
            found[name].append(spent(lambda cache=cache, position=position: step(cache, position)))
    return {name: values[WARM_UP:] for name, values in found.items()}


def sweeping(model: HuggingFaceDecoder, tokens: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of the sweep of one layer with each scheme."""
    setting = Setting("one-pass", "float32")

    def sweep(name: str) -> None:
        sweep_layer(model, tokens, LAYER, [("kv", name)], setting, 2 << 30)

    found: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for _ in range(rounds):
        for name in SCHEMES:
            found[name].append(spent(lambda name=name: sweep(name)))
    return found


def rows(task: str, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Median over the turns of each scheme's time over that of the published quantizer in the same turn."""
    return [
        {
            "task": task,
            "precision": name,
            "seconds": statistics.median(own),
            "over_published": statistics.median(a / b for a, b in zip(own, seconds[PUBLISHED], strict=True)),
            "turns": len(own),
        }
        for name, own in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of the sweep")
    parser.add_argument("--output", type=Path, default=RESULTS / "schemes.csv")
    arguments = parser.parse_args()
    prepare("cpu", 1)
    model = smollm2()
    tokens = torch.randint(49152, (2, 64), generator=torch.Generator().manual_seed(1))
    model.calibrated = calibrate(model, tokens, 2 << 30)
    table = rows("decode", decoding(model, tokens)) + rows("sweep", sweeping(model, tokens, arguments.rounds))
    for row in table:
        print(
            " ".join(
                f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    write_table(arguments.output, {key: [row[key] for row in table] for key in table[0]})


if __name__ == "__main__":
    main()
