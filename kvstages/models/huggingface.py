"""Decoders of Hugging Face's transformers, run by the library's own code, layer by layer.

No architecture is written here. What a layer is given beside the hidden states (rotary embeddings, position ids, flags)
is learned by running the model's forward pass with layers that only note their arguments; the same trick gives the
state before the first layer and the logits of the one after the last. A layer then runs with those arguments, the mask
that a cache asks for, and a bridge from the library's ``cache.update`` to ours: whatever rotary embedding, norm of
queries and keys, bias, soft cap, parallel block or mixture of experts a family has stays the library's.

Every model is tried as it is opened, and refused unless running its layers this way gives the logits of its own forward
pass, in one pass and token by token. Weights come from safetensors or GGUF files on disk. Nothing is downloaded, and no
code that comes with a model is run.

Axes: B batch, T new tokens, S positions that attention sees, L layers, H KV heads, D head width, E hidden width,
V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad

from kvstages.cache.offsets import Rotary
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.models.config import DecoderShape
from kvstages.models.decoder import Cache, Choice, Key, Known, mix_heads

# How far logits may lie from the library's own, as a share of the largest: what rounding does, with room. Many models
# take norms and softmax in FP32 whatever they compute in.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2}
TRIAL_TOKENS = 6
MASK = "attention_mask"
POSITIONS = "position_embeddings"
# What families call the projection of the keys, where it is one of its own.
KEY_PROJECTIONS = ("k_proj", "key_proj")


class Refused(ValueError):
    """The reason why a model cannot be measured; the caller that opens the model names it."""


class Bridge(transformers.Cache):
    """One of our caches, in the form that a layer of the library expects."""

    def __init__(self, cache: Cache):
        super().__init__(layers=[])
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self.cache.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.seen(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.cache.seen(layer_idx) + query_length, 0


class Noting:
    """A cache at some position; it keeps only layer and shape [H, D] of the keys and of the values that it sees."""

    def __init__(self, start: int = 0):
        self.start = start
        self.shapes: list[tuple[int, tuple[int, int], tuple[int, int]]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.shapes.append((layer, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
        return keys, values

    def seen(self, layer: int = 0) -> int:
        return self.start


class Keeping:
    """Another cache; it keeps the keys and values that it was given last, and what came back."""

    def __init__(self, cache: Cache):
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.given = keys, values
        self.read = self.cache.update(keys, values, layer)
        return self.read

    def seen(self, layer: int = 0) -> int:
        return self.cache.seen(layer)


class Reading:
    """Keys and values [B, H, S, D] to attend to that are known already, whatever a layer computes."""

    def __init__(self, keys: Tensor, values: Tensor, start: int):
        self.read, self.start = (keys, values), start

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.read

    def seen(self, layer: int = 0) -> int:
        return self.start


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer by the library: the names of the arguments of state and cache, and all other arguments."""

    state: str
    cache: str
    others: Mapping[str, Any]

    @classmethod
    def of(cls, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any]) -> LayerCall:
        """From the arguments of a call; Refused where state, cache and mask are not among them."""
        arguments = dict(signature.bind(*given, **named).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        state = next(iter(signature.parameters))
        cache = next((name for name, value in arguments.items() if isinstance(value, Bridge)), None)
        if not isinstance(arguments.get(state), Tensor) or cache is None or MASK not in arguments:
            raise Refused(f"a layer takes {', '.join(arguments)}; expected hidden states, a cache and {MASK}")
        return cls(state, cache, {name: arguments[name] for name in arguments if name not in (state, cache, MASK)})

    def arguments(self, x: Tensor, cache: Bridge, mask: Tensor | None) -> dict[str, Any]:
        """The same call with this state, cache and mask."""
        return {**self.others, self.state: x, self.cache: cache, MASK: mask}


class HuggingFaceDecoder(Known):
    """A causal language model of transformers as a ``Decoder`` (see ``decoder``).

    ``name`` stands in messages. ``limit`` is the longest text for which all of its layers are full attention, and
    ``limited_by`` what sets it. ValueError where its layers cannot be run one by one.
    """

    def __init__(self, model: transformers.PreTrainedModel, name: str, limit: int, limited_by: str):
        self.model, self.name, self.limited_by = model, name, limited_by
        self.dtype, self.device = model.dtype, model.device
        if self.dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products of experts know no FP64
        try:
            self.body = model.get_decoder()
            config = model.config.get_text_config(decoder=True)
            self.layers = find_layers(self.body, config.num_hidden_layers)
            self.signatures = [inspect.signature(layer.forward) for layer in self.layers]
            self.returns_tuple: list[bool] = []
            self.calls: dict[tuple[int, int], list[LayerCall]] = {}
            self._try_out(limit, getattr(config, "num_attention_heads", None))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Refused as error:
            raise ValueError(f"{name}: {error}") from error
        except Exception as error:  # whatever the code of five hundred families may raise when it is taken apart
            raise ValueError(f"{name}: its layers do not run one by one: {first_line(error)}") from error

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """ValueError for tokens beyond those that all layers attend to."""
        stop = start + tokens.shape[1]
        if stop > self.shape.context:
            raise ValueError(f"{self.name}: {stop} tokens, but {self.limited_by} is {self.shape.context} tokens")
        return self._note(tokens, start)[1]

    def run_layers(self, x: Tensor, cache: Cache, first: int = 0, last: int | None = None) -> Tensor:
        bridge = Bridge(cache)
        for layer in range(first, len(self.layers) if last is None else last):
            x = self._run(x, layer, bridge, cache.mask(x.shape[1], layer))
        return x

    def branch(
        self, x: Tensor, layer: int, caches: Mapping[Key | None, Cache]
    ) -> Callable[[Sequence[Choice[Key]]], Tensor]:
        base = Keeping(caches[None])
        masks = {key: cache.mask(x.shape[1], layer) for key, cache in caches.items()}
        start, mask = base.seen(layer), masks[None]
        self._run(x, layer, Bridge(base), mask)
        readings = {
            key: base.read if key is None else cache.update(*base.given, layer) for key, cache in caches.items()
        }
        alike = all(own is mask or torch.equal(own, mask) for own in masks.values())
        if not alike:
            readings, masks = aligned(readings, masks, self.shape.heads)
        keys, values = ({key: read[side] for key, read in readings.items()} for side in (0, 1))

        def states(choices: Sequence[Choice[Key]]) -> Tensor:
            read = Reading(mix_heads(keys, choices), mix_heads(values, choices), start)
            seen = mask if alike else mix_heads(masks, choices).repeat_interleave(len(x), dim=0)
            return self._run(x.repeat(len(choices), 1, 1), layer, Bridge(read), seen)

        return states

    def key_bias(self, layer: int) -> Tensor | None:
        """The bias of the layer's projection of that name; None where keys have no projection of their own."""
        for name, module in self.layers[layer].named_modules():
            if name.rpartition(".")[2] in KEY_PROJECTIONS and getattr(module, "bias", None) is not None:
                return module.bias.detach().unflatten(0, (self.shape.heads, -1))
        return None

    def rotary(self, layer: int) -> Rotary | None:
        return self._rotary[layer]

    @cached_property
    def _rotary(self) -> list[Rotary | None]:
        """Of each layer, read off the cosines and sines that the library hands to it (``turning``)."""
        calls, _ = self._note(torch.zeros(1, 2, dtype=torch.long, device=self.device), 0)
        return [turning(call.others.get(POSITIONS)) for call in calls]

    def pack(self) -> HuggingFaceDecoder:
        """The same decoder: the layers' products are the library's, so nothing is made faster."""
        return self

    def logits(self, x: Tensor) -> Tensor:
        last = len(self.layers) - 1

        def forward(layer: int, *given: Any, **named: Any) -> Any:
            passed = self.signatures[layer].bind(*given, **named).args[0]
            return self._returned(layer, x if layer == last else passed)

        tokens = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        with replaced_forward(self.layers, forward):
            return self.model(input_ids=tokens, use_cache=False).logits

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, V] of token ids [B, T], which follow the tokens that ``cache`` has already seen."""
        return self.logits(self.run_layers(self.embed(tokens, cache.seen()), cache))

    def _run(self, x: Tensor, layer: int, cache: Bridge, mask: Tensor | None) -> Tensor:
        """The state [B, T, E] after one layer; ``mask`` says what each query may see (see ``decoder.Cache``), also
        [B, H, T, S]."""
        where = cache.get_seq_length(layer), x.shape[1]
        if where not in self.calls:
            self.calls[where] = self._note(torch.zeros(1, x.shape[1], dtype=torch.long, device=x.device), where[0])[0]
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, torch.finfo(x.dtype).min)
            mask = mask if mask.dim() > 2 else mask.unsqueeze(0)
            if mask.shape[-3] == self.shape.heads:
                # The queries of a KV head stand together.
                mask = mask.repeat_interleave(self.shape.query_heads // self.shape.heads, dim=-3)
            mask = mask.expand(len(x), *mask.shape[-3:])
        out = self.layers[layer](**self.calls[where][layer].arguments(x, cache, mask))
        return out[0] if isinstance(out, tuple) else out

    def _note(self, tokens: Tensor, start: int) -> tuple[list[LayerCall], Tensor]:
        """How the library calls each layer for token ids [B, T] at positions start, start + 1, ..., without running
        any; and the state [B, T, E] before the first."""
        calls, states = [], []

        def forward(layer: int, *given: Any, **named: Any) -> Any:
            calls.append(LayerCall.of(self.signatures[layer], given, named))
            states.append(self.signatures[layer].bind(*given, **named).args[0])
            return self._returned(layer, states[-1])

        with replaced_forward(self.layers, forward):
            self.body(input_ids=tokens, cache=Bridge(Noting(start)), use_cache=True)
        return calls, states[0]

    def _returned(self, layer: int, x: Tensor) -> Any:
        """A state in the form in which the library takes it from this layer."""
        return (x, None) if self.returns_tuple[layer] else x

    @torch.no_grad()
    def _try_out(self, limit: int, query_heads: int | None) -> None:
        """Set the decoder's shape, and try whether its layers run one by one; Refused says why they do not."""
        known = self.model.get_input_embeddings().weight.shape[0]
        tokens = torch.randint(known, (2, min(TRIAL_TOKENS, limit)), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(self.device)
        noting, outputs = Noting(), []
        hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in self.layers]
        expected = self.model(input_ids=tokens, cache=Bridge(noting), use_cache=True).logits
        for hook in hooks:
            hook.remove()
        self.returns_tuple = [isinstance(out, tuple) for out in outputs]
        heads, key_width, value_width = kv_shape(noting.shapes, len(self.layers))
        if not expected.isfinite().all():
            raise Refused("its logits are not finite: weights are damaged, or too large for this dtype")
        if expected.shape[-1] > known:
            raise Refused(f"a vocabulary of {expected.shape[-1]}, larger than the embedding's {known}")
        width = self._note(tokens, 0)[1].shape[-1]
        vocabulary = expected.shape[-1]
        self.shape = DecoderShape(
            len(self.layers), heads, key_width, value_width, vocabulary, limit, width, query_heads or heads
        )
        self._compare(tokens, expected)

    def _compare(self, tokens: Tensor, expected: Tensor) -> None:
        """Refused unless running the layers one by one, in one pass and token by token, gives the logits expected."""
        shape, length = self.shape, tokens.shape[1]
        grid = PrecisionGrid.uniform(shape.layers, shape.heads, "bf16")
        packed = PackedCache(
            grid,
            len(tokens),
            shape.key_width,
            self.dtype,
            length,
            device=self.device,
            rounding=as_it_is,
            dense_storage=self.dtype,
            value_width=shape.value_width,
        )
        one_pass = self.run_layers(self._note(tokens, 0)[1], BlockCache(grid, self.device, as_it_is))
        steps = [
            self.run_layers(self._note(tokens[:, position : position + 1], position)[1], packed)
            for position in range(length)
        ]
        for way, x in {"in one pass": one_pass, "token by token": torch.cat(steps, dim=1)}.items():
            error = (self.logits(x) - expected).abs().max() / expected.abs().max()
            if not error < TOLERANCE[self.dtype]:
                raise Refused(f"run layer by layer, {way}, its logits differ by {float(error):.1g} from the library's")


