"""What the stages that train have in common: the arm from its options, the shared reference, one training from the
start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvstages.files.ledger import sha256
from kvstages.measure.adaptation import LOSS_BYTES, Arm, adapt, training_bytes
from kvstages.measure.calibration import calibrated
from kvstages.measure.execution import check_memory
from kvstages.measure.frozen import Frozen, shared
from kvstages.models.checkpoints import load_model
from kvstages.models.gpt2_nano import GPT


@dataclass(frozen=True)
class Training:
    """A model's file, the dtype of its weights, where it is trained, and on which token ids [B, T]; memory in bytes.

    ``calibration``: a file of the stage calibrate, for schemes that need one. It stays that of the model before
    training.
    """

    path: Path
    dtype: torch.dtype
    place: torch.device
    tokens: Tensor
    memory: int
    calibration: Path | None = None

    def frozen(self, batch: int) -> Frozen:
        """The reference, which all trainings of a process on the same batches in the same dtype share."""
        window = self.tokens.cpu().numpy().tobytes()
        key = (sha256(self.path), self.dtype, self.place, window, tuple(self.tokens.shape), batch, self.memory)
        return shared(key, lambda: Frozen(self.original, self.tokens, batch, self.memory))

    def run(
        self,
        arm: Arm,
        seed: int,
        progress: Callable[[float], None] = lambda done: None,
        after: Callable[[GPT, int], None] = lambda model, step: None,
    ) -> tuple[GPT, list[dict[str, float]]]:
        """The trained model and its curve; ``after`` is told the model and how many steps it has taken.

        ValueError where the memory is too little for a step.
        """
        frozen = self.frozen(arm.batch)
        model = copy.deepcopy(self.original)
        block = training_bytes(model, arm.batch, self.tokens.shape[1])
        check_memory(model, block, self.memory, arm.batch, LOSS_BYTES / model.dtype.itemsize)
        curve = adapt(model, self.tokens, arm, seed, frozen, self.memory, progress, lambda step: after(model, step))
        return model, curve

    @cached_property
    def original(self) -> GPT:
        """The model before training."""
        return self.load(self.dtype)

    def load(self, dtype: torch.dtype) -> GPT:
        """The same in any dtype."""
        return calibrated(load_model(self.path, dtype, self.place), self.calibration)
