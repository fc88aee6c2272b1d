"""Which precision each head's keys and values have, and the units that a policy chooses for.

A policy's unit is a whole head (part ``kv``), a head's keys (``k``) or values (``v``) by themselves, or a whole layer
(part ``layer``): the keys and values of all its heads.
Axes: L layers, H KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstages.cache.precisions import BITS, bits_of, by_size, stored_bytes
from kvstages.cache.schemes import SIDES, Bytes, bits_per_element, precision

# Parts of a head, and what stands in their place where a layer is one unit.
PARTS = ("kv", "k", "v")
LAYER = "layer"
# What the name of a study's unit stands for: the parts that have a precision of their own.
UNITS = {"head": ("kv",), "keys-values": ("k", "v"), "layer": (LAYER,)}


class Unit(NamedTuple):
    """What a policy gives one precision: a head, its keys or values alone, or a layer, whose head is 0."""

    layer: int
    head: int
    part: str

    def heads(self, heads: int) -> Sequence[int]:
        """Which of a layer's heads it has."""
        return range(heads) if self.part == LAYER else [self.head]


def sides_of(part: str) -> str:
    """What a part has: keys (k), values (v) or both (kv)."""
    return "kv" if part == LAYER else part


def units(layers: int, heads: int, unit: str) -> list[Unit]:
    """All units of a decoder, by layer, head and part; ``unit`` is head, keys-values or layer."""
    each = range(1 if unit == LAYER else heads)
    return [Unit(layer, head, part) for layer in range(layers) for head in each for part in UNITS[unit]]


@dataclass(frozen=True)
class PrecisionGrid:
    """Precision names of every head's keys [L][H] and values [L][H]."""

    keys: tuple[tuple[str, ...], ...]
    values: tuple[tuple[str, ...], ...]

    @classmethod
    def of_heads(cls, rows: Iterable[Iterable[str]]) -> PrecisionGrid:
        """Keys and values alike, from precisions [L][H]."""
        both = tuple(tuple(row) for row in rows)
        return cls(both, both)

    @classmethod
    def uniform(cls, layers: int, heads: int, precision: str) -> PrecisionGrid:
        """Every head's keys and values at one precision."""
        return cls.of_heads([[precision] * heads] * layers)

    @classmethod
    def of_units(cls, layers: int, heads: int, precisions: Mapping[Unit, str]) -> PrecisionGrid:
        """From the precision of each unit, every head covered."""
        sides = []
        for side in SIDES:
            rows: list[list[str]] = [[""] * heads for _ in range(layers)]
            for unit, name in precisions.items():
                for head in unit.heads(heads) if side in sides_of(unit.part) else ():
                    rows[unit.layer][head] = name
            sides.append(tuple(map(tuple, rows)))
        return cls(*sides)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PrecisionGrid:
        """From {"keys": [L][H], "values": [L][H]}, as a policy's file has it; ValueError on any other shape."""
        if not isinstance(record, Mapping) or set(record) != {"keys", "values"}:
            found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
            raise ValueError(f"precisions: {found}, expected the keys keys and values")
        for side, rows in record.items():
            if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
                raise ValueError(f"precisions.{side}: expected a list of layers, each a list of heads")
        keys, values = (tuple(tuple(row) for row in record[side]) for side in ("keys", "values"))
        if [len(row) for row in keys] != [len(row) for row in values]:
            raise ValueError("precisions: keys and values have different shapes")
        return cls(keys, values)

    def as_record(self) -> dict[str, list[list[str]]]:
        """The opposite of ``of_record``."""
        return {"keys": [list(row) for row in self.keys], "values": [list(row) for row in self.values]}

    @property
    def shape(self) -> list[int]:
        """Heads of each layer."""
        return [len(row) for row in self.keys]

    def row(self, layer: int) -> tuple[str, ...]:
        """Precisions of a layer's tensors [2H]: the heads' keys, then the heads' values."""
        return self.keys[layer] + self.values[layer]

    def flat(self) -> list[str]:
        """Precisions of all tensors, 2 · L · H of them."""
        return [name for layer in range(len(self.keys)) for name in self.row(layer)]

    def with_layer(self, layer: int, part: str, precision: str) -> PrecisionGrid:
        """This grid, with one part of all heads of a layer at another precision."""

        def changed(rows: Sequence[tuple[str, ...]], side: str) -> tuple[tuple[str, ...], ...]:
            if side not in sides_of(part):
                return tuple(rows)
            return (*rows[:layer], (precision,) * len(rows[layer]), *rows[layer + 1 :])

        return PrecisionGrid(changed(self.keys, "k"), changed(self.values, "v"))


def policy_bytes(grid: PrecisionGrid, widths: Sequence[int], tokens: int) -> Bytes:
    """Bytes of a policy's cache of one sequence of ``tokens``, by formula (docs/schemes.md, "Bytes"); ``widths``: of a
    head's keys and of its values."""
    sides = zip(SIDES, (grid.keys, grid.values), widths, strict=True)
    parts = [stored_bytes(name, side, width, tokens) for side, rows, width in sides for row in rows for name in row]
    return Bytes(*map(sum, zip(*parts, strict=True)))


def byte_record(grid: PrecisionGrid, widths: Sequence[int], tokens: int) -> dict[str, int]:
    """The same as a policy's record has it: what is stored once counts with the scales; beside what BF16 takes."""
    size = policy_bytes(grid, widths, tokens)
    dense = PrecisionGrid.of_heads([["bf16"] * heads for heads in grid.shape])
    return {
        "payload": size.payload,
        "scale": size.scales + size.once,
        "total": sum(size),
        "bf16": policy_bytes(dense, widths, tokens).payload,
    }


def tensor_counts(grid: PrecisionGrid) -> dict[str, int]:
    """How many of the heads' keys and values have each precision: the published ones, and others that are there."""
    tensors = grid.flat()
    return {name: tensors.count(name) for name in by_size([*BITS, *tensors])}


def average_payload_bits(grid: PrecisionGrid, widths: Sequence[int]) -> float:
    """Mean bits a stored element over all keys and values, of these widths, scales aside."""
    stored = _stored(grid, widths, "kv")
    return sum(width * bits_of(name) for _, width, name in stored) / sum(width for _, width, _ in stored)


def policy_bits(grid: PrecisionGrid, widths: Sequence[int], tokens: int, sides: str = "kv") -> float:
    """Bits a stored element takes, as the mean over the decoding steps 1 to ``tokens``, scales and exact tokens
    counted, what is stored once left out (``schemes.bits_per_element``). ``widths``: of a head's keys and of its
    values; ``sides``: keys, values or both."""
    stored = _stored(grid, widths, sides)
    bits = {
        (side, width, name): 16.0 if name == "bf16" else bits_per_element(precision(name), side, width, tokens)[0]
        for side, width, name in dict.fromkeys(stored)
    }
    return sum(each[1] * bits[each] for each in stored) / sum(width for _, width, _ in stored)


def _stored(grid: PrecisionGrid, widths: Sequence[int], sides: str) -> list[tuple[str, int, str]]:
    """Side, width and precision of the keys and values of every head."""
    both = zip(SIDES, widths, (grid.keys, grid.values), strict=True)
    return [(side, width, name) for side, width, rows in both if side in sides for row in rows for name in row]
