"""Where scores from gradients hold: a sample of them is measured, and those beyond second order are replaced.

A score from gradients is the KL to second order (docs/method.md, "Scores from gradients"). It fails where one unit
changes much, and where a quantized first key moves an attention sink: then the size of the change says little. So the
units (a head's keys, or its values) come in two classes, those whose scheme keeps the first token exact and those whose
scheme does not. Of each class a sample, spread evenly over the logarithm of the scores, is measured by itself, as a
sweep measures it. A score is *off* where the measured KL is more than ``OFF`` times larger or smaller, by more than two
standard errors. The class fails from the least score on from which at least half of the sampled ones are off. Every
score from there up is *marked*, and the largest are measured, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvstages.cache.schemes import precision

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "gradients-checked"
OFF = 1.5
# Scores below this, or below so small a share of the largest, are not worth a measurement.
LEAST, SHARE = 1e-6, 1e-4
KEY = ["layer", "head", "part", "precision"]
CHECK_COLUMNS = [
    *KEY, "first_exact", "why", "score", "standard_error", "measured_kl", "measured_standard_error", "ratio", "is_off",
    "threshold",
]  # fmt: skip

Key = tuple[int, int, str, str]


class Measured(NamedTuple):
    """A unit's measured KL (nats, mean over the blocks) and its standard error."""

    kl: float
    error: float


Measure = Callable[[list[Key]], Mapping[Key, Measured]]


def checkable(table: pd.DataFrame, precisions: Iterable[str]) -> pd.DataFrame:
    """The scores that may be checked: of keys or values alone, at some precisions, worth a measurement."""
    own = table[table["part"].isin(["k", "v"]) & table["precision"].isin(list(precisions))]
    floor = max(LEAST, SHARE * own["mean_kl"].max()) if len(own) else LEAST
    own = own[own["mean_kl"] >= floor].sort_values(["mean_kl", *KEY], ascending=[False, True, True, True, True])
    exact = [
        int(precision(name).method(part).first > 0) for name, part in zip(own["precision"], own["part"], strict=True)
    ]
    return own.assign(first_exact=exact)


def sample(scores: pd.DataFrame, count: int) -> pd.DataFrame:
    """``count`` rows at most, of falling scores, the nearest to places that are even on a logarithmic axis."""
    if len(scores) <= count:
        return scores
    logs = [math.log(score) for score in scores["mean_kl"]]
    chosen: list[int] = []
    for step in range(count):
        place = logs[0] + (logs[-1] - logs[0]) * step / max(1, count - 1)
        left = (index for index in range(len(logs)) if index not in chosen)
        chosen.append(min(left, key=lambda index: (abs(logs[index] - place), index)))
    return scores.iloc[sorted(chosen)]


def is_off(score: float, error: float, found: Measured) -> bool:
    """Whether a score is not the measured KL, by more than a factor and by more than both errors explain."""
    if not 1 / OFF <= found.kl / score <= OFF:
        noise = math.hypot(*(0.0 if math.isnan(each) else each for each in (error, found.error)))
        return abs(found.kl - score) > 2 * noise
    return False


def threshold(scores: list[float], off: list[bool]) -> float:
    """The least score, of one that is off, from which on at least half are off; infinity where there is none."""
    least = math.inf
    pairs = sorted(zip(scores, off, strict=True), reverse=True)
    for count, (score, is_wrong) in enumerate(pairs, start=1):
        if is_wrong and 2 * sum(wrong for _, wrong in pairs[:count]) >= count:
            least = score
    return least


def check(
    table: pd.DataFrame, precisions: Iterable[str], count: int, most: int, measure: Measure
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table with measured scores where they were measured, and what was checked.

    ``count``: units of the sample, half of each class where both are there; ``most``: marked ones to measure beside
    them. A whole head's score changes by what those of its keys and values change by. What is marked and not measured
    keeps its score; its measured KL is empty.
    """
    import pandas as pd

    rows = checkable(table, precisions)
    classes = [own for _, own in rows.groupby("first_exact", sort=True)]
    sampled = [sample(own, count // len(classes)) for own in classes]
    keys = [key for own in sampled for key in keys_of(own)]
    found = dict(measure(keys))
    limits, marked = {}, []
    for own, tried in zip(classes, sampled, strict=True):
        scores, errors = tried["mean_kl"].tolist(), tried["standard_error"].tolist()
        off = [is_off(*each) for each in zip(scores, errors, (found[key] for key in keys_of(tried)), strict=True)]
        limit = threshold(scores, off)
        limits[int(own["first_exact"].iloc[0])] = limit
        marked.append(own[own["mean_kl"] >= limit])
    beyond = pd.concat(marked).sort_values("mean_kl", ascending=False, kind="stable") if marked else rows
    others = [key for key in keys_of(beyond) if key not in found]
    found.update(measure(others[:most]))
    checked = pd.concat([*sampled, beyond]).drop_duplicates(KEY) if marked else rows
    record = []
    for row, key in zip(checked.itertuples(index=False), keys_of(checked), strict=True):
        own, limit = found.get(key), limits[row.first_exact]
        known = (None, None, None, None)
        if own is not None:
            known = own.kl, own.error, own.kl / row.mean_kl, int(is_off(row.mean_kl, row.standard_error, own))
        why = "sample" if key in keys else "marked"
        limit = None if math.isinf(limit) else limit
        record.append((*key, row.first_exact, why, row.mean_kl, row.standard_error, *known, limit))
    checks = pd.DataFrame(record, columns=CHECK_COLUMNS).sort_values(KEY, kind="stable", ignore_index=True)
    return corrected(table, found), checks


def corrected(table: pd.DataFrame, found: Mapping[Key, Measured]) -> pd.DataFrame:
    """A table of scores with the measured ones in their places, under a source of its own."""
    table = table.assign(source=SOURCE)
    place = {key: index for index, key in zip(table.index, keys_of(table), strict=True)}
    for key, own in found.items():
        more = own.kl - table.loc[place[key], "mean_kl"]
        table.loc[place[key], ["mean_kl", "standard_error"]] = own.kl, own.error
        layer, head, _, name = key
        whole = place.get((layer, head, "kv", name))
        if whole is not None:
            table.loc[whole, "mean_kl"] = max(0.0, table.loc[whole, "mean_kl"] + more)
    return table


def keys_of(table: pd.DataFrame) -> list[Key]:
    """Unit and precision of each row."""
    return [(int(layer), int(head), part, name) for layer, head, part, name in table[KEY].itertuples(index=False)]
