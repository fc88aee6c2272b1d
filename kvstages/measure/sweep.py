"""Interventions on single units: one head of one layer, its keys or values, or the whole layer, at another precision.

docs/method.md, "Sensitivity". Every other tensor stays as in a base policy: all BF16 for a study's sensitivities, or a
policy around which moves are measured again. Below the intervened layer nothing changes, so the sweep of layer l
starts from the base's hidden states there. The layer's keys and values are the base's too; only what its attention
reads back differs. So one cache per part and precision, with *all* heads changed, serves every intervention of the
layer: the intervention takes its head's keys and values from it and the others from the base. Above the layer all
caches are the base's, and interventions are rows of the same batches.

A row of a matrix product may depend, in its last digits, on where in the batch it stands. So what is the base's is
taken from the base: the KL of a position is the base's own where no earlier position of its block reads back
otherwise. An intervention that changes nothing therefore measures exactly what the base does, which is 0 where the
base is the reference, on every processor. What such digits do to all others is part of what the control intervention
measures, the floor.

In FP32 arithmetic all interventions share the reference's rounding of keys and values to BF16 (see ``rounding``).
Axes: B blocks, T tokens, H KV heads, E hidden width, V vocabulary, n interventions of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvstages.cache.interventions import read_back
from kvstages.cache.one_pass import BlockCache, DenseBlockCache
from kvstages.cache.precision_grid import LAYER, PrecisionGrid
from kvstages.cache.rounding import STORAGE, RecordedRounding, Rounding, SharedRounding, storage_rounding
from kvstages.measure.execution import (
    PASS_TOKENS,
    dense_grid,
    packed_cache,
    position_slices,
    state_bytes,
    window_states,
)
from kvstages.measure.metrics import Normalizer, divergence, normalizer
from kvstages.measure.setting import Setting
from kvstages.models.decoder import Cache, Decoder

# A part of a head and the precision that it gets: every head of a layer is changed so in turn, or where the part is the
# layer, all at once.
Change = tuple[str, str]


class Intervention(NamedTuple):
    """One row of the batch: the head whose part is changed (None: all), and how; the base changes none. A decoder's
    ``Choice``."""

    head: int | None
    change: Change | None

    @property
    def row(self) -> int:
        """Where its result stands among those of its change."""
        return self.head or 0


BASE = Intervention(None, None)


@dataclass(frozen=True)
class LayerSweep:
    """What one layer's sweep measures; FP64, B blocks.

    ``kl``: mean KL over the positions of each block, {change: [H, B]} in nats, [1, B] where the layer is changed as a
    whole. ``base_kl``: that of the base [B], 0 where the base is the reference. ``error``: what the change does to the
    tensors themselves, Σ ‖x̂ − x‖² / Σ ‖x‖² over a block, keys and values and heads added up, of the same shape.
    """

    kl: dict[Change, Tensor]
    base_kl: Tensor
    error: dict[Change, Tensor]


@torch.no_grad()
def sweep_layer(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    changes: Sequence[Change],
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
    base: PrecisionGrid | None = None,
    only: Collection[tuple[int, Change]] | None = None,
) -> LayerSweep:
    """Measure every change of every head of ``layer``, token ids [B, T]; always against the unquantized reference.
    With ``only`` those heads and changes alone; the KL of the others is NaN.

    ``memory`` bounds (in bytes) what goes through the model together: blocks, interventions and positions that do not
    fit follow in further passes. ``base`` is the policy around which to measure; None: all BF16. ValueError if the
    model has no such layer, or where a KL is no finite number.
    """
    if not 0 <= layer < model.shape.layers:
        raise ValueError(f"layer {layer}: the model has layers 0 to {model.shape.layers - 1}")
    heads: dict[Change, list[int | None]] = {
        change: [None] if change[0] == LAYER else [*range(model.shape.heads)] for change in changes
    }
    every = [Intervention(head, change) for change in changes for head in heads[change]]
    interventions = [BASE, *(each for each in every if only is None or tuple(each) in only)]
    sizes = {change: (len(each), len(tokens)) for change, each in heads.items()}
    kl = {change: torch.full(size, torch.nan, dtype=torch.float64) for change, size in sizes.items()}
    error = {change: torch.zeros(size, dtype=torch.float64) for change, size in sizes.items()}
    base_kl = torch.zeros(len(tokens), dtype=torch.float64)
    each = sweep_bytes(model, tokens.shape[1], setting.execution, len(changes))
    step = _fitting(len(tokens), tokens.shape[1], each, setting.execution, tokens.device, memory)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        rows = slice(start, start + len(part))
        recorded = RecordedRounding(layer)
        below = model.run_layers(model.embed(part), DenseBlockCache(part.device, recorded), last=layer)
        # In BF16 arithmetic keys and values are BF16 already, and every rounding in the model is a layer's own.
        shares = setting.dtype != STORAGE
        last = None if shares else layer + 1
        model.run_layers(below, DenseBlockCache(part.device, recorded), first=layer, last=last)
        for name in dict.fromkeys(name for _, name in changes):
            back = read_back(recorded.stored, name, layer, model.shape.widths, model.contexts)
            for change in (change for change in changes if change[1] == name):
                error[change][:, rows] = relative_error(back - recorded.stored, recorded.stored, change[0]).cpu()
        rounding = storage_rounding
        if shares:
            rounding = SharedRounding(recorded.errors, same=layer if base is None else -1)
        found = _sweep_blocks(model, part, layer, interventions, setting, memory, base, rounding, below)
        for done, (intervention, mean) in enumerate(found):
            wrong = (~torch.isfinite(mean)).nonzero()
            if len(wrong):
                head, change = intervention
                own = "" if head is None else f"head {head}, "
                what = "the base" if change is None else own + " ".join(change)
                raise ValueError(
                    f"layer {layer}, {what}: the KL of block {start + int(wrong[0])} is {float(mean[wrong[0]])}, "
                    "expected a finite number: does the model give finite logits?"
                )
            if intervention.change is None:
                base_kl[rows] = mean
            else:
                kl[intervention.change][intervention.row, rows] = mean
            progress((start + len(part) * min(1.0, (done + 1) / len(interventions))) / len(tokens))
    return LayerSweep(kl, base_kl, error)


def relative_error(error: Tensor, both: Tensor, part: str) -> Tensor:
    """Σ ‖x̂ − x‖² / Σ ‖x‖² over each block's positions, keys and values [B, 2H, T, D] apart, and added: FP64 [H, B]; of
    a layer heads are added, too: [1, B]."""
    wrong = error.double().square().sum(dim=(2, 3))
    size = both.double().square().sum(dim=(2, 3))
    relative = torch.where(size > 0, wrong / size, 0.0).T
    keys, values = relative.chunk(2)
    if part == LAYER:
        return (keys + values).sum(dim=0, keepdim=True)
    return {"k": keys, "v": values, "kv": keys + values}[part]


def sweep_bytes(model: Decoder, tokens: int, execution: str, changes: int) -> int:
    """Estimate of the memory that one block of a sweep takes beside its logits, in bytes.

    One intervention on its way through the layers; the recorded roundings of all layers; what the layer reads back
    under each change. ``token-by-token`` also keeps the state of every intervention after the layer.
    """
    shape, size = model.shape, model.dtype.itemsize
    values = tokens * size * shape.heads * sum(shape.widths)
    kept = values * (2 * shape.layers + 4 * (changes + 1))
    if execution == "token-by-token":
        kept += tokens * size * shape.width * (1 + changes * shape.heads)
    return state_bytes(model, tokens, execution) + kept


def _fitting(rows: int, tokens: int, each: int, execution: str, device: torch.device, memory: int) -> int:
    """How many of ``rows`` blocks or interventions, of so many tokens and bytes each, go through layers together."""
    fitting = max(1, memory // 2 // each)
    if execution == "one-pass":
        fitting = min(fitting, max(1, PASS_TOKENS[device.type] // tokens))
    return min(rows, fitting)


class Reference:
    """Logits of the unquantized decoder from its states x [B, T, E], a slice of positions at a time.

    Kept while all of them fit a quarter of ``memory`` (bytes), else computed anew for each group of interventions.
    """

    def __init__(self, model: Decoder, x: Tensor, memory: int):
        self.model, self.x = model, x
        size = x.shape[0] * x.shape[1] * model.shape.vocabulary * model.dtype.itemsize
        self.keeps = size <= memory // 4
        self.logits: dict[int, Tensor] = {}
        self.normalizer = Normalizer.room(*x.shape[:2], device=x.device)
        self.filled: set[int] = set()

    def at(self, positions: slice) -> tuple[Tensor, Normalizer]:
        """Logits [B, t, V] and their normalizer [B, t]."""
        logits = self.logits.get(positions.start)
        if logits is None:
            logits = self.model.logits(self.x[:, positions])
        if self.keeps:
            self.logits[positions.start] = logits
        here = slice(None), positions
        if positions.start not in self.filled:
            self.filled.add(positions.start)
            self.normalizer.fill(here, normalizer(logits))
        return logits, self.normalizer.at(here)


class Watched:
    """A cache, and whether what it gives back of each position is what the base's gives back."""

    def __init__(self, cache: Cache, base: Watched | None = None):
        self.cache, self.base = cache, base
        self.same: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As the cache does it; the base's must have been updated before."""
        read = self.cache.update(keys, values, layer)
        if self.base is None:
            self.read = read
            return read
        # The last positions read are the new ones as they are; those before them have come to be read just now.
        seen, new = read[0].shape[2], keys.shape[2]
        stored = slice(max(0, seen - 2 * new), seen - new)
        pairs = zip(read, self.base.read, strict=True)
        one, other = ((own[:, :, stored] == base[:, :, stored]).all(dim=-1) for own, base in pairs)
        self.same.append(one & other)
        return read

    def mask(self, new: int, layer: int) -> Tensor | None:
        return self.cache.mask(new, layer)

    def seen(self, layer: int = 0) -> int:
        return self.cache.seen(layer)

    def unchanged(self, head: int | None, tokens: int) -> Tensor:
        """Whether a position's logits are the base's if ``head`` alone (None: every head) reads back from here:
        bool [B, T].

        They are where no earlier position of the block reads back otherwise.
        """
        every = torch.cat(self.same, dim=2)[..., : tokens - 1]
        same = every.all(dim=1) if head is None else every[:, head]
        return F.pad(same.int().cumprod(dim=1), (1, 0), value=1).bool()


