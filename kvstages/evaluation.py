"""Joint evaluation: a whole policy at once, on a window, against the unquantized reference (STUDY.md, "Measuring")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstages.allocation import policy_bytes
from kvstages.cache import measured_bytes
from kvstages.execution import window_logits
from kvstages.gpt import GPT
from kvstages.metrics import position_metrics, summarise
from kvstages.runtime import Setting

Policy = Mapping[str, Any]


def check_policy(policy: Policy, model: GPT) -> list[list[str]]:
    """The grid [L][H] of a policy's record; ValueError if it is not one for this model."""
    grid = policy.get("precisions")
    if not isinstance(grid, list) or not all(isinstance(row, list) for row in grid):
        raise ValueError(f"policy {policy.get('policy')!r}: precisions is not a list of layers of heads")
    shape, expected = [len(row) for row in grid], [model.config.num_heads] * model.config.num_layers
    if shape != expected:
        raise ValueError(
            f"policy {policy.get('policy')!r}: precisions for heads {shape} a layer, but the model has {expected}"
        )
    return grid


def evaluate(
    model: GPT,
    tokens: Tensor,
    policy: Policy,
    reference: Tensor,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Figures of one policy and a table of its positions.

    Token ids [B, T]; ``reference``: logits [B, T, V] of the unquantized model on the same blocks, by the same
    execution (of the original model, where ``model`` is an adapted one). Memory in bytes. ValueError where the
    reference does not fit the window or the policy the model.
    """
    grid = check_policy(policy, model)
    expected = (*tokens.shape, model.config.vocab_size)
    if tuple(reference.shape) != expected:
        raise ValueError(f"reference logits {tuple(reference.shape)}, but window and model ask for {expected}")
    parts = [
        position_metrics(logits, reference[blocks].to(tokens.device), tokens[blocks])
        for blocks, logits in window_logits(model, tokens, grid, setting, memory, progress)
    ]
    metrics = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    summary = summarise(metrics)
    return {**summary, **storage(policy, model, tokens.shape[1], summary["mean_kl"])}, position_table(metrics)


def storage(policy: Policy, model: GPT, tokens: int, mean_kl: float) -> dict[str, Any]:
    """Bytes of one cache of ``tokens`` positions, counted from a real one; and the proxy beside the measured KL.

    ``reconstruction_bytes`` is what the working copy of the reconstructed past would take beside; it is transient
    and in no total.
    """
    grid = policy["precisions"]
    config = model.config
    payload, scales = measured_bytes(grid, config.head_dim, tokens)
    if (payload, scales) != policy_bytes(grid, config.head_dim, tokens):
        raise AssertionError("the cache's tensors do not have the bytes of the formula")
    dense = policy_bytes([["bf16"] * config.num_heads] * config.num_layers, config.head_dim, tokens)[0]
    quantized = sum(precision != "bf16" for row in grid for precision in row)
    return {
        "proxy": policy["proxy"],
        "proxy_gap": policy["proxy"] - mean_kl,
        "average_payload_bits": policy["average_payload_bits"],
        "tokens_per_cache": tokens,
        "payload_bytes": payload,
        "scale_bytes": scales,
        "total_bytes": payload + scales,
        "bf16_bytes": dense,
        "compression": dense / (payload + scales),
        "reconstruction_bytes": quantized * tokens * config.head_dim * 2 * torch.bfloat16.itemsize,
    }


def position_table(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of a table with a row a position, by block and position; cross entropy is NaN where no token follows."""
    blocks, length = metrics["kl"].shape
    return {
        "block": np.repeat(np.arange(blocks), length),
        "position": np.tile(np.arange(length), blocks),
        "kl": metrics["kl"].ravel(),
        "agrees": metrics["agrees"].ravel().astype(int),
        "cross_entropy": metrics["cross_entropy"].ravel(),
        "logit_deviation": metrics["logit_deviation"].ravel(),
    }
