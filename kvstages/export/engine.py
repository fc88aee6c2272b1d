"""What an engine is: its formats, what it can express with them, and how it is told; and the export of a policy to it.

Axes: L layers, H KV heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import bits_of, stored_bytes
from kvstages.cache.schemes import SIDES, check_width, precision
from kvstages.export.choices import Alternative, allocate, each_layer, project


class Format(NamedTuple):
    """A way in which an engine stores keys or values.

    ``precision``: what it is here, the engine's own quantizer; ``word``: what it is there. ``stand_in``: whether it
    stands for precisions of other quantizers that have as many bits or fewer.
    """

    precision: str
    word: str
    stand_in: bool = True


# Width of a head's keys and of its values.
Widths = tuple[int, int]
# Format of each layer's keys and of its values [L][2].
Layers = Sequence[tuple[Format, Format]]


class Engine(ABC):
    """An engine. A new one is a file that holds a subclass, and a line in ``engines``.

    ``name``: as the command takes it; ``file``: what the engine's own file is called; ``note``: one line on what was
    measured and what the engine does otherwise.
    """

    name: str
    file: str
    note: str

    @abstractmethod
    def formats(self, widths: Widths) -> list[Format]:
        """Every format of the engine for heads of some widths, those that do not fit them among them."""

    @abstractmethod
    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        """What the engine can express with some of its formats (``choices``), by index."""

    @abstractmethod
    def text(self, layers: Layers) -> str:
        """What the engine's own file holds; ``layers`` is one of the engine's alternatives."""

    def warnings(self, layers: Layers) -> list[str]:
        """What a user must know before relying on it, a line each; such as support that is not merged."""
        return []

    def fitting(self, widths: Widths) -> list[Format]:
        """The formats that heads of these widths can have; ValueError where none of them quantizes."""
        found, refused = [], ""
        for form in self.formats(widths):
            try:
                if form.precision != "bf16":
                    for side, width in zip(SIDES, widths, strict=True):
                        check_width(precision(form.precision), side, width)
                found.append(form)
            except ValueError as error:
                refused = str(error)
        if not any(form.precision != "bf16" for form in found):
            raise ValueError(f"{self.name}: {refused}")
        return found


@dataclass(frozen=True)
class Cache:
    """The cache that bytes are counted of: L layers of H heads of some widths, ``tokens`` long."""

    layers: int
    heads: int
    widths: Widths
    tokens: int

    @classmethod
    def of_policy(cls, policy: Mapping[str, Any]) -> Cache:
        """From a policy's record, which says of which model it is; ValueError where it does not fit that."""
        missing = [key for key in ("tokens", "bytes", "model") if key not in policy]
        if missing:
            raise ValueError(f"key {missing[0]!r} is missing, expected a policy of the stage allocate")
        grid, model, tokens = PrecisionGrid.of_record(policy["precisions"]), policy["model"], policy["tokens"]
        layers, heads, widths = model["layers"], model["heads"], (model["key_width"], model["value_width"])
        dense = 2 * layers * heads * sum(widths) * tokens
        if policy["bytes"]["bf16"] != dense or grid.shape != [heads] * layers:
            raise ValueError(
                f"bytes.bf16 is {policy['bytes']['bf16']}, expected {dense}: {tokens} tokens in {layers} layers of "
                f"{heads} heads, as its model has them"
            )
        return cls(layers, heads, widths, tokens)

    def bytes_of(self, name: str, side: str) -> int:
        """Bytes of a layer's keys (k) or values (v) as an engine lays them out: payload and scales of all its heads.

        A static scale is not among them: engines keep it with the weights.
        """
        size = stored_bytes(name, side, self.widths[SIDES.index(side)], self.tokens)
        return self.heads * (size.payload + size.scales)

    def sizes(self, formats: Sequence[Format]) -> np.ndarray:
        """Bytes of each place in each format [2L, F]."""
        sides = [[self.bytes_of(form.precision, side) for form in formats] for side in SIDES]
        return np.array(sides * self.layers, dtype=np.int64)

    def grid(self, layers: Layers) -> PrecisionGrid:
        """The precisions that a setting of an engine amounts to."""
        sides = [tuple((pair[side].precision,) * self.heads for pair in layers) for side in (0, 1)]
        return PrecisionGrid(*sides)


