"""The table of scores that allocators read.

Axes: U units, P quantized precisions, R rungs of the ladder (BF16 and the precisions that save bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstages.cache.precision_grid import LAYER, UNITS, PrecisionGrid, Unit, sides_of, units
from kvstages.cache.precisions import by_size, stored_bytes
from kvstages.cache.schemes import SIDES
from kvstages.files import ledger

if TYPE_CHECKING:
    import pandas as pd

    from kvstages.models.config import DecoderShape

# A score down to this is a KL of zero, rounded; a lower one is an error (docs/method.md, "Allocation").
ROUNDING = -1e-12
SETTING = ["execution", "compute_dtype"]
KEY = ["layer", "head", "part", "precision"]
VALUES = ["mean_kl", "reconstruction_error"]
COLUMNS = [*KEY, *VALUES, "source", *SETTING]


@dataclass(frozen=True)
class ScoreTable:
    """Scores of every unit of a decoder at the precisions that a policy may use.

    ``kl`` [P, U]: mean KL (nats) with that unit alone quantized. ``error`` [P, U]: relative reconstruction error of
    its keys and values, NaN where the source has none. ``precisions``: most bits first. ``widths``: of a head's keys
    and of its values. ``tokens``: positions of the cache whose bytes count. ``source``: where the scores come from.
    ValueError names the unit of a score that is NaN, infinite or negative beyond rounding.
    """

    layers: int
    heads: int
    unit: str
    precisions: tuple[str, ...]
    kl: np.ndarray
    error: np.ndarray
    widths: tuple[int, int]
    tokens: int
    source: str

    def __post_init__(self) -> None:
        if not self.precisions or list(self.precisions) != by_size(self.precisions):
            raise ValueError(
                f"precisions {', '.join(self.precisions) or 'none'}: expected some, each once, from most bytes to "
                f"fewest: {', '.join(by_size(self.precisions)) or 'int8, int4'}"
            )
        expected = (len(self.precisions), len(self.units))
        for name in ("kl", "error"):
            if getattr(self, name).shape != expected:
                raise ValueError(f"{name} of shape {getattr(self, name).shape}, expected {expected}")
        wrong = np.argwhere(~(np.isfinite(self.kl) & (self.kl >= ROUNDING)))
        if len(wrong):
            precision, unit = wrong[0]
            raise ValueError(
                f"sensitivity of {describe(self.units[unit])}, {self.precisions[precision]}: "
                f"{self.kl[precision, unit]}; expected a finite KL of 0 or more"
            )

    @cached_property
    def units(self) -> list[Unit]:
        """The units, by layer, head and part: the order of every array of units."""
        return units(self.layers, self.heads, self.unit)

    @cached_property
    def ladder(self) -> tuple[str, ...]:
        """What a unit may have, from BF16 down: a move goes one rung. A precision that saves no bytes of some unit is
        no rung."""
        rungs = ["bf16"]
        for precision in self.precisions:
            if all(self.unit_bytes(precision, part) < self.unit_bytes(rungs[-1], part) for part in UNITS[self.unit]):
                rungs.append(precision)
        return tuple(rungs)

    def unit_bytes(self, precision: str, part: str) -> int:
        """Bytes of one unit, a part of a head or a layer, in a cache of ``tokens`` positions."""
        widths = dict(zip(SIDES, self.widths, strict=True))
        heads = self.heads if part == LAYER else 1
        return heads * sum(sum(stored_bytes(precision, side, widths[side], self.tokens)) for side in sides_of(part))

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each unit at each rung, int64 [U, R]."""
        sizes = {part: [self.unit_bytes(rung, part) for rung in self.ladder] for part in UNITS[self.unit]}
        return np.array([sizes[unit.part] for unit in self.units], dtype=np.int64)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a cache of ``tokens`` positions with everything in BF16."""
        return sum(self.unit_bytes("bf16", unit.part) for unit in self.units)

    @cached_property
    def scores(self) -> np.ndarray:
        """Scores of BF16, all 0, and of every precision [1 + P, U]: where rounding left a KL less than 0, it is 0."""
        return np.stack([np.zeros(len(self.units)), *np.maximum(self.kl, 0.0)])

    @cached_property
    def costs(self) -> np.ndarray:
        """Score of each unit at each rung (nats) [U, R]."""
        return self._rungs(self.scores)

    @cached_property
    def errors(self) -> np.ndarray:
        """Relative reconstruction error of each unit at each rung [U, R]; ValueError where the source has none."""
        wrong = np.argwhere(~np.isfinite(self.error))
        if len(wrong):
            precision, unit = wrong[0]
            raise ValueError(
                f"sensitivity {self.source}: no reconstruction error of {describe(self.units[unit])}, "
                f"{self.precisions[precision]}"
            )
        return self._rungs(np.stack([np.zeros(len(self.units)), *self.error]))

    def _rungs(self, values: np.ndarray) -> np.ndarray:
        """Those of the ladder [U, R] out of values of BF16 and every precision [1 + P, U]."""
        return values[[("bf16", *self.precisions).index(rung) for rung in self.ladder]].T

    def proxy(self, choice: Sequence[str]) -> float:
        """Sum of the single-unit scores (nats) of a precision for each unit [U], added in the order of the units."""
        rows = [("bf16", *self.precisions).index(precision) for precision in choice]
        return float(np.cumsum(self.scores[rows, np.arange(len(self.units))])[-1])

    def choice(self, grid: PrecisionGrid) -> list[str] | None:
        """The precision of each unit [U] of a grid; None where this table has no score for it: another shape or
        precision, or precisions that differ within a unit."""
        if grid.shape != [self.heads] * self.layers or not set(grid.flat()) <= {"bf16", *self.precisions}:
            return None
        sides = {"k": grid.keys, "v": grid.values}
        found = [
            {sides[side][unit.layer][head] for side in sides_of(unit.part) for head in unit.heads(self.heads)}
            for unit in self.units
        ]
        return [names.pop() for names in found] if all(len(names) == 1 for names in found) else None

    def by_layer(self) -> ScoreTable:
        """The table of whole layers: scores and reconstruction errors summed over the units of each layer."""
        kl, error = (each.reshape(len(each), self.layers, -1).sum(axis=2) for each in (self.kl, self.error))
        return replace(self, unit=LAYER, kl=kl, error=error)

    def grid(self, choice: Sequence[str]) -> PrecisionGrid:
        """The precisions of every head's keys and values, from a precision for each unit [U]."""
        return PrecisionGrid.of_units(self.layers, self.heads, dict(zip(self.units, choice, strict=True)))


