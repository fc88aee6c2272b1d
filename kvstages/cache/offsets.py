"""What is known of a model's keys or values before any is stored: static offsets, largest magnitudes, rotary embedding.

An offset is a vector for each KV head, of the keys *before* their rotary embedding; subtracted from stored keys it is
rotated to their position first. It is stored once a cache, in FP16.

Axes: B sequences, H KV heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstages.cache.schemes import Method


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding: pairs of channels, turned by position times their frequency (Su et al. 2021).

    ``frequencies`` FP64 [P]: radians a position, of the first 2P channels; channels beyond stay. A pair is
    (i, i + P), or (2i, 2i + 1) if ``interleaved``. ``factor``: what the turned channels are multiplied with, too.
    """

    frequencies: Tensor
    interleaved: bool = False
    factor: float = 1.0

    def turn(self, x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """x [..., T or 1, D] turned to (or ``back`` from) positions [T]: FP64 [..., T, D]."""
        angles = positions.double().unsqueeze(-1) * self.frequencies.to(positions.device)
        cosine, sine = angles.cos() * self.factor, angles.sin() * self.factor
        if back:
            cosine, sine = cosine / self.factor**2, -sine / self.factor**2
        width = 2 * angles.shape[-1]
        turned, rest = x.double()[..., :width], x.double()[..., width:]
        pairs = turned.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else turned.chunk(2, dim=-1)
        first, second = pairs[0] * cosine - pairs[1] * sine, pairs[1] * cosine + pairs[0] * sine
        both = torch.stack((first, second), -1).flatten(-2) if self.interleaved else torch.cat((first, second), -1)
        return torch.cat((both, rest.expand(*both.shape[:-1], -1)), -1)


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

    def heads(self, rows: Tensor) -> Context:
        """That of some heads (indices)."""
        known = {name: getattr(self, name) for name in ("mean", "bias", "maximum")}
        return replace(self, **{name: None if x is None else x[rows.to(x.device)] for name, x in known.items()})

    def stored(self, method: Method, device: torch.device | str) -> Context:
        """What a cache keeps of it for a method, as it is kept: offsets in FP16, largest magnitudes in FP32.

        ValueError names what the method needs and is not known.
        """
        kept = {}
        for need, dtype, what in _NEEDS:
            if need in method.needs and getattr(self, need) is None:
                raise ValueError(f"{what} is not known; expected a context that has it")
            kept[need] = getattr(self, need).to(device, dtype) if need in method.needs else None
        return replace(self, **kept)

    @property
    def nbytes(self) -> int:
        """Bytes of what is known, the rotary embedding aside: that is the model's."""
        return sum(0 if x is None else x.nbytes for x in (self.mean, self.bias, self.maximum))


_NEEDS = (
    ("mean", torch.float16, "the mean"),
    ("bias", torch.float16, "the bias"),
    ("maximum", torch.float32, "the largest magnitude"),
)
NOTHING = Context()
# Of a model: by layer and side (k or v).
Contexts = Mapping[tuple[int, str], Context]


def offset(method: Method, context: Context, positions: Tensor) -> Tensor:
    """The offset of tokens at positions [T], FP64 [H, T or 1, D]."""
    vector = getattr(context, method.offset).unsqueeze(-2)
    return vector.double() if context.rotary is None else context.rotary.turn(vector, positions)


def mean_before_rotary(keys: Tensor, rotary: Rotary | None, skip: int = 4) -> Tensor:
    """Mean FP64 [H, D] of stored keys [B, H, T, D] turned back to before their rotary embedding.

    The first ``skip`` tokens of each sequence are left out: they are outliers of their own kind (attention sinks).
    """
    positions = torch.arange(keys.shape[2], device=keys.device)
    before = keys.double() if rotary is None else rotary.turn(keys, positions, back=True)
    return before[:, :, min(skip, keys.shape[2] - 1) :].mean(dim=(0, 2))