def _sweep_blocks(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    interventions: list[Intervention],
    setting: Setting,
    memory: int,
    base: PrecisionGrid | None,
    rounding: Rounding,
    below: Tensor,
) -> Iterator[tuple[Intervention, Tensor]]:
    """Mean KL [B] of every intervention on ``layer``, the base first, on blocks that fit together.

    ``below``: the reference's states [B, T, E] before the layer, the base's too where it is unquantized.
    """
    blocks, length = tokens.shape
    groups = _groups(model, tokens, interventions, setting.execution, memory)
    slices = position_slices(model, len(groups[0]) * blocks, length, memory)
    # With a shared rounding error, unquantized values are BF16 in the reference alone: they are kept as they come.
    storage = STORAGE if rounding is storage_rounding else setting.dtype
    around = base or dense_grid(model)

    def cache(grid: PrecisionGrid, rows: int) -> Cache:
        if setting.execution == "one-pass":
            return BlockCache(grid, tokens.device, rounding, model.contexts)
        return packed_cache(model, grid, rows, length, rounding, storage)

    watched: dict[Change | None, Watched] = {None: Watched(cache(around, blocks))}
    for change in dict.fromkeys(each.change for each in interventions if each.change is not None):
        watched[change] = Watched(cache(around.with_layer(layer, *change), blocks), watched[None])
    reference = None
    if base is not None:
        states = [x for _, x in window_states(model, tokens, dense_grid(model), setting, memory)]
        reference = Reference(model, torch.cat(states), memory)
    if setting.execution == "token-by-token":
        above = partial(cache, around)
        run = _token_by_token_states(model, tokens, layer, groups, watched, above)
    else:
        # Around the intervened layer an unquantized base needs no past apart from the present, only causal attention.
        through = DenseBlockCache(tokens.device, rounding) if base is None else cache(base, blocks)
        if base is not None:
            below = model.run_layers(model.embed(tokens), through, last=layer)
        run = _one_pass_states(model, below, layer, groups, watched, through)
    of_base = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    for group, x in zip(groups, run, strict=True):
        x = x.unflatten(0, (len(group), -1))
        if reference is None:
            reference = Reference(model, x[0], memory)
        kl = torch.empty(x.shape[:3], dtype=torch.float64, device=x.device)
        for positions in slices:
            logits, of_logits = reference.at(positions)
            own = model.logits(x[:, :, positions].flatten(0, 1)).unflatten(0, (len(group), -1))
            for index in range(len(group)):
                kl[index, :, positions] = divergence(own[index], logits, of_logits)
        if group is groups[0] and base is not None:
            of_base = kl[0].clone()
        for index, (head, change) in enumerate(group):
            if change is None:
                kl[index] = of_base
            else:
                kl[index] = torch.where(watched[change].unchanged(head, length), of_base, kl[index])
            yield group[index], kl[index].mean(dim=1).cpu()


