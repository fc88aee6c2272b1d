"""Distances between a policy's next-token distributions and the reference's (docs/method.md, "Measuring").

Exponentials and sums in FP64: in FP32 the scores of INT8 drown in rounding. Axes: B blocks, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows are taken a few at a time: on a CPU so that three FP64 copies stay in its cache, on a GPU to bound them.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 25}
# A KL is the difference of an expectation and a logarithm, and good to about 1e-15 nats. Below this it is computed
# anew, as a sum of terms that are never negative, which costs a second exponential.
CLOSE = 1e-9
# For |x| below this the series of exp(x) − 1 − x is exact to rounding; above it the subtraction is.
SERIES = 1 / 32
# Rows whose every |x| is below this need fewer terms of it.
SHORT_SERIES = 1 / 4096


@dataclass(frozen=True)
class Normalizer:
    """What turns logits into probabilities, exp(logit − largest) / total: FP64 [...] of logits [..., V]."""

    largest: Tensor
    total: Tensor

    @classmethod
    def room(cls, *positions: int, device: torch.device) -> Normalizer:
        """One that is still to be filled. Where logits come a slice of positions at a time, results that each slice
        kept in memory of its own would lie between the slices' logits, and these would find no room again."""
        return cls(*torch.empty(2, *positions, dtype=torch.float64, device=device))

    def fill(self, where: tuple[slice, ...], other: Normalizer) -> None:
        """Set that of some of the positions."""
        self.largest[where], self.total[where] = other.largest, other.total

    def at(self, where: slice | tuple[slice, ...]) -> Normalizer:
        """That of some of the positions."""
        return Normalizer(self.largest[where], self.total[where])

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """−log p in nats of tokens with the logits ``targets`` [...]: FP64 [...].

        From the largest logit: exact where the prediction is sure, and never below 0.
        """
        return self.total.log() + (self.largest - targets.double())


@torch.no_grad()
def normalizer(logits: Tensor) -> Normalizer:
    """That of logits [..., V]."""
    flat = logits.reshape(-1, logits.shape[-1])
    largest, total = torch.empty(2, len(flat), dtype=torch.float64, device=logits.device)
    for (rows,), (own,), (own_largest, own_total) in _chunks([flat], 1, [largest, total]):
        _lower(rows.copy_(own), own_largest, own.dtype == torch.float64)
        _sum_rows(rows.exp_(), own_total)
    return Normalizer(largest.view(logits.shape[:-1]), total.view(logits.shape[:-1]))


@torch.no_grad()
def divergence(logits: Tensor, reference: Tensor, of_reference: Normalizer | None = None) -> Tensor:
    """D(p ‖ q) in nats for each position, FP64 [...], p the softmax of logits [..., V] and q of the reference.

    Never negative, and 0 only where p = q as far as FP64 tells. Any finite logits will do. ``of_reference``, the
    reference's normalizer [...], spares its exponentials where one reference serves many.
    """
    other = normalizer(reference) if of_reference is None else of_reference
    return divergences_and_normalizer(logits, [(reference, other)])[0][0]


@torch.no_grad()
def divergences_and_normalizer(
    logits: Tensor, references: Sequence[tuple[Tensor, Normalizer]]
) -> tuple[list[Tensor], Normalizer]:
    """``divergence`` from each of some references, given with their normalizers; and the normalizer of the logits, FP64
    [...]. The same exponentials of the logits give all of it.

    With a and b the logits less their row's largest and weights w = exp a, D(p ‖ q) is
    Σ w · (a − b) / Σ w − log(Σ w / Σ exp b). Where the two are close it is taken from ``_close_divergence``.
    """
    own, gaps = _expected_gaps(logits, [(reference, other.largest) for reference, other in references])
    found = [
        _divergence(logits, reference, own, other, gap)
        for (reference, other), gap in zip(references, gaps, strict=True)
    ]
    return found, own


