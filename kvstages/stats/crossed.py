"""The interval of a mean over seeds and documents, both taken as samples: other seeds, and other texts of this kind.

Values x[s, d], one for each seed and document, are m + a_s + b_d + c_sd. Their mean has the variance
σ_a²/S + σ_b²/D + σ_c²/(S·D). The variance of the seeds' means over S estimates the first and third part, that of the
documents' means over D the second and third; their sum counts the third part twice, so it is not too small. Its degrees
of freedom follow Satterthwaite. (Clark, The language-as-fixed-effect fallacy, J. Verb. Learn. Verb. Behav. 12, 1973;
Satterthwaite, Biometrics Bulletin 2, 1946.) A bootstrap of three or five seeds would be too narrow. Axes: S seeds,
B blocks, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvstages.stats.bootstrap import LEVEL, Estimate, document_members

# Steps of the angle by which the quantile of Student's t is found; its error is below 1e-5.
STEPS = 100_000


def crossed_mean(values: np.ndarray, documents: Sequence[str] | None = None) -> Estimate:
    """Mean of values [S, B] and its 95 % interval over seeds and ``documents`` (the label of each block [B]; None takes
    each block for one).

    A document counts by its blocks, so the mean is that of all blocks. With one seed (where nothing is drawn) only
    documents vary, with one document only seeds. ValueError where there is nothing that varies, or labels do not fit.
    """
    values = np.asarray(values, dtype=float)
    blocks = values.shape[1]
    labels = [str(block) for block in range(blocks)] if documents is None else documents
    if len(labels) != blocks:
        raise ValueError(f"labels of {len(labels)} blocks, expected those of {blocks}")
    members = document_members(labels)
    # Scaled so that the mean over documents is the mean over blocks.
    rows = values @ members.T * (len(members) / blocks)
    parts = [
        (float(means.var(ddof=1)) / len(means), len(means) - 1)
        for means in (rows.mean(axis=1), rows.mean(axis=0))
        if len(means) > 1
    ]
    if not parts:
        raise ValueError("one seed and one document, expected several of one of them")
    mean, variance = float(values.mean()), sum(part for part, _ in parts)
    if variance == 0:
        return Estimate(mean, mean, mean)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    half = t_quantile((1 + LEVEL) / 2, freedom) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


@lru_cache(maxsize=64)
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t for a probability of 0.5 or more and 1 or more degrees of freedom.

    With t = √ν · tan θ the density is proportional to cos^(ν − 1) θ.
    """
    angles, cosines = _angles()
    density = cosines ** (freedom - 1)
    below = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    angle = np.interp((2 * probability - 1) * below[-1], below, angles)
    return math.sqrt(freedom) * math.tan(angle)


@lru_cache(maxsize=1)
def _angles() -> tuple[np.ndarray, np.ndarray]:
    """The angles of the steps, and their cosines."""
    angles = np.linspace(0.0, math.pi / 2, STEPS + 1)
    return angles, np.cos(angles).clip(0.0)
