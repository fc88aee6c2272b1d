"""Gradients in a file: what is needed to score another precision later, without another pass.

For each block of a window the keys and values as the reference stores them, and the gradient of every probe and timing
(see ``gradients``), in BF16: the stored values are BF16 anyway, and a gradient's rounding changes a score by less than
a thousandth. So the file takes ``kept_bytes``: 2 · (probes · timings + 1) bytes for each stored element.

Axes: P probes, B blocks, T tokens, L layers, H heads, D head width, W timings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvstages.files import ledger
from kvstages.files.atomic import tensor_stream
from kvstages.measure.gradients import BlockGradients, Timing
from kvstages.models.config import DecoderShape

AXES = {
    "stored": ["layer", "tensor", "token", "channel"],
    "gradients": ["timing", "layer", "tensor", "probe", "token", "channel"],
}


@dataclass(frozen=True)
class KeptGradients:
    """A file of gradients: ``blocks`` and ``tokens`` of the ``window``, ``probes``, ``timings``, and the ``widths`` of
    keys and of values."""

    path: Path
    blocks: int
    probes: int
    timings: tuple[Timing, ...]
    tokens: int
    widths: tuple[int, int]
    window: str

    def slices(self) -> Iterator[BlockGradients]:
        """The gradients, a block at a time, in FP32."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            for block in range(self.blocks):
                stored, gradients = (file.get_tensor(name).float() for name in _names(block))
                yield BlockGradients(block, stored.unsqueeze(1), gradients.unsqueeze(2), self.widths)


def block_shape(shape: DecoderShape, tokens: int) -> tuple[int, int, int, int]:
    """What a decoder stores of a block: layers, keys and values, tokens, width [L, 2H, T, D]."""
    return shape.layers, 2 * shape.heads, tokens, max(shape.widths)


def kept_bytes(shape: DecoderShape, blocks: int, tokens: int, probes: int, timings: int = 1) -> int:
    """Bytes of the file's tensors, for a window of so many blocks of so many tokens."""
    return 2 * blocks * (probes * timings + 1) * math.prod(block_shape(shape, tokens))


@contextmanager
def keeping(
    path: Path, shape: DecoderShape, tokens: Tensor, probes: int, timings: Sequence[Timing], window: str
) -> Iterator[Callable[[BlockGradients], None]]:
    """A file to write the gradients of a window's blocks [B, T] to, slice by slice."""
    blocks, length = tokens.shape
    layout = {}
    for block in range(blocks):
        stored, gradients = _names(block)
        layout[stored] = block_shape(shape, length)
        layers, tensors, *rest = layout[stored]
        layout[gradients] = (len(timings), layers, tensors, probes, *rest)
    record = {
        "axes": AXES,
        "blocks": blocks,
        "probes": probes,
        "timings": [timing._asdict() for timing in timings],
        "tokens": length,
        "widths": list(shape.widths),
        "window": window,
    }
    with tensor_stream(path, layout, record) as append:

        def keep(found: BlockGradients) -> None:
            for index in range(found.stored.shape[1]):
                append(_bytes(found.stored[:, index]))
                append(_bytes(found.gradients[:, :, index]))

        yield keep


def read_kept(path: Path) -> KeptGradients:
    """A file of gradients; ValueError names it and what is wrong with it. Its tensors are read block by block later."""
    from safetensors import SafetensorError, safe_open

    ledger.note(path)
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("record", "{}"))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a safetensors file of this project ({error})") from error
    if not isinstance(record, dict) or record.get("axes") != AXES:
        raise ValueError(f"{path}: no kept gradients; expected those of the stage gradients")
    try:
        timings = tuple(Timing(**timing) for timing in record["timings"])
        sizes = (record[key] for key in ("blocks", "probes"))
        widths = tuple(record["widths"])
        kept = KeptGradients(Path(path), *sizes, timings, record["tokens"], widths, record["window"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: kept gradients without {error}") from None
    expected = [name for block in range(kept.blocks) for name in _names(block)]
    if sorted(shapes) != sorted(expected):
        raise ValueError(f"{path}: tensors of {len(shapes) // 2} blocks, expected those of {kept.blocks}")
    return kept


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in BF16."""
    return tensor.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().data


def _names(block: int) -> tuple[str, str]:
    return f"block-{block:04d}.stored", f"block-{block:04d}.gradients"
