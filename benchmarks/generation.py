"""Generation through the library's code: our cache beside DynamicCache and the library's QuantizedCache.

A random Llama of SmolLM2-135M's shape, in BF16. All caches hold the same past and take each step in turn, so that a
drift of the machine's speed meets all alike; times are those of the processor, one thread. The library's quantized
caches are measured where the package that they need is installed (hqq, optimum-quanto), and left out elsewhere. They
keep their last tokens exact, up to 127 of them, and then quantize all of the past anew: they are measured with half as
many, and a 128th of a step that quantizes is counted with every step.
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
from torch.nn.functional import scaled_dot_product_attention

from kvstages import MixedPrecisionCache
from kvstages.cache.attention import SLICE_CODES, attend
from kvstages.cache.packed import append_all
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.files.atomic import write_table, write_text
from kvstages.provenance.environment import processor

LAYERS, HEADS, QUERY_HEADS, WIDTH, VOCABULARY = 30, 3, 9, 64, 49152
# Exact tokens after which the library's caches quantize, and the first steps, which warm up.
RESIDUAL, WARM_UP = 128, 3
# Processes that measure a cache's peak.
TURNS = 5
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
        num_attention_heads=QUERY_HEADS,
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
        return transformers.QuantizedCache(name, decoder.config, nbits=4, q_group_size=WIDTH, residual_length=RESIDUAL)
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
        cache.end(True)
    generator = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        keys, values = (torch.randn(batch, HEADS, tokens, WIDTH, generator=generator).bfloat16() for _ in range(2))
        cache.update(keys, values, layer)


def step(decoder: transformers.PreTrainedModel, cache: transformers.Cache, batch: int, number: int = 0) -> float:
    """Seconds of processor time of one more token."""
    start = time.process_time()
    decoder(input_ids=torch.full((batch, 1), number), cache=cache, use_cache=True)
    return time.process_time() - start


def speed(context: int, batch: int, steps: int) -> dict[str, Any]:
    """Tokens a second of each cache at a context; median and quartiles of DynamicCache's time over its own in the same
    step; and resident bytes. Of the library's quantized caches also the speed without the steps that quantize."""
    decoder = model()
    caches = {name: cache_of(name, decoder) for name in available()}
    for cache in caches.values():
        fill(decoder, cache, batch, context - RESIDUAL // 2)
        fill(decoder, cache, batch, RESIDUAL // 2)
    held = {f"resident_{name}": resident(cache) for name, cache in caches.items()}
    held |= {f"stored_{name}": cache.payload_bytes + cache.scale_bytes
             for name, cache in caches.items() if isinstance(cache, MixedPrecisionCache)}  # fmt: skip
    spent: dict[str, list[float]] = {name: [] for name in caches}
    for number in range(steps):
        for name, cache in caches.items():
            spent[name].append(step(decoder, cache, batch, number))
    dense, found = spent["dynamic"][WARM_UP:], {}
    for name, cache in caches.items():
        own, added = spent[name][WARM_UP:], 0.0
        if name in BACKENDS:
            fill(decoder, cache, batch, RESIDUAL // 2 - steps - 1)
            added = max(0.0, step(decoder, cache, batch) - statistics.median(own)) / RESIDUAL
            found[f"between_{name}"] = statistics.median(a / b for a, b in zip(dense, own, strict=True))
        ratios = [a / (b + added) for a, b in zip(dense, own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[f"tokens_per_second_{name}"] = batch / (statistics.median(own) + added)
        found |= {f"speed_{name}": middle, f"low_{name}": low, f"high_{name}": high}
    return found | held


def memory(cache: str, context: int, batch: int, steps: int = 4) -> dict[str, Any]:
    """Peak memory of a process that runs one cache, with a prompt and some steps, beside what the cache holds."""
    decoder = model()
    chosen = cache_of(cache, decoder)
    prompt = torch.randint(VOCABULARY, (batch, context), generator=torch.Generator().manual_seed(1))
    decoder(input_ids=prompt, cache=chosen, use_cache=True, logits_to_keep=1)
    for number in range(steps):
        step(decoder, chosen, batch, number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"resident_bytes": resident(chosen), "peak_bytes": peak}


def profile(context: int, batch: int) -> dict[str, Any]:
    """Milliseconds a step, all layers together: the whole with either cache, and what their attention is made of."""
    decoder = model()
    dense, ours = cache_of("dynamic", decoder), cache_of("int4", decoder)
    for cache in (dense, ours):
        fill(decoder, cache, batch, context)
    store, past = ours.layers[0].store, dense.layers[0]
    queries, *own = (torch.randn(batch, heads, 1, WIDTH).bfloat16() for heads in (QUERY_HEADS, HEADS, HEADS))
    at_once = 2 * batch * HEADS * context * WIDTH <= SLICE_CODES
    group = QUERY_HEADS // HEADS
    if at_once:
        room, asking = torch.empty(batch, 2 * HEADS, context, WIDTH), torch.randn(batch, HEADS, group, WIDTH)
    else:
        weights, codes = torch.rand(batch * HEADS, group, context), torch.randn(batch * HEADS, context, WIDTH)
    seen = torch.empty(batch, 2 * HEADS, context, WIDTH, dtype=torch.bfloat16)
    new = torch.randn(batch, 2 * HEADS, 1, WIDTH).bfloat16()

    def append() -> None:
        stores = [layer.store for layer in ours.layers]
        append_all(stores, [new] * LAYERS)
        for each in stores:
            each.crop(1)

    def in_fp32() -> None:
        if at_once:
            store.stored(None).stored[0].scaled(room)
        else:
            for side in range(2):
                list(store.stored(side).expanded(WIDTH))

    def products() -> None:
        if at_once:
            scaled_dot_product_attention(asking, *room.chunk(2, dim=1))
        else:
            torch.bmm(weights[..., :WIDTH], codes.mT)
            torch.bmm(weights, codes)

    parts = {
        "DynamicCache: append": lambda: [torch.cat((past.keys, own[0]), dim=2) for _ in range(2)],
        "DynamicCache: attention": lambda: scaled_dot_product_attention(
            queries, past.keys, past.values, enable_gqa=True
        ),
        "INT4: attention": lambda: attend(queries, store, own, WIDTH**-0.5),
        "of it: codes to FP32": in_fp32,
        "of it: products with codes": products,
        "reconstructing values instead": lambda: store.reconstruct_into(seen),
    }
    found = {name: 1e3 * LAYERS * statistics.median(seconds(part) for _ in range(15)) for name, part in parts.items()}
    found["INT4: quantize and append"] = 1e3 * statistics.median(seconds(append) for _ in range(15))
    for name, cache in (("step, DynamicCache", dense), ("step, INT4", ours)):
        found[name] = 1e3 * statistics.median(step(decoder, cache, batch) for _ in range(15))
    return found


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    function()
    return time.process_time() - start


CASES = {"speed": speed, "memory": memory, "profile": profile}
# Contexts and batches, and steps: fewer of them where one takes long.
SIZES = [
    {"context": context, "batch": batch, "steps": 47 if batch == 1 else 23 if context * batch <= 4096 else 8}
    for batch in (1, 8)
    for context in (256, 1024, 4096)
]


def run(case: str, **options: Any) -> dict[str, Any]:
    """One case in a process of its own, with one thread; its options and figures."""
    words = [case, *(f"{key}={value}" for key, value in options.items())]
    command = [sys.executable, "-m", "benchmarks.generation", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    print(*words, done.stdout.splitlines()[-1], flush=True)
    return {**options, **json.loads(done.stdout.splitlines()[-1])}


def memories(context: int, batch: int) -> list[dict[str, Any]]:
    """Peaks of every cache: median, least and largest of processes, in turns."""
    found = [run("memory", cache=name, context=context, batch=batch) for _ in range(TURNS) for name in available()]
    table = []
    for name in available():
        own = [row for row in found if row["cache"] == name]
        peaks = sorted(row["peak_bytes"] for row in own)
        middle = {"peak_bytes": int(statistics.median(peaks)), "least": peaks[0], "largest": peaks[-1]}
        table.append({**own[0], **middle, "processes": len(own)})
    return table


def page(speeds: list[dict[str, Any]], memories: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    caches = [name.removeprefix("resident_") for name in speeds[0] if name.startswith("resident_")]
    sizes = [{key: row[key] for key in ("context", "batch", "steps")} for row in speeds]
    others = [name for name in caches if name != "dynamic"]
    rate = [{**size, "dynamic, tokens/s": row["tokens_per_second_dynamic"],
             **{name: "{:.2f} [{:.2f}, {:.2f}]".format(*(row[f"{what}_{name}"] for what in ("speed", "low", "high")))
                for name in others},
             **{f"{name} between": row[f"between_{name}"] for name in others if f"between_{name}" in row}}
            for size, row in zip(sizes, speeds, strict=True)]  # fmt: skip
    bytes_ = [{**size, "dynamic, MB": row["resident_dynamic"] / 1e6,
               **{name: row[f"resident_{name}"] / row["resident_dynamic"] for name in others},
               "int4 over what it stores": row["resident_int4"] / row["stored_int4"]}
              for size, row in zip(sizes, speeds, strict=True)]  # fmt: skip
    peak = [{"cache": row["cache"], "holds, MB": row["resident_bytes"] / 1e6, "peak of the process, MB":
             "{:.0f} [{:.0f}, {:.0f}]".format(*(row[what] / 1e6 for what in ("peak_bytes", "least", "largest"))),
             "processes": row["processes"]} for row in memories]  # fmt: skip
    return (
        f"On {os.cpu_count()} cores of {processor()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one thread, processor time.\n\n"
        f'## Speed over DynamicCache\'s\n\nMedian over steps, and quartiles. "between": without the steps in which the '
        f"library's cache quantizes.\n\n{table(rate)}\n"
        f"## Resident bytes over DynamicCache's\n\n{table(bytes_)}\n"
        f"## Peak memory, a prompt of 4,096 tokens and 4 steps, one sequence\n\n"
        f"Median, least and largest of processes, those of all caches in turn.\n\n{table(peak)}\n"
        f"## Milliseconds of a step\n\n{table(profiles)}"
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
        "-memory": memories(context=4096, batch=1),
        "-profile": [run("profile", context=context, batch=1) for context in (256, 1024, 4096)],
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
