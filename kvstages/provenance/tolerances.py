"""Kinds of numbers, and by how much each may differ between two runs of the same study.

The data dictionaries (``schemas``) say it: each column or key that holds a number names its ``kind``. One that is
``exact`` (a setting, a budget, bytes), or that no schema knows, must be equal but for the last digits of arithmetic.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[1] / "schemas"
Tolerance = tuple[float, float]
# Kind to (relative, absolute) in FP32 and in BF16: a and b may differ by absolute + relative * max(|a|, |b|). Runs sum
# in other orders. In FP32 that moves logits by 1e-5, and now and then a key or value to the next code or BF16 value; in
# BF16 it flips roundings everywhere, so only sizes are compared.
KINDS: dict[str, tuple[Tolerance, Tolerance]] = {
    "logit": ((0.0, 1e-3), (0.05, 0.5)),  # of the reference, where nothing is quantized: sums alone
    "mean": (
        (0.05, 1e-9),
        (0.5, 2e-3),
    ),  # KL over many positions: a code moves that of one by half, the mean by little
    "few": ((0.5, 1e-7), (0.75, 0.05)),  # extremes, percentiles, errors: they hang on few positions, see "mean"
    "column": ((0.2, 0.0), (1.0, 0.0)),  # single positions as one vector: distance over length; some move by half
    "agreement": ((0.0, 0.01), (0.0, 0.03)),  # share of marks that differ: two most likely tokens may be nearly tied
    "count": ((0.05, 2.0), (0.5, 4.0)),  # blocks that disagree, and where first: the same ties, in whole numbers
    "loss": ((5e-3, 1e-3), (0.02, 0.01)),  # log p moves with the distribution, up and down: its mean by a small part
    "probability": (
        (0.5, 2e-3),
        (0.5, 0.05),
    ),  # Δp of single tokens as for "few", whose means are near 0
    "statistic": ((0.2, 0.02), (0.5, 1.0)),  # ratios, differences, correlations of the above: both parts count
    "trained": ((0.2, 2e-3), (0.5, 0.02)),  # KL of trained models, and differences of them: training spreads every flip
    "reduction": ((0.1, 0.0), (0.75, 0.0)),  # 1 - a / b, judged by a / b: what two means may differ by, see "mean"
    "weights": ((1e-3, 0.0), (1e-2, 0.0)),  # distance of two trained models over the length of one: losses' gradients
}
EXACT: Tolerance = (1e-12, 0.0)
# The kind of numbers 1 - a / b that are judged by a / b: where a and b are nearly equal, the number itself is near 0.
REDUCTION = "reduction"
# A ratio to what may be next to 0, where a last digit of the parts moves it by any amount. The parts stand in the same
# table and are compared; of the ratio only whether there is one.
DERIVED = "derived"
# What a run ran on: the reason for a comparison, not its subject.
PLACE = "place"


def tolerance(kind: str | None, bfloat16: bool) -> Tolerance:
    """(relative, absolute) of a kind."""
    return KINDS[kind][bfloat16] if kind in KINDS else EXACT


def allowed(kind: str | None, bfloat16: bool, a: float, b: float) -> float:
    """By how much two numbers of a kind may differ."""
    relative, absolute = tolerance(kind, bfloat16)
    sizes = (abs(1 - a), abs(1 - b)) if kind == REDUCTION else (abs(a), abs(b))
    return absolute + relative * max(sizes)


def kinds(name: str) -> dict[str, str]:
    """Kinds by column, key or tensor of a file, ``name`` as seen from the study's folder; {} where no schema has it."""
    return next((found for pattern, found in _schemas() if pattern.fullmatch(name)), {})


def read_schema(path: Path) -> dict[str, Any]:
    """A data dictionary; by libyaml, which takes a tenth of the time, where PyYAML was built with it."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def _schemas() -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Each schema's kinds, and the paths that its title names: results/{study}/sweep/{dtype}/layer-{layer}.csv."""
    found = []
    for path in sorted(SCHEMAS.glob("*.schema.yaml")):
        schema = read_schema(path)
        for title in schema["title"].split(" and "):
            if title.startswith("results/{study}/"):
                parts = re.split(r"(\{\w+\}|\.\.\.)", title.removeprefix("results/{study}/"))
                words = {"...": ".+"}
                pattern = "".join(
                    re.escape(part) if index % 2 == 0 else words.get(part, "[^/]+") for index, part in enumerate(parts)
                )
                found.append((re.compile(pattern), dict(named(schema))))
    return found


def named(schema: Any) -> Iterator[tuple[str, str]]:
    """Names and kinds of all numbers in a schema, at whatever depth."""
    if isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            if "kind" in inner:
                yield name, inner["kind"]
            yield from named(inner)
        for key in ("items", "additionalProperties"):
            yield from named(schema.get(key))
