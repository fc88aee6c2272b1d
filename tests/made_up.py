"""Result files of tests with made-up numbers: richer than what was published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from gappy import write_gappy

from kvstages.cache.precisions import bits_of
from kvstages.files.atomic import write_json
from kvstages.models.config import DecoderShape
from kvstages.policies.screening import precisions_of, screening_set
from kvstages.scores.columns import SENSITIVITY_COLUMNS
from kvstages.scores.second_order import Measured, check
from kvstages.scores.table import read_scores

# How much a score and a relative reconstruction error grow from INT8.
GROWTH = {"int8": 1.0, "int4": 329.0, "int3": 1800.0, "int2": 16129.0}
SCHEMES, BITS = ("int4", "centred4", "kivi4"), (8, 6, 5, 4, 3, 2)


def sensitivity_table(
    source: str = "measured-float32",
    layers: int = 12,
    heads: int = 8,
    parts: Sequence[str] = ("kv",),
    precisions: Sequence[str] = ("int8", "int4"),
    floor: float | None = 1e-12,
    seed: int = 0,
) -> pd.DataFrame:
    """A gathered table: INT8 scores near 1e-7 that vary between heads, others as rounding theory has them."""
    random = np.random.default_rng(seed)
    rows = []
    for layer in range(layers):
        for head in range(heads):
            for part in parts:
                score = 1e-7 * random.lognormal(0, 1)
                for precision in precisions:
                    kl = score * GROWTH[precision] * random.lognormal(0, 0.1)
                    low = None if floor is None else floor * random.lognormal(0, 0.2)
                    rows.append({
                        "layer": layer, "head": head, "part": part, "precision": precision, "mean_kl": kl,
                        "standard_error": kl / 9, "blocks": 8, "floor_kl": low,
                        "bf16_step_kl": None if low is None else 1e-8, "below_floor": int(low is not None and kl < low),
                        "reconstruction_error": 1e-5 * GROWTH[precision], "source": source, "execution": "one-pass",
                        "compute_dtype": source.removeprefix("measured-"),
                    })  # fmt: skip
    return pd.DataFrame(rows, columns=SENSITIVITY_COLUMNS)


def split_policy_file(path: Path) -> Path:
    """Policy of 2 x 2 heads in which keys and values differ in two of them."""
    grid = {"keys": [["bf16", "int8"], ["int4", "int2"]], "values": [["bf16", "int3"], ["int2", "int2"]]}
    write_json(path, {"policy": "exact-9000B", "precisions": grid})
    return path


RECIPES = {
    # recipe: allocator, source of scores, unit, precisions, joint KL against that of published
    "published": ("greedy", "measured-bfloat16", "head", "int8 int4", 1.0),
    "greedy": ("greedy", "measured-float32", "head", "int8 int4", 0.8),
    "exact": ("exact", "measured-float32", "head", "int8 int4", 0.75),
    "exact-split-low": ("exact", "measured-float32", "keys-values", "int8 int4 int3 int2", 0.6),
    "by-depth": ("by-depth", "measured-float32", "head", "int8 int4", 1.6),
}
JOINT_SETTING = {"window": "validation", "execution": "one-pass", "compute_dtype": "float32"}
BF16_BYTES = 393_216


def policy_rows(
    policy: str,
    kl: Sequence[float],
    recipe: str = "",
    allocator: str = "exact",
    source: str = "measured-float32",
    unit: str = "head",
    precisions: str = "int8 int4",
    size: int = 200_000,
    proxy: float = 1e-3,
    agreement: Sequence[float] | float = 0.9,
    limit: int | None = None,
    truth: Sequence[float] | float | None = None,
    dtype: str = "float32",
) -> pd.DataFrame:
    """Rows of a joint.csv: one policy, with a KL for each block; two blocks a document."""
    blocks = range(len(kl))
    texts = {
        "policy": policy, "recipe": recipe or policy, "allocator": allocator, "sensitivity": source, "unit": unit,
        "precisions": precisions,
    }  # fmt: skip
    sizes = {"bytes": size, "bf16_bytes": BF16_BYTES, "limit": limit or size, "proxy": proxy}
    measured = {
        "mean_kl": kl, "truth_kl": np.asarray(kl) + 1e-5 if truth is None else truth, "agreement": agreement,
        "cross_entropy": 3.5, "agrees_alone": 3, "first_agrees_alone": 1,
    }  # fmt: skip
    documents = {"document": [f"text-{block // 2}" for block in blocks]}
    setting = {**JOINT_SETTING, "compute_dtype": dtype}
    return pd.DataFrame({**texts, **sizes, "block": blocks, **measured, **documents, **setting})


def write_set(folder: Path, policies: Sequence[pd.DataFrame], below: dict[str, float] | None = None) -> Path:
    """joint.csv of some policies, that of BF16 arithmetic in a folder (of all but random ones), and the policy-set.json
    beside it; returns the first."""
    table = pd.concat(policies)
    write_gappy(folder / "joint.csv", table)
    quantized = table["mean_kl"] > 0
    in_bf16 = table.assign(
        compute_dtype="bfloat16",
        mean_kl=table["mean_kl"] + BF16_FLOOR * quantized,
        truth_kl=table["truth_kl"] + BF16_FLOOR,
    )
    write_gappy(folder / "bfloat16" / "joint.csv", in_bf16[in_bf16["recipe"] != "random"])
    write_json(folder / "policy-set.json", {"draws": [{"policies": _shares(below or {})}]})
    return folder / "joint.csv"


def _shares(below: dict[str, float]) -> dict[str, dict[str, float]]:
    return {policy: {"proxy": 1e-3, "share_below": share} for policy, share in below.items()}


UNIFORM = [("bf16", 0.0, 1.0), ("int8", 1e-4, 0.55), ("int4", 3e-2, 0.3), ("int2", 2.0, 0.18)]
# KL that every quantized policy has beyond its own in BF16 arithmetic, and what that costs with nothing quantized.
BF16_FLOOR = 4e-4


def write_comparison(folder: Path, budgets: Sequence[str] = ("0.01", "0.04"), blocks: int = 8, seed: int = 0) -> Path:
    """comparison/BUDGET/ and frontier/ of a study, with made-up KL, in FP32 and in a folder bfloat16; ``folder``.

    In BF16 arithmetic every quantized policy has ``BF16_FLOOR`` more KL than in FP32, and as much from the FP32 model.
    """
    random = np.random.default_rng(seed)
    shape = random.lognormal(0, 0.5, blocks)

    def kl(level: float) -> np.ndarray:
        return level * shape * random.lognormal(0, 0.05, blocks)

    uniform = [
        policy_rows(name, kl(level), "uniform", "uniform", "measured-float32", size=int(BF16_BYTES * part), proxy=level)
        for name, level, part in UNIFORM
    ]
    for budget in budgets:
        policies = [
            policy_rows(recipe, kl(float(budget) * factor), recipe, allocator, source, unit, precisions,
                        int(BF16_BYTES * 0.01 / float(budget)) // 2, float(budget) * factor)
            for recipe, (allocator, source, unit, precisions, factor) in RECIPES.items()
        ]  # fmt: skip
        policies += uniform
        for number in range(1, 13):
            factor = random.lognormal(1, 0.5)
            policies.append(
                policy_rows(f"random-{number:04d}", kl(float(budget) * factor), "random", "at-random",
                            size=int(BF16_BYTES * 0.01 / float(budget)) // 2 - 64, proxy=float(budget) * factor)
            )  # fmt: skip
        write_set(folder / "comparison" / budget, policies, {"greedy": 0.0002, "exact": 0.0, "by-depth": 0.125})
    policies = list(uniform)
    for recipe in ("published", "exact", "exact-split-low"):
        allocator, source, unit, precisions, factor = RECIPES[recipe]
        for part in (1.0, 0.86, 0.72, 0.55, 0.44, 0.3):
            level = 0.0 if part == 1 else factor * 3e-2 * 10 ** (-8 * (part - 0.3))
            size = int(BF16_BYTES * part)
            policies.append(
                policy_rows(f"{recipe}-{size}B", kl(level), recipe, allocator, source, unit, precisions, size, level)
            )
    write_set(folder / "frontier", policies)
    return folder


def scheme_scores(schemes: Sequence[str] = SCHEMES, layers: int = 2, heads: int = 2, seed: int = 0) -> pd.DataFrame:
    """Scores from gradients of some schemes: fourfold for each bit less, a tenth where keys have an offset."""
    random = np.random.default_rng(seed)
    rows = sensitivity_table("gradients", layers, heads, ("kv", "k", "v"), ("int8",), None, seed)
    tables = []
    for name in precisions_of(schemes, BITS, BITS):
        growth = 4.0 ** (8 - bits_of(name)) * (0.1 if "centred" in name else 1.0)
        kl = rows["mean_kl"] * growth * random.lognormal(0, 0.1, len(rows))
        tables.append(rows.assign(precision=name, mean_kl=kl, standard_error=kl / 9, compute_dtype="float32"))
    return pd.concat(tables, ignore_index=True)


def score_reader(path: Path, tokens: int = 64, head_dim: int = 64):
    """What ``screening_set`` reads scores with: those of a decoder of 2 x 2 heads."""
    shape = DecoderShape(2, 2, head_dim, head_dim, 40, 64, 128, 2)
    return lambda unit, precisions: read_scores(path, shape, tokens, unit, precisions)


def write_screening(folder: Path, blocks: int = 8, measured: Sequence[int] = (4, 2)) -> None:
    """Scores, checks, policies and made-up joint measurements of a screening: 20 % more KL than the proxy."""
    random = np.random.default_rng(1)
    table = scheme_scores()

    def measured_units(keys):
        return {key: Measured(1e-4 * (key[0] + 1), 1e-6) for key in keys}

    found, checks = check(table, ["int4", "int2", "centred4"], 8, 4, measured_units)
    write_gappy(folder / "checks.csv", checks)
    write_gappy(folder / "scores.csv", found)
    record = screening_set(SCHEMES, BITS, measured, ["4.25bits", "3bits"], score_reader(folder / "scores.csv"))
    said = {"tokens": 64, "execution": "one-pass", "compute_dtype": "float32"}
    write_json(folder / "policies.json", {**record, **said, "model": {"key_width": 64, "value_width": 64}})
    joint = [
        policy_rows(
            policy["policy"], 1.2 * policy["proxy"] * random.lognormal(0, 0.1, blocks), policy["recipe"],
            policy["allocator"], policy["sensitivity"], policy["unit"], " ".join(policy["ladder"][1:]),
            policy["bytes"]["total"], policy["proxy"], limit=policy["limit"],
        ).assign(bf16_bytes=policy["bytes"]["bf16"])
        for policy in record["policies"]
    ]  # fmt: skip
    write_gappy(folder / "joint.csv", pd.concat(joint))


def write_export(folder: Path, blocks: int = 8, seed: int = 0) -> Path:
    """export/joint.csv of a study: a policy, what two engines make of it, and the best of each, with made-up KL."""
    random = np.random.default_rng(seed)
    shape = random.lognormal(0, 0.5, blocks)
    # recipe: allocator, unit, precisions, bytes, joint KL
    recipes = {
        "own": ("greedy", "head", "int8 int4", 200_000, 1.0),
        "vllm-projected": ("projected", "layer", "int8_per_token_head int4_per_token_head", 250_000, 0.5),
        "vllm-allocated": ("exact", "layer", "int8_per_token_head int4_per_token_head", 250_000, 0.4),
        "vllm-layer": ("exact", "layer", "int8_per_token_head int4_per_token_head", 250_000, 0.35),
        "vllm-own": ("greedy", "head", "int8 int4", 250_000, 0.3),
        "modelopt-projected": ("projected", "layer", "fp8_e4m3 nvfp4", 230_000, 0.9),
        "modelopt-allocated": ("exact", "layer", "fp8_e4m3 nvfp4", 229_000, 0.8),
        "modelopt-own": ("greedy", "head", "int8 int4", 230_000, 0.45),
        "modelopt-allocated-own": ("exact", "layer", "fp8_e4m3 nvfp4", 199_000, 1.1),
    }
    rows = [
        policy_rows(recipe, 1e-2 * level * shape * random.lognormal(0, 0.05, blocks), recipe, allocator,
                    unit=unit, precisions=precisions, size=size, limit=size, proxy=1e-2 * level)
        for recipe, (allocator, unit, precisions, size, level) in recipes.items()
    ]  # fmt: skip
    write_gappy(folder / "export" / "joint.csv", pd.concat(rows))
    return folder / "export" / "joint.csv"


def write_continuations(folder: Path, prompts: int = 12, tokens: int = 16) -> None:
    """generation/continuations.csv: the control parts once, policies the sooner the more they quantize."""
    random = np.random.default_rng(5)
    rows = []
    for prefill in ("exact", "stepwise"):
        for policy, mean in (("bf16", 0.0), ("greedy-0.01", 14.0), ("int4", 3.0), ("int8", 40.0)):
            same = np.minimum(random.geometric(1 / mean, prompts) - 1, tokens) if mean else np.full(prompts, tokens)
            if not mean:
                same[3] = 9
            rows += [
                (policy, prefill, 1 if policy == "bf16" else prompts, block, f"text-{block // 2}", 16, tokens,
                 int(own), "float32")
                for block, own in enumerate(same)
            ]  # fmt: skip
    names = ["policy", "prefill", "together", "block", "document", "prompt_tokens", "tokens", "same", "compute_dtype"]
    write_gappy(folder / "generation" / "continuations.csv", pd.DataFrame(rows, columns=names))


def write_domains(folder: Path, blocks: int = 8) -> list[Path]:
    """domains/{domain}/{length}/joint.csv: calibrating on another text costs 30 %, on other blocks 10 %."""
    random = np.random.default_rng(6)
    places = [(domain, length) for domain in ("letters", "speeches") for length in (64, 256)]
    written = []
    for domain, length in places:
        shape = random.lognormal(0, 0.5, blocks)
        rows = [
            policy_rows(f"{made}-{of}-{budget}", level * shape * (1 + 0.3 * (made != domain) + 0.1 * (of != length)),
                        source=f"{made}-{of}", size=size)
            for budget, level, size in (("10bits", 1e-3, 245_760), ("5bits", 1e-1, 122_880)) for made, of in places
        ]  # fmt: skip
        written.append(folder / "domains" / domain / str(length) / "joint.csv")
        write_gappy(written[-1], pd.concat(rows).assign(window=f"validation-{domain}-{length}"))
    return written
