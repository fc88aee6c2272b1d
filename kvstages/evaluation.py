"""Joint evaluation: a whole policy at once, on a window, against the unquantized reference (STUDY.md, "Measuring")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstages.allocation import LADDER, policy_bytes
from kvstages.cache import measured_bytes
from kvstages.execution import window_logits
from kvstages.files import read_json
from kvstages.gpt import GPT
from kvstages.metrics import position_metrics
from kvstages.model_config import GPTConfig
from kvstages.runtime import Setting
from kvstages.summary import summarise

Policy = Mapping[str, Any]
# What an evaluation reads of a policy's record.
POLICY_KEYS = ("policy", "precisions", "proxy", "average_payload_bits")


def check_policy(policy: Any, config: GPTConfig) -> list[list[str]]:
    """The grid [L][H] of a policy's record; ValueError if it is not one for a decoder of this shape."""
    if not isinstance(policy, Mapping):
        raise ValueError(f"a policy is a JSON object, found {type(policy).__name__}")
    missing = [key for key in POLICY_KEYS if key not in policy]
    if missing:
        raise ValueError(f"key {missing[0]!r} is missing, expected a policy of the stage allocate")
    for key in ("proxy", "average_payload_bits"):
        if isinstance(policy[key], bool) or not isinstance(policy[key], int | float):
            raise ValueError(f"{key} is {policy[key]!r}, expected a number")
    grid = policy["precisions"]
    if not isinstance(grid, list) or not all(isinstance(row, list) for row in grid):
        raise ValueError(f"precisions is {type(grid).__name__}, expected a list of layers, each a list of heads")
    shape, expected = [len(row) for row in grid], [config.num_heads] * config.num_layers
    if shape != expected:
        raise ValueError(f"precisions for heads {shape} a layer, but the model has {expected}")
    for layer, row in enumerate(grid):
        for head, precision in enumerate(row):
            if precision not in LADDER:
                raise ValueError(f"layer {layer}, head {head}: {precision!r}, expected one of {', '.join(LADDER)}")
    return grid


def read_policy(path: Path, config: GPTConfig) -> dict[str, Any]:
    """A policy's record; ValueError names ``path`` where it is not one for a decoder of this shape."""
    policy = read_json(path)
    try:
        check_policy(policy, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return policy


def reference_logits(tensors: Mapping[str, Tensor], path: Path) -> Tensor:
    """The logits [B, T, V] among the tensors of ``path``; ValueError says what the file holds instead."""
    if "logits" not in tensors:
        held = ", ".join(sorted(tensors)[:5]) or "no tensors"
        raise ValueError(f"{path}: holds {held}; expected the tensor logits, from the stage reference")
    if tensors["logits"].dim() != 3:
        raise ValueError(f"{path}: logits {tuple(tensors['logits'].shape)}, expected blocks × tokens × vocabulary")
    return tensors["logits"]


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
    grid = check_policy(policy, model.config)
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
    """Columns of a table with a row a position, by block and position; NaN where no token follows to be predicted."""
    blocks, length = metrics["kl"].shape
    return {
        "block": np.repeat(np.arange(blocks), length),
        "position": np.tile(np.arange(length), blocks),
        "kl": metrics["kl"].ravel(),
        "reverse_kl": metrics["reverse_kl"].ravel(),
        "agrees": metrics["agrees"].ravel().astype(int),
        "cross_entropy": metrics["cross_entropy"].ravel(),
        "reference_cross_entropy": metrics["reference_cross_entropy"].ravel(),
        "delta_p": metrics["delta_p"].ravel(),
        "logit_deviation": metrics["logit_deviation"].ravel(),
    }
