"""Sensitivities of all units at once, from gradients: the second-order picture of the KL.

Near the reference KL(p ‖ q) ≈ ½ · δᵀ F δ with δ the change of the logits and F = diag(q) − q qᵀ. For a label y drawn
from q itself the score e_y − q has covariance F, so one backward pass of Σ_t ε_t · log q(y_t), with random signs ε_t,
gives at every layer's keys and values a gradient g with E[⟨g, Δ⟩²] = Σ_t δ_tᵀ F_t δ_t for any change Δ of them that
changes the logits by δ to first order. For a unit with quantization error Δ_u take a_u = ⟨g, Δ_u⟩, a number for each
block and probe: ½ · E[a_u²] is the unit's KL summed over the block's positions, for every unit and every precision from
the same pass, and a policy's is ½ · E[(Σ_u a_u)²], with the interactions of its units. (Amari, Natural Gradient Works
Efficiently in Learning, 1998: KL and Fisher information; Hutchinson, 1989: random probes.)

What is differentiated is what *later* positions read back: a step's own key and value are exact (STUDY.md, "The
cache").
Axes: P probes, B blocks, T tokens, L layers, H heads, R quantized precisions; tensors of a layer [B, 2H, T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvstages.cache.interventions import check_finite
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.precision_grid import PARTS
from kvstages.cache.rounding import storage_rounding
from kvstages.measure.execution import PASS_TOKENS, dense_grid
from kvstages.measure.sweep import read_back, reconstruction_error
from kvstages.models.gpt2_nano import GPT

Error = dict[tuple[str, str], Tensor]


class GradientCache(BlockCache):
    """All positions of a block in one pass, unquantized, with a zero added to what later positions read back.

    The gradient of the logits with respect to that zero is the gradient with respect to the stored keys and values,
    all that follows from them included. Rounding to BF16 counts as the identity in it: the reference's rounding errors
    stay what they are, as in a sweep (see ``rounding.SharedRounding``).
    """

    def __init__(self, model: GPT, device: torch.device):
        super().__init__(dense_grid(model), device)
        self.stored: list[Tensor] = []
        self.added: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, 2T, D]: as stored, then as they are."""
        both = torch.cat((keys, values), dim=1)
        check_finite(both.detach(), layer)
        both = both + (storage_rounding(both, layer, 0) - both).detach()
        added = torch.zeros_like(both, requires_grad=True)
        self.stored.append(both.detach())
        self.added.append(added)
        # Taken apart by chunk, whose backward pass is one copy; that of a slice is zeros, a copy and a sum.
        keys, values = torch.cat((both + added, both), dim=2).chunk(2, dim=1)
        return keys, values


class Scores:
    """Signed scores ε_t · (e_y − q_t) of the logits [B, T, V], a probe at a time.

    Each block draws by itself, seeded with its number and the probe's, on the CPU: a draw depends neither on which
    blocks go through the model together nor on the device.
    """

    def __init__(self, logits: Tensor, first_block: int):
        wide = logits.detach().double().softmax(dim=-1)
        self.q = wide.to(logits.dtype)
        self.cumulative = wide.cpu().cumsum(dim=-1)
        self.first_block = first_block

    def draw(self, probe: int) -> Tensor:
        """The scores [B, T, V] of one probe."""
        blocks, length, vocabulary = self.q.shape
        numbers = []
        for block in range(self.first_block, self.first_block + blocks):
            # Not a torch.Generator: of its seed only the lower 32 bits count.
            numbers.append(torch.from_numpy(np.random.default_rng([probe, block]).random((2, length))))
        places, signs = torch.stack(numbers, dim=1)
        places = (places * self.cumulative[..., -1]).unsqueeze(-1)
        labels = torch.searchsorted(self.cumulative, places, right=True).clamp_(max=vocabulary - 1)
        signs = torch.where(signs < 0.5, -1.0, 1.0).to(self.q).unsqueeze(-1)
        chosen = torch.arange(vocabulary, device=self.q.device) == labels.to(self.q.device)
        return (chosen.to(self.q.dtype) - self.q) * signs


def block_projections(
    model: GPT, tokens: Tensor, precisions: Sequence[str], probes: int, first_block: int = 0
) -> tuple[Tensor, Error]:
    """What one slice of a window's blocks tells: ``a_u`` and the reconstruction errors of its keys and values.

    a_u: FP64 [P, B, L, 2H, R], a layer's tensors being the keys of the heads and then their values. Errors: relative
    squared error as in a sweep, {(part, precision): [L, H, B]}. Token ids [B, T], the first block's number in its
    window; one forward pass, and a backward pass a probe, for all blocks, units and precisions together.
    """
    cache = GradientCache(model, tokens.device)
    with torch.enable_grad():
        logits = model(tokens, cache)
    scores = Scores(logits, first_block)
    # Rows of one product a tensor: [B, 2H, R, T · D].
    errors = [
        torch.stack([read_back(stored, precision) - stored for precision in precisions], dim=2).flatten(3)
        for stored in cache.stored
    ]
    found = torch.empty(probes, len(tokens), len(errors), *errors[0].shape[1:3], dtype=torch.float64)
    for probe in range(probes):
        gradients = torch.autograd.grad(logits, cache.added, scores.draw(probe), retain_graph=probe + 1 < probes)
        for layer, (gradient, error) in enumerate(zip(gradients, errors, strict=True)):
            found[probe, :, layer] = (error @ gradient.flatten(2).unsqueeze(-1)).squeeze(-1)
    wrong = {
        (part, precision): torch.stack([reconstruction_error(both, part, precision) for both in cache.stored]).cpu()
        for part in PARTS
        for precision in precisions
    }
    return found, wrong


@torch.no_grad()
def window_projections(
    model: GPT,
    tokens: Tensor,
    precisions: Sequence[str],
    probes: int,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[Tensor, Error]:
    """``block_projections`` of all blocks of a window [B, T], as many at a time as fit ``memory`` (bytes)."""
    found, wrong = zip(*_slices(model, tokens, precisions, probes, memory, progress), strict=True)
    return torch.cat(found, dim=1), {trial: torch.cat([each[trial] for each in wrong], dim=2) for trial in wrong[0]}


def _slices(
    model: GPT,
    tokens: Tensor,
    precisions: Sequence[str],
    probes: int,
    memory: int,
    progress: Callable[[float], None],
) -> Iterator[tuple[Tensor, Error]]:
    step = max(1, memory // graph_bytes(model, tokens.shape[1], len(precisions)))
    step = min(step, max(1, PASS_TOKENS[tokens.device.type] // tokens.shape[1]))
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        yield block_projections(model, part, precisions, probes, start)
        progress((start + len(part)) / len(tokens))


def graph_bytes(model: GPT, tokens: int, precisions: int) -> int:
    """Estimate of the memory that one block keeps for its backward passes, in bytes.

    Activations of every layer (about 30 of width E a token, and the scores of attention over 2T positions, three
    times), the errors of every precision, and of the logits four copies and two in FP64.
    """
    config = model.config
    size = model.lm_head.weight.element_size()
    layer = tokens * ((30 + 2 * precisions) * config.embedding_dim + 6 * config.num_heads * tokens)
    return size * config.num_layers * layer + (4 * size + 16) * tokens * config.vocab_size
