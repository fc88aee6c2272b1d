"""Joint evaluation of a whole policy on a window, against the unquantized reference (docs/method.md, "Measuring")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstages.cache.packed import measured_bytes
from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.files.read import read_tensors
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.metrics import position_metrics
from kvstages.measure.setting import Setting
from kvstages.models.gpt2_nano import GPT
from kvstages.policies.record import check_policy
from kvstages.stats.summary import summarise

Policy = Mapping[str, Any]


def read_reference(path: Path, made: Mapping[str, Any]) -> Tensor:
    """Logits [B, T, V] of a reference; ValueError names ``path`` if it was not computed as ``ledger`` says."""
    tensors, record = read_tensors(path)
    logits = reference_logits(tensors, path)
    differ = [f"{key} {record.get(key)}, not {value}" for key, value in made.items() if record.get(key) != value]
    if differ:
        raise ValueError(f"{path}: computed with {'; '.join(differ)}: compute it as the policy is evaluated")
    return logits


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
    grid = PrecisionGrid.of_record(policy["precisions"])
    config = model.config
    size = measured_bytes(grid, config.head_dim, tokens, model.contexts)
    if size != policy_bytes(grid, config.head_dim, tokens):
        raise AssertionError("the cache's tensors do not have the bytes of the formula")
    dense = policy_bytes(dense_grid(model), config.head_dim, tokens).payload
    quantized = sum(precision != "bf16" for precision in grid.flat())
    return {
        "proxy": policy["proxy"],
        "proxy_gap": policy["proxy"] - mean_kl,
        "average_payload_bits": policy["average_payload_bits"],
        "tokens_per_cache": tokens,
        "payload_bytes": size.payload,
        "scale_bytes": size.scales + size.once,
        "total_bytes": sum(size),
        "bf16_bytes": dense,
        "compression": dense / sum(size),
        "reconstruction_bytes": quantized * tokens * config.head_dim * torch.bfloat16.itemsize,
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
