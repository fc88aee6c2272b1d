"""The tables of results: each is built as one tidy DataFrame, and laid out from it as a page.

``results``, ``adaptation`` and ``sensitivity_summary`` return (table, page). Where the study repeats a published one,
the folder of published figures adds a column ``published_...`` beside each measured column that was published.
``study`` is the study's title, for the title of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages import published as publication
from kvstages.html_page import Column, Section, count, decimal, divergence, factor, page, percent
from kvstages.quantizer import BITS, LEVELS
from kvstages.records import arm_and_seed, policy_order, read_columns, read_record

if TYPE_CHECKING:
    import pandas as pd

MEASURED = ["execution", "arithmetic", "dense_storage"]
WINDOW = ["window", "sequences", "positions", "targets", "tokens_per_cache"]
HELD_OUT = [
    "mean_kl", "mean_kl_low", "mean_kl_high", "p50_kl", "p95_kl", "p99_kl", "max_kl",
    "agreement", "agreement_low", "agreement_high", "cross_entropy", "perplexity", "max_logit_deviation",
    "first_disagreement_mean", "sequences_with_disagreement",
]  # fmt: skip
METRICS = ["policy", "proxy", *HELD_OUT, "total_bytes", "compression"]
# What was published of them: all but the intervals.
PUBLISHED_HELD_OUT = [name for name in HELD_OUT if not name.endswith(("_low", "_high"))]
# The arm of this project that repeats the published recipe.
PUBLISHED_ARM = "noise"

STORAGE_NOTES = [
    "Bytes are the persistent payload plus the scales of one cache of {tokens} tokens at batch 1; transient "
    "reconstruction while decoding is not counted. Dense heads always count as BF16, 2 bytes an element.",
    "Less storage is not a speed-up: decoding from a packed cache does more work, and no speed is measured here.",
]
PROXY_NOTE = (
    "The proxy is a calibration proxy, the sum of single-head KL on the calibration window. It is not a bound on the "
    "KL of the joint policy."
)
INTERVAL_NOTE = (
    "In brackets: 95 % interval, bootstrap over blocks. KL in nats, over all positions, position 0 included."
)
PUBLISHED_NOTE = (
    "“Published” figures are those of the write-up that this study repeats (NVIDIA RTX A5000, PyTorch 2.4.1, BF16 "
    "arithmetic); the source is in the README beside the figures."
)


def results(
    evaluations: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """One row a policy, from each evaluation.json and the policy.json beside it; bf16, int8, int4, then by budget."""
    import pandas as pd

    records = [read_record(path, [*METRICS, *MEASURED, *WINDOW]) for path in evaluations]
    policies = [read_record(Path(path).parent / "policy.json", ["heads"]) for path in evaluations]
    rows = []
    for record, policy in sorted(zip(records, policies, strict=True), key=lambda pair: policy_order(pair[0]["policy"])):
        heads = {f"heads_{precision}": policy["heads"].get(precision, 0) for precision in BITS}
        rows.append({"policy": record["policy"], **heads, **{name: record[name] for name in METRICS[1:]}})
    table = pd.DataFrame(rows)
    if published is not None:
        validation = publication.published_validation(published)
        proxies = publication.published_policies(published)
        known = {name: {**metrics, "proxy": proxies.get(name, {}).get("proxy")} for name, metrics in validation.items()}
        for name in ("proxy", *PUBLISHED_HELD_OUT, "total_bytes", "compression"):
            _beside(table, name, [known.get(policy, {}).get(name) for policy in table["policy"]])
    storage = Section(
        "Storage, divergence and agreement",
        [
            Column("policy", "policy", str),
            *(Column(f"{precision.upper()} heads", f"heads_{precision}", count) for precision in BITS),
            Column("proxy (nats)", "proxy", divergence),
            Column("mean KL (nats)", "mean_kl", divergence, interval=True),
            Column("agreement", "agreement", percent, interval=True),
            Column("bytes", "total_bytes", count),
            Column("compression", "compression", factor),
        ],
        table,
    )
    notes = [measured_note(records), INTERVAL_NOTE, PROXY_NOTE, *_storage_notes(records)]
    sections = [storage, *_held_out_sections([Column("policy", "policy", str)], table)]
    return table, page(
        page_title(study, "results of every policy"), sections, notes + [PUBLISHED_NOTE] * (published is not None)
    )


def adaptation(
    original: Sequence[Path], adapted: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """Rows by cache policy, arm and seed, with mean and (sample) standard deviation over the seeds of each arm.

    ``original`` are the evaluation.json files of the model before adaptation, ``adapted`` those in ARM/seed-SEED/POLICY
    folders; arms and seeds keep the order given.
    """
    import pandas as pd

    keys = ["policy", *HELD_OUT, *MEASURED, *WINDOW]
    before = [read_record(path, keys) for path in original]
    after = [(*arm_and_seed(path), read_record(path, keys)) for path in adapted]
    rows = [{"policy": record["policy"], "arm": "original", "seed": "", **_pick(record)} for record in before]
    rows += [
        {"policy": record["policy"], "arm": arm, "seed": str(seed), **_pick(record)} for arm, seed, record in after
    ]
    table = pd.DataFrame(rows)
    if published is not None:
        validation, seeds = publication.published_validation(published), publication.published_adaptation(published)
        for name in PUBLISHED_HELD_OUT:
            values = []
            for row in table.itertuples():
                source = validation if row.arm == "original" else {}
                if row.arm == PUBLISHED_ARM and int(row.seed) in seeds:
                    source = seeds[int(row.seed)]["policies"]
                values.append(source.get(row.policy, {}).get(name))
            _beside(table, name, values)
    parts = []
    for policy in sorted(set(table["policy"]), key=policy_order, reverse=True):
        for _, part in table[table["policy"] == policy].groupby("arm", sort=False):
            parts.append(part)
            if len(part) > 1:
                parts.append(_over_seeds(part))
    table = pd.concat(parts, ignore_index=True)
    names = [Column("cache policy", "policy", str), Column("arm", "arm", str), Column("seed", "seed", str)]
    columns = [
        *names,
        Column("mean KL (nats)", "mean_kl", divergence, interval=True),
        Column("agreement", "agreement", percent, interval=True),
    ]
    notes = [
        "Every row, also those of adapted models, is measured against the original model with BF16 caches.",
        "Arm noise trains with cache noise; arm control does the same steps without it. No noise in evaluation.",
        "Mean and standard deviation: of the sample of seeds. An arm with a single seed has neither; without noise "
        "nothing is random, so one run says all.",
        measured_note(before + [record for _, _, record in after]),
        INTERVAL_NOTE,
        *_storage_notes(before),
    ]
    mean = ("seed", "mean")
    sections = [Section("Divergence and agreement", columns, table, mean), *_held_out_sections(names, table, mean)]
    return table, page(page_title(study, "adaptation"), sections, notes + [PUBLISHED_NOTE] * (published is not None))


def sensitivity_summary(
    sensitivity: Path, evaluations: Sequence[Path], published: Path | None = None, study: str | None = None
) -> tuple[pd.DataFrame, str]:
    """One row a precision: spread of the single-head scores, their trend over layers, and how they add up.

    ``evaluations`` are the evaluation.json of uniform policies; ``sum_over_joint`` is the sum of a precision's scores
    over the measured mean KL of the uniform policy of that name. ``median_ratio_to_int8`` is the median over heads of
    score / INT8 score, ``theoretical_ratio_to_int8`` what rounding theory says, the square of the ratio of levels.
    """
    import pandas as pd

    scores = read_columns(sensitivity, ["layer", "head", "mean_kl", "blocks"], ["precision", *MEASURED])
    records = {
        record["policy"]: record for record in (read_record(p, ["policy", "mean_kl", *WINDOW]) for p in evaluations)
    }
    table = _summarise(scores, {policy: record["mean_kl"] for policy, record in records.items()})
    if published is not None:
        grids = publication.published_sensitivities(published)
        theirs = pd.DataFrame(
            [
                (layer, head, precision, score)
                for precision, grid in grids.items()
                for layer, row in enumerate(grid)
                for head, score in enumerate(row)
            ],
            columns=["layer", "head", "precision", "mean_kl"],
        )
        joint = {name: metrics["mean_kl"] for name, metrics in publication.published_validation(published).items()}
        other = _summarise(theirs, joint).set_index("precision").reindex(table["precision"])
        for name in table.columns[2:]:
            if name != "theoretical_ratio_to_int8":
                _beside(table, name, other[name].tolist())
    spread = [
        Column("precision", "precision", str),
        Column("heads", "heads", count),
        *(Column(name, name, divergence) for name in ("sum", "minimum", "median", "maximum")),
    ]
    structure = [
        Column("precision", "precision", str),
        Column("correlation with layer (r)", "correlation_with_layer", decimal(2)),
        Column("median ratio to INT8", "median_ratio_to_int8", decimal(1)),
        Column("ratio by rounding theory", "theoretical_ratio_to_int8", decimal(1)),
        Column("joint KL of the uniform policy", "joint_mean_kl", divergence),
        Column("sum / joint KL", "sum_over_joint", decimal(2)),
    ]
    first = scores.iloc[0] if len(scores) else None
    notes = [
        "Scores: mean KL (nats) over the calibration window with one head at this precision and all others in BF16"
        + (f"; {int(first['blocks'])} blocks." if first is not None else "."),
        f"Measured with {_settings(scores.to_dict('records'))}.",
        "Rounding theory: the error of a rounding grows with the square of its step, (127/7)² ≈ 329 from INT8 to INT4. "
        "A ratio far below it, or a strong correlation with the layer, says that something else than the rounding of "
        "the cache was measured.",
        "Joint KL: the uniform policy on the held-out window "
        + "; ".join(sorted({f"{r['window']}, {r['positions']:,} positions" for r in records.values()}))
        + ". The sum is over the calibration window, so the quotient also compares two windows.",
        PROXY_NOTE,
        *_storage_notes(list(records.values())),
    ]
    sections = [
        Section("Spread of the single-head scores (nats)", spread, table),
        Section(
            "What the scores say: trend over layers, INT4 against INT8, sum against the joint policy", structure, table
        ),
    ]
    title = page_title(study, "sensitivity summary")
    return table, page(title, sections, notes + [PUBLISHED_NOTE] * (published is not None))


def page_title(study: str | None, table: str) -> str:
    return f"{table[0].upper()}{table[1:]}" if study is None else f"{study}: {table}"


def _held_out_sections(
    names: Sequence[Column], table: pd.DataFrame, emphasis: tuple[str, str] | None = None
) -> list[Section]:
    """Two sections of held-out metrics, narrow enough for published columns too; ``names`` tell the rows apart."""
    distribution = [Column(f"{name} KL", f"{name}_kl", divergence) for name in ("p50", "p95", "p99", "max")]
    prediction = [
        Column("cross entropy (nats)", "cross_entropy", decimal(4)),
        Column("perplexity", "perplexity", decimal(3)),
        Column("largest logit deviation", "max_logit_deviation", decimal(3)),
        Column("first disagreement (mean position)", "first_disagreement_mean", decimal(1)),
        Column("blocks that disagree", "sequences_with_disagreement", count),
    ]
    return [
        Section("Distribution of the KL over positions (nats)", [*names, *distribution], table, emphasis),
        Section("Prediction, and where the most likely token differs", [*names, *prediction], table, emphasis),
    ]


def _summarise(scores: pd.DataFrame, joint: dict[str, float]) -> pd.DataFrame:
    import pandas as pd

    by_head = scores.pivot(index=["layer", "head"], columns="precision", values="mean_kl")
    layer = by_head.index.get_level_values("layer").to_series(index=by_head.index).astype(float)
    rows = []
    for precision in dict.fromkeys(scores["precision"]):
        own = by_head[precision]
        row: dict[str, Any] = {
            "precision": precision, "heads": len(own), "sum": own.sum(), "minimum": own.min(), "median": own.median(),
            "maximum": own.max(),
            "correlation_with_layer": own.corr(layer) if layer.nunique() > 1 and own.nunique() > 1 else None,
        }  # fmt: skip
        row["median_ratio_to_int8"] = (
            (own / by_head["int8"]).median() if (by_head.get("int8", own * 0) > 0).all() else None
        )
        row["theoretical_ratio_to_int8"] = (LEVELS["int8"] / LEVELS[precision]) ** 2 if precision in LEVELS else None
        row["joint_mean_kl"] = joint.get(precision)
        row["sum_over_joint"] = own.sum() / joint[precision] if joint.get(precision) else None
        rows.append(row)
    return pd.DataFrame(rows)


def _beside(table: pd.DataFrame, name: str, values: list[Any]) -> None:
    """Insert the published values of column ``name`` after it and its interval; whole numbers stay whole."""
    import pandas as pd

    if all(value is None or isinstance(value, int) for value in values):
        values = pd.array(values, dtype="Int64")
    place = table.columns.get_loc(f"{name}_high" if f"{name}_high" in table else name) + 1
    table.insert(place, f"published_{name}", values)


def _pick(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in HELD_OUT}


def _over_seeds(part: pd.DataFrame) -> pd.DataFrame:
    """Rows "mean" and "standard deviation" of one arm and policy; intervals are those of single seeds only."""
    import pandas as pd

    measured = [name for name in part.columns[3:] if not name.endswith(("_low", "_high"))]
    values = part[measured].astype(float)
    both = pd.DataFrame([values.mean(skipna=False), values.std(ddof=1, skipna=False)])
    both.insert(0, "seed", ["mean", "standard deviation"])
    both.insert(0, "arm", part["arm"].iloc[0])
    both.insert(0, "policy", part["policy"].iloc[0])
    return both.reindex(columns=part.columns)


def _settings(records: Sequence[dict[str, Any]]) -> str:
    """Execution, arithmetic and dense storage; those that differ between records are all named."""
    said = {key: " / ".join(dict.fromkeys(str(record[key]) for record in records)) for key in MEASURED}
    return "{execution} execution, {arithmetic} arithmetic, dense heads kept as {dense_storage} while measuring".format(
        **said
    )


def measured_note(records: Sequence[dict[str, Any]]) -> str:
    windows = dict.fromkeys(
        f"window {r['window']}, {r['sequences']:,} blocks of {r['tokens_per_cache']} tokens, "
        f"{r['positions']:,} positions ({r['targets']:,} targets of the cross entropy)"
        for r in records
    )
    return f"Measured with {_settings(records)}, teacher-forced; {'; '.join(windows)}."


def _storage_notes(records: Sequence[dict[str, Any]]) -> list[str]:
    tokens = " / ".join(dict.fromkeys(str(record["tokens_per_cache"]) for record in records))
    return [note.format(tokens=tokens) for note in STORAGE_NOTES]
