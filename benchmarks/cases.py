"""What is timed, each case in a process of its own: ``python -m benchmarks.cases NAME key=value ...`` prints JSON.

Models have random weights. Every case also times a large matrix product in the same process: the machine's own speed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import naive
from kvstages.adaptation import Arm, adapt
from kvstages.cache import PackedCache
from kvstages.digests import stage_modules
from kvstages.evaluation import evaluate
from kvstages.execution import dense_grid, window_logits
from kvstages.gpt import GPT, GPTConfig
from kvstages.policies import policy_record
from kvstages.runtime import DTYPES, Setting, prepare
from kvstages.sweep import sweep_layer

FULL = GPTConfig(vocab_size=9157, context_len=1024, embedding_dim=512, num_layers=12, num_heads=8)
EMBEDDED = GPTConfig(vocab_size=2048, context_len=256, embedding_dim=128, num_layers=12, num_heads=8)
SHAPES = {"full": FULL, "embedded": EMBEDDED}
MEMORY = 2048 << 20
PRECISIONS = ("int8", "int4")


def random_model(config: GPTConfig, dtype: str) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(DTYPES[dtype]).eval().requires_grad_(False)


def random_tokens(config: GPTConfig, blocks: int, length: int) -> Tensor:
    return torch.randint(config.vocab_size, (blocks, length), generator=torch.Generator().manual_seed(1))


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def matmul_flops(dtype: str) -> float:
    """Floating-point operations a second of one large matrix product; the best of several."""
    a = torch.randn(2048, 2048).to(DTYPES[dtype])
    return 2 * 2048**3 / min(seconds(lambda: a @ a) for _ in range(5))


def memory_bandwidth() -> float:
    """Bytes a second read by a sum over 256 MiB; the best of several."""
    x = torch.ones(1 << 26)
    return x.nbytes / min(seconds(x.sum) for _ in range(5))


def minimal_flops(config: GPTConfig, layers: range, heads: int, tokens: int, length: int) -> float:
    """Multiplications and additions that the interventions of some layers cannot do without.

    For each token: the intervened layer's attention (of the one head) and MLP, all of the layers above, and the
    output projection.
    """
    width = config.embedding_dim
    attention = 2 * width * length  # scores and mixing, causal: half of 4 · E · T
    above = 2 * 11 * width**2 + attention
    per_token = sum(
        2 * 8 * width**2 + attention / config.num_heads + (config.num_layers - 1 - layer) * above for layer in layers
    )
    return len(PRECISIONS) * heads * tokens * (per_token + len(layers) * 2 * width * config.vocab_size)


def sweep_case(
    shape: str,
    dtype: str,
    execution: str,
    threads: int,
    layers: str = "all",
    blocks: int = 8,
    length: int = 64,
    heads: int = 0,
    depth: int = 0,
) -> dict[str, Any]:
    """Our sweep: all layers, or those named (as 0,5,11). Also with other numbers of heads, layers, tokens."""
    prepare("cpu", threads)
    base = SHAPES[shape]
    config = GPTConfig(
        base.vocab_size,
        max(base.context_len, length),
        base.head_dim * (heads or base.num_heads),
        depth or base.num_layers,
        heads or base.num_heads,
    )
    chosen = list(range(config.num_layers)) if layers == "all" else [int(layer) for layer in layers.split(",")]
    model, tokens = random_model(config, dtype), random_tokens(config, blocks, length)
    setting = Setting(execution, dtype, dtype)
    sweep_layer(model, tokens[:1], config.num_layers - 1, PRECISIONS, setting, MEMORY)
    before = matmul_flops(dtype)
    spent = seconds(lambda: [sweep_layer(model, tokens, layer, PRECISIONS, setting, MEMORY) for layer in chosen])
    speed = max(before, matmul_flops(dtype))
    interventions = len(chosen) * config.num_heads * len(PRECISIONS)
    flops = sum(
        minimal_flops(config, range(layer, layer + 1), config.num_heads, tokens.numel(), length) for layer in chosen
    )
    return {
        "seconds": spent,
        "interventions": interventions,
        "tokens_per_second": interventions * tokens.numel() / spent,
        "minimal_tflop": flops / 1e12,
        "matmul_gflops": speed / 1e9,
        "share_of_matmul": flops / spent / speed,
    }


def naive_case(shape: str, dtype: str, threads: int, blocks: int = 1) -> dict[str, Any]:
    """The plain implementation: one INT4 intervention on some blocks, scaled to the 192 + 1 runs of a sweep."""
    prepare("cpu", threads)
    config = SHAPES[shape]
    model, tokens = random_model(config, dtype), random_tokens(config, blocks, 64)
    reference = torch.stack([naive.block_logits(model, block[:4], dense_grid(model)) for block in tokens])
    reference = reference.repeat(1, 16, 1)
    spent = seconds(lambda: naive.intervention(model, tokens, 6, 3, "int4", reference))
    per_token = spent / tokens.numel()
    interventions = config.num_layers * config.num_heads * len(PRECISIONS)
    return {
        "seconds": per_token * 512 * (interventions + 1),
        "seconds_measured": spent,
        "interventions": interventions,
        "tokens_per_second": 1 / per_token,
    }


def naive_adaptation_case(shape: str, dtype: str, threads: int, steps: int = 3) -> dict[str, Any]:
    """Seconds a step of adaptation as published."""
    prepare("cpu", threads)
    config = SHAPES[shape]
    model, frozen = (random_model(config, dtype) for _ in range(2))
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=False, foreach=False)
    tokens = random_tokens(config, 4, 64)
    naive.adaptation_step(model, frozen, tokens, optimizer)
    spent = seconds(lambda: [naive.adaptation_step(model, frozen, tokens, optimizer) for _ in range(steps)])
    return {"seconds_a_step": spent / steps}


def mixed_policy(config: GPTConfig) -> list[list[str]]:
    """A mixed policy in the published one's proportions: 70 INT4, 19 INT8 and 7 BF16 of 96 heads, by turns."""
    order = ["int4"] * 70 + ["int8"] * 19 + ["bf16"] * 7
    generator = torch.Generator().manual_seed(3)
    count = config.num_layers * config.num_heads
    flat = [order[int(index) % 96] for index in torch.randperm(count, generator=generator)]
    return [flat[row * config.num_heads : (row + 1) * config.num_heads] for row in range(config.num_layers)]


