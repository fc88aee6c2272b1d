"""Attention to stored tokens inside a model of transformers, by the library's registry of attention functions.

While a model runs with a cache of ours its attention function is ``attention``. For a token that the cache has just
stored it asks the cache, which attends to what is stored as it is (``cache.attention``); all else goes to the function
that the model had, the library's "sdpa". A model is tried first (``Trial``): its layers must hand the function what the
cache returned, and nothing that changes scores, such as a soft cap or a sink.

Axes: B sequences, H KV heads, G queries a KV head, T new tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import transformers
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstages.models.huggingface import Noting

NAME, LIBRARY = "kvstages", "sdpa"
# Further arguments of attention functions that leave scores as they are, one token's in a window among them.
HARMLESS = {"is_causal", "sliding_window", "position_ids", "use_cache"}


class Attends(Protocol):
    """What attends to tokens that it has stored."""

    def attend(self, queries: Tensor, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None) -> Tensor:
        """Attention [B, G · H, 1, D] of queries [B, G · H, 1, D] of one token with its ``own`` key and value."""


class Running(Protocol):
    """The cache of the forward pass under way."""

    def take(self, keys: Tensor, values: Tensor, named: dict[str, Any]) -> Attends | None:
        """Who attends for a layer that hands on these keys and values; None: the library."""


_RUNNING: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def attending(config: transformers.PreTrainedConfig, cache: Running) -> Iterator[None]:
    """A forward pass of a decoder of this configuration, with ``cache``."""
    before, token = config._attn_implementation, _RUNNING.set(cache)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _RUNNING.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **named: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [B, T, G · H, D] of queries [B, G · H, T, D], and no weights."""
    running = _RUNNING.get()
    attends = None if running is None else running.take(key, value, named)
    if attends is None:
        library = ALL_ATTENTION_FUNCTIONS[LIBRARY]
        return library(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **named)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attends.attend(query, (key, value), scaling, attention_mask).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
transformers.AttentionMaskInterface.register(NAME, sdpa_mask)


class Trial(Noting):
    """Notes shapes of keys and values as ``Noting`` does, and whether a model's attention can be to stored tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Tensor, Tensor]] = []
        self.taken: list[bool] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.given.append((keys, values))
        return super().update(keys, values, layer)

    def take(self, keys: Tensor, values: Tensor, named: dict[str, Any]) -> None:
        same = bool(self.given) and keys is self.given[-1][0] and values is self.given[-1][1]
        self.taken.append(same and HARMLESS.issuperset(name for name, value in named.items() if value is not None))

    @property
    def fits(self) -> bool:
        """Whether every layer handed on what the cache returned, and nothing that changes scores."""
        return len(self.taken) == len(self.given) and all(self.taken)
