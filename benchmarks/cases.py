"""What is timed, each case in a process of its own: ``python -m benchmarks.cases NAME key=value ...`` prints JSON.

Models have random weights. Every case also times a large matrix product in the same process: the machine's own speed.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import naive
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PARTS, UNITS, PrecisionGrid
from kvstages.cache.precisions import QUANTIZED
from kvstages.measure.adamw import AdamW
from kvstages.measure.adaptation import NOISE, Arm, adapt
from kvstages.measure.evaluation import evaluate
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.frozen import Frozen
from kvstages.measure.gradients import window_projections
from kvstages.measure.setting import DTYPES, Setting, prepare
from kvstages.measure.sweep import sweep_layer
from kvstages.models.gpt2_nano import GPT, GPTConfig
from kvstages.models.packed_linear import Linear, packs, product, vendor
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record
from kvstages.provenance.environment import processor
from kvstages.scores.columns import changes

FULL = GPTConfig(vocab_size=9157, context_len=1024, embedding_dim=512, num_layers=12, num_heads=8)
DEMO = GPTConfig(vocab_size=2048, context_len=256, embedding_dim=128, num_layers=12, num_heads=8)
SHAPES = {"full": FULL, "demo": DEMO}
CPU = torch.device("cpu")
MEMORY = 2048 << 20
PRECISIONS = ("int8", "int4")
CHANGES = changes(UNITS["head"], PRECISIONS)


def random_model(config: GPTConfig, dtype: str) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(DTYPES[dtype]).eval().requires_grad_(False)


def packed_model(config: GPTConfig, dtype: str) -> GPT:
    """The same, as the stages that measure load it."""
    return random_model(config, dtype).pack()


def random_tokens(config: GPTConfig, blocks: int, length: int) -> Tensor:
    return torch.randint(config.vocab_size, (blocks, length), generator=torch.Generator().manual_seed(1))


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of this process's threads: what other processes do on the machine hardly counts."""
    start = time.process_time()
    function()
    return time.process_time() - start


def matmul_flops(dtype: str) -> float:
    """Floating-point operations a second of one large matrix product, the faster of two; the best of several."""
    a = torch.randn(2048, 2048).to(DTYPES[dtype])
    products = [lambda: a @ a]
    if packs(DTYPES[dtype], CPU, vendor()):
        linear = Linear(2048, 2048).to(DTYPES[dtype]).requires_grad_(False)
        linear.pack()
        products.append(lambda: linear(a))
    return 2 * 2048**3 / min(seconds(each) for each in products for _ in range(5))


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
    layers: str = "all",
    blocks: int = 8,
    length: int = 64,
    heads: int = 0,
    depth: int = 0,
) -> dict[str, Any]:
    """Our sweep: all layers, or those named (as 0,5,11). Also with other numbers of heads, layers, tokens."""
    prepare("cpu", 1)
    base = SHAPES[shape]
    config = GPTConfig(
        base.vocab_size,
        max(base.context_len, length),
        base.head_dim * (heads or base.num_heads),
        depth or base.num_layers,
        heads or base.num_heads,
    )
    chosen = list(range(config.num_layers)) if layers == "all" else [int(layer) for layer in layers.split(",")]
    model, tokens = packed_model(config, dtype), random_tokens(config, blocks, length)
    setting = Setting(execution, dtype)
    sweep_layer(model, tokens[:1], config.num_layers - 1, CHANGES, setting, MEMORY)
    before = matmul_flops(dtype)
    spent = seconds(lambda: [sweep_layer(model, tokens, layer, CHANGES, setting, MEMORY) for layer in chosen])
    speed = max(before, matmul_flops(dtype))
    interventions = len(chosen) * config.num_heads * len(PRECISIONS)
    flops = sum(
        minimal_flops(config, range(layer, layer + 1), config.num_heads, tokens.numel(), length) for layer in chosen
    )
    return {
        "product": product(DTYPES[dtype], CPU, packs(DTYPES[dtype], CPU, vendor())),
        "seconds": spent,
        "interventions": interventions,
        "tokens_per_second": interventions * tokens.numel() / spent,
        "minimal_tflop": flops / 1e12,
        "matmul_gflops": speed / 1e9,
        "share_of_matmul": flops / spent / speed,
    }