def projected(engine: Engine, grid: PrecisionGrid, cache: Cache) -> tuple[Layers, dict[str, str]]:
    """What an engine has for a policy, and which format of it stands for each of the policy's precisions.

    A precision becomes the engine's own format of that name; else the stand-in of the fewest bits that are as many as
    its own or more, then of the fewest bytes. The keys of a layer take the highest of its heads', and so do the
    values; of what the engine can express with these formats, the setting of fewest bytes that gives nothing less.
    ValueError names what the engine lacks.
    """
    available = engine.fitting(cache.widths)
    stands_for = {name: _stand_in(engine, name, available, cache) for name in dict.fromkeys(grid.flat())}
    formats = [form for form in available if form in stands_for.values() or form.precision == "bf16"]
    keys = [_rank(form, cache) for form in formats]
    place = {name: formats.index(form) for name, form in stands_for.items()}
    needed = np.array([
        max((place[name] for name in row), key=keys.__getitem__)
        for pair in zip(grid.keys, grid.values, strict=True)
        for row in pair
    ])  # fmt: skip
    enough = np.array([[a >= b for b in keys] for a in keys])
    try:
        chosen = project(engine.alternatives(cache.layers, formats), needed, enough, cache.sizes(formats))
    except ValueError as error:
        raise ValueError(f"{engine.name}: {error}") from None
    return _layers(chosen, formats), {name: form.word for name, form in stands_for.items()}


def allocated(
    engine: Engine, costs: Mapping[str, np.ndarray], cache: Cache, limit: int, every_layer: bool = False
) -> Layers:
    """What an engine can express of least proxy, in so many of its own bytes or fewer.

    ``costs``: of each precision, the scores of the layers' keys and values summed over heads (nats) [2L]; formats
    without scores are not used. BF16 costs nothing. ``every_layer``: instead of what the engine can express, any of its
    formats for each layer, keys and values alike: a policy whose unit is the layer.
    """
    known = {"bf16": np.zeros(2 * cache.layers), **costs}
    formats = [form for form in engine.fitting(cache.widths) if form.precision in known]
    cost = np.stack([known[form.precision] for form in formats], axis=1)
    same = [(index, index) for index in range(len(formats))]
    own = [each_layer(cache.layers, same)] if every_layer else engine.alternatives(cache.layers, formats)
    try:
        chosen = allocate(own, cost, cache.sizes(formats), limit)
    except ValueError as error:
        raise ValueError(f"{engine.name}: {error}") from None
    return _layers(chosen, formats)


def engine_bytes(layers: Layers, cache: Cache) -> int:
    """Bytes of a cache in the engine's own layout."""
    return sum(cache.bytes_of(form.precision, side) for pair in layers for form, side in zip(pair, SIDES, strict=True))


def _layers(chosen: np.ndarray, formats: Sequence[Format]) -> Layers:
    return [(formats[keys], formats[values]) for keys, values in chosen.reshape(-1, 2)]


def _rank(form: Format, cache: Cache) -> tuple[int, int]:
    """How much a format keeps: bits, then bytes."""
    return bits_of(form.precision), cache.bytes_of(form.precision, "k")


def _stand_in(engine: Engine, name: str, available: Sequence[Format], cache: Cache) -> Format:
    for form in available:
        if form.precision == name:
            return form
    fitting = [form for form in available if form.stand_in and bits_of(form.precision) >= bits_of(name)]
    if not fitting:
        raise ValueError(f"{engine.name}: has nothing of {bits_of(name)} bits or more for {name}")
    return min(fitting, key=lambda form: _rank(form, cache))
