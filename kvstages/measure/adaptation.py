"""Adaptation: a few steps of training with noise in the KV cache, against a frozen reference.

docs/method.md, "Adaptation". Loss = cross entropy + β · KL(student || reference). In training every key and value, the
current token's too, gets uniform noise of half an INT4 step; evaluation has none. The control arm takes the same steps
without noise.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstages.cache.interventions import check_finite
from kvstages.measure.adamw import AdamW
from kvstages.measure.execution import position_slices
from kvstages.models.decoder import CausalCache
from kvstages.models.gpt2_nano import GPT

# What a token id may be where no token follows.
NONE = -1
# Bytes of a logit in training: itself, the reference's, logarithms of both, and what their losses keep and return.
LOSS_BYTES = 48


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


def losses(logits: Tensor, following: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of the tokens that follow and KL(student || reference), both summed over positions, nats in FP32.

    Logits and reference [B, t, V]; ids [B, t] of the tokens that follow, NONE where there is none.
    """
    log_p = F.log_softmax(logits.float(), dim=-1)
    log_q = F.log_softmax(reference.float(), dim=-1)
    cross_entropy = F.nll_loss(log_p.flatten(0, 1), following.flatten(), ignore_index=NONE, reduction="sum")
    return cross_entropy, (log_p.exp() * (log_p - log_q)).sum(dim=-1).sum()


class Frozen:
    """The reference's logits of each batch: from its states after the last layer and its own output layer.

    Kept where those of all batches fit a quarter of ``memory`` (bytes), else computed anew at each step.
    """

    @torch.no_grad()
    def __init__(self, model: GPT, tokens: Tensor, arm: Arm, memory: int):
        self.head = copy.deepcopy(model.lm_head)
        chosen = {tuple(rows) for rows in itertools.islice(batches(len(tokens), arm.batch), arm.steps)}
        causal = CausalCache(tokens.device)
        self.states = {rows: model.run_layers(model.embed(tokens[list(rows)]), causal) for rows in sorted(chosen)}
        elements = sum(x.shape[0] * x.shape[1] for x in self.states.values()) * model.shape.vocabulary
        self.keeps = elements * model.dtype.itemsize <= memory // 4
        self.kept: dict[tuple[tuple[int, ...], int], Tensor] = {}

    @torch.no_grad()
    def logits(self, rows: tuple[int, ...], positions: slice) -> Tensor:
        """Logits [batch, t, V] of some positions of a batch."""
        found = self.kept.get((rows, positions.start))
        if found is None:
            found = self.head(self.states[rows][:, positions])
        if self.keeps:
            self.kept[rows, positions.start] = found
        return found


def training_bytes(model: GPT, batch: int, tokens: int) -> int:
    """Estimate of what the layers keep of one batch for its backward pass, in bytes: about 30 activations of width E a
    token, and the scores of attention three times."""
    shape = model.shape
    layer = batch * tokens * (30 * shape.width + 3 * shape.query_heads * tokens)
    return model.dtype.itemsize * shape.layers * layer


def adapt(
    model: GPT,
    tokens: Tensor,
    arm: Arm,
    seed: int,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> list[dict[str, float]]:
    """Train ``model`` in place, in its own dtype; one record a step (loss, cross_entropy, kl, gradient_norm).

    Token ids [B, T] of the adaptation window. The frozen reference is the model as it comes in; its logits are
    computed by the path and with the shape of training, so that the KL of a student that has not moved and hears no
    noise is exactly 0. ``memory`` (bytes) bounds what is kept of the logits: losses and their gradients are computed a
    slice of positions at a time. ValueError where the loss ceases to be finite.
    """
    frozen = Frozen(model, tokens, arm, memory)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = NoiseCache(arm.noise_bits, generator)
    model.requires_grad_(True).train()
    optimizer = AdamW(model.parameters(), arm.learning_rate, arm.weight_decay)
    curve = []
    chosen = batches(len(tokens), arm.batch)
    following = F.pad(tokens[:, 1:], (0, 1), value=NONE)
    slices = position_slices(model, arm.batch, tokens.shape[1], memory, LOSS_BYTES / model.dtype.itemsize)
    for step in range(arm.steps):
        rows = next(chosen)
        model.zero_grad()
        states = model.run_layers(model.embed(tokens[rows]), cache)
        # The output layer's backward pass ends at its own copy of the states; that of the layers starts from there.
        ends = states.detach().requires_grad_()
        cross_entropy, kl = torch.zeros(2, device=tokens.device)
        for positions in slices:
            targets = following[rows, positions]
            logits = model.logits(ends[:, positions])
            parts = losses(logits, targets, frozen.logits(tuple(rows), positions))
            own, distance = parts[0] / (following[rows] != NONE).sum(), parts[1] / ends[..., 0].numel()
            (own + arm.beta * distance).backward()
            cross_entropy, kl = cross_entropy + own.detach(), kl + distance.detach()
        (states * ends.grad).sum().backward()
        loss = cross_entropy + arm.beta * kl
        norm = nn.utils.clip_grad_norm_(model.parameters(), arm.clip)
        optimizer.step()
        figures = {"loss": loss, "cross_entropy": cross_entropy, "kl": kl, "gradient_norm": norm}
        curve.append({name: float(value) for name, value in figures.items()})
        if not all(map(torch.isfinite, (loss, norm))):
            raise ValueError(f"adaptation, seed {seed}, step {step}: loss {curve[-1]['loss']}; lower the learning rate")
        progress((step + 1) / arm.steps)
    model.requires_grad_(False).eval()
    return curve
