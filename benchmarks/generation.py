"""Generation through the library's code: our cache beside DynamicCache and the library's QuantizedCache.

A random Llama of SmolLM2-135M's shape, in BF16. All caches hold the same past and take each step in turn, so that a
drift of the machine's speed meets all alike; times are those of the processor, one thread. The library's quantized
caches are measured where the package that they need is installed (hqq, optimum-quanto), and left out elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvstages import MixedPrecisionCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.quantizer import choose_scale, pack, quantize
from kvstages.cache.reading import codes_of_bytes, multipliers
from kvstages.files.atomic import write_table, write_text
from kvstages.provenance.environment import processor

LAYERS, HEADS, WIDTH, VOCABULARY = 30, 3, 64, 49152
BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}
# A policy as allocators make them: most heads in INT4, some in INT8, few in BF16.
ROWS = [["int4", "int8", "bf16"], ["int4", "int4", "int8"], ["int4", "int4", "int4"]]


def model() -> transformers.PreTrainedModel:
    """The model, with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=HEADS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def cache_of(name: str, decoder: transformers.PreTrainedModel) -> transformers.Cache:
    """A cache by its name."""
    if name == "dynamic":
        return transformers.DynamicCache(config=decoder.config)
    if name in BACKENDS:
        return transformers.QuantizedCache(name, decoder.config, nbits=4, q_group_size=WIDTH, residual_length=128)
    plain = name.removesuffix("-copy")
    rows = ROWS * (LAYERS // len(ROWS)) if plain == "mixed" else [[plain] * HEADS] * LAYERS
    return MixedPrecisionCache(PrecisionGrid.of_heads(rows), decoder, working_copy=name != plain)


def available() -> list[str]:
    """The caches that can be measured here."""
    there = [name for name, module in BACKENDS.items() if importlib.util.find_spec(module.split(".")[0])]
    return ["dynamic", "int4", "mixed", "int4-copy", *there]


def resident(cache: transformers.Cache) -> int:
    """Bytes of the tensors that live between steps: ours say it; the library's keep them in their layers."""
    if isinstance(cache, MixedPrecisionCache):
        return cache.resident_bytes
    found = {}

    def walk(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            if hasattr(thing, "_data"):  # a tensor of quanto's, which wraps its codes, scales and shifts
                walk([getattr(thing, name, None) for name in ("_data", "_scale", "_shift")])
                return
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                walk(value)
        elif isinstance(thing, list | tuple):
            for value in thing:
                walk(value)

    for layer in cache.layers:
        walk(vars(layer))
    return sum(found.values())


def fill(decoder: transformers.PreTrainedModel, cache: transformers.Cache, batch: int, tokens: int) -> None:
    """Give a cache a past of random keys and values."""
    if isinstance(cache, MixedPrecisionCache):
        cache.begin(decoder.get_decoder(), None)
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        keys, values = (torch.randn(batch, HEADS, tokens, WIDTH, generator=generator).bfloat16() for _ in range(2))
        cache.update(keys, values, layer)


def step(decoder: transformers.PreTrainedModel, cache: transformers.Cache, batch: int, number: int = 0) -> float:
    """Seconds of processor time of one more token."""
    start = time.process_time()
    decoder(input_ids=torch.full((batch, 1), number), cache=cache, use_cache=True)
    return time.process_time() - start


def speed(context: int, batch: int, steps: int = 13) -> dict[str, Any]:
    """Tokens a second of each cache at a context, over DynamicCache in the same step, and resident bytes."""
    decoder = model()
    caches = {name: cache_of(name, decoder) for name in available()}
    for cache in caches.values():
        fill(decoder, cache, batch, context)
    spent: dict[str, list[float]] = {name: [] for name in caches}
    for number in range(steps):
        for name, cache in caches.items():
            spent[name].append(step(decoder, cache, batch, number))
    found: dict[str, Any] = {}
    for name, cache in caches.items():
        # The first steps warm up.
        ratios = [dense / own for dense, own in zip(spent["dynamic"][3:], spent[name][3:], strict=True)]
        found[f"tokens_per_second_{name}"] = batch / statistics.median(spent[name][3:])
        found[f"speed_{name}"] = statistics.median(ratios)
        found[f"resident_{name}"] = resident(cache)
        if isinstance(cache, MixedPrecisionCache):
            found[f"stored_{name}"] = cache.payload_bytes + cache.scale_bytes
    return found


def memory(cache: str, context: int, batch: int, steps: int = 4) -> dict[str, Any]:
    """Peak memory of a process that runs one cache, beside what the cache holds."""
    decoder = model()
    chosen = cache_of(cache, decoder)
    fill(decoder, chosen, batch, context)
    for number in range(steps):
        step(decoder, chosen, batch, number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"resident_bytes": resident(chosen), "peak_bytes": peak}


def profile(context: int, batch: int) -> dict[str, Any]:
    """Milliseconds a step with INT4: the whole with either cache, and what reconstruction of all layers is made of."""
    decoder = model()
    dense, ours = cache_of("dynamic", decoder), cache_of("int4", decoder)
    for cache in (dense, ours):
        fill(decoder, cache, batch, context)
    store = ours.layers[0].store
    packed, scales = store._stored("int4"), store._stored("scales")[..., 0].contiguous()
    table, bits = codes_of_bytes(4), scales.view(torch.int16).int().flatten()
    index, steps = packed.int().flatten(), multipliers(7)[bits]
    out = torch.empty(batch, 2 * HEADS, store.length, WIDTH, dtype=torch.bfloat16)
    new = torch.randn(batch, 2 * HEADS, 1, WIDTH).bfloat16()
    vectors, mean, variance = out.view(1, -1, WIDTH), torch.zeros_like(steps), torch.ones_like(steps)
    nothing = torch.empty(0), torch.empty(0)

    def quantize_new() -> None:
        scale = choose_scale(new)
        pack(quantize(new, scale, 7), 4)

    parts = {
        "reconstruct": lambda: store.reconstruct_into(out),
        "of it: bytes to indices": lambda: packed.int(),
        "of it: codes": lambda: torch.index_select(table, 0, index, out=out.view(table.dtype).view(-1)),
        "of it: multipliers": lambda: multipliers(7)[bits],
        "of it: times multiplier": lambda: torch.native_batch_norm(
            vectors, steps, None, mean, variance, False, 0.0, 0.0, out=(vectors, *nothing)
        ),
        "quantize the new token": quantize_new,
    }
    found = {name: 1e3 * LAYERS * statistics.median(seconds(part) for _ in range(9)) for name, part in parts.items()}
    for name, cache in (("step, DynamicCache", dense), ("step, INT4", ours)):
        found[name] = 1e3 * statistics.median(step(decoder, cache, batch) for _ in range(9))
    return found


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    function()
    return time.process_time() - start


CASES = {"speed": speed, "memory": memory, "profile": profile}
SIZES = [{"context": context, "batch": batch} for batch in (1, 8) for context in (256, 1024, 4096)]


def run(case: str, **options: Any) -> dict[str, Any]:
    """One case in a process of its own, with one thread; its options and figures."""
    words = [case, *(f"{key}={value}" for key, value in options.items())]
    command = [sys.executable, "-m", "benchmarks.generation", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    print(*words, done.stdout.splitlines()[-1], flush=True)
    return {**options, **json.loads(done.stdout.splitlines()[-1])}


def page(speeds: list[dict[str, Any]], memories: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    caches = [name.removeprefix("resident_") for name in speeds[0] if name.startswith("resident_")]
    sizes = [{key: row[key] for key in ("context", "batch")} for row in speeds]
    others = [name for name in caches if name != "dynamic"]
    rate = [{**size, "dynamic, tokens/s": row["tokens_per_second_dynamic"],
             **{name: row[f"speed_{name}"] for name in others}}
            for size, row in zip(sizes, speeds, strict=True)]  # fmt: skip
    bytes_ = [{**size, "dynamic, MB": row["resident_dynamic"] / 1e6,
               **{name: row[f"resident_{name}"] / row["resident_dynamic"] for name in others},
               "int4 over what it stores": row["resident_int4"] / row["stored_int4"]}
              for size, row in zip(sizes, speeds, strict=True)]  # fmt: skip
    peak = [{"cache": row["cache"], "holds, MB": row["resident_bytes"] / 1e6, "peak of the process, MB":
             row["peak_bytes"] / 1e6} for row in memories]  # fmt: skip
    return (
        f"On {os.cpu_count()} cores of {processor()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one thread, processor time.\n\n"
        f"## Speed over DynamicCache's\n\n{table(rate)}\n"
        f"## Resident bytes over DynamicCache's\n\n{table(bytes_)}\n"
        f"## Peak memory, 4,096 tokens, one sequence\n\n{table(peak)}\n"
        f"## Milliseconds of a step with INT4\n\n{table(profiles)}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown, of few digits."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in [list(rows[0]), ["---"] * len(rows[0]), *cells])


def main() -> None:
    """Run every case, and write generation.csv, generation-memory.csv, generation-profile.csv and generation.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="Folder to write to.")
    folder = parser.parse_args().output
    found = {
        "": [run("speed", **size) for size in SIZES],
        "-memory": [run("memory", cache=name, context=4096, batch=1) for name in available()],
        "-profile": [run("profile", **size) for size in SIZES[:3]],
    }
    for name, rows in found.items():
        write_table(folder / f"generation{name}.csv", {key: [row[key] for row in rows] for key in rows[0]})
    write_text(folder / "generation.md", page(*found.values()))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in CASES:
        torch.set_num_threads(1)
        given = dict(word.split("=", 1) for word in sys.argv[2:])
        options = {key: int(value) if value.isdigit() else value for key, value in given.items()}
        with torch.no_grad():
            print(json.dumps(CASES[sys.argv[1]](**options)))
    else:
        main()
