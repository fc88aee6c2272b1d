"""Sensitivities of all units at once, from gradients: the second-order picture of the KL.

Near the reference KL(p ‖ q) ≈ ½ · δᵀ F δ with δ the change of the logits and F = diag(q) − q qᵀ. For a label y drawn
from q itself the score e_y − q has covariance F, so one backward pass of Σ_t ε_t · log q(y_t), with random signs ε_t,
gives at every layer's keys and values a gradient g with E[⟨g, Δ⟩²] = Σ_t δ_tᵀ F_t δ_t for any change Δ of them that
changes the logits by δ to first order. For a unit with quantization error Δ_u take a_u = ⟨g, Δ_u⟩, a number for each
block and probe: ½ · E[a_u²] is the unit's KL summed over the block's positions, for every unit and every precision from
the same pass, and a policy's is ½ · E[(Σ_u a_u)²], with the interactions of its units. (Amari, Natural Gradient Works
Efficiently in Learning, 1998: KL and Fisher information; Hutchinson, 1989: random probes.)

What is differentiated is what *later* positions read back: a step's own key and value are exact (docs/method.md,
"Cache rule"). From when on they do depends on when a scheme stores a token (``Timing``): a group of tokens that shares
a scale is exact until it is full. So there is a gradient for each timing, all from the same passes.

The gradients do not depend on the quantizer. Whatever precision is to be scored, its errors are taken afterwards from
the same stored keys and values: it costs a reconstruction and a product, and no pass. They can be kept in a file, too
(see ``kept_gradients``), and scored later.

Axes: P probes, B blocks, T tokens, L layers, H heads, R quantized precisions, W timings; tensors of a layer
[B, 2H, T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstages.cache.interventions import check_finite, read_back
from kvstages.cache.offsets import Contexts
from kvstages.cache.one_pass import BlockCache, read_stored
from kvstages.cache.precision_grid import PARTS
from kvstages.cache.rounding import storage_rounding
from kvstages.cache.schemes import PUBLISHED, SIDES, Method, precision
from kvstages.cache.sides import join, part
from kvstages.measure.execution import PASS_TOKENS, dense_grid, position_slices
from kvstages.measure.sweep import relative_error
from kvstages.models.decoder import Decoder

Error = dict[tuple[str, str], Tensor]
# Logits, their softmax, a probe's scores and their sign's product; three in FP64 on the way to the softmax.
SCORE_COPIES = 10
# Precisions whose errors are multiplied with the gradients at once: with so many the sums are those of one alone, to
# the last digit; with more they may not be.
PRODUCT_COLUMNS = 4


class Timing(NamedTuple):
    """When tokens are stored quantized: their own step apart, how many stay exact at first, how many share a scale and
    so wait for each other, how many are recent. The plain one is that of every scheme that stores a token at once,
    whatever its first tokens: those have no error."""

    first: int = 0
    tokens: int = 1
    recent: int = 0

    @classmethod
    def of(cls, method: Method) -> Timing:
        return cls(method.first, method.tokens, method.recent) if method.delayed else cls()

    def mask(self, tokens: int) -> Tensor:
        """Whether the query of position t reads position j as it is stored, bool [t, j]."""
        return read_stored(Method(share=f"channel{self.tokens}", first=self.first, recent=self.recent), tokens)


def timings_of(precisions: Iterable[str]) -> tuple[Timing, ...]:
    """The timings of some precisions' keys and values, each once; the plain one is the first."""
    methods = [precision(name).method(side) for name in precisions for side in SIDES]
    return tuple(dict.fromkeys(map(Timing.of, [PUBLISHED, *methods])))


class BlockGradients(NamedTuple):
    """What some blocks of a window give, the first of them number ``first``.

    ``stored``: keys and values as the reference stores them [L, B, 2H, T, D]. ``gradients`` [W, L, B, 2H, P, T, D]: of
    each timing and probe, with respect to what later positions read back. ``widths``: of keys and of values; D is the
    larger.
    """

    first: int
    stored: Tensor
    gradients: Tensor
    widths: tuple[int, int]


