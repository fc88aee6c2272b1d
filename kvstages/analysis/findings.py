"""The numbers that docs/results.md and the README state, read from a finished study's tables.

``read_findings`` reads them, by machine; ``add_machine`` puts them into the record docs/findings.json, beside those of
other machines, because the published recipe's scores in BF16 are mostly rounding and so differ between processors.
``results_page`` writes the text around them. Numbers keep ``DIGITS`` significant digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstages.analysis.engines_page import read_engines
from kvstages.analysis.joint_table import ENDS, PUBLISHED, RANDOM, UNIFORM
from kvstages.analysis.number_text import rounded
from kvstages.cache.precision_grid import PrecisionGrid, Unit
from kvstages.files.read import read_columns, read_record

# Measure to the column of its reduction against the published recipe.
MEASURES = {"mean_kl": "kl_reduction", "excess_kl": "excess_reduction"}
Numbers = dict[str, Any]


def read_findings(study: Path) -> Numbers:
    """Everything that is stated of the study in the folder ``study``, and the machine that measured it.

    ValueError names a table that is missing a column; OSError one that is missing: the study must have a comparison in
    two arithmetics and be finished.
    """
    manifest = read_record(study / "manifest.json", ["environment"])
    environment = manifest["environment"]
    return {
        "machine": {
            "processor": environment["processor"],
            "torch": environment["packages"]["torch"],
            "devices": environment["devices"],
        },
        "windows": _windows(study),
        "comparison": _comparison(study),
        "frontier": _frontier(study),
        "published": _published_policies(study),
        "scores": _scores(study),
        "proxy": _proxy(study),
        "gradients": _gradients(study),
        "policies": _policies(study),
        "engines": read_engines(study / "tables"),
    }


def add_machine(record: Mapping[str, Any], name: str, found: Numbers) -> Numbers:
    """The record with a machine's numbers first, in the place of older ones of the same name."""
    others = {key: value for key, value in record.get("machines", {}).items() if key != name}
    return {**record, "first": name, "machines": {name: found, **others}}


def with_intervals(row: Mapping[str, Any], name: str) -> list[Any]:
    """A figure of a row, its interval over blocks, and over documents."""
    return [rounded(row[column]) for column in (name, *(f"{name}{end}" for end in ENDS))]


def _table(path: Path, numbers: list[str], texts: list[str], gaps: list[str] | None = None) -> list[dict[str, Any]]:
    return read_columns(path, numbers, texts, gaps or []).to_dict("records")


def _uncertain(*names: str) -> list[str]:
    return [f"{name}{end}" for name in names for end in ("", *ENDS)]


def _windows(study: Path) -> Numbers:
    rows = _table(study / "windows.csv", ["block", "start"], ["window", "document"])
    own = [row for row in rows if row["window"] == "validation"]
    documents = {row["document"] for row in own if row["document"] == row["document"]}
    return {"blocks": len(own), "documents": len(documents)}


def _comparison(study: Path) -> list[Numbers]:
    """By budget: its bytes, and every policy by name with its measures in each arithmetic."""
    gaps = [*_uncertain("kl_reduction", "excess_kl", "excess_reduction"), "rank", "excess_rank"]
    rows = _table(
        study / "tables" / "equal-bytes.csv",
        ["bytes", "compression", "mean_kl", "mean_kl_low", "mean_kl_high"],
        ["budget", "compute_dtype", "recipe", "policy"],
        [*gaps, "mean_kl_documents_low", "mean_kl_documents_high"],
    )
    found = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        own = [row for row in rows if row["budget"] == budget]
        policies: dict[str, Numbers] = {}
        for row in own:
            entry = policies.setdefault(row["policy"], {"recipe": row["recipe"], "bytes": rounded(row["bytes"])})
            entry[row["compute_dtype"]] = {
                name: with_intervals(row, name) for pair in MEASURES.items() for name in pair
            } | {"rank": rounded(row["rank"]), "excess_rank": rounded(row["excess_rank"])}
        base = next(row for row in own if row["recipe"] == PUBLISHED)
        found.append(
            {
                "budget": budget,
                "bytes": rounded(base["bytes"]),
                "compression": rounded(base["compression"]),
                "policies": policies,
            }
        )
    return found


