"""Levels: which values a code can stand for, given a vector's scale (and zero point).

Each kind of levels says how a scale is fitted to a vector, what its codes are, and what they stand for. Vectors are
the last axis: x [..., N], parameters [..., 1] (a scale; with a zero point also that), codes int8 [..., N] of which the
lower ``bits`` count, so that two's complement and unsigned codes are packed alike. Arithmetic is FP32, sums are FP64.
"""

from __future__ import annotations

import math
from functools import cache, cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache import engines
from kvstages.cache.quantizer import dequantize, largest_magnitude, quantize
from kvstages.cache.schemes import Method

Parameters = tuple[Tensor, ...]

# E2M1 magnitudes by code (OCP Microscaling Formats 1.0, 5.3.3).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_LARGEST = 448.0
# From so many numbers on, looking up where they lie among limits is several times faster than searching.
MANY = 1 << 13


class Levels(Protocol):
    """One kind of levels."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        """The plain scale (and zero point) of x [..., N]: FP32 [..., 1]."""

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        """Codes int8 [..., N] of x under parameters as they are stored, widened to FP32."""

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        """Values FP32 [..., N] of codes."""


def levels_of(method: Method) -> Levels:
    """The levels that a method names."""
    return _ASYMMETRIC if method.zero and method.levels == "int" else _LEVELS[method.levels]


class MidTread:
    """−m, ..., 0, ..., m with m = 2^(b − 1) − 1, times scale / m: the published quantizer, operation for operation."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        return (_largest(x),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        return quantize(x, parameters[0].squeeze(-1), 2 ** (bits - 1) - 1)

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        return dequantize(codes, parameters[0].squeeze(-1), 2 ** (bits - 1) - 1, torch.float32)


class Asymmetric:
    """0, ..., n with n = 2^b − 1, times range / n, plus the zero point: from the least to the largest value (KIVI)."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        low, high = x.float().aminmax(dim=-1, keepdim=True)
        return (high - low).clamp_(max=engines.LARGEST_STEP), low

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        width, low = parameters
        steps = ((x.float() - low) * (2**bits - 1)).div_(_divisor(width)).round_()
        return _unsigned(steps.clamp_(0, 2**bits - 1))

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        width, low = parameters
        return (_index(codes, bits).float() * width).div_(2**bits - 1) + low


class MidRise:
    """±½, ±3/2, ..., ±(n − ½) with n = 2^(b − 1), times scale / n: a level more than mid-tread, and no zero."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        return (_largest(x),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        half = 2 ** (bits - 1)
        steps = (x.float() * half).div_(_divisor(parameters[0])).floor_()
        return steps.clamp_(-half, half - 1).to(torch.int8)

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        return ((codes.float() + 0.5) * parameters[0]).div_(2 ** (bits - 1))


class LloydMax:
    """The 2^b levels of least squared error for the unit Gaussian, times the root mean square (Max 1960)."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        return (x.double().square().mean(dim=-1, keepdim=True).sqrt().float(),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        _, limits = _gaussian_levels(bits, x.device)
        return _unsigned(limits.below(x.float() / _divisor(parameters[0])))

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        values, _ = _gaussian_levels(bits, codes.device)
        return _look_up(values, codes).mul_(parameters[0])


class FloatingPoint:
    """E4M3 (8 bits) or E2M1 (4 bits) numbers, times the scale; rounded to nearest, ties to even, saturating."""

    def fit(self, x: Tensor, bits: int) -> Parameters:
        return (_largest(x) / (FP8_LARGEST if bits == 8 else FP4[-1]),)

    def encode(self, x: Tensor, parameters: Parameters, bits: int) -> Tensor:
        scaled = x.float() / _divisor(parameters[0])
        if bits == 8:
            return scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).view(torch.int8)
        _, limits = _fp4_levels(x.device)
        return _unsigned(limits.below(scaled.abs()) + 8 * (scaled < 0))

    def decode(self, codes: Tensor, parameters: Parameters, bits: int) -> Tensor:
        if bits == 8:
            return codes.view(torch.float8_e4m3fn).float() * parameters[0]
        values, _ = _fp4_levels(codes.device)
        return _look_up(values, codes).mul_(parameters[0])


@cache
def gaussian_levels(bits: int) -> np.ndarray:
    """Lloyd-Max levels of the unit Gaussian, FP64 [2^bits], ascending.

    Each level is the mean of what lies nearest to it. Newton's method on that condition for the positive half, from
    the levels of the companding approximation (Panter and Dite 1951); it converges in a few steps to FP64.
    """
    half = 2 ** (bits - 1)
    # A density's best levels are as dense as its cube root: that of the Gaussian is one of deviation √3.
    levels = math.sqrt(3) * np.array([_quantile(0.5 + (index + 0.5) / (2 * half)) for index in range(half)])
    for _ in range(100):
        edges = np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]))
        density = np.exp(-0.5 * edges**2) / math.sqrt(2 * math.pi)
        mass = np.array([_tail(low) - _tail(high) for low, high in pairwise(edges)])
        mean = (density[:-1] - density[1:]) / mass
        # How a cell's mean moves with its lower and upper edge; an edge moves by half of what each neighbour does.
        last = np.where(np.isfinite(edges), edges, 0.0)[1:]
        lower, upper = density[:-1] * (mean - edges[:-1]) / mass, density[1:] * (last - mean) / mass
        lower[0] = upper[-1] = 0
        slope = np.diag(1 - lower / 2 - upper / 2) - np.diag(lower[1:] / 2, -1) - np.diag(upper[:-1] / 2, 1)
        step = np.linalg.solve(slope, levels - mean)
        levels = levels - step
        if np.abs(step).max() < 1e-13:
            break
    return np.concatenate((-levels[::-1], levels))


def _tail(x: float) -> float:
    """The share of a unit Gaussian above x."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def _quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


