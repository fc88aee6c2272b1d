"""Policies of two runs that differ only in moves whose scores are equal within their error.

An allocator takes the move that its scores make the cheapest, and stops at its budget. Where two moves, or a sum and
the budget, differ by less than scores may between two runs, another order of sums can choose the other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvstages.cache.precision_grid import LAYER, Unit, units
from kvstages.files.read import read_columns, read_json
from kvstages.provenance.tolerances import tolerance

# What follows from the precisions of a policy; all else of its record must be equal.
CHOSEN = {
    "precisions", "tensors", "proxy", "proxy_steps", "average_payload_bits", "bytes", "compression",
}  # fmt: skip
# What it was made of: the scores, which are compared themselves.
MADE_OF = {"provenance"}
# Allocators that choose by the KL of single units.
BY_SCORES = {"greedy", "exact", "by-layer"}


def other_choices(first: Path, second: Path) -> dict[str, str]:
    """Name of each policy that differs within the error of its scores, and in which units, as a line for a person."""
    found: dict[str, str] = {}
    for path in sorted(first.rglob("polic*.json")):
        twin = second / path.relative_to(first)
        if path.name not in ("policy.json", "policy-set.json") or not twin.is_file():
            continue
        try:
            pairs = zip(records(path), records(twin), strict=True)
            for a, b in pairs:
                if a.get("policy") == b.get("policy") and a.get("precisions") != b.get("precisions"):
                    units = same_but_for(a, b, first, second)
                    if units:
                        found[a["policy"]] = f"{path.relative_to(first).as_posix()}: {a['policy']}: {', '.join(units)}"
        except (ValueError, OSError, KeyError, TypeError, IndexError, AttributeError):
            continue  # the comparison of the records reports what is wrong with one
    return found


def records(path: Path) -> list[Mapping[str, Any]]:
    """The policies of a file: its own record, or those of a set."""
    record = read_json(path)
    return record["policies"] if path.name == "policy-set.json" else [record]


def same_but_for(a: Mapping[str, Any], b: Mapping[str, Any], first: Path, second: Path) -> list[str]:
    """The units in which two policies differ, if their scores are as near as scores may be; otherwise none."""
    settings = [{key: value for key, value in record.items() if key not in CHOSEN | MADE_OF} for record in (a, b)]
    if settings[0] != settings[1] or a["allocator"] not in BY_SCORES:
        return []
    moved = {unit: pair for unit, pair in differing(a, b) if pair[0] != pair[1]}
    source = a["sensitivity"]
    relative, absolute = tolerance("mean", "bfloat16" in source)
    for folder in (first, second):
        scores = scores_of(folder / "scores" / f"{source}.csv")
        costs = [
            sum(scores[unit, pair[side]] if pair[side] != "bf16" else 0.0 for unit, pair in moved.items())
            for side in (0, 1)
        ]
        # What the allocator compared: with a budget in nats also the whole sum, with bytes the moves alone.
        compared = max(a["proxy"], b["proxy"]) if a["budget_in"] == "nats" else max(costs)
        if abs(costs[0] - costs[1]) > absolute + relative * compared:
            return []
    return [f"{_said(unit)} ({'/'.join(pair)})" for unit, pair in moved.items()]


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[Unit, tuple[str, str]]]:
    """Each unit of the policies, with its precision in both."""
    first, second = (each["precisions"] for each in (a, b))
    for unit in units(len(first["keys"]), len(first["keys"][0]), a["unit"]):
        side = "values" if unit.part == "v" else "keys"
        yield unit, (first[side][unit.layer][unit.head], second[side][unit.layer][unit.head])


def scores_of(path: Path) -> dict[tuple[Unit, str], float]:
    """Scores of a gathered table by unit and precision; of layers that were not measured, the sums over their heads."""
    table = read_columns(path, ["layer", "head", "mean_kl"], ["part", "precision"])
    found = {
        (Unit(int(row.layer), int(row.head), row.part), row.precision): float(row.mean_kl)
        for row in table.itertuples(index=False)
    }
    sums = table[table["part"] == "kv"].groupby(["layer", "precision"])["mean_kl"].sum()
    return {(Unit(int(layer), 0, LAYER), name): float(kl) for (layer, name), kl in sums.items()} | found


def _said(unit: Unit) -> str:
    if unit.part == LAYER:
        return f"layer {unit.layer}"
    return f"layer {unit.layer} head {unit.head}{'' if unit.part == 'kv' else f' {unit.part}'}"