def study_case(shape: str, dtype: str, execution: str, threads: int) -> dict[str, Any]:
    """The published configuration: sweep, eight policies, 3 × 50 steps of adaptation and their six evaluations."""
    prepare("cpu", threads)
    config = SHAPES[shape]
    model = random_model(config, dtype)
    calibration, adaptation, validation = (random_tokens(config, blocks, 64) for blocks in (8, 56, 32))
    setting = Setting(execution, dtype, dtype)
    grids = [dense_grid(model), *([[p] * config.num_heads] * config.num_layers for p in PRECISIONS)]
    grids += [mixed_policy(config)] * 5
    policies = [policy_record("policy", "greedy", 0.01, grid, 0.0, 0, config.head_dim, 64) for grid in grids]
    arm = Arm(4, 50, 4, 1e-6, 0.01, 1.0, 1.0)

    def logits(tokens: Tensor) -> Tensor:
        return torch.cat([part for _, part in window_logits(model, tokens, dense_grid(model), setting, MEMORY)])

    def evaluations(decoder: GPT, chosen: list[dict[str, Any]], reference: Tensor) -> None:
        for policy in chosen:
            evaluate(decoder, validation, policy, reference, setting, MEMORY)

    spent = {
        "sweep": seconds(
            lambda: [
                sweep_layer(model, calibration, layer, PRECISIONS, setting, MEMORY)
                for layer in range(config.num_layers)
            ]
        )
    }
    start = time.perf_counter()
    reference = logits(validation)
    evaluations(model, policies, reference)
    spent["evaluation"] = time.perf_counter() - start
    spent["adaptation"] = spent["adapted"] = 0.0
    for seed in (1337, 2026, 9001):
        student = random_model(config, dtype)
        spent["adaptation"] += seconds(lambda student=student, seed=seed: adapt(student, adaptation, arm, seed))
        spent["adapted"] += seconds(lambda student=student: evaluations(student, [policies[0], policies[3]], reference))
    return {"seconds": sum(spent.values()), **{f"seconds_{part}": value for part, value in spent.items()}}


def decode_case(
    dtype: str, policy: str, context: int, batch: int, threads: int, working_copy: int = 1, steps: int = 12
) -> dict[str, Any]:
    """Tokens a second of decoding at the full shape, the last ``steps`` positions before ``context``."""
    device = prepare("cpu", threads)
    model = random_model(FULL, dtype)
    grid = {
        "bf16": dense_grid(model),
        "mixed": mixed_policy(FULL),
        "int8": [["int8"] * 8] * 12,
        "int4": [["int4"] * 8] * 12,
    }
    arithmetic = DTYPES[dtype]
    cache = PackedCache(grid[policy], batch, FULL.head_dim, arithmetic, arithmetic, context, bool(working_copy), device)
    tokens = random_tokens(FULL, batch, context)
    spent = []
    with torch.no_grad():
        for layer in range(FULL.num_layers):
            past = torch.randn(batch, FULL.num_heads, context - steps - 2, FULL.head_dim).to(arithmetic)
            cache.update(past, past, layer)
        for position in range(context - steps - 2, context):
            spent.append(seconds(lambda position=position: model(tokens[:, position : position + 1], cache)))
    median = sorted(spent[2:])[len(spent[2:]) // 2]
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.input_embedding.weight.nbytes
    past_bytes = 2 * batch * FULL.num_layers * FULL.embedding_dim * context * arithmetic.itemsize
    read = weights + (past_bytes if working_copy else cache.payload_bytes + cache.scale_bytes)
    bandwidth = memory_bandwidth()
    return {
        "tokens_per_second": batch / median,
        "seconds_a_step": median,
        "payload_bytes": cache.payload_bytes,
        "scale_bytes": cache.scale_bytes,
        "working_bytes": cache.working_bytes,
        "bandwidth_gb_per_second": bandwidth / 1e9,
        "share_of_bandwidth": read / median / bandwidth,
    }


def import_case(stage: str, threads: int = 1) -> dict[str, Any]:
    """Seconds that a fresh interpreter takes to start and to import everything that a stage needs."""
    names = [name for name in stage_modules(stage) if not name.endswith("__main__")]
    if stage in ("adapt", "make-embedded-model"):
        # What an optimizer's first step imports.
        names.append("torch._dynamo")
    fresh = f"import importlib; [importlib.import_module(name) for name in {names!r}]"
    return {"seconds": seconds(lambda: subprocess.run([sys.executable, "-c", fresh], check=True))}


CASES = {
    "sweep": sweep_case,
    "naive": naive_case,
    "naive-adaptation": naive_adaptation_case,
    "study": study_case,
    "decode": decode_case,
    "import": import_case,
}


def main(arguments: list[str]) -> None:
    name, *pairs = arguments
    options: dict[str, Any] = {}
    for pair in pairs:
        key, value = pair.split("=", 1)
        options[key] = int(value) if value.lstrip("-").isdigit() and key != "layers" else value
    figures = CASES[name](**options)
    figures["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