def _divergence(logits: Tensor, reference: Tensor, own: Normalizer, other: Normalizer, gap: Tensor) -> Tensor:
    """D(p ‖ q) [...] from both normalizers and the expected gap Σ w · (a − b) / Σ w [...]."""
    result = (gap - _log_ratio(own.total, other.total)).view(-1)
    close = (result < CLOSE).nonzero().squeeze(1)
    if len(close):
        width = logits.shape[-1]
        flat, others = logits.reshape(-1, width), reference.reshape(-1, width)
        rows = min(len(close), max(1, CHUNK_ELEMENTS[logits.device.type] // width))
        room = torch.empty(4, rows, width, dtype=torch.float64, device=logits.device)
        for part in close.split(rows):
            mine, theirs = flat.index_select(0, part), others.index_select(0, part)
            # Many are equal: the first position of a block has no past.
            differ = (mine - theirs).abs().amax(dim=-1) > 0
            result[part[~differ]] = 0
            if differ.any():
                mine, theirs = mine[differ], theirs[differ]
                result[part[differ]] = _close_divergence(mine, theirs, room[:, : len(mine)])
    return result.view(gap.shape)


def _close_divergence(logits: Tensor, reference: Tensor, room: Tensor) -> Tensor:
    """D(p ‖ q) of rows [n, V], exact to rounding however close they are: FP64 [n]; ``room`` FP64 [4, n, V].

    For d = b − a, D(p ‖ q) = log Σ p exp d − Σ p d, whatever constant is added to d. With δ = d − Σ p d, whose
    expectation is 0, that is log(1 + Σ p φ(δ)), φ(x) = exp(x) − 1 − x: no term is negative, and none is lost beside a
    larger one of the other sign.
    """
    own, other, x, terms = room.unbind()
    total, mean, above, unused = torch.empty(4, len(own), dtype=torch.float64, device=own.device)
    _lower(own.copy_(logits), unused, logits.dtype == torch.float64)
    _lower(other.copy_(reference), unused, reference.dtype == torch.float64)
    torch.sub(other, own, out=x)
    weights = own.exp_()
    _sum_rows(weights, total)
    _sum_rows(torch.mul(weights, x, out=terms), mean)
    shift = mean.div_(total).unsqueeze(-1)
    x.sub_(shift)
    # Row by row, so that no row's result depends on those beside it.
    short = torch.abs(x, out=terms).amax(dim=-1) < SHORT_SERIES
    _series(x, 5, terms).mul_(weights)
    if not short.all():
        terms[~short] = _above_tangent(x[~short], weights[~short], other.sub_(shift)[~short])
    _sum_rows(terms, above)
    return above.div_(total).log1p_()


def _series(x: Tensor, order: int, out: Tensor) -> Tensor:
    """φ(x) = exp(x) − 1 − x as its Taylor series up to x to the power ``order``."""
    out.fill_(1 / math.factorial(order))
    for power in range(order - 1, 1, -1):
        out.mul_(x).add_(1 / math.factorial(power))
    return out.mul_(x).mul_(x)


def _above_tangent(x: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
    """w · φ(x), φ(x) = exp(x) − 1 − x being by how much exp lies above its tangent at 0; w · exp(x) = exp(logits)."""
    series = _series(x.clamp(-SERIES, SERIES), 8, torch.empty_like(x)).mul_(weights)
    # Where w is too small for FP64, exp(x) may be too large for it: their product is neither.
    far = torch.where(x < 1, torch.expm1(x).sub_(x).mul_(weights), logits.exp().sub_(weights * (1 + x)))
    return torch.where(x.abs() <= SERIES, series, far)


def _expected_gaps(logits: Tensor, references: Sequence[tuple[Tensor, Tensor]]) -> tuple[Normalizer, list[Tensor]]:
    """The logits' normalizer, and Σ w · (a − b) / Σ w (see ``divergences_and_normalizer``) of each reference, which is
    given with its largest logits: FP64 [...] of [..., V]."""
    flat = [each.reshape(-1, each.shape[-1]) for each in (logits, *(reference for reference, _ in references))]
    tops = [largest.reshape(-1) for _, largest in references]
    largest, total, *gaps = torch.empty(2 + len(tops), len(flat[0]), dtype=torch.float64, device=logits.device)
    for (rows, others, weights), (own, *each), (own_largest, own_total, *results) in _chunks(
        flat, 3, [largest, total, *gaps, *tops]
    ):
        _lower(rows.copy_(own), own_largest, own.dtype == torch.float64)
        torch.exp(rows, out=weights)
        _sum_rows(weights, own_total)
        for other, gap, top in zip(each, results[: len(tops)], results[len(tops) :], strict=True):
            _lower_by(others.copy_(other), top, other.dtype == torch.float64)
            _sum_rows(torch.sub(rows, others, out=others).mul_(weights), gap)
    shape = logits.shape[:-1]
    return Normalizer(largest.view(shape), total.view(shape)), [gap.div_(total).view(shape) for gap in gaps]


def _chunks(
    inputs: list[Tensor], copies: int, outputs: list[Tensor]
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]]:
    """A few rows at a time: FP64 room [n, V], as often as ``copies``, and rows [n, V] and [n] of inputs and outputs.

    The room is the same for all chunks; each row's results are to be independent of the chunking.
    """
    rows, width = inputs[0].shape
    step = min(rows, max(1, CHUNK_ELEMENTS[inputs[0].device.type] // width))
    room = torch.empty(copies, step, width, dtype=torch.float64, device=inputs[0].device)
    whole = room.unbind()
    parts = [zip(*(tensor.split(step) for tensor in tensors), strict=True) for tensors in (inputs, outputs)]
    for own, results in zip(*parts, strict=True):
        yield whole if len(own[0]) == step else room[:, : len(own[0])].unbind(), own, results


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    """Sum each row [n, V] into ``out`` [n], the same whatever n: torch would share out a single long row among
    threads, and so add in another order; it never gets a single one."""
    if len(rows) > 1:
        torch.sum(rows, dim=-1, out=out)
    else:
        out.copy_(rows.expand(2, -1).sum(dim=-1)[:1])


def _lower(rows: Tensor, largest: Tensor, wide: bool) -> None:
    """Move the largest logit of each row [n, V] to 0, in place, and keep it in ``largest`` [n].

    Differences beyond FP64 become the largest that it has; there are some only where logits are ``wide``, FP64.
    """
    torch.amax(rows, dim=-1, out=largest)
    _lower_by(rows, largest, wide)


def _lower_by(rows: Tensor, largest: Tensor, wide: bool) -> None:
    """The same where the largest logits [n] are known."""
    rows.sub_(largest.unsqueeze(-1))
    if wide:
        rows.clamp_(min=-torch.finfo(torch.float64).max)


def _log_ratio(total: Tensor, other: Tensor) -> Tensor:
    """log(total / other); of nearly equal sums by their difference, which is exact where a quotient would round."""
    near = (total > other / 2) & (total < other * 2)
    return torch.where(near, ((total - other) / other).log1p_(), total.log() - other.log())


def argmax(logits: Tensor) -> Tensor:
    """Token ids [...] of the largest of logits [..., V]; of equal ones the first.

    On a CPU by numpy: torch's took 12 times (FP32) and 23 times (BF16) as long on an AMD EPYC.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    wide = logits.float() if logits.dtype == torch.bfloat16 else logits
    return torch.from_numpy(np.asarray(wide.detach().numpy().argmax(axis=-1)))


def target_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits [...] of one token id [...] a position, out of logits [..., V]."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def position_metrics(logits: Tensor, reference: Tensor, targets: Tensor) -> dict[str, np.ndarray]:
    """Metrics of each position: logits and reference [..., V], the token id [...] that follows it; arrays [...].

    kl and reverse_kl, D(p ‖ q) and D(q ‖ p) of the policy's p and the reference's q; agrees (both argmaxes are the same
    token); logit_deviation (largest absolute difference). Of the token that follows: cross_entropy and
    reference_cross_entropy, and delta_p, its probability under the policy minus under the reference. An id below 0
    stands for none: these three are NaN there.
    """
    own, (gap,) = _expected_gaps(logits, [(reference, reference.amax(dim=-1).double())])
    other, (other_gap,) = _expected_gaps(reference, [(logits, own.largest)])
    known = targets >= 0
    entropies = [
        each.cross_entropy(target_logits(scores, targets.clamp(min=0))).where(known, math.nan)
        for each, scores in ((own, logits), (other, reference))
    ]
    metrics = {
        "kl": _divergence(logits, reference, own, other, gap),
        "reverse_kl": _divergence(reference, logits, other, own, other_gap),
        "agrees": argmax(logits) == argmax(reference),
        "logit_deviation": _largest_gap(logits, reference),
        "cross_entropy": entropies[0],
        "reference_cross_entropy": entropies[1],
        "delta_p": (-entropies[0]).exp() - (-entropies[1]).exp(),
    }
    return {name: values.cpu().numpy() for name, values in metrics.items()}


def _largest_gap(logits: Tensor, reference: Tensor) -> Tensor:
    """Largest |a − b| of logits a and b [..., V] at each position: FP64 [...]."""
    flat = [logits.reshape(-1, logits.shape[-1]), reference.reshape(-1, logits.shape[-1])]
    result = torch.empty(len(flat[0]), dtype=torch.float64, device=logits.device)
    for (rows, others), (own, other), (largest,) in _chunks(flat, 2, [result]):
        rows.copy_(own).sub_(others.copy_(other))
        torch.amax(rows.abs_(), dim=-1, out=largest)
    return result.view(logits.shape[:-1])
