"""What a sweep may do to a part of one unit, and what each tensor of a layer then reads back as.

An intervention gives a part of one head another precision. A control intervention quantizes nothing: it moves every
value to a neighbouring one, and so measures the floor. Axes: keys and values together [B, 2H, T, D], the heads' keys
first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstages.cache.coding import Codec
from kvstages.cache.offsets import NOTHING, Contexts, Stored, joined
from kvstages.cache.precisions import MAX_CODES
from kvstages.cache.quantizer import neighbour, reconstruct
from kvstages.cache.rounding import STORAGE
from kvstages.cache.schemes import PUBLISHED, SIDES, Method, check_width, precision

# Interventions that quantize nothing and measure the floor: each value moved to a neighbouring one, of the dtype that
# the model computes in, or of BF16. Stored dense, as "bf16" is.
CONTROLS = ("compute-step", "bf16-step")


DENSE = ("bf16", *CONTROLS)


def check_finite(both: Tensor, layer: int) -> None:
    """ValueError that names layer and head if keys and values [B, 2H, T, D] hold NaN or infinity."""
    # A sum is not finite if an element is not; only then (or if it overflows) is each element looked at.
    if math.isfinite(both.sum()):
        return
    heads = both.shape[1] // 2
    for _, row, *_ in (~torch.isfinite(both)).nonzero().tolist():
        kind = "keys" if row < heads else "values"
        raise ValueError(f"layer {layer}, head {row % heads}: NaN or infinity in the {kind}")


def check_precisions(row: Sequence[str], layer: int) -> None:
    """ValueError that names the layer and a precision that there is not."""
    for name in row:
        if name not in DENSE:
            try:
                precision(name)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from None


def method_of(name: str, side: int) -> Method:
    """What is done to keys (side 0) or values (1) of a precision or intervention; dense ones are stored at once."""
    return PUBLISHED if name in DENSE else precision(name).method(SIDES[side])


class Group(NamedTuple):
    """Tensors of a layer that are coded alike but for their offsets: the ``rows`` of [2H], how they are coded, and the
    bytes of what is stored of them once a cache."""

    rows: Tensor
    codec: Codec
    once_bytes: int


class ReadBack:
    """What the tensors of one layer read back as, by their precisions [2H]: quantized, dense, or moved by a control.

    The published precisions are quantized in one go; those of other schemes group by group (``groups``). ``widths``: of
    keys and of values. ``sides``: what the tensors are, keys and then values, or one of them. ValueError names the
    layer, and a precision that there is not, or whose scheme needs what ``contexts`` does not have.
    """

    def __init__(
        self,
        row: Sequence[str],
        layer: int,
        device: torch.device | str,
        widths: tuple[int, int],
        contexts: Contexts | None = None,
        sides: str = "kv",
    ):
        check_precisions(row, layer)
        self.groups = _groups(row, layer, device, dict(zip(SIDES, widths, strict=True)), contexts or {}, sides)
        self.rows = {
            name: torch.tensor([index for index, found in enumerate(row) if found == name], device=device)
            for name in dict.fromkeys((*MAX_CODES, *DENSE))
            if name in row
        }
        self.uniform = len(self.rows) == 1 and not self.groups
        quantized = [name for name in MAX_CODES if name in self.rows]
        self.quantized = quantized
        self.nulls = [name for name in CONTROLS if name in self.rows]
        nothing = torch.tensor([], dtype=torch.long, device=device)
        self.quantized_rows = torch.cat([nothing, *(self.rows[name] for name in quantized)])
        self.dense_rows = torch.cat([nothing, *(self.rows[name] for name in DENSE if name in self.rows)])
        # A step quantizes all tensors in one go, each to its own m; what comes out for the others is not used.
        self.levels = torch.tensor([float(MAX_CODES.get(name, 1)) for name in row], device=device).view(-1, 1, 1)
        self.is_dense = torch.tensor([name in DENSE for name in row], device=device).view(-1, 1, 1)

    def pick(self, x: Tensor, rows: Tensor) -> Tensor:
        """Some tensors of x [B, 2H, ...]; x itself where the layer has one precision."""
        return x if self.uniform else x.index_select(1, rows)

    def moved(self, both: Tensor) -> Tensor:
        """Keys and values with those of a control intervention moved to their neighbours."""
        for name in self.nulls:
            values = both.index_select(1, self.rows[name])
            both = both.index_copy(
                1, self.rows[name], neighbour(values, both.dtype if name == "compute-step" else STORAGE)
            )
        return both

    def reconstruct(self, both: Tensor) -> Tensor:
        """Keys and values [B, 2H, T, D] of whole sequences as later steps read them back."""
        stored = self.moved(both)
        rows = self.quantized_rows
        if self.quantized and self.uniform:
            stored = reconstruct(both, MAX_CODES[self.quantized[0]])
        elif self.quantized:
            quantized = reconstruct(both.index_select(1, rows), self.levels.index_select(0, rows))
            stored = stored.index_copy(1, rows, quantized)
        for group in self.groups:
            own, width = both.index_select(1, group.rows), group.codec.width
            # The narrower side is filled up (see ``sides``); what fills it is no part of a vector.
            back = group.codec.reconstruct(own[..., :width])
            stored = stored.index_copy(1, group.rows, pad(back, (0, own.shape[3] - width)))
        return stored


def read_back(
    both: Tensor, name: str, layer: int, widths: tuple[int, int] | None = None, contexts: Contexts | None = None
) -> Tensor:
    """Keys and values [B, 2H, T, D] of whole sequences of ``layer`` as a cache of one precision (or control
    intervention) gives them back, in their dtype. ``widths``: of keys and of values, where D is that of one alone."""
    widths = widths or (both.shape[3], both.shape[3])
    return ReadBack([name] * both.shape[1], layer, both.device, widths, contexts).reconstruct(both)


def _groups(
    row: Sequence[str],
    layer: int,
    device: torch.device | str,
    widths: Mapping[str, int],
    contexts: Contexts,
    sides: str,
) -> list[Group]:
    """The groups of a layer's tensors whose precision is of another scheme than the published one.

    Tensors that differ in nothing but their offset are coded together; the offset of one that has none is zero.
    """
    members: dict[tuple[Method, int, int], list[tuple[int, Stored]]] = {}
    heads = len(row) // len(sides)
    for index, name in enumerate(row):
        if name in MAX_CODES or name in DENSE:
            continue
        side = sides[index // heads]
        found = precision(name)
        method = found.method(side)
        try:
            check_width(found, side, widths[side])
            head = torch.tensor([index % heads])
            stored = contexts.get((layer, side), NOTHING).stored(method, device, head)
        except ValueError as error:
            kind = {"k": "keys", "v": "values"}[side]
            raise ValueError(f"layer {layer}, {kind} in {name}: {error}") from None
        kind = replace(method, offset=""), found.bits, widths[side]
        members.setdefault(kind, []).append((index, stored))
    groups = []
    for (method, bits, width), rows in members.items():
        for together in _alike(rows):
            indices, stored = zip(*together, strict=True)
            codec = Codec(method, bits, width, joined(stored), device)
            groups.append(Group(torch.tensor(indices, device=device), codec, sum(each.nbytes for each in stored)))
    return groups


def _alike(rows: list[tuple[int, Stored]]) -> list[list[tuple[int, Stored]]]:
    """Tensors apart whose offsets are turned to their positions and those whose offsets are not, where both come."""
    turned = [row for row in rows if row[1].rotary is not None]
    others = [row for row in rows if row[1].rotary is None]
    apart = turned and any(stored.offset is not None for _, stored in others)
    return [turned, others] if apart else [rows]
