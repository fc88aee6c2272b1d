"""The protocol of a decoder and of its cache: what measuring asks of them, whatever the architecture.

A sweep, an evaluation, gradients and generated text need nothing else, so a family of models is one file that has a
class of this shape. Hidden states are tensors [B, T, E] between layers.

Axes: B batch (blocks, or interventions on blocks), T new tokens, S positions that attention sees, L layers, H KV heads,
D width of a head's keys or values, E hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvstages.cache.offsets import Context, Contexts, Rotary
from kvstages.cache.one_pass import causal_mask
from kvstages.models.config import DecoderShape

Key = TypeVar("Key", bound=Hashable)
# A row of a batch of interventions: a head (None: every head), and the reading that it alone has its keys and values
# from. Where that is None, the base's, the head does not matter.
Choice = tuple[int | None, Key | None]


class Cache(Protocol):
    """The protocol of a cache: the ``update`` of Hugging Face's caches, and the mask that goes with it."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take the new keys and values [B, H, T, D] of ``layer``; return those to attend to, [B, H, S, D]."""

    def mask(self, new: int, layer: int) -> Tensor | None:
        """Which of the S positions that ``update`` will return each of ``new`` queries may see; None: all.

        Bool [T, S]; [H, T, S] where KV heads differ; [B, 1, T, S] where sequences do.
        """

    def seen(self, layer: int = 0) -> int:
        """How many tokens ``layer`` has already taken, before this step: the position of the first new one."""


class CausalCache:
    """A cache that stores and quantizes nothing: every token of a block goes in one pass."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return keys, values

    def mask(self, new: int, layer: int) -> Tensor | None:
        return causal_mask(new, str(self.device))

    def seen(self, layer: int = 0) -> int:
        return 0


class Decoder(Protocol):
    """A decoder whose layers run one by one through a cache. ``cache.seen`` gives a layer's position in the text."""

    @property
    def shape(self) -> DecoderShape:
        """Layers, KV heads, widths, vocabulary and context."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""

    @property
    def device(self) -> torch.device:
        """Where its weights are; token ids and caches belong there."""

    def pack(self) -> Decoder:
        """The same decoder, made faster where it can be for inference alone: nothing is differentiated or trained."""

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """The state [B, T, E] before the first layer, of token ids [B, T] at positions start, start + 1, ..."""

    def run_layers(self, x: Tensor, cache: Cache, first: int = 0, last: int | None = None) -> Tensor:
        """The state [B, T, E] after layers first, first + 1, ... up to but without ``last``, from that before."""

    def branch(
        self, x: Tensor, layer: int, caches: Mapping[Key | None, Cache]
    ) -> Callable[[Sequence[Choice[Key]]], Tensor]:
        """Run one layer with its keys and values read back in several ways at once, one cache each (None: the base).

        ``x`` [B, T, E] is the state before the layer. Every cache is updated once, here. What comes back makes the
        states [n · B, T, E] after the layer of n interventions, which have all heads' keys and values from the
        base but for one head, or none. It is to be called before the caches are updated again.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, T, V] of the state [B, T, E] after the last layer: each position by itself, so that a slice of
        the positions gives a slice of the logits."""

    @property
    def contexts(self) -> Contexts:
        """What is known of the layers' keys and values before any is stored (see ``Known``)."""


class Known:
    """What quantizer schemes may need to know of a decoder's keys and values: its own part, for families to inherit."""

    # From the stage calibrate.
    calibrated: Contexts | None = None

    @property
    def contexts(self) -> Contexts:
        """What is known of every layer's keys and values: what was calibrated, or else the model's own part."""
        if self.calibrated is not None:
            return self.calibrated
        return {
            (layer, "k"): Context(bias=self.key_bias(layer), rotary=self.rotary(layer))
            for layer in range(self.shape.layers)
        }

    def key_bias(self, layer: int) -> Tensor | None:
        """The bias of a layer's keys [H, D]; None where it has none, or where it is not known how to find it."""
        return None

    def rotary(self, layer: int) -> Rotary | None:
        """The rotary embedding of a layer's keys; None where it has none that is known."""
        return None


def mix_heads(readings: Mapping[Key | None, Tensor], choices: Sequence[Choice[Key]]) -> Tensor:
    """Tensors [n · B, H, ...] of n interventions: from the base reading [B, H, ...] (under None) but for one head, or
    all."""
    base = readings[None]
    stacked = base.repeat(len(choices), *[1] * (base.dim() - 1)).unflatten(0, (len(choices), -1))
    for index, (head, key) in enumerate(choices):
        if key is not None:
            own = slice(None) if head is None else head
            stacked[index, :, own] = readings[key][:, own]
    return stacked.flatten(0, 1)