def _frontier(study: Path) -> dict[str, list[Numbers]]:
    """By arithmetic: every policy of the frontier with its measures, families in order, by falling limit."""
    rows = _table(
        study / "tables" / "frontier.csv",
        ["limit", "bytes", "mean_kl", "mean_kl_low", "mean_kl_high"],
        ["compute_dtype", "recipe", "policy"],
        [
            *_uncertain("kl_reduction", "excess_kl", "excess_reduction"),
            "mean_kl_documents_low",
            "mean_kl_documents_high",
        ],
    )
    found: dict[str, list[Numbers]] = {}
    for row in rows:
        found.setdefault(row["compute_dtype"], []).append(
            {
                "recipe": row["recipe"],
                "policy": row["policy"],
                "limit": rounded(row["limit"]),
                **{name: with_intervals(row, name) for pair in MEASURES.items() for name in pair},
            }
        )
    return found


def _published_policies(study: Path) -> dict[str, Numbers]:
    """By budget: how many heads of the published recipe's policy are in INT4, and the share of the sum of its scores,
    measured in FP32, that these have."""
    scores = read_columns(
        study / "scores" / "measured-float32.csv", ["layer", "head", "mean_kl"], ["part", "precision"]
    )
    by_unit = scores.set_index(["layer", "head", "part", "precision"])["mean_kl"].to_dict()
    found = {}
    for path in sorted((study / "comparison").glob("*/published/policy.json")):
        grid = PrecisionGrid.of_record(read_record(path, ["precisions"])["precisions"])
        heads = [
            (Unit(layer, head, "kv"), precision)
            for layer, row in enumerate(grid.keys)
            for head, precision in enumerate(row)
            if precision != "bf16"
        ]
        each = {unit: by_unit[(*unit, precision)] for unit, precision in heads}
        low = [unit for unit, precision in heads if precision == "int4"]
        total = sum(each.values())
        share = sum(each[unit] for unit in low) / total if total > 0 else None
        found[path.parent.parent.name] = {"int4_heads": len(low), "int4_share": rounded(share)}
    return found


def _scores(study: Path) -> dict[str, dict[str, Numbers]]:
    """By source and precision, of whole heads: ratio to INT8, sum over the joint KL, and scores below the floor."""
    names = ["median_ratio_to_int8", "sum_over_joint", "below_floor", "median_bf16_step", "median"]
    rows = _table(study / "tables" / "sensitivity-summary.csv", ["heads"], ["source", "part", "precision"], names)
    found: dict[str, dict[str, Numbers]] = {}
    for row in rows:
        if row["part"] == "kv":
            found.setdefault(row["source"], {})[row["precision"]] = {
                name: rounded(row[name]) for name in ["heads", *names]
            }
    return found


def _proxy(study: Path) -> Numbers:
    """How the proxy of the FP32 scores orders policies: by decade, and among random policies of equal bytes."""
    ends = ["rank_correlation", "rank_correlation_low", "rank_correlation_high", "median_ratio"]
    rows = _table(study / "tables" / "proxy-joint.csv", ["policies"], ["sensitivity", "proxies"], ends)
    decades = [
        {"proxies": row["proxies"], "policies": rounded(row["policies"]), **{name: rounded(row[name]) for name in ends}}
        for row in rows
        if row["sensitivity"] == "measured-float32"
    ]
    kept = [row for row in decades if not row["proxies"].startswith(RANDOM)]
    by_budget = [row for row in decades if row["proxies"].startswith(RANDOM)]
    rows = _table(study / "tables" / "prediction.csv", ["policies"], ["window", "set", "predictor"], ends)
    random = {
        row["window"]: {name: rounded(row[name]) for name in ["policies", *ends]}
        for row in rows
        if row["set"] == "random, equal bytes" and row["predictor"] == "proxy_kl"
    }
    return {"decades": kept, "random_by_budget": by_budget, "random": random}


def _gradients(study: Path) -> list[Numbers]:
    """Rank correlation of scores from gradients with measured ones, by part and precision, at the most probes."""
    rows = _table(study / "tables" / "gradients.csv", ["probes", "rank_correlation"], ["part", "precision"])
    most = max(row["probes"] for row in rows)
    return [
        {name: row[name] if isinstance(row[name], str) else rounded(row[name]) for name in row}
        for row in rows
        if row["probes"] == most
    ]


def _policies(study: Path) -> list[Numbers]:
    """The study's own policies, as the table of results has them."""
    numbers = ["proxy", "mean_kl", "mean_kl_low", "mean_kl_high", "agreement", "total_bytes", "compression"]
    rows = _table(study / "tables" / "results.csv", numbers, ["policy"])
    return [{"policy": row["policy"], **{name: rounded(row[name]) for name in numbers}} for row in rows]


def compared_recipes(comparison: Numbers) -> list[str]:
    """Names of the policies that are compared at a budget's bytes with the published one, random ones aside."""
    return [
        name for name, entry in comparison["policies"].items() if entry["recipe"] not in (RANDOM, UNIFORM, PUBLISHED)
    ]
