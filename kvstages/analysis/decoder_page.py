"""A section of docs/results.md on a Hugging Face decoder: what its study's tables say, in the order of the tables.

``read_decoder`` puts their numbers into the record docs/findings.json; ``section`` writes the text around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstages.analysis.engines_page import engine_lines, read_engines
from kvstages.analysis.number_text import nats, rounded
from kvstages.files.read import read_columns, read_record

POLICY = ["mean_kl", "mean_kl_low", "mean_kl_high", "agreement", "total_bytes", "compression", "proxy"]
SCHEME = ["bits_at_end", "bytes", "mean_kl", "agreement"]
SPREAD = [
    *("mean_kl_documents_low", "mean_kl_documents_high", "agreement_documents_low", "agreement_documents_high"),
    *("times_less", "times_less_documents_low", "times_less_documents_high"),
]
CHECK = ["probes", "units", "median_ratio"]
CHECKED = ["rank_correlation", "rank_correlation_low", "rank_correlation_high", "median_ratio_low", "median_ratio_high"]


def read_decoder(study: Path) -> dict[str, Any]:
    """What the page states of the study in the folder ``study``.

    ValueError names a table that lacks a column; OSError one that is missing: the study must be finished.
    """
    manifest = read_record(study / "manifest.json", ["environment", "configuration"])
    environment, settings = manifest["environment"], manifest["configuration"]["study"]
    tables = study / "tables"
    policies = read_columns(tables / "results.csv", POLICY, ["policy"])
    checks = read_columns(tables / "gradients.csv", CHECK, ["part", "precision"], CHECKED)
    checks = checks[checks["probes"] == checks["probes"].max()]
    found = {
        "processor": environment["processor"],
        "torch": environment["packages"]["torch"],
        "transformers": environment["packages"]["transformers"],
        "title": settings["title"],
        "arithmetic": settings["compute_dtype"],
        **_window(study, settings),
        "policies": _rows(policies),
        "checks": _rows(checks),
    }
    if (tables / "screening.csv").exists():
        schemes = read_columns(tables / "screening.csv", SCHEME, ["recipe", "policy", "scheme", "budget"], SPREAD)
        found["schemes"] = _rows(
            schemes[schemes["recipe"].isin(["uniform", "published", "exact-published", "recommended"])]
        )
    engines = read_engines(tables)
    return {**found, "engines": engines} if engines else found


def _window(study: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    windows = read_columns(study / "windows.csv", ["block"], ["window", "document"])
    own = windows[windows["window"] == "validation"]
    return {"block": settings["block"], "blocks": len(own), "documents": int(own["document"].nunique())}


def _rows(table: Any) -> list[dict[str, Any]]:
    return [
        {name: rounded(value) if not isinstance(value, str) else value for name, value in row.items()}
        for row in table.to_dict("records")
    ]


def section(name: str, found: Mapping[str, Any]) -> str:
    """The section of one study."""
    lines = [
        f"## {found['title']}",
        "",
        f"Study `{name}`, {found['arithmetic']} arithmetic, {found['blocks']} held-out blocks of {found['block']} "
        f"tokens from {found['documents']} documents, on {found['processor']} with torch {found['torch']} and "
        f"transformers {found['transformers']}. KL is KL(policy || reference), a mean over positions.",
        "",
        "| policy | proxy (nats) | mean KL (nats), interval over blocks | agreement | bytes | compression |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["policies"]:
        ends = _ends(row["mean_kl_low"], row["mean_kl_high"]) if row["mean_kl"] else ""
        lines.append(
            f"| {row['policy']} | {nats(row['proxy'])} | {nats(row['mean_kl'])}{ends} | "
            f"{100 * row['agreement']:.2f} % | {row['total_bytes']:,} | {row['compression']:.2f} |"
        )
    lines += [
        "",
        "Scores come from gradients. Of a sample of heads that were also measured:",
        "",
        "| precision | heads | rank correlation | median estimated / measured |",
        "|---|---|---|---|",
    ]
    for row in found["checks"]:
        if row["part"] == "kv":
            lines.append(
                f"| {row['precision'].upper()} | {row['units']} | {_number(row['rank_correlation'])}"
                f"{_ends(row['rank_correlation_low'], row['rank_correlation_high'], _number)} | "
                f"{_number(row['median_ratio'])}{_ends(row['median_ratio_low'], row['median_ratio_high'], _number)} |"
            )
    if "schemes" in found:
        lines += [
            "",
            "Quantizer schemes ([what the names mean](schemes.md)). Bits are those of a stored element at the end of a "
            "block, with everything that the cache stores. *Times less KL* is against the published quantizer or "
            "recipe at the same bits. Intervals are over documents.",
            "",
            "| budget | recipe | scheme | bits | mean KL (nats) | agreement | times less KL |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in found["schemes"]:
            kl = _ends(row["mean_kl_documents_low"], row["mean_kl_documents_high"])
            times = _ends(row["times_less_documents_low"], row["times_less_documents_high"], _number)
            lines.append(
                f"| {row['budget'] or '–'} | {row['recipe']} | `{row['scheme']}` | {row['bits_at_end']:.2f} | "
                f"{nats(row['mean_kl'])}{kl} | {100 * row['agreement']:.1f} % | {_number(row['times_less'])}{times} |"
            )
    if "engines" in found:
        lines += ["", *engine_lines(found["engines"])]
    return "\n".join(lines)


def _ends(low: float | None, high: float | None, form: Any = None) -> str:
    """An interval behind its number; nothing where it is not known."""
    if low is None or high is None:
        return ""
    form = form or nats
    return f" [{form(low)}, {form(high)}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