def _groups(
    model: Decoder, tokens: Tensor, interventions: list[Intervention], execution: str, memory: int
) -> list[list[Intervention]]:
    """Interventions that go through the model together.

    All groups have the same size (the last is filled up with the base), so that each intervention meets the same batch
    shape as the base, which opens the first.
    """
    blocks, length = tokens.shape
    each = blocks * state_bytes(model, length, execution)
    size = _fitting(len(interventions), blocks * length, each, execution, tokens.device, memory)
    groups = [interventions[start : start + size] for start in range(0, len(interventions), size)]
    groups[-1] = groups[-1] + [BASE] * (size - len(groups[-1]))
    return groups


def _one_pass_states(
    model: Decoder,
    below: Tensor,
    layer: int,
    groups: list[list[Intervention]],
    watched: Mapping[Change | None, Cache],
    around: Cache,
) -> Iterator[Tensor]:
    """States [n · B, T, E] after the last layer of each group of n interventions, all positions in one pass.

    ``below``: the base's states [B, T, E] before the layer; ``around``: the cache of the layers above.
    """
    states = model.branch(below, layer, watched)
    for group in groups:
        yield model.run_layers(states(group), around, first=layer + 1)


def _token_by_token_states(
    model: Decoder,
    tokens: Tensor,
    layer: int,
    groups: list[list[Intervention]],
    watched: Mapping[Change | None, Cache],
    above: Callable[[int], Cache],
) -> Iterator[Tensor]:
    """States [n · B, T, E] after the last layer of each group of n interventions, position by position.

    What the intervened layer reads is the base's, up to the change, and the same for all groups: its outputs are
    computed first and kept, and each group then starts from them. ``above``: a new cache of so many rows.
    """
    starts: list[list[Tensor]] = []
    for position in range(tokens.shape[1]):
        x = model.run_layers(model.embed(tokens[:, position : position + 1], position), watched[None], last=layer)
        states = model.branch(x, layer, watched)
        starts.append([states(group) for group in groups])
    for index, group in enumerate(groups):
        cache = above(len(group) * len(tokens))
        yield torch.cat([model.run_layers(each[index], cache, first=layer + 1) for each in starts], dim=1)
