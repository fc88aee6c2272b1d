"""Which precision each head's keys and values have, and the units that a policy chooses for.

A policy's unit is a whole head (part ``kv``), or a head's keys (``k``) or values (``v``) by themselves.
Axes: L layers, H KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstages.cache.precisions import BITS, bits_of, by_size, stored_bytes
from kvstages.cache.schemes import SIDES, Bytes, bits_per_element, precision

# What the name of a study's unit stands for: the parts of a head that have a precision of their own.
UNITS = {"head": ("kv",), "keys-values": ("k", "v")}
PARTS = ("kv", "k", "v")


class Unit(NamedTuple):
    """What a policy gives one precision: a head, or its keys or values alone."""

    layer: int
    head: int
    part: str


def units(layers: int, heads: int, unit: str) -> list[Unit]:
    """All units of a decoder, by layer, head and part; ``unit`` is head or keys-values."""
    return [Unit(layer, head, part) for layer in range(layers) for head in range(heads) for part in UNITS[unit]]


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
        return cls.of_heads([[precision] * heads] * layers)

    @classmethod
    def of_units(cls, layers: int, heads: int, precisions: Mapping[Unit, str]) -> PrecisionGrid:
        """From the precision of each unit, every head covered."""
        sides = []
        for side in ("k", "v"):
            chosen = {unit[:2]: name for unit, name in precisions.items() if side in unit.part}
            sides.append(tuple(tuple(chosen[layer, head] for head in range(heads)) for layer in range(layers)))
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
            if side not in part:
                return tuple(rows)
            return (*rows[:layer], (precision,) * len(rows[layer]), *rows[layer + 1 :])

        return PrecisionGrid(changed(self.keys, "k"), changed(self.values, "v"))


def policy_bytes(grid: PrecisionGrid, head_dim: int, tokens: int, value_width: int | None = None) -> Bytes:
    """Bytes of a policy's cache of one sequence of ``tokens``, by formula (docs/schemes.md, "Bytes"); ``value_width``
    where values are not as wide as keys."""
    sides = zip(SIDES, (grid.keys, grid.values), (head_dim, value_width or head_dim), strict=True)
    parts = [stored_bytes(name, side, width, tokens) for side, rows, width in sides for row in rows for name in row]
    return Bytes(*map(sum, zip(*parts, strict=True)))


def byte_record(grid: PrecisionGrid, head_dim: int, tokens: int) -> dict[str, int]:
    """The same as a policy's record has it: what is stored once counts with the scales; beside what BF16 takes."""
    size = policy_bytes(grid, head_dim, tokens)
    dense = PrecisionGrid.of_heads([["bf16"] * heads for heads in grid.shape])
    return {
        "payload": size.payload,
        "scale": size.scales + size.once,
        "total": sum(size),
        "bf16": policy_bytes(dense, head_dim, tokens).payload,
    }


def tensor_counts(grid: PrecisionGrid) -> dict[str, int]:
    """How many of the heads' keys and values have each precision: the published ones, and others that are there."""
    tensors = grid.flat()
    return {name: tensors.count(name) for name in by_size([*BITS, *tensors])}


def average_payload_bits(grid: PrecisionGrid) -> float:
    """Mean bits a stored element over all keys and values, scales aside."""
    bits = [bits_of(precision) for precision in grid.flat()]
    return sum(bits) / len(bits)


def policy_bits(grid: PrecisionGrid, head_dim: int, tokens: int, sides: str = "kv") -> float:
    """Bits a stored element takes, as the mean over the decoding steps 1 to ``tokens``, scales and exact tokens
    counted, what is stored once left out (``schemes.bits_per_element``). ``sides``: keys, values or both."""
    stored = [(side, name) for side in sides for row in (grid.keys if side == "k" else grid.values) for name in row]
    bits = {
        pair: 16.0 if pair[1] == "bf16" else bits_per_element(precision(pair[1]), pair[0], head_dim, tokens)[0]
        for pair in dict.fromkeys(stored)
    }
    return sum(bits[pair] for pair in stored) / len(stored)
