"""Coding: what vectors become in storage, and what they come back as, for any method.

    encode: subtract the offset, rotate, take apart into what shares a scale, choose scales and codes
    decode: the same backwards
    pack, unpack: codes as a stream of bits
    reconstruct: both, for whole sequences, with what the method keeps exact

Offsets and rotations are FP64 (see ``rotation``), the quantizer FP32, as the published one is.

Axes: B sequences, H heads, T tokens, D head width; keys or values [B, H, T, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvstages.cache import scales
from kvstages.cache.levels import Parameters, levels_of
from kvstages.cache.offsets import NONE, NOTHING, Context, Stored
from kvstages.cache.quantizer import pack, unpack
from kvstages.cache.rotation import rotate, rotation_matrix
from kvstages.cache.schemes import Method


class Encoded(NamedTuple):
    """T tokens coded: ``codes`` int8 [B, H, T, D], or packed as they are stored, uint8 [B, H, T, ⌈D · bits / 8⌉];
    ``parameters`` (scales; with a zero point also those) [B, H, T or T / g, G], G of them a token, or a group of g
    tokens; none where the scale is static."""

    codes: Tensor
    parameters: Parameters


class Codec:
    """A method with its bits, and what is stored once for the heads that it is for.

    The method's own offset is of no account: ``context`` has that of each head.
    """

    def __init__(
        self, method: Method, bits: int, width: int, context: Stored = NONE, device: torch.device | str = "cpu"
    ):
        self.method, self.bits, self.width, self.context = method, bits, width, context
        self.levels = levels_of(method)
        self.matrix = rotation_matrix(method, width, torch.device(device))
        self.static = None
        self._turned: tuple[tuple[int, int], Tensor | None] = (-1, -1), None
        if self.context.maximum is not None:
            self.static = scales.static_scale(method, bits, self.context.maximum).view(-1, 1, 1, 1)

    def encode(self, x: Tensor, start: int = 0) -> Encoded:
        """Keys or values of the tokens from ``start`` on; T is a multiple of the tokens that share a scale."""
        shift = self._offset(start, x.shape[2])
        y = x if shift is None else x.double() - shift
        blocks = self._apart(self.turn(y).float())
        if self.method.share == "tensor":
            chosen, codes = (), self.levels.encode(blocks, (self.static,), self.bits)
        else:
            chosen, codes = scales.choose(blocks, self.method, self.bits, self.static)
        return Encoded(self._together(codes), tuple(each.squeeze(-1) for each in chosen))

    def decode(self, coded: Encoded, dtype: torch.dtype, start: int = 0, turned: bool = False) -> Tensor:
        """Keys or values of the tokens from ``start`` on; ``turned``: still rotated, as they were coded."""
        wide = self._wide(tuple(each.unsqueeze(-1) for each in coded.parameters))
        y = self._together(self.levels.decode(self._apart(coded.codes), wide, self.bits))
        shift = self._offset(start, y.shape[2])
        if turned:
            shift = None if shift is None else self.turn(shift)
        elif self.matrix is not None:
            y = rotate(y, self.matrix.T)
        return (y if shift is None else y + shift).to(dtype)

    def pack(self, coded: Encoded) -> Encoded:
        """Tokens as they are stored."""
        return coded._replace(codes=pack(coded.codes, self.bits))

    def unpack(self, stored: Encoded) -> Encoded:
        """The inverse of ``pack``."""
        return stored._replace(codes=unpack(stored.codes, self.bits, self.width))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Keys or values of whole sequences as later steps read them back, in x's dtype.

        What a cache of T tokens keeps exact comes back as it is: the first tokens, and those of a group that is not
        full. From when on a token is read so is ``Method.stored_at``; before, it is exact.
        """
        first = min(self.method.first, x.shape[2])
        count = (x.shape[2] - first) // self.method.tokens * self.method.tokens
        if not count:
            return x
        back = self.decode(self.encode(x[:, :, first : first + count], first), x.dtype, first)
        return back if count == x.shape[2] else torch.cat((x[:, :, :first], back, x[:, :, first + count :]), dim=2)

    def turn(self, x: Tensor) -> Tensor:
        """x [..., D] rotated as what is stored is; as it is where the method rotates nothing."""
        return x if self.matrix is None else rotate(x, self.matrix)

    def turn_back(self, x: Tensor) -> Tensor:
        """The inverse of ``turn``."""
        return x if self.matrix is None else rotate(x, self.matrix.T)

    def _offset(self, start: int, tokens: int) -> Tensor | None:
        """The offset of some tokens, FP64 [H, T or 1, D]; None where there is none."""
        if self.context.offset is None:
            return None
        # A step asks twice, to store a token and to read it back.
        if self._turned[0] != (start, tokens):
            self._turned = (start, tokens), self.context.at(start, tokens)
        return self._turned[1]

    def _apart(self, x: Tensor) -> Tensor:
        """[B, H, T, D] as vectors that share a scale [B, H, T or T / g, G, N]."""
        if self.method.tokens > 1:
            return x.unflatten(2, (-1, self.method.tokens)).transpose(-1, -2)
        return x.unflatten(3, (-1, self.method.group or self.width))

    def _together(self, x: Tensor) -> Tensor:
        """The inverse of ``_apart``."""
        return x.transpose(-1, -2).flatten(2, 3) if self.method.tokens > 1 else x.flatten(3)

    def _wide(self, stored: Parameters) -> Parameters:
        """Stored parameters in FP32; the static scale where there are none."""
        return scales.widen(stored, self.static) if stored else (self.static,)


def codec_of(
    method: Method, bits: int, width: int, context: Context = NOTHING, device: torch.device | str = "cpu"
) -> Codec:
    """The codec of heads that ``context`` describes; ValueError names what the method needs and is not known."""
    return Codec(method, bits, width, context.stored(method, device), device)


def reconstruct(x: Tensor, method: Method, bits: int, context: Context = NOTHING) -> Tensor:
    """Keys or values x [B, H, T, D] of whole sequences as later steps read them back, in x's dtype.

    ``context`` describes the H heads. See ``Codec.reconstruct``.
    """
    return codec_of(method, bits, x.shape[3], context, x.device).reconstruct(x)