class GradientCache(BlockCache):
    """All positions of a block in one pass, unquantized, with zeros added to what later positions read back.

    The gradient of the logits with respect to a zero is the gradient with respect to the stored keys and values, all
    that follows from them included. There is a zero for each class of reads that the timings tell apart; those of the
    classes in which a timing reads the stored value add up to its gradient. Rounding to BF16 counts as the identity:
    the reference's rounding errors stay what they are, as in a sweep (see ``rounding.SharedRounding``).
    """

    def __init__(self, model: Decoder, device: torch.device, tokens: int, timings: Sequence[Timing]):
        super().__init__(dense_grid(model), device)
        masks = torch.stack([timing.mask(tokens) for timing in timings])
        reads = masks.flatten(1).T.unique(dim=0)
        # [C, W]: which timings read the stored value in each class; [C, t, j]: which reads are in it.
        self.members = reads[reads.any(dim=1)]
        classes = (masks.unsqueeze(0) == self.members.view(*self.members.shape, 1, 1)).all(dim=1)
        past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        exact = past & ~classes.any(dim=0)
        self.shown = torch.cat((*classes, exact), dim=1).to(device)
        self.stored: list[Tensor] = []
        self.added: list[list[Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, (C + 1) T, D]: as stored, once for each class, then as they are."""
        both = join(keys, values)
        check_finite(both.detach(), layer)
        both = both + (storage_rounding(both, layer, 0) - both).detach()
        added = [torch.zeros_like(both, requires_grad=True) for _ in self.members]
        self.stored.append(both.detach())
        self.added.append(added)
        return part(torch.cat((*(both + zero for zero in added), both), dim=2), keys, values)

    def mask(self, new: int, layer: int) -> Tensor | None:
        return self.shown


def draws(probes: int, blocks: range, tokens: int) -> Tensor:
    """Random numbers of each probe and block: those of labels and those of signs, FP64 [P, B, 2, T].

    Each block draws by itself, seeded with its number and the probe's, on the CPU: a draw depends neither on which
    blocks go through the model together nor on the device.
    """
    # Not a torch.Generator: of its seed only the lower 32 bits count.
    numbers = [
        [np.random.default_rng([probe, block]).random((2, tokens)) for block in blocks] for probe in range(probes)
    ]
    return torch.from_numpy(np.array(numbers))


class Scores:
    """Signed scores ε_t · (e_y − q_t) of logits [B, t, V], a probe at a time."""

    def __init__(self, logits: Tensor):
        wide = logits.detach().double().softmax(dim=-1)
        self.q = wide.to(logits.dtype)
        self.cumulative = wide.cpu().cumsum(dim=-1)

    def draw(self, numbers: Tensor) -> Tensor:
        """The scores [B, t, V] that random numbers [B, 2, t] give."""
        places, signs = numbers.unbind(dim=1)
        places = (places * self.cumulative[..., -1]).unsqueeze(-1)
        labels = torch.searchsorted(self.cumulative, places, right=True).clamp_(max=self.q.shape[-1] - 1)
        signs = torch.where(signs < 0.5, -1.0, 1.0).to(self.q).unsqueeze(-1)
        chosen = torch.arange(self.q.shape[-1], device=self.q.device) == labels.to(self.q.device)
        return (chosen.to(self.q.dtype) - self.q) * signs


def state_gradients(model: Decoder, states: Tensor, numbers: Tensor, memory: int) -> Tensor:
    """Gradients of each probe's scores with respect to the states [B, T, E] after the last layer: [P, B, T, E].

    Logits are computed a slice of positions at a time; each position's are its state's alone. ``numbers`` [P, B, 2, T].
    """
    found = states.new_empty(len(numbers), *states.shape)
    for positions in position_slices(model, *states.shape[:2], memory, SCORE_COPIES):
        piece = states.detach()[:, positions].requires_grad_()
        with torch.enable_grad():
            logits = model.logits(piece)
        scores = Scores(logits)
        for probe, drawn in enumerate(numbers):
            with torch.enable_grad():
                through = _Given.apply(logits, scores.draw(drawn[:, :, positions]))
            (found[probe, :, positions],) = torch.autograd.grad(through, piece, retain_graph=probe + 1 < len(numbers))
    return found


class _Given(torch.autograd.Function):
    """A number whose gradient with respect to a tensor is given. ``torch.autograd.grad`` takes one, too, but imports
    PyTorch's compiler for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def block_gradients(
    model: Decoder, tokens: Tensor, probes: int, timings: Sequence[Timing], memory: int, first_block: int = 0
) -> BlockGradients:
    """Gradients of blocks [B, T] that go through the model together: a forward pass, and a backward pass a probe.

    ``memory`` (bytes) bounds the logits.
    """
    cache = GradientCache(model, tokens.device, tokens.shape[1], timings)
    with torch.enable_grad():
        states = model.run_layers(model.embed(tokens), cache)
    numbers = draws(probes, range(first_block, first_block + len(tokens)), tokens.shape[1])
    at_states = state_gradients(model, states, numbers, memory)
    stored = torch.stack(cache.stored)
    members = cache.members.T.to(stored.device, stored.dtype)
    found = stored.new_empty(len(timings), *stored.shape[:3], probes, *stored.shape[3:])
    flat = [zero for added in cache.added for zero in added]
    for probe in range(probes):
        with torch.enable_grad():
            through = _Given.apply(states, at_states[probe])
        gradients = torch.autograd.grad(through, flat, retain_graph=probe + 1 < probes)
        of_classes = torch.stack(gradients).unflatten(0, (len(stored), -1))
        for timing, member in enumerate(members):
            found[timing, :, :, :, probe] = torch.einsum("c,lcbhtd->lbhtd", member, of_classes)
    return BlockGradients(first_block, stored, found, model.shape.widths)


