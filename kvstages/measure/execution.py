"""The two executions of a study: how a window's blocks go through the model.

``token-by-token`` is the thing itself: one token after the other through the packed cache. ``one-pass`` takes all
positions of a block in one pass, with a mask that shows each query the reconstructed past and its own exact key and
value. The two agree up to rounding; ``one-pass`` is one large matrix product where ``token-by-token`` is many small
ones. The output layer, which remembers nothing, takes slices of the positions in both.
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
from kvstages.models.decoder import Cache, CausalCache, Decoder

# Tokens of one one-pass pass: enough rows for matrix products at full speed; more would leave a CPU's cache.
PASS_TOKENS = {"cpu": 512, "cuda": 1 << 16}
# What is alive of a slice's logits at once: the policy's, the reference's, and a copy on the way.
LOGITS_COPIES = 3
# Rows of FP64 in which a position's metrics are computed, where one row is more than a chunk.
FP64_ROWS = 7


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
        contexts=model.contexts,
    )


def state_bytes(model: Decoder, tokens: int, execution: str) -> int:
    """Estimate of the memory that one block of ``tokens`` takes on its way through the layers, in bytes.

    Activations (about 16 of width E a token, and the scores of attention) or the working copies of all layers' caches.
    """
    shape, size = model.shape, model.dtype.itemsize
    if execution == "one-pass":
        return tokens * size * (16 * shape.width + 2 * shape.query_heads * tokens)
    return tokens * size * (2 * shape.width + shape.heads * sum(shape.widths) * shape.layers)


def blocks_per_pass(model: Decoder, blocks: int, tokens: int, execution: str, memory: int) -> int:
    """How many blocks go through the layers together: all that fit half of ``memory`` (bytes), and at least one."""
    fitting = max(1, memory // 2 // state_bytes(model, tokens, execution))
    if execution == "one-pass":
        fitting = min(fitting, max(1, PASS_TOKENS[model.device.type] // tokens))
    return min(blocks, fitting)


def position_slices(model: Decoder, rows: int, tokens: int, memory: int, copies: float = LOGITS_COPIES) -> list[slice]:
    """Slices of the positions whose logits, of ``rows`` blocks, fit half of ``memory`` (bytes); at least one each.

    ``copies``: how many tensors of the logits' size are alive at once. What is computed from them in FP64 is a few rows
    at a time (see ``metrics``).
    """
    each = rows * model.shape.vocabulary * model.dtype.itemsize * copies
    step = min(tokens, max(1, int(memory / 2 / each)))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def least_bytes(model: Decoder, block: int, rows: int = 1, copies: float = LOGITS_COPIES) -> int:
    """The least memory to measure with: half for one pass, of ``block`` bytes, half for the logits of a position.

    ``rows``: blocks that cannot go apart; ``copies`` as in ``position_slices``.
    """
    position = model.shape.vocabulary * (model.dtype.itemsize * rows * int(copies) + FP64_ROWS * 8)
    return 2 * max(block, position)


def check_memory(model: Decoder, block: int, memory: int, rows: int = 1, copies: float = LOGITS_COPIES) -> None:
    """ValueError that says how much is needed where ``memory`` is less than ``least_bytes`` (bytes)."""
    least = least_bytes(model, block, rows, copies)
    if memory < least:
        needed = -(-least // (1 << 20))
        raise ValueError(f"memory_mb {memory >> 20}: this model and these blocks need at least {needed}")


def run_layers(
    model: Decoder, x: Tensor, cache: Cache, execution: str, first: int = 0, last: int | None = None
) -> Tensor:
    """The state [B, T, E] after layers first, first + 1, ... up to but without ``last``, from that of all positions.

    ``token-by-token`` hands the positions one after the other to the layers.
    """
    if execution == "one-pass":
        return model.run_layers(x, cache, first, last)
    return torch.cat([model.run_layers(each, cache, first, last) for each in x.split(1, dim=1)], dim=1)


def policy_cache(model: Decoder, grid: PrecisionGrid | None, blocks: int, tokens: int, execution: str) -> Cache:
    """The cache that blocks of ``tokens`` go through under a policy's grid; None stores keys and values exactly, as
    the model computes them (one-pass only)."""
    if grid is None:
        return CausalCache(model.device)
    if execution == "one-pass":
        return BlockCache(grid, model.device, contexts=model.contexts)
    return packed_cache(model, grid, blocks, tokens)


@torch.no_grad()
def window_states(
    model: Decoder,
    tokens: Tensor,
    grid: PrecisionGrid | None,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[tuple[slice, Tensor]]:
    """States [blocks, T, E] after the last layer of token ids [B, T] under a policy's grid, a slice of the blocks each.

    How blocks are grouped depends on shapes and ``memory`` only, never on the policy: any two policies go through
    the same path with the same batch shapes. Each block is its own cache. ``progress`` is told the share done.
    """
    blocks, length = tokens.shape
    step = blocks_per_pass(model, blocks, length, setting.execution, memory)
    for start in range(0, blocks, step):
        part = tokens[start : start + step]
        cache = policy_cache(model, grid, len(part), length, setting.execution)
        yield slice(start, start + len(part)), run_layers(model, model.embed(part), cache, setting.execution)
        progress((start + len(part)) / blocks)


@torch.no_grad()
def window_logits(
    model: Decoder,
    tokens: Tensor,
    grid: PrecisionGrid | None,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Logits [blocks, positions, V] of token ids [B, T] under a policy's grid, and which blocks and positions.

    A slice of blocks and of their positions at a time, so that ``memory`` (bytes) is enough whatever the vocabulary.
    """
    for blocks, x in window_states(model, tokens, grid, setting, memory, progress):
        for positions in position_slices(model, *x.shape[:2], memory):
            yield (blocks, positions), model.logits(x[:, positions])
