"""The reference: logits of the unquantized decoder on a window, which policies are measured against.

They are written and read a slice of blocks and positions at a time, so that no vocabulary is too large for memory.
Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvstages.files.atomic import write_tensor_slices
from kvstages.files.read import TensorSlices
from kvstages.measure.execution import dense_grid, policy_cache, run_layers, window_logits
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Decoder

TENSOR = "logits"
# What the record of logits says that no rounding of keys and values has touched; and of those in FP32.
CACHE = {"cache": "exact"}
EXACT = {"execution": "one-pass", "compute_dtype": "float32", **CACHE}


# The kinds of numbers that logits are written as, by their codes in safetensors.
CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
DTYPES = {code: dtype for dtype, code in CODES.items()}


class Logits(Protocol):
    """Logits [B, T, V], in memory (a tensor), in a file or still to be computed: their shape, and slices of blocks and
    positions."""

    shape: tuple[int, ...]

    def __getitem__(self, where: tuple[slice, slice]) -> Tensor: ...


def write_reference(
    path: Path,
    model: Decoder,
    tokens: Tensor,
    setting: Setting,
    memory: int,
    record: Mapping[str, Any],
    progress: Callable[[float], None] = lambda done: None,
) -> None:
    """Write the logits of the unquantized decoder, of token ids [B, T], as they are computed; memory in bytes.

    Keys and values are stored as BF16, unless the ``record`` says with ``CACHE`` that they are stored exactly.
    ValueError names the first block and position whose logits are not finite; nothing is then left of the file.
    """
    grid = None if CACHE.items() <= record.items() else dense_grid(model)
    slices = window_logits(model, tokens, grid, setting, memory, progress)
    shape = (*tokens.shape, model.shape.vocabulary)
    parts = ((where, map(_bytes, part.cpu())) for where, part in map(_checked, slices))
    write_tensor_slices(path, TENSOR, CODES[model.dtype], shape, parts, record)


def _checked(part: tuple[tuple[slice, slice], Tensor]) -> tuple[tuple[slice, slice], Tensor]:
    (blocks, positions), logits = part
    # A sum is not finite if a logit is not; only then (or if it overflows) is each of them looked at.
    if not torch.isfinite(logits.sum(dtype=torch.float64)) and not (finite := logits.isfinite().all(dim=-1)).all():
        block, position = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"block {blocks.start + block}, position {positions.start + position}: NaN or infinity in the logits"
        )
    return part


def _bytes(rows: Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    return rows.contiguous().view(torch.uint8).numpy().data


class StoredLogits(TensorSlices):
    """Logits [B, T, V] of a file, read a slice of blocks and positions at a time."""

    def __getitem__(self, where: tuple[slice, slice]) -> Tensor:
        blocks, positions = self.ranges(where)
        found = torch.empty(len(blocks), len(positions), self.shape[2], dtype=DTYPES[self.code])
        self.read_into(where, map(_bytes, found))
        return found


class ComputedLogits:
    """Logits [B, T, V] of the unquantized decoder, computed as they are asked for.

    Token ids [B, T]. The blocks that are asked for together go through the layers together, as under a policy, and
    their states [blocks, T, E] are kept until others are asked for. ValueError names the first block and position whose
    logits are not finite.
    """

    def __init__(self, model: Decoder, tokens: Tensor, setting: Setting):
        self.shape = (*tokens.shape, model.shape.vocabulary)
        self._model, self._tokens, self._setting = model, tokens, setting
        self._blocks: slice | None = None
        self._states: Tensor | None = None

    @torch.no_grad()
    def __getitem__(self, where: tuple[slice, slice]) -> Tensor:
        blocks, positions = where
        if blocks != self._blocks:
            part, execution = self._tokens[blocks], self._setting.execution
            cache = policy_cache(self._model, dense_grid(self._model), *part.shape, execution)
            self._states = run_layers(self._model, self._model.embed(part), cache, execution)
            self._blocks = blocks
        return _checked((where, self._model.logits(self._states[:, positions])))[1]


def read_reference(path: Path, made: Mapping[str, Any]) -> StoredLogits:
    """Logits [B, T, V] of a reference, read as they are needed.

    ValueError names ``path`` if it holds something else, or was not computed as ``made`` says.
    """
    logits = StoredLogits(path, TENSOR)
    # Logits of exact keys and values are the truth, never the reference.
    expected, record = {**dict.fromkeys(CACHE), **made}, logits.record
    differ = [f"{key} {record.get(key)}, not {value}" for key, value in expected.items() if record.get(key) != value]
    if differ:
        raise ValueError(f"{path}: computed with {'; '.join(differ)}: compute it as the policy is evaluated")
    return logits


def check_reference(reference: Logits, model: Decoder, tokens: Tensor) -> None:
    """ValueError where the reference is not one of this window and model."""
    expected = (*tokens.shape, model.shape.vocabulary)
    if tuple(reference.shape) != expected:
        raise ValueError(f"reference logits {tuple(reference.shape)}, but window and model ask for {expected}")
