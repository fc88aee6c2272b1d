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
from kvstages.measure.setting import Setting
from kvstages.models.gpt2_nano import GPT

# Tokens of one one-pass pass: enough rows for matrix products at full speed; more would leave a CPU's cache.
PASS_TOKENS = {"cpu": 512, "cuda": 1 << 16}


def dense_grid(model: GPT) -> PrecisionGrid:
    """The policy with every head in BF16."""
    return PrecisionGrid.uniform(model.config.num_layers, model.config.num_heads, "bf16")


def block_bytes(model: GPT, tokens: int, execution: str) -> int:
    """Estimate of the memory that one block of ``tokens`` takes on its way through the model, in bytes.

    Logits and what is computed from them in FP64; activations (about 16 of width E a token, and the scores of
    attention) or the working copies of all layers' caches.
    """
    config = model.config
    size = model.lm_head.weight.element_size()
    logits = tokens * config.vocab_size * (size + 8)
    if execution == "one-pass":
        return logits + tokens * size * (16 * config.embedding_dim + 2 * config.num_heads * tokens)
    return logits + tokens * size * 2 * config.embedding_dim * config.num_layers


def blocks_per_pass(model: GPT, blocks: int, tokens: int, execution: str, memory: int) -> int:
    """How many blocks go through the model together: all that fit ``memory`` (bytes), and at least one."""
    fitting = max(1, memory // block_bytes(model, tokens, execution))
    if execution == "one-pass":
        fitting = min(fitting, max(1, PASS_TOKENS[model.lm_head.weight.device.type] // tokens))
    return min(blocks, fitting)


@torch.no_grad()
def window_logits(
    model: GPT,
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
            logits = model(part, BlockCache(grid, tokens.device, contexts=model.contexts))
        else:
            width, contexts = model.config.head_dim, model.contexts
            cache = PackedCache(grid, len(part), width, setting.dtype, length, device=tokens.device, contexts=contexts)
            logits = torch.empty(*part.shape, model.config.vocab_size, dtype=setting.dtype, device=tokens.device)
            for position in range(length):
                logits[:, position] = model(part[:, position : position + 1], cache)[:, 0]
                progress((start + len(part) * (position + 1) / length) / blocks)
        progress((start + len(part)) / blocks)
        yield slice(start, start + len(part)), logits
