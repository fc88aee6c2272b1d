"""Adaptation: a few steps of training with a noisy or quantized KV cache, against a frozen reference.

docs/method.md, "Adaptation". Loss = cross entropy + β · KL(student || reference). An arm says what training does to
keys and values: nothing (a control), uniform noise, or the quantizer itself with straight-through gradients. Evaluation
has no noise. A seed draws the noise and, in arms that shuffle, the order of the batches; those of one seed take the
same blocks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstages.cache.interventions import check_finite
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.adamw import AdamW
from kvstages.measure.execution import position_slices
from kvstages.measure.frozen import Frozen, ordered_batches
from kvstages.measure.training_caches import NoiseCache, StraightThroughCache
from kvstages.models.decoder import Cache, CausalCache
from kvstages.models.gpt2_nano import GPT

# What a token id may be where no token follows.
NONE = -1
# Bytes of a logit in training: itself, the reference's, logarithms of both, and what their losses keep and return.
LOSS_BYTES = 48
# Weights that are compared at once.
SLICE = 1 << 20
NOISE, STRAIGHT_THROUGH = "noise", "straight-through"


@dataclass(frozen=True)
class Arm:
    """Settings of one adaptation. ``cache`` is None (the control), ``NOISE`` or ``STRAIGHT_THROUGH``; the last two
    take each tensor's precision from ``grid``. ``shuffled``: each seed has an order of batches of its own."""

    cache: str | None
    grid: PrecisionGrid | None
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    clip: float
    beta: float
    shuffled: bool = False


class CheckedCache(CausalCache):
    """Keys and values as the model computes them; ValueError where they are not finite."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        check_finite(torch.cat((keys, values), dim=1).detach(), layer)
        return keys, values


def training_cache(model: GPT, arm: Arm, generator: torch.Generator) -> Cache:
    """What the keys and values of one step go through."""
    if arm.grid is None:
        return CheckedCache(model.device)
    return NoiseCache(arm.grid, generator) if arm.cache == NOISE else StraightThroughCache(model, arm.grid)


def losses(logits: Tensor, following: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the tokens that follow and KL(student || reference), both summed over positions, nats in FP32.

    Logits [B, t, V]; ids [B, t] of the tokens that follow, NONE where there is none; the reference's logarithms of
    probabilities, FP32 [B, t, V].
    """
    return _Losses.apply(logits, following, log_q)


