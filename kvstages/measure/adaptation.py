"""Adaptation: a few steps of training with noise in the KV cache, against a frozen reference.

docs/method.md, "Adaptation". Loss = cross entropy + β · KL(student || reference). In training every key and value, the
current token's too, gets uniform noise of half an INT4 step; evaluation has none. The control arm takes the same steps
without noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstages.cache.interventions import check_finite
from kvstages.measure.adamw import AdamW
from kvstages.models.gpt2_nano import GPT


@dataclass(frozen=True)
class Arm:
    """Settings of one adaptation; ``noise_bits`` None trains without noise (the control)."""

    noise_bits: int | None
    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    clip: float
    beta: float


class NoiseCache:
    """Keys and values of a whole block with fresh uniform noise in ± scale / (2 m), scale = max |x| over D.

    m is the largest code of the imitated precision, 7 for 4 bits. The noise's size is not differentiated through.
    """

    def __init__(self, bits: int | None, generator: torch.Generator):
        self.levels = None if bits is None else 2 ** (bits - 1) - 1
        self.generator = generator

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] to attend to, noise added."""
        check_finite(torch.stack((keys, values)).detach(), layer)
        if self.levels is None:
            return keys, values
        return self._noisy(keys), self._noisy(values)

    def _noisy(self, x: Tensor) -> Tensor:
        reach = x.detach().abs().amax(dim=-1, keepdim=True) / (2 * self.levels)
        uniform = torch.rand(x.shape, generator=self.generator, dtype=torch.float32, device=self.generator.device)
        return x + reach * uniform.mul_(2).sub_(1).to(x)

    def mask(self, new: int, layer: int) -> Tensor | None:
        return torch.ones(new, new, dtype=torch.bool, device=self.generator.device).tril()

    def seen(self) -> int:
        return 0


def batches(blocks: int, batch: int) -> Iterator[list[int]]:
    """Endless batches of block indices, in order and round the window."""
    position = 0
    while True:
        yield [(position + offset) % blocks for offset in range(batch)]
        position = (position + batch) % blocks


def losses(logits: Tensor, tokens: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the next tokens and KL(student ‖ reference), both means in nats, in FP32.

    Logits and reference [B, T, V], token ids [B, T].
    """
    log_p = F.log_softmax(logits.float(), dim=-1)
    log_q = F.log_softmax(reference.float(), dim=-1)
    cross_entropy = F.nll_loss(log_p[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return cross_entropy, (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()


@torch.no_grad()
def frozen_logits(model: GPT, tokens: Tensor, arm: Arm) -> dict[tuple[int, ...], Tensor]:
    """Logits [batch, T, V] of every batch of blocks that the arm's steps will take, before training."""
    chosen = {tuple(rows) for rows in itertools.islice(batches(len(tokens), arm.batch), arm.steps)}
    return {rows: model(tokens[list(rows)]) for rows in sorted(chosen)}


def adapt(
    model: GPT,
    tokens: Tensor,
    arm: Arm,
    seed: int,
    progress: Callable[[float], None] = lambda done: None,
) -> list[dict[str, float]]:
    """Train ``model`` in place, in its own dtype; one record a step (loss, cross_entropy, kl, gradient_norm).

    Token ids [B, T] of the adaptation window. The frozen reference is the model as it comes in; its logits are
    computed once for each batch that recurs, by the path and with the shape of training, so that the KL of a student
    that has not moved and hears no noise is exactly 0. ValueError where the loss ceases to be finite.
    """
    frozen = frozen_logits(model, tokens, arm)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = NoiseCache(arm.noise_bits, generator)
    model.requires_grad_(True).train()
    optimizer = AdamW(model.parameters(), arm.learning_rate, arm.weight_decay)
    curve = []
    chosen = batches(len(tokens), arm.batch)
    for step in range(arm.steps):
        rows = next(chosen)
        batch = tokens[rows]
        cross_entropy, kl = losses(model(batch, cache), batch, frozen[tuple(rows)])
        loss = cross_entropy + arm.beta * kl
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), arm.clip)
        optimizer.step()
        figures = {"loss": loss, "cross_entropy": cross_entropy, "kl": kl, "gradient_norm": norm}
        curve.append({name: float(value.detach()) for name, value in figures.items()})
        if not all(map(torch.isfinite, (loss, norm))):
            raise ValueError(f"adaptation, seed {seed}, step {step}: loss {curve[-1]['loss']}; lower the learning rate")
        progress((step + 1) / arm.steps)
    model.requires_grad_(False).eval()
    return curve