def gradients_case(shape: str, probes: int = 32, heads: int = 0, depth: int = 0, precisions: int = 4) -> dict[str, Any]:
    """All scores from gradients against the sweep of all parts and precisions, in one process, by its CPU time.

    Of the sweep the lowest and the highest layer are run: its cost falls evenly in between. Both are also told in
    forward passes of the model over the same blocks, which run before, between and after.
    """
    place = prepare("cpu", 1)
    base = SHAPES[shape]
    heads, depth = heads or base.num_heads, depth or base.num_layers
    config = GPTConfig(base.vocab_size, base.context_len, base.head_dim * heads, depth, heads)
    model, tokens = random_model(config, "float32").to(place), random_tokens(config, 8, 64)
    wanted = QUANTIZED[:precisions]
    tried = [(part, precision) for part in PARTS for precision in wanted]
    setting = Setting("one-pass", "float32")

    @torch.no_grad()
    def forward() -> None:
        model(tokens)

    window_projections(model, tokens[:1], wanted, 1, MEMORY)
    forward()
    passes = [seconds(forward) for _ in range(5)]
    estimated = seconds(lambda: window_projections(model, tokens, wanted, probes, MEMORY))
    passes += [seconds(forward) for _ in range(5)]
    ends = [
        seconds(lambda layer=layer: sweep_layer(model, tokens, layer, tried, setting, MEMORY))
        for layer in (0, depth - 1)
    ]
    passes += [seconds(forward) for _ in range(5)]
    measured, one = depth * sum(ends) / 2, statistics.median(passes)
    return {
        "forward_seconds": one,
        "gradients_seconds": estimated,
        "sweep_seconds": measured,
        "gradients_passes": estimated / one,
        "sweep_passes": measured / one,
        "sweep_over_gradients": measured / estimated,
        "scores": depth * heads * len(tried),
    }


