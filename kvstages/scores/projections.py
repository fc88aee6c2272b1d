"""Projections a_u: the first-order effect of quantizing each tensor, as a few random numbers for each.

The stage ``gradients`` writes them (see ``measure.gradients``): for each probe, block, layer, tensor and precision the
product of a random gradient with what that precision changes about the tensor. Their squares are KLs to second order:
½ · E[a_u²] of a unit, ½ · E[(a_K + a_V)²] of a whole head, ½ · E[(Σ_u a_u)²] of a policy, summed over the positions
of a block.

Axes: P probes, B blocks, L layers, H heads, R quantized precisions; 2H tensors, the keys of the heads first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstages.cache.precision_grid import PARTS, PrecisionGrid
from kvstages.cache.schemes import precision as check
from kvstages.files.atomic import write_table, write_tensors
from kvstages.files.read import read_arrays
from kvstages.scores.columns import SENSITIVITY_COLUMNS
from kvstages.stats.bootstrap import standard_errors

TENSOR = "projections"
AXES = ["probe", "block", "layer", "tensor", "precision"]
SOURCE = "gradients"


@dataclass(frozen=True)
class Projections:
    """``values``: FP64 [P, B, L, 2H, R]; ``precisions`` [R]; ``tokens``: positions of a block."""

    values: np.ndarray
    precisions: tuple[str, ...]
    tokens: int

    @property
    def heads(self) -> int:
        return self.values.shape[3] // 2

    @property
    def shape(self) -> list[int]:
        """Heads of each layer."""
        return [self.heads] * self.values.shape[2]

    def some(self, probes: slice) -> Projections:
        """The same by some of the probes."""
        return replace(self, values=self.values[probes])

    def parts(self, part: str) -> np.ndarray:
        """a_u of the units of one part [P, B, L, H, R]; those of a whole head add up."""
        keys, values = self.values[:, :, :, : self.heads], self.values[:, :, :, self.heads :]
        return {"k": keys, "v": values}[part] if part != "kv" else keys + values

    def kl(self, part: str) -> np.ndarray:
        """Mean KL (nats a position) of each unit of one part, by block [B, L, H, R]."""
        return self._mean_kl(self.parts(part))

    def of_policy(self, grid: PrecisionGrid) -> np.ndarray:
        """a_u of the tensors of a policy [P, B, L, 2H], 0 where they stay in BF16.

        ValueError where the policy is one for another shape of decoder, or has a precision that was not tried.
        """
        if grid.shape != self.shape:
            raise ValueError(f"a policy of {grid.shape} heads, expected {self.shape}")
        unknown = sorted(set(grid.flat()) - {"bf16", *self.precisions})
        if unknown:
            raise ValueError(f"a policy with {unknown[0]}; the projections hold {', '.join(self.precisions)}")
        index = np.array([[self._place(name) for name in grid.row(layer)] for layer in range(len(self.shape))])
        chosen = np.take_along_axis(self.values, np.maximum(index, 0)[None, None, :, :, None], axis=4)[..., 0]
        return np.where(index < 0, 0.0, chosen)

    def joint_kl(self, grid: PrecisionGrid) -> np.ndarray:
        """Mean KL of a policy by block [B], interactions of all of its tensors included."""
        return self._mean_kl(self.of_policy(grid).sum(axis=(2, 3)))

    def additive_kl(self, grid: PrecisionGrid, unit: str) -> np.ndarray:
        """Sum of the mean KL of a policy's units by block [B]: no interactions between units, nor between the heads
        of a layer."""
        chosen = self.of_policy(grid)
        if unit != "keys-values":
            chosen = chosen[:, :, :, : self.heads] + chosen[:, :, :, self.heads :]
        return self._mean_kl(chosen).sum(axis=(1, 2))

    def _place(self, precision: str) -> int:
        return -1 if precision == "bf16" else self.precisions.index(precision)

    def _mean_kl(self, a: np.ndarray) -> np.ndarray:
        return np.square(a).mean(axis=0) / (2 * self.tokens)


def record_of(precisions: Sequence[str], tokens: int, window: str) -> dict[str, Any]:
    """What is kept beside the tensor of projections."""
    return {"axes": AXES, "precisions": list(precisions), "tokens": tokens, "window": window}


def read_projections(path: Path) -> Projections:
    """The file of the stage ``gradients``; ValueError names it and what is wrong with it."""
    arrays, record = read_arrays(path)
    if list(arrays) != [TENSOR] or record.get("axes") != AXES:
        raise ValueError(
            f"{path}: tensors {', '.join(sorted(arrays)) or 'none'}, expected {TENSOR} of the stage gradients"
        )
    values, precisions, tokens = arrays[TENSOR], record.get("precisions"), record.get("tokens")
    try:
        _ = [check(name) for name in precisions]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: precisions {precisions}: {error}") from None
    if not precisions:
        raise ValueError(f"{path}: no precisions")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{path}: tokens {tokens!r}, expected the positions of a block")
    if values.ndim != 5 or values.shape[3] % 2 or values.shape[4] != len(precisions) or 0 in values.shape:
        raise ValueError(f"{path}: projections of shape {values.shape}, expected [P, B, L, 2H, {len(precisions)}]")
    return Projections(values.astype(np.float64), tuple(precisions), tokens)


def sensitivity_columns(
    found: Projections, error: Mapping[tuple[str, str], np.ndarray], source: str = SOURCE
) -> dict[str, list[Any]]:
    """Columns of the sensitivity table (see ``sensitivity``) of every layer, head, part and precision.

    ``mean_kl``: mean over the blocks of ½ · E[a²] / T. ``standard_error``: that of this mean over the blocks. Every
    block has probes of its own, so it holds both the spread of the text and that of the probes; NaN for one block.
    There is no floor: nothing but the quantizer is in a gradient. ``error``: {(part, precision): [L, H, B]}.
    """
    rows = []
    kl = {part: found.kl(part) for part in PARTS}
    blocks = found.values.shape[1]
    means = {part: np.ascontiguousarray(np.moveaxis(own, 0, -1)).mean(axis=-1).tolist() for part, own in kl.items()}
    errors = {part: standard_errors(own).tolist() for part, own in kl.items()}
    wrong = {change: own.mean(axis=-1).tolist() for change, own in error.items()}
    for layer in range(len(found.shape)):
        for head in range(found.heads):
            for part in PARTS:
                for index, precision in enumerate(found.precisions):
                    score = means[part][layer][head][index], errors[part][layer][head][index], blocks
                    rest = wrong[part, precision][layer][head], source, "one-pass", "float32"
                    rows.append((layer, head, part, precision, *score, None, None, 0, *rest))
    return {name: [row[index] for row in rows] for index, name in enumerate(SENSITIVITY_COLUMNS)}


def write_scores(
    table: Path,
    projections: Path,
    values: np.ndarray,
    error: Mapping[tuple[str, str], Any],
    precisions: Sequence[str],
    tokens: int,
    window: str,
    source: str = SOURCE,
) -> None:
    """Write the sensitivity table and the projections of precisions.

    ``values`` FP64 [P, B, L, 2H, R] and ``error`` {(part, precision): [L, H, B]}: those of ``measure.gradients``.
    ``source``: what the table calls its scores.
    """
    found = Projections(values, tuple(precisions), tokens)
    columns = sensitivity_columns(found, {change: np.asarray(each) for change, each in error.items()}, source)
    write_tensors(projections, {TENSOR: values}, record_of(precisions, tokens, window))
    write_table(table, columns, ["standard_error"])
