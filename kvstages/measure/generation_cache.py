"""A mixed-precision KV cache for ``generate()`` of Hugging Face's transformers: a policy in use.

What is stored is what the workflow measures: codes packed to their bits with their scales, unquantized heads in BF16,
and nothing quantized twice. A token attends to what is stored as it is where that can be (``cache.attention``);
elsewhere a layer's past is reconstructed, attended to and dropped again. No copy of it is kept unless asked for. A
step's own keys and values are attended to as they are (docs/generation.md).

Axes: B sequences, H KV heads, T new tokens, S tokens seen, D head width; keys and values [B, H, T, D].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from kvstages.cache.attention import attend
from kvstages.cache.interventions import check_finite
from kvstages.cache.offsets import Contexts
from kvstages.cache.packed import LayerCache, UnevenLayerCache, append_all
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.rounding import STORAGE, storage_rounding
from kvstages.cache.schemes import SIDES, precision
from kvstages.cache.sides import join, part
from kvstages.cache.stores import grown
from kvstages.files.read import read_json
from kvstages.measure.calibration import read_contexts
from kvstages.measure.stored_attention import LIBRARY, Trial, attending
from kvstages.models.config import DecoderShape
from kvstages.models.huggingface import Bridge, kv_shape
from kvstages.models.huggingface_files import WINDOWED, check_config, layer_types
from kvstages.models.identity import ModelIdentity
from kvstages.models.weights import model_digest
from kvstages.policies.identity import check_identity
from kvstages.policies.record import check_keys, check_named, check_precisions

# What tokens that come together see of each other: exactly what they are, or each those before it as they are stored.
PREFILLS = ("exact", "stepwise")


class MixedLayer(CacheLayerMixin):
    """One layer of the cache. ``store`` is None until the first tokens come: batch, dtype and device are theirs."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: MixedPrecisionCache, layer: int):
        super().__init__()
        self.cache, self.layer, self.forward_passes = weakref.proxy(cache), layer, 0
        self.store: LayerCache | UnevenLayerCache | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.store = self.cache.store_of(self.layer, key_states, value_states)
        self.device, self.is_initialized = key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, T, D]; return what they attend to, [B, H, S + T, D]."""
        self.cache.check(key_states, value_states, self)
        self.forward_passes = self.cache.forward_passes
        if self.attends(key_states):
            return self.cache.hand(
                self, *(storage_rounding(each, self.layer, 0) for each in (key_states, value_states))
            )
        both = join(key_states, value_states)
        check_finite(both, self.layer)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        elif self.cache.padding_grew:
            self.store.extend_padding(self.cache.padding)
        seen = self.store.update(storage_rounding(both, self.layer, self.store.length))
        return part(seen, key_states, value_states)

    def attends(self, keys: Tensor) -> bool:
        """Whether new tokens attend to what is stored as it is: single ones, where nothing else is asked for."""
        return (
            self.cache.running is not None
            and self.store is not None
            and self.store.foldable
            and keys.shape[2] == 1
            and keys.device.type == "cpu"
            and keys.dtype != torch.float64
            and not torch.is_grad_enabled()
        )

    def attend(self, queries: Tensor, own: tuple[Tensor, Tensor], scaling: float, mask: Tensor | None) -> Tensor:
        """Attention [B, G · H, 1, D] of a token with its ``own`` key and value (see ``cache.attention``)."""
        return attend(queries, self.store, own, scaling, mask)

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store, self.is_initialized = None, False

    def check_crop(self, tokens_to_remove: int) -> None:
        """ValueError where the last tokens cannot be dropped."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected the tokens to drop as a number of 0 or below")
        if self.store is not None:
            self.store.check_crop(-tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if tokens_to_remove and self.store is not None:
            self.store.crop(-tokens_to_remove)
            if not self.store.length:
                self.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.store.select(rows.to(self.device))

    def offload(self) -> None:
        raise ValueError("a mixed-precision cache stays on the device of its model")

    def prefetch(self) -> None:
        self.offload()


class MixedPrecisionCache(transformers.Cache):
    """A cache that stores every head's keys and values in the precision that a policy gives it.

    For ``generate(..., past_key_values=cache)``, or ``cache=``. It serves one model and one batch: ``reset()`` it for
    other sequences. It notices which model uses it and how its sequences are padded, by a hook on the model's decoder.

    ``prefill``, "exact": tokens that come together see each other exactly and are stored quantized, as engines do with
    a prompt; "stepwise": a token sees those before it as they are stored, as the workflow measures it. Tokens must then
    come one by one (``generate(..., prefill_chunk_size=1)``). ``contexts``: what schemes need to know of the model.
    ``working_copy``: keep the reconstructed past beside what is stored, for more memory than without a policy: faster
    where the past would be reconstructed at each step.
    """

    def __init__(
        self,
        grid: PrecisionGrid,
        model: transformers.PreTrainedModel,
        prefill: str = "exact",
        contexts: Contexts | None = None,
        working_copy: bool = False,
    ):
        if prefill not in PREFILLS:
            raise ValueError(f"prefill {prefill!r}: expected one of {', '.join(PREFILLS)}")
        decoder = opened(model)
        check_precisions(grid, decoder.shape)
        for name in dict.fromkeys(grid.flat()):
            if contexts is None and name != "bf16" and any(precision(name).method(side).needs for side in SIDES):
                raise ValueError(f"{name} needs to know the model: give calibration=, a file of the stage calibrate")
        self.grid, self.prefill, self.contexts, self.working_copy = grid, prefill, contexts, working_copy
        self.shape, self.limit, self.decoder = decoder.shape, decoder.limit, weakref.ref(decoder.body)
        self.fits = decoder.fits and not working_copy
        self.forward_passes = 0
        # What ends the forward pass under way; the layer whose attention comes next, with the token's key and value;
        # and layers with such tokens, to be stored when it ends.
        self.running: ExitStack | None = None
        self.handed: tuple[MixedLayer, tuple[Tensor, Tensor]] | None = None
        self.unstored: list[tuple[MixedLayer, Tensor]] = []
        # Stores of layers that have no tokens yet in the forward pass under way, by layer.
        self.prepared: dict[int, LayerCache | UnevenLayerCache] = {}
        # Padding of the sequences [B]; whether more of it may follow, and whether more did in this forward pass.
        self.padding: Tensor | None = None
        self.padding_may_grow = self.padding_grew = False
        super().__init__(layers=[MixedLayer(self, layer) for layer in range(decoder.shape.layers)])

    @classmethod
    def from_policy(
        cls,
        policy: str | Path,
        model: transformers.PreTrainedModel,
        prefill: str = "exact",
        calibration: str | Path | None = None,
        working_copy: bool = False,
    ) -> MixedPrecisionCache:
        """The cache of a policy's file (policy.json) for the model that it was made for.

        ``calibration``: file of the stage calibrate, for schemes that subtract offsets or have static scales.
        ValueError in one line for a policy of another model or shape, and for models without a plain KV cache.
        """
        record = read_json(Path(policy))
        try:
            check_keys(record)
            check_identity(record, opened(model).identity(model))
            grid = PrecisionGrid.of_record(record["precisions"])
            check_named(grid, record)
            contexts = None if calibration is None else read_contexts(Path(calibration))
            return cls(grid, model, prefill, contexts, working_copy)
        except ValueError as error:
            raise ValueError(f"{policy}: {error}") from None

    def begin(self, body: nn.Module, mask: Any) -> None:
        """A forward pass of a decoder with this cache begins; ``mask`` [B, S + T] is that of all its tokens."""
        if body is not self.decoder():
            raise ValueError("this cache was made for another model: make one for each")
        # One that the user interrupted: no hook is called then.
        self.end(False)
        self.forward_passes += 1
        if self.fits and not body.training and body.config._attn_implementation == LIBRARY:
            self.handed, self.unstored, self.running = None, [], ExitStack()
            self.running.enter_context(attending(body.config, self))
        seen = self.get_seq_length()
        self.padding_grew = bool(seen) and self.padding_may_grow
        if seen and not self.padding_grew:
            return
        self.padding, self.padding_may_grow = None, False
        if isinstance(mask, Tensor) and mask.dim() == 2:
            padding = (mask.cumsum(dim=1) == 0).sum(dim=1)
            if bool(padding.any()):
                self.padding = padding
                # A chunk of a prompt may end before a sequence begins.
                self.padding_may_grow = bool((padding == mask.shape[1]).any())

    def end(self, done: bool) -> None:
        """The forward pass is over: store its tokens that are not yet; none of one that was broken off."""
        self.prepared.clear()
        if self.running is None:
            return
        self.running.close()
        unstored, self.unstored, self.running = self.unstored, [], None
        if not done or not unstored:
            return
        for layer, both in unstored:
            check_finite(both, layer.layer)
        append_all([layer.store for layer, _ in unstored], [both for _, both in unstored])

    def store_of(self, layer: int, keys: Tensor, values: Tensor) -> LayerCache | UnevenLayerCache:
        """The store of a layer that has none, for tokens [B, H, T, D] like these.

        Later layers get theirs at the same time. A forward pass frees large tensors all the time; a store that takes a
        piece of such a gap leaves one that the next layer's tensors do not fit into, and the process grows.
        """
        if layer not in self.prepared:
            empty = [each for each in range(layer, len(self.layers)) if self.layers[each].store is None]
            self.prepared = {each: self._store(each, keys, values) for each in empty}
        return self.prepared.pop(layer)

    def _store(self, layer: int, keys: Tensor, values: Tensor) -> LayerCache | UnevenLayerCache:
        """A store with room for tokens like these, and for some that follow."""
        widths, rows = (keys.shape[3], values.shape[3]), (self.grid.keys[layer], self.grid.values[layer])
        options = {
            "batch": keys.shape[0],
            "arithmetic": keys.dtype,
            "dense_storage": STORAGE,
            "layer": layer,
            "capacity": grown(keys.shape[2]),
            "working_copy": self.working_copy,
            "device": keys.device,
            "contexts": self.contexts,
            "padding": self.padding,
        }
        if widths[0] == widths[1]:
            return LayerCache(rows[0] + rows[1], head_dim=widths[0], **options)
        sides = zip(rows, widths, SIDES, strict=True)
        return UnevenLayerCache(*(LayerCache(row, head_dim=width, sides=side, **options) for row, width, side in sides))

    def hand(self, layer: MixedLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A token's keys and values [B, H, 1, D] of a layer, as they are: the attention that comes next is theirs."""
        if self.handed is not None:
            raise RuntimeError(f"layer {self.handed[0].layer}: the model did not ask for the attention to its past")
        self.handed = layer, (keys, values)
        self.unstored.append((layer, torch.cat((keys, values), dim=1)))
        return keys, values

    def take(self, keys: Tensor, values: Tensor, named: dict[str, Any]) -> MixedLayer | None:
        """The layer that attends for the model; None where it was given all that there is to attend to."""
        if self.handed is None:
            return None
        (layer, own), self.handed = self.handed, None
        if keys is not own[0] or values is not own[1]:
            raise RuntimeError(f"layer {layer.layer}: the model attends to other keys and values than it was given")
        return layer

    def check(self, keys: Tensor, values: Tensor, layer: MixedLayer) -> None:
        """ValueError unless keys and values are the next ones of the model and the batch that the cache is for."""
        found = keys.shape[1], keys.shape[3], values.shape[3]
        expected = self.shape.heads, self.shape.key_width, self.shape.value_width
        store = layer.store
        if layer.forward_passes == self.forward_passes or found != expected:
            raise ValueError(f"layer {layer.layer}: this cache was made for another model: make one for each")
        if store is not None and (store.batch, store.arithmetic) != (len(keys), keys.dtype):
            raise ValueError(
                f"layer {layer.layer}: {len(keys)} sequences in {keys.dtype}, but the cache holds {store.batch} in "
                f"{store.arithmetic}: reset() it for others"
            )
        if self.prefill == "stepwise" and keys.shape[2] > 1:
            raise ValueError(
                f"{keys.shape[2]} tokens at once, but prefill is stepwise: generate(..., prefill_chunk_size=1), and no "
                "assistant; or take prefill='exact'"
            )
        tokens = layer.get_seq_length() + keys.shape[2]
        if tokens > self.limit:
            raise ValueError(f"{tokens} tokens, but the model has a layer whose attention has a window of {self.limit}")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise ValueError(f"layer {layer_idx}: this cache was made for another model: make one for each")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens (a number of 0 or below) as if they had never come.

        ValueError, and nothing is dropped, where a scheme has quantized tokens before them that were exact without.
        """
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def payload_bytes(self) -> int:
        """Bytes of codes, and of keys and values that are not quantized."""
        return sum(layer.store.payload_bytes for layer in self.layers if layer.store is not None)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, zero points and offsets."""
        stores = [layer.store for layer in self.layers if layer.store is not None]
        return sum(store.scale_bytes + store.once_bytes for store in stores)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all tensors that live between steps, room for tokens to come included: of all that are reached from
        the cache, each memory once. What schemes are told of a model (``contexts``) is not counted."""
        found = {}
        for tensor in tensors([layer.store for layer in self.layers], set()):
            storage = tensor.untyped_storage()
            found[tensor.device, storage.data_ptr()] = storage.nbytes()
        return sum(found.values())


class OpenedModel:
    """What a cache needs to know of an opened model, found once: its decoder without the head, and its shape.

    ``limit`` is the length up to which all of its layers attend to every token. ValueError where its cache is not one
    of keys and values of full attention.
    """

    def __init__(self, model: transformers.PreTrainedModel):
        name = Path(model.config.name_or_path or type(model).__name__)
        check_config(name, model.config)
        config = model.config.get_text_config(decoder=True)
        self.limit = min((window for kind, window in layer_types(config) if kind in WINDOWED), default=1 << 62)
        self._body = weakref.ref(model.get_decoder())
        trial, by_registry = Trial(), self.body.config._attn_implementation == LIBRARY
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.no_grad(), attending(self.body.config, trial) if by_registry else nullcontext():
            logits = model(input_ids=token, cache=Bridge(trial), use_cache=True).logits
        # Whether its attention can be to stored tokens (see ``stored_attention``).
        self.fits = by_registry and trial.fits
        layers = config.num_hidden_layers
        heads, key_width, value_width = kv_shape(trial.shapes, layers)
        query_heads = getattr(config, "num_attention_heads", heads)
        sizes = logits.shape[-1], self.limit, config.hidden_size, query_heads
        self.shape = DecoderShape(layers, heads, key_width, value_width, *sizes)
        self._digest: str | None = None
        self.body.register_forward_pre_hook(announce, with_kwargs=True)
        self.body.register_forward_hook(dismiss, with_kwargs=True, always_call=True)

    @property
    def body(self) -> nn.Module:
        return self._body()

    def identity(self, model: transformers.PreTrainedModel) -> ModelIdentity:
        """The identity of the model, whose weights are read at the first call."""
        if self._digest is None:
            self._digest = model_digest(model)
        return ModelIdentity(self.shape, self._digest)


_OPENED: weakref.WeakKeyDictionary[nn.Module, OpenedModel] = weakref.WeakKeyDictionary()


def opened(model: transformers.PreTrainedModel) -> OpenedModel:
    """What is known of a model."""
    if model not in _OPENED:
        _OPENED[model] = OpenedModel(model)
    return _OPENED[model]


def announce(body: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Tell a cache of ours that a forward pass of a decoder begins."""
    cache = cache_of(named)
    if cache is not None:
        cache.begin(body, named.get("attention_mask"))


def dismiss(body: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
    """Tell a cache of ours that it has ended."""
    cache = cache_of(named)
    if cache is not None:
        cache.end(output is not None)


def cache_of(named: Mapping[str, Any]) -> MixedPrecisionCache | None:
    """The cache of ours among the arguments of a forward pass, if there is one."""
    cache = named.get("cache", named.get("past_key_values"))
    return cache if isinstance(cache, MixedPrecisionCache) else None


def tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that is reached from an object's attributes and items."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors(value, seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type):
        yield from tensors(vars(thing), seen)
