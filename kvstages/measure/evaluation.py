"""Joint evaluation of a whole policy on a window, against the unquantized reference (docs/method.md, "Measuring")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache.packed import measured_bytes
from kvstages.cache.precision_grid import PrecisionGrid, average_payload_bits, policy_bytes
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.metrics import position_metrics
from kvstages.measure.reference import Logits, check_reference
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Decoder
from kvstages.policies.record import check_policy
from kvstages.stats.summary import summarise

Policy = Mapping[str, Any]


def evaluate(
    model: Decoder,
    tokens: Tensor,
    policy: Policy,
    reference: Logits,
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Figures of one policy and a table of its positions.

    Token ids [B, T]; ``reference``: logits [B, T, V] of the unquantized model on the same blocks, by the same
    execution (of the original model, where ``model`` is an adapted one). Memory in bytes. ValueError where the
    reference does not fit the window or the policy the model.
    """
    grid = check_policy(policy, model.shape)
    check_reference(reference, model, tokens)
    following = F.pad(tokens[:, 1:], (0, 1), value=-1)
    metrics: dict[str, np.ndarray] = {}
    for where, logits in window_logits(model, tokens, grid, setting, memory, progress):
        part = position_metrics(logits, reference[where].to(tokens.device), following[where])
        for name, values in part.items():
            metrics.setdefault(name, np.empty(tokens.shape, dtype=values.dtype))[where] = values
    summary = summarise(metrics)
    return {**summary, **storage(policy, model, tokens.shape[1], summary["mean_kl"])}, position_table(metrics)


def storage(policy: Policy, model: Decoder, tokens: int, mean_kl: float) -> dict[str, Any]:
    """Bytes of one cache of ``tokens`` positions, counted from a real one; and the proxy beside the measured KL.

    ``reconstruction_bytes`` is what the working copy of the reconstructed past would take beside; it is transient
    and in no total.
    """
    grid = PrecisionGrid.of_record(policy["precisions"])
    shape = model.shape
    size = measured_bytes(grid, shape.key_width, tokens, shape.value_width, model.contexts)
    if size != policy_bytes(grid, shape.widths, tokens):
        raise AssertionError("the cache's tensors do not have the bytes of the formula")
    dense = policy_bytes(dense_grid(model), shape.widths, tokens).payload
    reconstructed = sum(
        width * sum(precision != "bf16" for row in side for precision in row)
        for width, side in zip(shape.widths, (grid.keys, grid.values), strict=True)
    )
    return {
        "proxy": policy["proxy"],
        "proxy_gap": None if policy["proxy"] is None else policy["proxy"] - mean_kl,
        "average_payload_bits": average_payload_bits(grid, shape.widths),
        "tokens_per_cache": tokens,
        "payload_bytes": size.payload,
        "scale_bytes": size.scales + size.once,
        "total_bytes": sum(size),
        "bf16_bytes": dense,
        "compression": dense / sum(size),
        "reconstruction_bytes": reconstructed * tokens * torch.bfloat16.itemsize,
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
