"""Small random decoders for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvstages.cache.precisions import BITS
from kvstages.measure.execution import window_logits
from kvstages.models.gpt2_nano import GPT, GPTConfig
from kvstages.models.identity import ModelIdentity
from kvstages.models.weights import model_digest
from kvstages.policies.identity import identity_record


def random_model(
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 8,
    vocab: int = 50,
    context: int = 32,
    seed: int = 0,
    dtype=torch.float32,
) -> GPT:
    """A decoder whose weights are large enough that every part of it matters."""
    model = GPT(GPTConfig(vocab, context, heads * head_dim, layers, heads))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.normal_(std=fan_in**-0.5 if parameter.dim() > 1 else 0.2, generator=generator)
        for block in model.blocks:
            block.attn_norm.weight += 1
            block.mlp_norm.weight += 1
    return model.to(dtype).eval().requires_grad_(False)


def random_tokens(blocks: int = 3, length: int = 12, vocab: int = 50, seed: int = 1) -> torch.Tensor:
    """Token ids [B, T]."""
    return torch.randint(vocab, (blocks, length), generator=torch.Generator().manual_seed(seed))


def all_logits(model, tokens: torch.Tensor, grid, setting, memory: int = 1 << 30) -> torch.Tensor:
    """Logits [B, T, V] of a whole window under a policy's grid."""
    logits = torch.full((*tokens.shape, model.shape.vocabulary), torch.nan, dtype=setting.dtype)
    for where, part in window_logits(model, tokens, grid, setting, memory):
        logits[where] = part
    return logits


def identity_of(model: GPT) -> ModelIdentity:
    """The identity of an opened decoder."""
    return ModelIdentity(model.shape, model_digest(model))


def identified(record: Mapping[str, Any], model: ModelIdentity, names: Iterable[str] = BITS) -> dict[str, Any]:
    """The record of a policy, or of a set, as a file of this model's."""
    return {**record, **identity_record(model.as_record(), names, {"made-up": "0" * 64})}