class _Losses(torch.autograd.Function):
    """Those losses and their gradient, operation for operation as PyTorch would take it, but in the same memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, following: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(logits.float(), dim=-1)
        ctx.dtype, ctx.log_p, ctx.p, ctx.gap, ctx.following = logits.dtype, log_p, log_p.exp(), log_p - log_q, following
        cross_entropy = F.nll_loss(log_p.flatten(0, 1), following.flatten(), ignore_index=NONE, reduction="sum")
        return cross_entropy, (ctx.p * ctx.gap).sum(dim=-1).sum()

    @staticmethod
    def backward(ctx: Any, of_cross_entropy: Tensor, of_kl: Tensor) -> tuple[Tensor, None, None]:
        # With respect to log p: p · gap is differentiated by both of its factors.
        gradient = ctx.gap.mul_(of_kl).mul_(ctx.p).add_(ctx.p.mul_(of_kl))
        known = (ctx.following != NONE).nonzero(as_tuple=True)
        gradient[*known, ctx.following[known]] -= of_cross_entropy
        found = torch._log_softmax_backward_data(gradient, ctx.log_p, -1, torch.float32)
        return found.to(ctx.dtype), None, None


def training_bytes(model: GPT, batch: int, tokens: int) -> int:
    """Estimate of what the layers keep of one batch for its backward pass, in bytes: about 30 activations of width E a
    token, and the scores of attention (of twice the positions where both exact and stored ones are offered) thrice."""
    shape = model.shape
    layer = batch * tokens * (30 * shape.width + 6 * shape.query_heads * tokens)
    return model.dtype.itemsize * shape.layers * layer


def adapt(
    model: GPT,
    tokens: Tensor,
    arm: Arm,
    seed: int,
    frozen: Frozen,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
    after: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """Train ``model`` in place, in its own dtype; one record a step (loss, cross_entropy, kl, gradient_norm).

    Token ids [B, T] of the adaptation window. ``frozen``: the reference on the same window. Its logits are computed by
    the path and with the shape of training, so that the KL of a student that has not moved and hears no noise is
    exactly 0. ``memory`` (bytes) bounds what is kept of the logits: losses and their gradients are computed a slice of
    positions at a time. ``after`` is told how many steps have been taken; it may measure the model and must not change
    it. ValueError names the step whose loss is not finite, or whose keys or values are not.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    parameters = list(model.requires_grad_(True).parameters())
    optimizer = AdamW(parameters, arm.learning_rate, arm.weight_decay)
    curve = []
    chosen = ordered_batches(len(tokens), arm.batch, seed if arm.shuffled else None)
    following = F.pad(tokens[:, 1:], (0, 1), value=NONE)
    slices = position_slices(model, arm.batch, tokens.shape[1], memory, LOSS_BYTES / model.dtype.itemsize)
    for step in range(arm.steps):
        rows = next(chosen)
        for parameter in parameters:
            parameter.grad = None
        cache = training_cache(model, arm, generator)
        try:
            states = model.run_layers(model.embed(tokens[rows]), cache)
        except ValueError as error:
            raise ValueError(f"adaptation, seed {seed}, step {step}: {error}; lower the learning rate") from None
        # The output layer's backward pass ends at its own copy of the states; that of the layers starts from there.
        ends = states.detach().requires_grad_()
        cross_entropy, kl = torch.zeros(2, device=tokens.device)
        for positions in slices:
            targets = following[rows, positions]
            logits = model.logits(ends[:, positions])
            parts = losses(logits, targets, frozen.log_probabilities(tuple(rows), positions))
            own, distance = parts[0] / (following[rows] != NONE).sum(), parts[1] / ends[..., 0].numel()
            (own + arm.beta * distance).backward()
            cross_entropy, kl = cross_entropy + own.detach(), kl + distance.detach()
        (states * ends.grad).sum().backward()
        loss = cross_entropy + arm.beta * kl
        norm = nn.utils.clip_grad_norm_(parameters, arm.clip)
        figures = {"loss": loss, "cross_entropy": cross_entropy, "kl": kl, "gradient_norm": norm}
        curve.append({name: float(value) for name, value in figures.items()})
        if not all(map(torch.isfinite, (loss, norm))):
            raise ValueError(f"adaptation, seed {seed}, step {step}: loss {curve[-1]['loss']}; lower the learning rate")
        optimizer.step()
        progress((step + 1) / arm.steps)
        after(step + 1)
    model.requires_grad_(False).zero_grad()
    return curve


def change(model: GPT, before: GPT) -> dict[str, float | int]:
    """How far training has moved the weights: how many there are, the share that changed at all, the norm of the change
    over that of the weights, and the mean and the largest change of one of them."""
    count = moved = 0
    squares = whole = absolute = largest = 0.0
    for pair in zip(model.parameters(), before.parameters(), strict=True):
        # Slices, so that a large tensor has no copy in FP64.
        for own, old in zip(*(parameter.flatten().split(SLICE) for parameter in pair), strict=True):
            old = old.double()
            step = own.double() - old
            count, moved = count + step.numel(), moved + int((step != 0).sum())
            squares, whole = squares + float(step.square().sum()), whole + float(old.square().sum())
            absolute, largest = absolute + float(step.abs().sum()), max(largest, float(step.abs().max()))
    return {
        "weights": count,
        "changed_share": moved / count,
        "relative_change": (squares / whole) ** 0.5,
        "mean_change": absolute / count,
        "largest_change": largest,
    }
