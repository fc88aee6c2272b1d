"""What is known of a model's keys or values before any is stored: static offsets, largest magnitudes, rotary embedding.

An offset is a vector for each KV head, of the keys *before* their rotary embedding; subtracted from stored keys it is
rotated to their position first. It is stored once a cache, in FP16.

Axes: B sequences, H KV heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvstages.cache.schemes import Method


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding: pairs of channels, turned by position times their frequency (Su et al. 2021).

    ``frequencies`` FP64 [P]: radians a position, of the first 2P channels; channels beyond stay. A pair is
    (i, i + P), or (2i, 2i + 1) if ``interleaved``. ``factor``: what the turned channels are multiplied with, too.
    """

    frequencies: Tensor
    interleaved: bool = False
    factor: float = 1.0

    def turn(self, x: Tensor, start: int, tokens: int, back: bool = False) -> Tensor:
        """x [..., T or 1, D] turned to (or ``back`` from) T positions from ``start`` on: FP64 [..., T, D]."""
        turns = _turns(self, start, tokens, x.device)
        width = 2 * turns.shape[-1]
        turned, rest = x[..., :width].double(), x[..., width:]
        # A pair as a complex number.
        pairs = turned.unflatten(-1, (-1, 2)) if self.interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        there = torch.view_as_complex(pairs.contiguous()) * (1 / turns if back else turns)
        there = torch.view_as_real(there)
        there = (there if self.interleaved else there.transpose(-1, -2)).flatten(-2)
        if not rest.shape[-1]:
            return there
        return torch.cat((there, rest.double().expand(*there.shape[:-1], -1)), -1)


@lru_cache(maxsize=8)
def _turns(rotary: Rotary, start: int, tokens: int, device: torch.device) -> Tensor:
    """What pairs are multiplied with at some positions, complex [T, P]; the same in every layer of a step."""
    angles = torch.outer(torch.arange(start, start + tokens, dtype=torch.float64), rotary.frequencies.cpu())
    return torch.polar(torch.full_like(angles, rotary.factor), angles).to(device)


@dataclass(frozen=True)
class Context:
    """What a method may need of one layer's keys, or of its values.

    ``mean``, ``bias``: offsets [H, D]. ``maximum``: largest magnitude of all heads in the calibration, FP32 [H], the
    same for each. ``rotary``: of keys, where the model has one. None: not known.
    """

    mean: Tensor | None = None
    bias: Tensor | None = None
    maximum: Tensor | None = None
    rotary: Rotary | None = None

    def stored(self, method: Method, device: torch.device | str, heads: Tensor | None = None) -> Stored:
        """What a cache keeps of it for a method and some heads (indices; None: all).

        ValueError names what the method needs and is not known.
        """
        for need in method.needs:
            if getattr(self, need) is None:
                raise ValueError(f"{_CALLED[need]} is not known; expected a context that has it")

        def kept(name: str, dtype: torch.dtype) -> Tensor | None:
            if name not in method.needs:
                return None
            known = getattr(self, name)
            return (known if heads is None else known[heads.to(known.device)]).to(device, dtype)

        offset = kept(method.offset, torch.float16)
        return Stored(offset, kept("maximum", torch.float32), None if offset is None else self.rotary)


NOTHING = Context()
# Of a model: by layer and side (k or v).
Contexts = Mapping[tuple[int, str], Context]
_CALLED = {"mean": "the mean", "bias": "the bias", "maximum": "the largest magnitude"}


@dataclass(frozen=True)
class Stored:
    """What a cache keeps once for some heads: ``offset`` FP16 [H, D], ``maximum`` FP32 [H]; and the rotary embedding,
    which is the model's."""

    offset: Tensor | None = None
    maximum: Tensor | None = None
    rotary: Rotary | None = None

    @property
    def nbytes(self) -> int:
        return sum(0 if x is None else x.nbytes for x in (self.offset, self.maximum))

    def at(self, start: int, tokens: int) -> Tensor:
        """The offset of tokens from ``start`` on, FP64 [H, T or 1, D]."""
        vector = self.offset.unsqueeze(-2)
        return vector.double() if self.rotary is None else self.rotary.turn(vector, start, tokens)


NONE = Stored()


def joined(parts: Sequence[Stored]) -> Stored:
    """What is stored of several heads, together; the offset of one that has none is zero, wherever it is turned."""
    with_offset = [part for part in parts if part.offset is not None]
    offset = maximum = rotary = None
    if with_offset:
        rotary = next((part.rotary for part in with_offset if part.rotary is not None), None)
        zero = torch.zeros_like(with_offset[0].offset)
        offset = torch.cat([zero if part.offset is None else part.offset for part in parts])
    if parts[0].maximum is not None:
        maximum = torch.cat([part.maximum for part in parts])
    return Stored(offset, maximum, rotary)


def mean_before_rotary(keys: Tensor, rotary: Rotary | None, skip: int = 4) -> Tensor:
    """Mean FP64 [H, D] of stored keys [B, H, T, D] turned back to before their rotary embedding.

    The first ``skip`` tokens of each sequence are left out: they are outliers of their own kind (attention sinks).
    """
    before = keys.double() if rotary is None else rotary.turn(keys, 0, keys.shape[2], back=True)
    return before[:, :, min(skip, keys.shape[2] - 1) :].mean(dim=(0, 2))
