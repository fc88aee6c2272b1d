"""Every metric of every policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis import published as publication
from kvstages.analysis.entries import Entry, Input
from kvstages.cache.precisions import by_size
from kvstages.files.read import read_record
from kvstages.policies.names import policy_order
from kvstages.tables.notes import (
    HELD_OUT,
    INTERVAL_NOTE,
    MEASURED,
    PROXY_NOTE,
    PUBLISHED_HELD_OUT,
    PUBLISHED_NOTE,
    WINDOW,
    held_out_sections,
    measured_note,
    page_title,
    put_beside,
    storage_notes,
)
from kvstages.tables.page import Column, Section, count, divergence, factor, page, percent

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=1,
    title="Results of every policy",
    inputs={
        "evaluations": Input("evaluation_files", "EVALUATION.json", several=True),
    },
    beside=("policy_files",),
    published=True,
)

METRICS = ["policy", "proxy", *HELD_OUT, "total_bytes", "compression"]
TENSORS_NOTE = "Tensors: a head has two, its keys and its values. Precisions that no policy uses are left out."


def make(
    evaluations: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """One row a policy, from each evaluation.json and the policy.json beside it; uniform ones first, then by budget."""
    import pandas as pd

    records = [
        read_record(
            path, [*METRICS, *MEASURED, *WINDOW], ["proxy", "mean_kl", "agreement", "total_bytes", "compression"]
        )
        for path in evaluations
    ]
    policies = [read_record(Path(path).parent / "policy.json", ["tensors"]) for path in evaluations]
    used = by_size(name for policy in policies for name, count in policy["tensors"].items() if count)
    rows = []
    for record, policy in sorted(zip(records, policies, strict=True), key=lambda pair: policy_order(pair[0]["policy"])):
        tensors = {f"tensors_{precision}": policy["tensors"].get(precision, 0) for precision in used}
        rows.append({"policy": record["policy"], **tensors, **{name: record[name] for name in METRICS[1:]}})
    table = pd.DataFrame(rows)
    if published is not None:
        validation = publication.published_validation(published)
        proxies = publication.published_policies(published)
        known = {name: {**metrics, "proxy": proxies.get(name, {}).get("proxy")} for name, metrics in validation.items()}
        for name in ("proxy", *PUBLISHED_HELD_OUT, "total_bytes", "compression"):
            put_beside(table, name, [known.get(policy, {}).get(name) for policy in table["policy"]])
    storage = Section(
        "Storage, divergence and agreement",
        [
            Column("policy", "policy", str),
            *(Column(f"{precision.upper()} tensors", f"tensors_{precision}", count) for precision in used),
            Column("proxy (nats)", "proxy", divergence),
            Column("mean KL (nats)", "mean_kl", divergence, interval=True),
            Column("agreement", "agreement", percent, interval=True),
            Column("bytes", "total_bytes", count),
            Column("compression", "compression", factor),
        ],
        table,
    )
    notes = [measured_note(records), INTERVAL_NOTE, TENSORS_NOTE, PROXY_NOTE, *storage_notes(records)]
    sections = [storage, *held_out_sections([Column("policy", "policy", str)], table)]
    return table, page(
        page_title(study, "results of every policy"), sections, notes + [PUBLISHED_NOTE] * (published is not None)
    )