@torch.no_grad()
def window_gradients(
    model: Decoder,
    tokens: Tensor,
    probes: int,
    timings: Sequence[Timing],
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Iterator[BlockGradients]:
    """``block_gradients`` of all blocks of a window [B, T], as many at a time as fit ``memory`` (bytes)."""
    step = max(1, memory // 2 // graph_bytes(model, tokens.shape[1], probes, len(timings)))
    step = min(step, max(1, PASS_TOKENS[tokens.device.type] // tokens.shape[1]))
    for start in range(0, len(tokens), step):
        blocks = tokens[start : start + step]
        yield block_gradients(model, blocks, probes, timings, memory, start)
        progress((start + len(blocks)) / len(tokens))


def project(
    found: BlockGradients, timings: Sequence[Timing], precisions: Sequence[str], contexts: Contexts | None = None
) -> tuple[Tensor, Error]:
    """What some blocks tell of precisions: ``a_u`` and the reconstruction errors of their keys and values.

    a_u: FP64 [P, B, L, 2H, R], a layer's tensors being the keys of the heads and then their values. Errors: relative
    squared error as in a sweep, {(part, precision): [L, H, B]}. ValueError for a precision whose timing is not among
    those of the gradients.
    """
    layers, blocks, tensors = found.stored.shape[:3]
    probes, heads = found.gradients.shape[4], tensors // 2
    which = [[_place(timings, name, side) for name in precisions] for side in SIDES]
    projections = torch.empty(probes, blocks, layers, tensors, len(precisions), dtype=torch.float64)
    changes = [(side, name) for side in PARTS for name in precisions]
    wrong = {change: torch.empty(layers, heads, blocks, dtype=torch.float64) for change in changes}
    for layer, both in enumerate(found.stored):
        errors = []
        for name in precisions:
            errors.append(read_back(both, name, layer, found.widths, contexts) - both)
            for side in PARTS:
                wrong[side, name][layer] = relative_error(errors[-1], both, side).cpu()
        flat = torch.stack(errors, dim=-1).flatten(2, 3)
        for side, rows in zip(which, (slice(0, heads), slice(heads, tensors)), strict=True):
            for timing in set(side):
                gradients = found.gradients[timing, layer, :, rows].flatten(3).contiguous()
                alike = torch.tensor([index for index, place in enumerate(side) if place == timing])
                for own in alike.split(PRODUCT_COLUMNS):
                    product = gradients @ flat[:, rows][..., own]
                    projections[:, :, layer, rows, own] = product.permute(2, 0, 1, 3).cpu().double()
    return projections, wrong


def window_projections(
    model: Decoder,
    tokens: Tensor,
    precisions: Sequence[str],
    probes: int,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
    keep: Callable[[BlockGradients], None] = lambda found: None,
) -> tuple[Tensor, Error]:
    """``project`` of all blocks of a window [B, T]; ``keep`` is given the gradients of each slice of them."""
    timings = timings_of(precisions)

    def parts() -> Iterator[tuple[Tensor, Error]]:
        for found in window_gradients(model, tokens, probes, timings, memory, progress):
            keep(found)
            yield project(found, timings, precisions, model.contexts)

    return joined(parts())


def joined(parts: Iterable[tuple[Tensor, Error]]) -> tuple[Tensor, Error]:
    """Projections and errors of slices of a window as those of all of its blocks."""
    found, wrong = zip(*parts, strict=True)
    return torch.cat(found, dim=1), {change: torch.cat([each[change] for each in wrong], dim=2) for change in wrong[0]}


def graph_bytes(model: Decoder, tokens: int, probes: int, timings: int) -> int:
    """Estimate of the memory that one block keeps for its backward passes, and of its gradients, in bytes.

    Activations of every layer (about 30 of width E a token, and the scores of attention over T positions as they are
    and T for each timing, three times), the gradients of every probe and timing, and those of every probe where the
    output layer begins.
    """
    shape, size = model.shape, model.dtype.itemsize
    stored = 2 * shape.heads * max(shape.widths)
    layer = tokens * (30 * shape.width + (probes * timings + 2 * timings) * stored)
    layer += tokens * tokens * 3 * (1 + timings) * shape.query_heads
    return size * (shape.layers * layer + probes * tokens * shape.width)


def _place(timings: Sequence[Timing], name: str, side: str) -> int:
    timing = Timing.of(precision(name).method(side))
    if timing not in timings:
        raise ValueError(
            f"precision {name}: no gradients of its timing (first {timing.first}, tokens that share a scale "
            f"{timing.tokens}, recent {timing.recent}); expected a pass that was told of it"
        )
    return timings.index(timing)
