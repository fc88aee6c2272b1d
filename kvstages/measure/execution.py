"""The two executions of a study: how a window's blocks go through the model.

``token-by-token`` is the thing itself: one token after the other through the packed cache. ``one-pass`` takes all
positions of a block in one pass, with a mask that shows each query the reconstructed past and its own exact key and
value. The two agree up to rounding; ``one-pass`` is one large matrix product where ``token-by-token`` is many small
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.rounding import STORAGE, Rounding, storage_rounding
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Decoder

# Tokens of one one-pass pass: enough rows for matrix products at full speed; more would leave a CPU's cache.
PASS_TOKENS = {"cpu": 512, "cuda": 1 << 16}


def dense_grid(model: Decoder) -> PrecisionGrid:
    """The policy with every head in BF16."""
    return PrecisionGrid.uniform(model.shape.layers, model.shape.heads, "bf16")


def packed_cache(
    model: Decoder,
    grid: PrecisionGrid,
    batch: int,
    tokens: int,
    rounding: Rounding = storage_rounding,
    dense_storage: torch.dtype = STORAGE,
) -> PackedCache:
    """The packed cache of ``tokens`` positions of a batch, for this decoder, with a working copy of the past."""
    return PackedCache(
        grid,
        batch,
        model.shape.key_width,
        model.dtype,
        tokens,
        device=model.device,
        rounding=rounding,
        dense_storage=dense_storage,
        value_width=model.shape.value_width,
    )


def block_bytes(model: Decoder, tokens: int, execution: str) -> int:
    """Estimate of the memory that one block of ``tokens`` takes on its way through the model, in bytes.

    Logits and what is computed from them in FP64; activations (about 16 of width E a token, and the scores of
    attention) or the working copies of all layers' caches.
    """
    shape, size = model.shape, model.dtype.itemsize
    logits = tokens * shape.vocabulary * (size + 8)
    if execution == "one-pass":
        return logits + tokens * size * (16 * shape.width + 2 * shape.query_heads * tokens)
    return logits + tokens * size * shape.heads * sum(shape.widths) * shape.layers


def blocks_per_pass(model: Decoder, blocks: int, tokens: int, execution: str, memory: int) -> int:
    """How many blocks go through the model together: all that fit ``memory`` (bytes), and at least one."""
    fitting = max(1, memory // block_bytes(model, tokens, execution))
    if execution == "one-pass":
        fitting = min(fitting, max(1, PASS_TOKENS[model.device.type] // tokens))
    return min(blocks, fitting)


@torch.no_grad()
def window_logits(
    model: Decoder,
    tokens: Tensor,
    grid: PrecisionGrid,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[tuple[slice, Tensor]]:
    """Logits [blocks, T, V] of token ids [B, T] under a policy's grid, a slice of the blocks at a time.

    How blocks are grouped depends on shapes and ``memory`` only, never on the policy: any two policies go through
    the same path with the same batch shapes. Each block is its own cache. ``progress`` is told the share done.
    """
    blocks, length = tokens.shape
    step = blocks_per_pass(model, blocks, length, setting.execution, memory)
    for start in range(0, blocks, step):
        part = tokens[start : start + step]
        if setting.execution == "one-pass":
            x = model.run_layers(model.embed(part), BlockCache(grid, tokens.device))
            logits = model.logits(x)
        else:
            cache = packed_cache(model, grid, len(part), length)
            logits = torch.empty(*part.shape, model.shape.vocabulary, dtype=setting.dtype, device=tokens.device)
            for position in range(length):
                x = model.run_layers(model.embed(part[:, position : position + 1], position), cache)
                logits[:, position] = model.logits(x)[:, 0]
                progress((start + len(part) * (position + 1) / length) / blocks)
        progress((start + len(part)) / blocks)
        yield slice(start, start + len(part)), logits