def turning(handed: Any) -> Rotary | None:
    """The rotary embedding whose cosines and sines [B, T, 2 pairs] of the positions 0, 1, ... a layer is handed; None
    where it is handed none, or where pairs are neither half the turned channels apart nor neighbours."""
    if not isinstance(handed, tuple):
        return None
    cosine, sine = (each[0].double().cpu() for each in handed)
    factor = float(cosine[0, 0])
    angles = torch.atan2(sine[1], cosine[1])
    half = len(angles) // 2
    if torch.equal(angles[:half], angles[half:]):
        return Rotary(angles[:half], False, factor)
    if torch.equal(angles[::2], angles[1::2]):
        return Rotary(angles[::2], True, factor)
    return None


def as_it_is(both: Tensor, layer: int, start: int) -> Tensor:
    """Keys and values that are not rounded to the 16 bits of a cache (see ``rounding``)."""
    return both


def aligned(
    readings: Mapping[Key | None, tuple[Tensor, Tensor]], masks: Mapping[Key | None, Tensor], heads: int
) -> tuple[dict[Key | None, tuple[Tensor, Tensor]], dict[Key | None, Tensor]]:
    """Readings [B, H, S, D] of as many positions each, and who sees which of them [1, H, T, S]; what fills a reading up
    is seen by nobody."""
    most = max(keys.shape[2] for keys, _ in readings.values())
    filled = {key: tuple(pad(side, (0, 0, 0, most - side.shape[2])) for side in read) for key, read in readings.items()}
    shown = {key: pad(mask, (0, most - mask.shape[-1])).expand(1, heads, -1, -1) for key, mask in masks.items()}
    return filled, shown


