"""The settings of an adaptation tried on the reserved window: every learning rate, β and number of steps.

A training has no schedule, so one with few steps is the beginning of one with more: each learning rate and β is trained
once, and measured at every number of steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.measure.adaptation import Arm
from kvstages.measure.adapted import MEANS, evaluate_adapted
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.setting import Setting
from kvstages.measure.training_jobs import Training
from kvstages.models.gpt2_nano import GPT


@dataclass(frozen=True)
class Grid:
    """What is tried: a cache with its precisions, and every combination of steps, learning rates and β."""

    cache: str
    precisions: PrecisionGrid
    steps: tuple[int, ...]
    learning_rates: tuple[float, ...]
    betas: tuple[float, ...]
    batch: int
    weight_decay: float
    clip: float
    shuffled: bool
    seed: int


def run_grid(
    training: Training,
    grid: Grid,
    reserved: Tensor,
    setting: Setting,
    progress: Callable[[float], None] = lambda done: None,
) -> list[dict[str, float]]:
    """A row for the model before training (steps 0) and for each combination, by learning rate, β and steps.

    ``reserved``: token ids [B, T] that each is measured on, under the grid's precisions and with a BF16 cache.
    """
    original = training.load(setting.dtype)
    dense = dense_grid(original)
    reference = torch.empty(*reserved.shape, original.shape.vocabulary, dtype=setting.dtype, device=training.place)
    for where, logits in window_logits(original, reserved, dense, setting, training.memory):
        reference[where] = logits

    def measure(model: GPT, learning_rate: float, beta: float, steps: int) -> dict[str, float]:
        if model.dtype != setting.dtype:
            converted = training.load(setting.dtype)
            converted.load_state_dict(model.state_dict())
            model = converted
        means = evaluate_adapted(model, reserved, [grid.precisions, dense], reference, setting, training.memory)
        (quantized, unquantized) = (dict(zip(MEANS, each, strict=True)) for each in means.mean(dim=1).tolist())
        return {
            "learning_rate": learning_rate,
            "beta": beta,
            "steps": steps,
            **quantized,
            "bf16_mean_kl": unquantized["mean_kl"],
            "bf16_cross_entropy": unquantized["cross_entropy"],
        }

    rows = [measure(original, 0.0, 0.0, 0)]
    pairs = list(itertools.product(grid.learning_rates, grid.betas))
    for done, (learning_rate, beta) in enumerate(pairs):
        arm = Arm(
            grid.cache,
            grid.precisions,
            max(grid.steps),
            grid.batch,
            learning_rate,
            grid.weight_decay,
            grid.clip,
            beta,
            grid.shuffled,
        )

        def after(model: GPT, step: int, learning_rate: float = learning_rate, beta: float = beta) -> None:
            if step in grid.steps:
                rows.append(measure(model, learning_rate, beta, step))

        training.run(arm, grid.seed, lambda part, done=done: progress((done + part) / len(pairs)), after)
    return rows