def describe(unit: Unit) -> str:
    """A unit as messages name it."""
    if unit.part == LAYER:
        return f"layer {unit.layer}"
    return f"layer {unit.layer}, head {unit.head}, part {unit.part}"


def read_scores(
    path: Path, decoder: DecoderShape, tokens: int, unit: str = "head", precisions: Iterable[str] | None = None
) -> ScoreTable:
    """Scores of a decoder's units at some precisions, or at all that the table has for such units.

    A layer's score is what was measured of all its heads together, where the table has that; else the sum of the scores
    of its heads. ValueError names ``path`` and a unit and precision whose score is missing, repeated, NaN or negative,
    or a table of another shape of decoder.
    """
    every = read_table(path)
    table = every[every["part"].isin(UNITS[unit])]
    if unit == LAYER and table.empty:
        parts = read_scores(path, decoder, tokens, "head", precisions)
        return parts.by_layer()
    if table.empty:
        raise ValueError(f"{path}: no scores of the parts {', '.join(UNITS[unit])} (unit {unit})")
    shape = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    expected = decoder.layers, 1 if unit == LAYER else decoder.heads
    if shape != expected:
        raise ValueError(
            f"{path}: scores of {shape[0]} layers × {shape[1]} heads, but the model has {expected[0]} × {expected[1]}"
        )
    held = _held(path, table)
    asked = held if precisions is None else list(precisions)
    missing = [precision for precision in asked if precision not in held]
    if missing:
        raise ValueError(f"{path}: no {missing[0]} scores (unit {unit}); it holds {', '.join(held)}")
    repeated = table[table.duplicated(KEY)]
    if len(repeated):
        layer, head, part, precision = repeated.iloc[0][KEY]
        raise ValueError(f"{path}: two scores of {describe(Unit(layer, head, part))}, {precision}")
    found = dict(zip(table[KEY].itertuples(index=False, name=None), table[VALUES].to_numpy(), strict=True))
    places = units(decoder.layers, decoder.heads, unit)
    wanted = [(*place, precision) for precision in asked for place in places]
    absent = [key for key in wanted if key not in found]
    if absent:
        raise ValueError(f"{path}: no score of {describe(Unit(*absent[0][:3]))}, {absent[0][3]}")
    values = np.array([found[key] for key in wanted]).reshape(len(asked), len(places), len(VALUES))
    kl, error = values[..., 0], values[..., 1]
    source = read_source(path, table)
    try:
        return ScoreTable(decoder.layers, decoder.heads, unit, tuple(asked), kl, error, decoder.widths, tokens, source)
    except ValueError as wrong:
        raise ValueError(f"{path}: {wrong}") from None


def _held(path: Path, table: pd.DataFrame) -> list[str]:
    """The precisions of a table; ValueError names one that there is not."""
    try:
        return by_size(table["precision"][table["precision"] != "bf16"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_table(path: Path) -> pd.DataFrame:
    """The columns of a sensitivity table that allocation reads; ValueError names the file and what is wrong with it."""
    import pandas as pd

    ledger.note(path)
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a table ({error})") from error
    missing = [column for column in COLUMNS if column not in table]
    if missing:
        raise ValueError(f"{path}: column {missing[0]!r} is missing; found {', '.join(map(str, table.columns))}")
    if table.empty:
        raise ValueError(f"{path}: no scores, only a header")
    for column in ("layer", "head", *VALUES):
        numbers = pd.to_numeric(table[column], errors="coerce")
        wrong = numbers.isna() & table[column].notna()
        if wrong.any():
            raise ValueError(f"{path}: column {column!r} holds {table[column][wrong].iloc[0]!r}, expected a number")
        table[column] = numbers
    for column in ("layer", "head"):
        wrong = ~table[column].map(lambda value: math.isfinite(value) and value >= 0 and value == int(value))
        if wrong.any():
            raise ValueError(f"{path}: column {column!r} holds {table[column][wrong].iloc[0]}, expected 0, 1, ...")
    return table[COLUMNS].astype({"layer": int, "head": int})


def read_source(path: Path, table: pd.DataFrame) -> str:
    """Where the scores of a table come from; ValueError unless all come from one place."""
    sources = sorted(map(str, table["source"].unique()))
    if len(sources) != 1:
        raise ValueError(f"{path}: scores of the sources {', '.join(sources)}, expected one")
    return sources[0]


def read_setting(path: Path) -> dict[str, str]:
    """How the scores of a table were measured (execution, compute_dtype); ValueError if not all in one way."""
    settings = read_table(path)[SETTING].drop_duplicates().to_dict("records")
    if len(settings) != 1:
        raise ValueError(f"{path}: scores measured in {len(settings)} ways, expected one")
    return settings[0]