def find_layers(body: nn.Module, count: int) -> nn.ModuleList:
    """The decoder layers of a model: the outermost list of that many modules."""
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise Refused(f"no list of {count} layers found in {type(body).__name__}")


def kv_shape(shapes: Sequence[tuple[int, tuple[int, int], tuple[int, int]]], layers: int) -> tuple[int, int, int]:
    """KV heads, and width of their keys and values, from what the layers handed to a cache; Refused if they differ."""
    missing = sorted(set(range(layers)) - {layer for layer, *_ in shapes})
    if missing:
        raise Refused(f"layer {missing[0]} keeps no keys and values of its own (it is recurrent, or shares a layer's)")
    if len(shapes) > layers:
        raise Refused("a layer keeps more than one set of keys and values")
    ((heads, key_width), (value_heads, value_width)), *others = {(keys, values) for _, keys, values in shapes}
    if others or heads != value_heads:
        raise Refused("KV heads that differ from layer to layer, or keys from values, in their number or width")
    return heads, key_width, value_width


@contextmanager
def replaced_forward(layers: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Have ``forward`` called, with its index before the arguments, in place of each layer's own."""
    for index, layer in enumerate(layers):
        layer.forward = partial(forward, index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def first_line(error: BaseException) -> str:
    """An exception's text in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
