"""Scales: how a vector's scale is chosen, and how it is stored.

Plain: as the levels fit it (the largest magnitude, or the root mean square). MSE: times the multiplier, of a few, under
which the vector comes back with the least squared error; that of 1 is among them, so it is never worse. The decoder
sees only what is stored: FP16, FP32, or E4M3 relative to a static FP32 scale of the whole tensor (NVFP4).

Axes: vectors [..., N], parameters [..., 1].
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvstages.cache.engines import LARGEST_STEP
from kvstages.cache.levels import FP8_LARGEST, Parameters, levels_of
from kvstages.cache.quantizer import LARGEST_SCALE
from kvstages.cache.schemes import Method

# The largest scale that is stored; an FP32 one times a code must be finite, too.
LARGEST = {"fp16": LARGEST_SCALE, "fp32": LARGEST_STEP, "e4m3": FP8_LARGEST}
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
# Multipliers of a scale: less than 1 clips. The root mean square of Lloyd-Max levels may also grow: a vector with
# outliers is no Gaussian.
CLIPPING = tuple(0.89**power for power in range(11))
AROUND = (1.0, 0.77, 0.84, 0.92, 1.1, 1.2, 1.35, 1.55, 1.8, 2.1)
# Elements that are tried with several multipliers at once: beyond it, one after the other.
TRIED_TOGETHER = 1 << 18


def choose(x: Tensor, method: Method, bits: int, static: Tensor | None) -> tuple[Parameters, Tensor]:
    """The parameters of vectors x [..., N] as stored, and the codes under them; ``static`` [..., 1] is what a scale in
    E4M3 is relative to."""
    levels = levels_of(method)
    plain = levels.fit(x, bits)
    if not method.search:
        chosen = store(plain, method, static)
        return chosen, levels.encode(x, widen(chosen, static), bits)
    multipliers = _multipliers(method.levels == "lloyd", x.device)
    wrong = []
    for portion in multipliers.split(max(1, TRIED_TOGETHER // max(1, x.numel()))):
        tried = store(_scaled(plain, portion.view(-1, *[1] * x.dim())), method, static)
        wide = widen(tried, static)
        codes = levels.encode(x.expand(len(portion), *x.shape), wide, bits)
        wrong.append((levels.decode(codes, wide, bits) - x).double().square().sum(dim=-1, keepdim=True))
    best = torch.cat(wrong).argmin(dim=0)
    chosen = store(_scaled(plain, multipliers[best]), method, static)
    if len(wrong) == 1:
        # All were tried at once, and the codes of the best are there already.
        return chosen, codes.gather(0, best.expand_as(x).unsqueeze(0)).squeeze(0)
    return chosen, levels.encode(x, widen(chosen, static), bits)


@cache
def _multipliers(around: bool, device: torch.device) -> Tensor:
    return torch.tensor(AROUND if around else CLIPPING, device=device)


def store(parameters: Parameters, method: Method, static: Tensor | None) -> Parameters:
    """Parameters FP32 as they are stored; what is too large saturates."""
    limit = LARGEST[method.stored]
    if static is not None:
        parameters = tuple(each / torch.where(static == 0, torch.inf, static) for each in parameters)
    return tuple(each.clamp(-limit, limit).to(DTYPES[method.stored]) for each in parameters)


def widen(parameters: Parameters, static: Tensor | None) -> Parameters:
    """Stored parameters in FP32."""
    wide = tuple(each.float() for each in parameters)
    return wide if static is None else tuple(each * static for each in wide)


def static_scale(method: Method, bits: int, maximum: Tensor) -> Tensor:
    """The static FP32 scale [...] of a tensor whose largest magnitude is ``maximum`` [...].

    Where the whole tensor has one scale, that; where its vectors' scales are stored in E4M3, what makes the largest
    of them E4M3's largest number.
    """
    (fitted,) = levels_of(method).fit(maximum.float().unsqueeze(-1), bits)
    return fitted.squeeze(-1) / (FP8_LARGEST if method.stored == "e4m3" else 1.0)


def _scaled(plain: Parameters, multiplier: Tensor) -> Parameters:
    """Parameters with the scale multiplied; a zero point moves so that the middle of its range stays."""
    scale, *zero = plain
    scaled = multiplier * scale
    return (scaled, *(each + (scale - scaled) / 2 for each in zero))
