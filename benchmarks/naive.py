"""The study written plainly: one head, one block, one token at a time, unpacking the whole past at every step.

This is what the published implementation does, and what the benchmarks compare with. It measures the same numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache.precisions import MAX_CODES
from kvstages.cache.quantizer import choose_scale, dequantize, pack, quantize, unpack
from kvstages.measure.metrics import divergence
from kvstages.models.gpt2_nano import GPT


class HeadCache:
    """One head's keys or values, token by token."""

    def __init__(self, precision: str, head_dim: int, dtype: torch.dtype):
        self.precision, self.head_dim, self.dtype = precision, head_dim, dtype
        self.payload: list[Tensor] = []
        self.scales: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        """Store one vector [D]."""
        if self.precision == "bf16":
            self.payload.append(x)
            return
        scale = choose_scale(x)
        codes = quantize(x, scale, MAX_CODES[self.precision])
        self.scales.append(scale)
        self.payload.append(pack(codes, 4) if self.precision == "int4" else codes)

    def past(self) -> Tensor:
        """All stored vectors [tokens, D], unpacked."""
        stored = torch.stack(self.payload)
        if self.precision == "bf16":
            return stored
        codes = unpack(stored, 4, self.head_dim) if self.precision == "int4" else stored
        return dequantize(codes, torch.stack(self.scales), MAX_CODES[self.precision], self.dtype)


@torch.no_grad()
def block_logits(model: GPT, tokens: Tensor, precisions: list[list[str]]) -> Tensor:
    """Logits [T, V] of one block of token ids [T] under a policy [L][H]."""
    config, dtype = model.config, model.lm_head.weight.dtype
    caches = [
        [[HeadCache(precision, config.head_dim, dtype) for precision in row] for _ in range(2)] for row in precisions
    ]
    logits = []
    for position, token in enumerate(tokens):
        x = model.input_embedding(token) + model.pos_embedding[0, position]
        for layer, block in enumerate(model.blocks):
            normed = block.attn_norm(x)
            queries, keys, values = (
                projection(normed).view(config.num_heads, config.head_dim) for projection in (block.Q, block.K, block.V)
            )
            # The cache holds 16 bits, whatever the model computes in.
            keys, values = keys.bfloat16().to(dtype), values.bfloat16().to(dtype)
            outputs = []
            for head in range(config.num_heads):
                key_cache, value_cache = (caches[layer][kind][head] for kind in (0, 1))
                seen_keys, seen_values = keys[head : head + 1], values[head : head + 1]
                if position:
                    seen_keys = torch.cat((key_cache.past(), seen_keys))
                    seen_values = torch.cat((value_cache.past(), seen_values))
                weights = F.softmax(seen_keys @ queries[head] / math.sqrt(config.head_dim), dim=-1)
                outputs.append(weights @ seen_values)
                key_cache.append(keys[head])
                value_cache.append(values[head])
            x = x + torch.cat(outputs)
            x = x + block.mlp(block.mlp_norm(x))
        logits.append(model.lm_head(x))
    return torch.stack(logits)


def intervention(model: GPT, tokens: Tensor, layer: int, head: int, precision: str, reference: Tensor) -> float:
    """Mean KL (nats) of one single-head intervention over blocks [B, T], against reference logits [B, T, V]."""
    grid = [["bf16"] * model.config.num_heads for _ in range(model.config.num_layers)]
    grid[layer][head] = precision
    kl = [divergence(block_logits(model, block, grid), logits) for block, logits in zip(tokens, reference, strict=True)]
    return float(torch.stack(kl).mean())


def adaptation_step(model: GPT, frozen: GPT, tokens: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of adaptation as published: the frozen reference runs along, and the optimizer is not fused."""
    from kvstages.cache.precision_grid import PrecisionGrid
    from kvstages.measure.training_caches import NoiseCache

    with torch.no_grad():
        log_q = F.log_softmax(frozen(tokens).float(), dim=-1)
    noise = NoiseCache(PrecisionGrid.uniform(model.shape.layers, model.shape.heads, "int4"), torch.Generator())
    log_p = F.log_softmax(model(tokens, noise).float(), dim=-1)
    cross_entropy = F.nll_loss(log_p[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    optimizer.zero_grad()
    (cross_entropy + kl).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
