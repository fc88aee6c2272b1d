"""A section of docs/results.md on a Hugging Face decoder: what its study's tables say, in the order of the tables.

``read_decoder`` puts their numbers into the record docs/findings.json; ``section`` writes the text around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstages.analysis.engines_page import engine_lines, read_engines
from kvstages.analysis.number_text import interval, nats, number, rounded
from kvstages.files.read import read_columns, read_record

POLICY = ["mean_kl", "mean_kl_low", "mean_kl_high", "agreement", "total_bytes", "compression", "proxy"]
SCHEME = ["bits_at_end", "bytes", "mean_kl", "agreement"]
SPREAD = [
    *("mean_kl_documents_low", "mean_kl_documents_high", "agreement_documents_low", "agreement_documents_high"),
    *("times_less", "times_less_documents_low", "times_less_documents_high"),
]
DOMAINS = ["calibrated_length", "length", "blocks", "documents", "mean_kl"]
RATIOS = ["ratio", "ratio_low", "ratio_high", "ratio_documents_low", "ratio_documents_high"]
GENERATED = ["prompts", "prompt_tokens", "tokens", "exact_match", "mean_same", "mean_same_low", "mean_same_high"]
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
    if (tables / "domains.csv").exists():
        texts = ["budget", "calibrated_domain", "domain"]
        found["domains"] = _rows(read_columns(tables / "domains.csv", DOMAINS, texts, RATIOS))
    if (tables / "generation.csv").exists():
        found["generated"] = _rows(read_columns(tables / "generation.csv", GENERATED, ["prefill", "policy"]))
    engines = read_engines(tables)
    return {**found, "engines": engines} if engines else found


def _window(study: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    windows = read_columns(study / "windows.csv", ["block"], ["window", "document"])
    own = windows[windows["window"] == "validation"]
    return {"block": settings["block"], "blocks": len(own), "documents": int(own["document"].nunique())}


def _rows(table: Any) -> list[dict[str, Any]]:
    return [{name: rounded(value) for name, value in row.items()} for row in table.to_dict("records")]


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
        ends = interval(row["mean_kl_low"], row["mean_kl_high"], nats) if row["mean_kl"] else ""
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
                f"| {row['precision'].upper()} | {row['units']} | {number(row['rank_correlation'])}"
                f"{interval(row['rank_correlation_low'], row['rank_correlation_high'], number)} | "
                f"{number(row['median_ratio'])}{interval(row['median_ratio_low'], row['median_ratio_high'], number)} |"
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
            kl = interval(row["mean_kl_documents_low"], row["mean_kl_documents_high"], nats)
            times = interval(row["times_less_documents_low"], row["times_less_documents_high"], number)
            lines.append(
                f"| {row['budget'] or '–'} | {row['recipe']} | `{row['scheme']}` | {row['bits_at_end']:.2f} | "
                f"{nats(row['mean_kl'])}{kl} | {100 * row['agreement']:.1f} % | {number(row['times_less'])}{times} |"
            )
    if "engines" in found:
        lines += ["", *engine_lines(found["engines"])]
    if "domains" in found:
        lines += _domains(found["domains"])
    if "generated" in found:
        lines += _generated(found["generated"])
    return "\n".join(lines)


def _domains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What policies that were calibrated on one text do on another: a matrix for each budget."""
    lines = [
        "",
        "Calibrated here, measured there ([definition](method.md#domains)). A row is the text and block length whose "
        "scores made a policy, a column those that it was measured on. A cell is the joint KL in nats, and its ratio "
        "to that of the policy which was calibrated on the column's own. The interval of the ratio is over documents, "
        "where there are at least 4, else over blocks; it covers no other calibration blocks or probes.",
    ]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        own = [row for row in rows if row["budget"] == budget]
        made, here = (
            list(dict.fromkeys(_place(row, of) for row in sorted(own, key=lambda row, of=of: _place(row, of))))
            for of in ("calibrated_", "")
        )
        cells = {(_place(row, "calibrated_"), _place(row, "")): row for row in own}
        lines += ["", f"| {budget}, calibrated on | {' | '.join(map(_named, here))} |", "|---" * (len(here) + 1) + "|"]
        lines += [
            f"| {_named(row)} | {' | '.join(_cell(cells.get((row, column))) for column in here)} |" for row in made
        ]
        counts = {_place(row, ""): f"{row['blocks']:.0f} blocks of {row['documents']:.0f} documents" for row in own}
        lines += ["", f"Measured on {'; '.join(f'{_named(place)}: {counts[place]}' for place in here)}."]
    return lines


def _place(row: Mapping[str, Any], of: str) -> tuple[str, int]:
    """Domain and block length that a row was calibrated or measured on."""
    return row[f"{of}domain"], int(row[f"{of}length"])


def _named(place: tuple[str, int]) -> str:
    return f"{place[0]}, {place[1]} tokens"


def _cell(row: Mapping[str, Any] | None) -> str:
    """KL and, of a policy from elsewhere, the ratio with its interval; a dash where it was not measured."""
    if row is None:
        return "–"
    kl = nats(row["mean_kl"])
    if row["ratio_low"] is None:
        return kl
    of = "ratio_documents" if row["ratio_documents_low"] is not None else "ratio"
    return f"{kl}; {number(row['ratio'])}{interval(row[f'{of}_low'], row[f'{of}_high'], number)}"


def _generated(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How long generated text stays that of the unquantized cache."""
    first = rows[0]
    lines = [
        "",
        f"Greedy continuations of {first['prompts']:.0f} held-out prompts of {first['prompt_tokens']:.0f} tokens, "
        f"{first['tokens']:.0f} tokens each, against those of the unquantized cache "
        "([definition](method.md#generated-text)). The row bf16 is the control: the unquantized cache with another "
        "number of prompts at once. Intervals are over documents.",
        "",
        "| prefill | policy | same text | same tokens before the first other, mean |",
        "|---|---|---|---|",
    ]
    for row in rows:
        ends = interval(row["mean_same_low"], row["mean_same_high"], number)
        lines.append(
            f"| {row['prefill']} | {row['policy']} | {100 * row['exact_match']:.0f} % | "
            f"{number(row['mean_same'])}{ends} |"
        )
    return lines
