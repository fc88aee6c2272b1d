"""Windows: runs of token positions of a shard, cut in order into non-overlapping blocks (docs/method.md, "Windows").

A block of T tokens is one sequence with its own cache. B is the number of blocks of a window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstages.models.config import GPTConfig
from kvstages.study.shards import read_shard

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[int, int]
# A block of one token predicts nothing, so it has no cross entropy.
SMALLEST_BLOCK = 2


def parse_windows(texts: list[str]) -> dict[str, Window]:
    """Windows written as ``name=start:end``, in the order given; ValueError on another form or a repeated name."""
    windows: dict[str, Window] = {}
    for text in texts:
        match = re.fullmatch(r"([a-z0-9-]+)=(-?\d+):(-?\d+)", text)
        if match is None:
            raise ValueError(f"window {text!r}: expected name=start:end, such as calibration=0:512")
        if match[1] in windows:
            raise ValueError(f"window {match[1]} is given twice")
        windows[match[1]] = int(match[2]), int(match[3])
    return windows


def check_windows(windows: Mapping[str, Window], block: int) -> None:
    """ValueError unless the windows stand in order, do not overlap and each is a positive multiple of the block."""
    if block < SMALLEST_BLOCK:
        raise ValueError(f"block of {block} tokens: expected at least {SMALLEST_BLOCK}")
    previous, reached = None, 0
    for name, (start, end) in windows.items():
        here = f"window {name} ({start} to {end})"
        if start < 0:
            raise ValueError(f"{here} starts before the shard; expected positions of 0 or more")
        if end <= start:
            raise ValueError(f"{here} is empty; expected an end after its start")
        if (end - start) % block:
            raise ValueError(f"{here} holds {end - start} tokens, not a multiple of the block of {block}")
        if start < reached:
            raise ValueError(
                f"{here} starts before {previous} ends at {reached}; windows stand in order and do not overlap"
            )
        previous, reached = name, end


def cut_windows(shard: Path, windows: Mapping[str, Window], block: int, config: GPTConfig) -> dict[str, np.ndarray]:
    """Token blocks int64 [B, T] of each window; ValueError names the shard, the window and what is wrong.

    Only the ids inside the windows are read: what else the shard holds neither costs nor matters.
    """
    check_windows(windows, block)
    if block > config.context_len:
        raise ValueError(f"block of {block} tokens is longer than the model's context of {config.context_len}")
    tokens = read_shard(shard)
    blocks = {}
    for name, (start, end) in windows.items():
        if end > len(tokens):
            raise ValueError(f"{shard}: window {name} ends at {end}, past the shard's {len(tokens)} tokens")
        ids = tokens[start:end].astype(np.int64)
        beyond = np.flatnonzero(ids >= config.vocab_size)
        if beyond.size:
            raise ValueError(
                f"{shard}: token id {ids[beyond[0]]} at position {start + beyond[0]} (window {name}) is not below "
                f"the model's vocabulary of {config.vocab_size}"
            )
        blocks[name] = ids.reshape(-1, block)
    return blocks


def check_tokens(tokens: Tensor, config: GPTConfig, path: Path) -> None:
    """ValueError unless token ids [B, T], read from ``path``, fit the decoder: its context and its vocabulary."""
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(
            f"{path}: a tensor {tuple(tokens.shape)} of {tokens.dtype}, expected token ids [blocks, block]"
        )
    if tokens.shape[1] > config.context_len:
        raise ValueError(
            f"{path}: blocks of {tokens.shape[1]} tokens are longer than the model's context of {config.context_len}"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= config.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{path}: token id {wrong} is outside the model's vocabulary of {config.vocab_size}")


def load_window(path: Path, name: str, config: GPTConfig | None = None) -> Tensor:
    """Token blocks int64 [B, T] of one window of a windows file.

    ValueError lists the windows that the file does hold; given a decoder's ``config``, also where the window was cut
    for another model and does not fit this one.
    """
    from kvstages.files.read import read_tensors

    tensors, _ = read_tensors(path)
    if name not in tensors:
        raise ValueError(f"{path}: no window {name!r}; it holds {', '.join(sorted(tensors))}")
    if config is not None:
        check_tokens(tensors[name], config, path)
    return tensors[name]