def profile_case(dtype: str, layer: int) -> dict[str, Any]:
    """Where one layer's one-pass sweep at the full shape spends its time, as shares."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from kvstages.measure import sweep as module

    prepare("cpu", 1)
    model, tokens = packed_model(FULL, dtype), random_tokens(FULL, 8, 64)
    setting = Setting("one-pass", dtype)
    measure = module.divergence

    def recorded(*arguments: Tensor) -> Tensor:
        with record_function("divergence"):
            return measure(*arguments)

    module.divergence = recorded
    sweep_layer(model, tokens[:1], layer, CHANGES, setting, MEMORY)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        sweep_layer(model, tokens, layer, CHANGES, setting, MEMORY)
    module.divergence = measure
    events = {event.key: event for event in run.key_averages()}
    whole = sum(event.self_cpu_time_total for event in events.values())
    # Packed weights (BF16) have a product of their own, which adds the bias as it goes.
    plain, packed = events.get("aten::addmm"), events.get("mkldnn::_linear_pointwise")
    shares = {
        "matrix products": plain.self_cpu_time_total if plain else packed.cpu_time_total,
        "bias of the products": plain.cpu_time_total - plain.self_cpu_time_total if plain else 0,
        "attention": events["aten::scaled_dot_product_attention"].cpu_time_total,
        "KL in FP64": events["divergence"].cpu_time_total,
        "layer norm": events["aten::native_layer_norm"].cpu_time_total,
    }
    shares = {name: spent / whole for name, spent in shares.items()}
    return {**shares, "rest": 1 - sum(shares.values())}


def naive_case(shape: str, dtype: str, blocks: int = 1) -> dict[str, Any]:
    """The plain implementation: one INT4 intervention on some blocks, scaled to the 192 + 1 runs of a sweep."""
    prepare("cpu", 1)
    config = SHAPES[shape]
    model, tokens = random_model(config, dtype), random_tokens(config, blocks, 64)
    dense = [["bf16"] * config.num_heads] * config.num_layers
    reference = torch.stack([naive.block_logits(model, block[:4], dense) for block in tokens])
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


def naive_adaptation_case(shape: str, dtype: str, steps: int = 3) -> dict[str, Any]:
    """Seconds a step of adaptation as published."""
    prepare("cpu", 1)
    config = SHAPES[shape]
    model, frozen = (random_model(config, dtype) for _ in range(2))
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=False, foreach=False)
    tokens = random_tokens(config, 4, 64)
    naive.adaptation_step(model, frozen, tokens, optimizer)
    spent = seconds(lambda: [naive.adaptation_step(model, frozen, tokens, optimizer) for _ in range(steps)])
    return {"seconds_a_step": spent / steps}


def adaptation_case(shape: str, dtype: str, pairs: int = 4, steps: int = 150) -> dict[str, Any]:
    """A step of adaptation as published and one of ours, in turn in one process, by its CPU time.

    Ours has its part of the reference, which is computed once for ``steps`` steps of all seeds. ``limit``: the ratio if
    optimizer and reference took no time, so that only the student's own forward and backward pass were left.
    """
    prepare("cpu", 1)
    config = SHAPES[shape]
    tokens = random_tokens(config, 56, 64)
    student, plain, reference = (random_model(config, dtype) for _ in range(3))
    made: list[Frozen] = []
    of_reference = seconds(lambda: made.append(Frozen(reference, tokens, 4, MEMORY)))
    (frozen,) = made
    of_reference += seconds(lambda: [frozen.log_probabilities(rows, slice(0, 64)) for rows in frozen.states])
    optimizer = torch.optim.AdamW(plain.requires_grad_(True).parameters(), lr=1e-6, fused=False, foreach=False)
    own, naive_steps, optimizing = [], [], []
    step_of = AdamW.step

    def timed(self: AdamW) -> None:
        optimizing.append(seconds(lambda: step_of(self)))

    began = time.process_time()

    def after(step: int) -> None:
        nonlocal began
        own.append(time.process_time() - began)
        naive_steps.append(seconds(lambda: naive.adaptation_step(plain, reference, tokens[:4], optimizer)))
        began = time.process_time()

    noise = PrecisionGrid.uniform(config.num_layers, config.num_heads, "int4")
    AdamW.step = timed
    adapt(student, tokens, Arm(NOISE, noise, pairs + 1, 4, 1e-6, 0.01, 1.0, 1.0), 1, frozen, MEMORY, after=after)
    AdamW.step = step_of
    # The first pair warms up.
    ours, published, optimized = (statistics.median(each[1:]) for each in (own, naive_steps, optimizing))
    part = of_reference / steps
    return {
        "published_seconds": published,
        "seconds": ours + part,
        "ratio": published / (ours + part),
        "limit": published / (ours - optimized),
        "share_optimizer": optimized / (ours + part),
        "share_reference": part / (ours + part),
    }


def mixed_policy(config: GPTConfig) -> PrecisionGrid:
    """A mixed policy in the published one's proportions: 70 INT4, 19 INT8 and 7 BF16 of 96 heads, by turns."""
    order = ["int4"] * 70 + ["int8"] * 19 + ["bf16"] * 7
    generator = torch.Generator().manual_seed(3)
    count = config.num_layers * config.num_heads
    flat = [order[int(index) % 96] for index in torch.randperm(count, generator=generator)]
    return PrecisionGrid.of_heads(
        flat[row * config.num_heads : (row + 1) * config.num_heads] for row in range(config.num_layers)
    )


def study_case(shape: str, dtype: str, execution: str) -> dict[str, Any]:
    """The published configuration: sweep, eight policies, 3 × 50 steps of adaptation and their six evaluations."""
    prepare("cpu", 1)
    config = SHAPES[shape]
    model = packed_model(config, dtype)
    calibration, adaptation, validation = (random_tokens(config, blocks, 64) for blocks in (8, 56, 32))
    setting = Setting(execution, dtype)
    grids = [dense_grid(model), *(PrecisionGrid.uniform(config.num_layers, config.num_heads, p) for p in PRECISIONS)]
    grids += [mixed_policy(config)] * 5
    of_scores = {"unit": "head", "ladder": ("bf16", *PRECISIONS), "sensitivity": "none"}
    policies = [
        policy_record("policy", "greedy", Budget(0.01, "nats"), grid, 0.0, 0, config.shape.widths, 64, **of_scores)
        for grid in grids
    ]
    noise = PrecisionGrid.uniform(config.num_layers, config.num_heads, "int4")
    arm = Arm(NOISE, noise, 50, 4, 1e-6, 0.01, 1.0, 1.0)
    frozen = Frozen(random_model(config, dtype), adaptation, 4, MEMORY)

    def logits(tokens: Tensor) -> Tensor:
        found = torch.empty(*tokens.shape, model.shape.vocabulary, dtype=setting.dtype)
        for where, part in window_logits(model, tokens, dense_grid(model), setting, MEMORY):
            found[where] = part
        return found

    def evaluations(decoder: GPT, chosen: list[dict[str, Any]], reference: Tensor) -> None:
        for policy in chosen:
            evaluate(decoder, validation, policy, reference, setting, MEMORY)

    spent = {
        "sweep": seconds(
            lambda: [
                sweep_layer(model, calibration, layer, CHANGES, setting, MEMORY) for layer in range(config.num_layers)
            ]
        )
    }
    start = time.process_time()
    reference = logits(validation)
    evaluations(model, policies, reference)
    spent["evaluation"] = time.process_time() - start
    spent["adaptation"] = spent["adapted"] = 0.0
    for seed in (1337, 2026, 9001):
        student = random_model(config, dtype)
        spent["adaptation"] += seconds(
            lambda student=student, seed=seed: adapt(student, adaptation, arm, seed, frozen, MEMORY)
        )
        spent["adapted"] += seconds(
            lambda student=student: evaluations(student.pack(), [policies[0], policies[3]], reference)
        )
    return {"seconds": sum(spent.values()), **{f"seconds_{part}": value for part, value in spent.items()}}