class Limits:
    """Ascending limits FP32 [n] between ranges of numbers, and in which range a number lies."""

    def __init__(self, limits: Tensor):
        self.limits = limits

    @cached_property
    def cells(self) -> tuple[Tensor, Tensor]:
        """Of each cell, the FP32 numbers whose upper 16 bits are the same: how many limits lie below all of it, uint8
        [65536], and the next limit, FP32. One limit at most lies within: a cell is less than a hundredth wide."""
        bits = torch.arange(1 << 16, dtype=torch.int32, device=self.limits.device) << 16
        first, last = bits.view(torch.float32), (bits | 0xFFFF).view(torch.float32)
        # Of negative numbers the last is the least; after an infinity come no numbers.
        below = torch.bucketize(torch.where(last < first, last, first), self.limits)
        return below.to(torch.uint8), F.pad(self.limits, (0, 1), value=math.inf)[below]

    def below(self, x: Tensor) -> Tensor:
        """How many limits lie below each x FP32 [...]; both ways give the same."""
        x = x.contiguous()
        if x.numel() < MANY:
            return torch.bucketize(x, self.limits)
        below, following = self.cells
        cells = (x.view(torch.int32) >> 16).bitwise_and_(0xFFFF).flatten()
        found = below.index_select(0, cells)
        return found.add_(x.flatten() > following.index_select(0, cells)).view(x.shape)


@cache
def _gaussian_levels(bits: int, device: torch.device) -> tuple[Tensor, Limits]:
    """The levels that the lower bits of a byte stand for, FP32 [256], and what lies between levels."""
    levels = torch.from_numpy(gaussian_levels(bits))
    return _of_bytes(levels.float(), device), Limits(((levels[1:] + levels[:-1]) / 2).float().to(device))


@cache
def _fp4_levels(device: torch.device) -> tuple[Tensor, Limits]:
    """E2M1 values that the lower bits of a byte stand for, FP32 [256], and the ends of the magnitudes' ranges."""
    values = torch.tensor(FP4)
    between = (values[1:] + values[:-1]) / 2
    # A range ends with its upper limit; a tie that goes up to an even code must lie beyond it.
    between[1::2] = torch.nextafter(between[1::2], torch.tensor(0.0))
    return _of_bytes(torch.cat((values, -values)), device), Limits(between.to(device))


def _of_bytes(values: Tensor, device: torch.device) -> Tensor:
    """Values [2^b] by all bits of a byte [256], of which the upper ones, which may extend a sign, do not count."""
    return values.repeat(256 // len(values)).to(device)


def _look_up(values: Tensor, codes: Tensor) -> Tensor:
    """Values [...] of codes int8 [...], out of those of all bytes [256]."""
    return values.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def _largest(x: Tensor) -> Tensor:
    return largest_magnitude(x).unsqueeze(-1).float()


def _divisor(scale: Tensor) -> Tensor:
    """A scale to divide by: under a scale of zero every code is that of zero."""
    return scale.masked_fill(scale == 0, torch.inf)


def _unsigned(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.int8)


def _index(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes as int64, from int8 whose upper bits extend a sign."""
    return codes.long() & (2**bits - 1)


_ASYMMETRIC = Asymmetric()
_LEVELS: dict[str, Levels] = {
    "int": MidTread(),
    "rise": MidRise(),
    "lloyd": LloydMax(),
    "fp": FloatingPoint(),
    "q_0": engines.Q0(),
    "q_1": engines.Q1(),
    "per_token_head": engines.PerTokenHead(),
}
