"""Which quantizer scheme a model should be stored with, from a few blocks of text: for the choice of a new study.

One calibration pass and one set of gradients; every scheme is scored from these, and ``policies.screening`` recommends
the one whose exact allocation has the least proxy. Nothing is measured here: a study's own screening does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvstages.cache.precision_grid import UNITS
from kvstages.cache.schemes import INTEGER_BITS, SIDES, check_width, precision
from kvstages.measure.calibration import calibrate
from kvstages.measure.gradients import window_projections
from kvstages.models.decoder import Decoder
from kvstages.policies.screening import Choice, at_bits, precisions_of, recommend
from kvstages.scores.projections import Projections
from kvstages.scores.table import ScoreTable

# What is tried of any model; the last where the model has key biases.
SCHEMES = ("int4", "rotated4", "lloyd4-hadamard+mse", "centred4", "lloyd4-k.mean+hadamard+mse+e4m3+first1", "debiased4")
# Scores above this are often beyond second order where the first token is quantized.
TRUSTED = 1e-3


class Advice(NamedTuple):
    """The recommended policy and scheme, and why, a line each."""

    choice: Choice
    reasons: list[str]


def advise(
    model: Decoder,
    tokens: Tensor,
    budget: str = "4.25bits",
    probes: int = 8,
    memory: int = 1 << 31,
    progress: Callable[[float], None] = lambda done: None,
    cached: int | None = None,
) -> Advice:
    """The scheme for a model at a budget, from blocks of token ids [B, T].

    ``cached``: tokens of the cache whose bytes are counted; T where it is not given.

    Calibrates the model on these blocks. ValueError where no scheme fits the model's heads or the budget.
    """
    shape = model.shape
    model.calibrated = calibrate(model, tokens, memory)
    schemes = fitting(shape.widths, model.key_bias(0) is not None)
    names = precisions_of(schemes, INTEGER_BITS, ())
    values, error = window_projections(model, tokens, names, probes, memory, progress)
    found = Projections(values.numpy(), tuple(names), tokens.shape[1])
    errors = {change: each.numpy() for change, each in error.items()}

    def scores(unit: str, precisions: Sequence[str]) -> ScoreTable:
        index = [names.index(name) for name in precisions]
        # [R, L, H, parts], flat in the order of the units.
        kl = np.stack([found.kl(part).mean(axis=0)[..., index] for part in UNITS[unit]], axis=-2)
        wrong = np.stack(
            [np.stack([errors[part, name].mean(axis=-1) for name in precisions], axis=-1) for part in UNITS[unit]],
            axis=-2,
        )
        flat = (np.moveaxis(each, -1, 0).reshape(len(precisions), -1) for each in (kl, wrong))
        return ScoreTable(
            *(shape.layers, shape.heads, unit, tuple(precisions), *flat, shape.widths),
            *(cached or tokens.shape[1], "gradients"),
        )

    ladders = {scheme: at_bits(scheme, INTEGER_BITS) for scheme in schemes}
    choice = recommend(ladders, budget, scores)
    reasons = [
        f"{scheme}: {proxy:.3g} nats (proxy of its best policy of {budget})"
        for scheme, proxy in sorted(choice.proxies.items(), key=lambda item: item[1])
    ]
    worst = float(scores("keys-values", ["int4"]).kl.max())
    if worst > TRUSTED:
        reasons.append(
            f"warning: one unit alone costs {worst:.3g} nats in INT4, beyond what scores from gradients can tell: "
            "check them by measuring"
        )
    return Advice(choice, reasons)


def fitting(widths: Sequence[int], biased: bool) -> list[str]:
    """The schemes that are tried of a model whose keys and values have these widths; ``biased``: its keys have biases
    that are known."""
    return [scheme for scheme in SCHEMES if _fits(scheme, widths, biased)]


def _fits(scheme: str, widths: Sequence[int], biased: bool) -> bool:
    """Whether heads of these widths can be stored so, and the model has what the scheme needs."""
    found = precision(scheme)
    if found.keys.offset == "bias" and not biased:
        return False
    try:
        for side, width in zip(SIDES, widths, strict=True):
            check_width(found, side, width)
    except ValueError:
        return False
    return True