def decode_case(dtype: str, context: int, batch: int, steps: int = 16) -> dict[str, Any]:
    """Decoding at the full shape, the last ``steps`` positions before ``context``: BF16 heads and the mixed policy.

    All caches take each step in turn, in one process, and ratios are those of a step: a drift of the machine's speed
    meets all alike. The mixed policy runs with its working copy, and (up to 8 sequences) unpacking its past anew.
    """
    device = prepare("cpu", 1)
    model, arithmetic = packed_model(FULL, dtype), DTYPES[dtype]
    tokens = random_tokens(FULL, batch, context)

    def filled(grid: PrecisionGrid, working_copy: bool) -> PackedCache:
        cache = PackedCache(grid, batch, FULL.head_dim, arithmetic, context, working_copy, device)
        for layer in range(FULL.num_layers):
            past = torch.randn(batch, FULL.num_heads, context - steps, FULL.head_dim).to(arithmetic)
            cache.update(past, past, layer)
        return cache

    caches = {"bf16": filled(dense_grid(model), True), "mixed": filled(mixed_policy(FULL), True)}
    if batch <= 8:
        caches["unpacking"] = filled(mixed_policy(FULL), False)
    spent: dict[str, list[float]] = {name: [] for name in caches}
    with torch.no_grad():
        for position in range(context - steps, context):
            step = tokens[:, position : position + 1]
            for name, cache in caches.items():
                spent[name].append(seconds(lambda step=step, cache=cache: model(step, cache)))
    # The first steps settle the prefill and warm up.
    median = {name: statistics.median(values[3:]) for name, values in spent.items()}
    ratio = {
        name: statistics.median(dense / own for dense, own in zip(spent["bf16"][3:], values[3:], strict=True))
        for name, values in spent.items()
    }
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.input_embedding.weight.nbytes
    read = weights + caches["bf16"].payload_bytes
    mixed = caches["mixed"]
    return {
        "tokens_per_second_bf16": batch / median["bf16"],
        "tokens_per_second_mixed": batch / median["mixed"],
        "mixed_over_bf16": ratio["mixed"],
        "unpacking_over_bf16": ratio.get("unpacking"),
        "stored_over_bf16": (mixed.payload_bytes + mixed.scale_bytes) / caches["bf16"].payload_bytes,
        "stored_and_copy_over_bf16": (mixed.payload_bytes + mixed.scale_bytes + mixed.working_bytes)
        / caches["bf16"].payload_bytes,
        "share_of_bandwidth_bf16": read / median["bf16"] / memory_bandwidth(),
        "share_of_bandwidth_mixed": read / median["mixed"] / memory_bandwidth(),
    }


CASES = {
    "sweep": sweep_case,
    "naive": naive_case,
    "naive-adaptation": naive_adaptation_case,
    "adaptation": adaptation_case,
    "study": study_case,
    "decode": decode_case,
    "profile": profile_case,
    "gradients": gradients_case,
}


def main(arguments: list[str]) -> None:
    name, *pairs = arguments
    options: dict[str, Any] = {}
    for pair in pairs:
        key, value = pair.split("=", 1)
        options[key] = int(value) if value.lstrip("-").isdigit() and key != "layers" else value
    figures = CASES[name](**options)
    figures["processor"] = processor()
    figures["instructions"] = torch.backends.cpu.get_cpu_capability()
    figures["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
