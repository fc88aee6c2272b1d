"""The cache for generate(): the library's own where nothing is quantized; whole in whatever is done to it.

Each test of the second half is a fault that other caches have.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_models
import pytest
import torch
import transformers
from huggingface_models import FAMILIES, LAYERS, VOCABULARY
from models import identified

import kvstages
from kvstages import MixedPrecisionCache
from kvstages.cache.packed import LayerCache, PackedCache
from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.cache.schemes import precision
from kvstages.files.atomic import write_json
from kvstages.measure import generation_cache
from kvstages.measure.calibration import calibrate, write_contexts
from kvstages.measure.generation_cache import MixedLayer, opened
from kvstages.models.huggingface import HuggingFaceDecoder
from kvstages.policies.budgets import Budget
from kvstages.policies.making import policy_record

LENGTH, NEW = 9, 5
# Every kind of store: published precisions, exact first tokens, scales shared by tokens, a recent window, rotation.
MIXED = ["int4", "bf16", "int3-first2", "int4-k.channel4+v.group2+zero", "int6-recent3", "rotated4"]
FAMILIES_HERE = ["llama", "gpt2", "gemma3", "gpt-neox", "gpt-bigcode", "mimo-v2"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No gradients; no advice of the library on names that it changes."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture(scope="module")
def exact() -> transformers.PreTrainedModel:
    """A Llama in FP64: what is computed in another order gives the same codes."""
    return huggingface_models.shared("llama")


def heads_of(family: str) -> int:
    return FAMILIES[family][2][0]


def uniform(name: str, family: str = "llama") -> PrecisionGrid:
    return PrecisionGrid.uniform(LAYERS, heads_of(family), name)


def mixed(family: str = "llama") -> PrecisionGrid:
    """Another precision for every head's keys and values."""
    count = LAYERS * heads_of(family)
    names = [MIXED[index % len(MIXED)] for index in range(2 * count)]
    rows = [names[start : start + heads_of(family)] for start in range(0, 2 * count, heads_of(family))]
    return PrecisionGrid(*(tuple(map(tuple, rows[part::2])) for part in range(2)))


def prompt(batch: int = 1, length: int = LENGTH, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Sequences, and the scores of every step."""
    out = model.generate(
        ids,
        **{
            "past_key_values": cache,
            "max_new_tokens": NEW,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "output_scores": True,
            "return_dict_in_generate": True,
            **options,
        },
    )
    return (out.sequences, *(out.scores or ()))


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def forward(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(input_ids=ids, cache=cache, use_cache=True, attention_mask=mask).logits


def read(cache: MixedPrecisionCache) -> list[torch.Tensor]:
    """What every layer reads its tokens back as, once the next step begins."""
    out = []
    for layer in cache.layers:
        layer.store.settle()
        back = torch.empty(layer.store.batch, 2 * layer.store.heads, layer.store.length, layer.store.head_dim).double()
        layer.store.reconstruct_into(back)
        out.append(back)
    return out


def stored(cache: MixedPrecisionCache) -> list[torch.Tensor]:
    """The codes, scales and exact tokens themselves."""
    found = []
    for layer in cache.layers:
        layer.store.settle()
        found += [layer.store._stored(name) for name in layer.store.store]
        for _, store in layer.store.groups:
            found += [store.first, store.last, *(growing.tensor for growing in store._growing())]
    return [tensor.clone() for tensor in found]


# --- nothing quantized: the library's own cache, bit for bit ---

MASK = torch.tensor([[0] * 4 + [1] * 5, [0] + [1] * 8, [1] * 9])
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "padded": {"attention_mask": MASK},
    "padded beams": {"attention_mask": MASK, "num_beams": 3, "num_return_sequences": 2},
    "chunks": {"attention_mask": MASK, "prefill_chunk_size": 2},
    "one by one": {"attention_mask": MASK, "prefill_chunk_size": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_in_bf16_it_is_the_dynamic_cache_bit_for_bit(family, way):
    model = huggingface_models.shared(family, torch.bfloat16)
    ids = prompt(3 if "attention_mask" in WAYS[way] else 1)
    runs = []
    for cache in (transformers.DynamicCache(config=model.config), MixedPrecisionCache(uniform("bf16", family), model)):
        torch.manual_seed(1)
        runs.append(generated(model, ids, cache, **WAYS[way]))
    assert same(*runs)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_bf16_assisted_decoding_and_a_continued_conversation_are_the_same(family):
    model = huggingface_models.shared(family, torch.bfloat16)
    assistant = huggingface_models.model(family, torch.bfloat16)
    assistant.get_output_embeddings().weight[::2] *= 0.9  # it is right now and then
    runs = []
    for cache in (transformers.DynamicCache(config=model.config), MixedPrecisionCache(uniform("bf16", family), model)):
        first = generated(model, prompt(), cache, assistant_model=assistant, max_new_tokens=12)
        further = torch.cat((first[0], prompt(length=3, seed=4)), dim=1)
        second = generated(model, further, cache)
        runs.append((*first, *second))
    assert same(*runs)


def test_both_names_of_the_argument_are_taken():
    model = huggingface_models.shared("llama", torch.bfloat16)
    one, other = (MixedPrecisionCache(mixed(), model) for _ in range(2))
    named = model.generate(
        prompt(), cache=other, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(generated(model, prompt(), one)[0], named)


# --- as measured ---


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_stepwise_is_what_the_workflow_measures(family):
    model = huggingface_models.shared(family)
    decoder = HuggingFaceDecoder(model, family, 32, "the limit")
    grid, ids = mixed_of_width(family), prompt(2, LENGTH + 3)
    measured = PackedCache(grid, 2, decoder.shape.key_width, torch.float64, value_width=decoder.shape.value_width)
    expected = torch.cat([decoder(ids[:, at : at + 1], measured) for at in range(ids.shape[1])], dim=1)
    cache = MixedPrecisionCache(grid, model, prefill="stepwise")
    found = torch.cat([forward(model, ids[:, at : at + 1], cache) for at in range(ids.shape[1])], dim=1)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    one_by_one = {"prefill_chunk_size": 1, "max_new_tokens": 2}
    assert generated(model, ids[:1, :4], MixedPrecisionCache(grid, model, "stepwise"), **one_by_one)
    with pytest.raises(ValueError, match=r"4 tokens at once, but prefill is stepwise: generate\(\.\.\., prefill_chunk"):
        generated(model, ids[:1, :4], MixedPrecisionCache(grid, model, "stepwise"))


def mixed_of_width(family: str) -> PrecisionGrid:
    """The mixed grid, with precisions that fit heads of any width."""
    plain = {"int4-k.channel4+v.group2+zero": "int4-k.channel4+zero"}
    swap = [tuple(tuple(plain.get(name, name) for name in row) for row in rows) for rows in
            (mixed(family).keys, mixed(family).values)]  # fmt: skip
    return PrecisionGrid(*swap)


def test_exact_prefill_sees_the_prompt_as_it_is_and_stores_the_same(exact):
    ids = prompt(2)
    cache, stepwise = MixedPrecisionCache(mixed(), exact), MixedPrecisionCache(mixed(), exact, "stepwise")
    dense = forward(exact, ids, MixedPrecisionCache(uniform("bf16"), exact))
    assert torch.allclose(forward(exact, ids, cache), dense, rtol=1e-9, atol=1e-9)
    for at in range(LENGTH):
        forward(exact, ids[:, at : at + 1], stepwise)
    # In the first layer what is stored does not depend on what is attended to.
    assert torch.equal(read(cache)[0], read(stepwise)[0])
    assert not torch.allclose(read(cache)[2], read(stepwise)[2], rtol=1e-3)


# --- attention to what is stored ---

PUBLISHED = ["int4", "bf16", "int8", "int4", "int3"]


def published(family: str) -> PrecisionGrid:
    """Another published precision for every head's keys and values; the last layer in BF16."""
    heads = heads_of(family)
    names = [PUBLISHED[index % len(PUBLISHED)] for index in range(2 * heads * (LAYERS - 1))] + ["bf16"] * (2 * heads)
    rows = [tuple(names[start : start + heads]) for start in range(0, len(names), heads)]
    return PrecisionGrid(tuple(rows[::2]), tuple(rows[1::2]))


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """The layers whose attention was to what is stored, as they come."""
    layers, own = [], MixedLayer.attend

    def attend(self, *given):
        layers.append(self.layer)
        return own(self, *given)

    monkeypatch.setattr(MixedLayer, "attend", attend)
    return layers


@pytest.mark.parametrize("way", ["greedy", "beams", "padded", "padded beams", "one by one"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt-neox", "gpt-bigcode"])
def test_attention_to_what_is_stored_is_that_to_what_is_read_back(attended, family, way):
    """A working copy is read back; with FP32 values the two differ by the order of sums."""
    model = huggingface_models.shared(family, torch.float32)
    ids = prompt(3 if "attention_mask" in WAYS[way] else 1)
    cache = MixedPrecisionCache(published(family), model)
    found, *scores = generated(model, ids, cache, **WAYS[way])
    layers = [layer for layer in range(LAYERS) if set(published(family).row(layer)) != {"bf16"}]
    assert layers and attended[: len(layers)] == layers and len(attended) % len(layers) == 0
    count = len(attended)
    copy = MixedPrecisionCache(published(family), model, working_copy=True)
    expected, *others = generated(model, ids, copy, **WAYS[way])
    assert len(attended) == count and torch.equal(found, expected)
    for ours, theirs in zip(scores, others, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_models_own_attention_is_back_after_each_pass(monkeypatch):
    model = huggingface_models.shared("llama", torch.float32)
    cache = MixedPrecisionCache(uniform("int4"), model)
    forward(model, prompt(), cache)
    forward(model, prompt(1, 1), cache)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(MixedLayer, "attend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, prompt(1, 1), cache)
    assert model.config._attn_implementation == "sdpa"
    assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH + 1}  # none of the broken pass
    monkeypatch.undo()
    fresh = MixedPrecisionCache(uniform("int4"), model)
    for ids in (prompt(), prompt(1, 1), prompt(1, 1, seed=8)):
        expected = forward(model, ids, fresh)
    assert torch.equal(forward(model, prompt(1, 1, seed=8), cache), expected)


def test_a_pass_that_the_user_interrupts_leaves_nothing_behind(attended):
    """PyTorch calls no hook after Ctrl-C: the next pass with the cache ends that one."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model = huggingface_models.shared("llama", torch.float32)
    cache = MixedPrecisionCache(uniform("int4"), model)
    forward(model, prompt(), cache)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MixedLayer, "attend", interrupted)
        forward(model, prompt(1, 1), cache)
    cache.reset()
    found = generated(model, prompt(2), cache)
    assert attended and model.config._attn_implementation == "sdpa"
    assert same(found, generated(model, prompt(2), MixedPrecisionCache(uniform("int4"), model)))


def test_what_is_not_finite_is_named_and_not_stored():
    model = huggingface_models.model("llama", torch.float32)
    cache = MixedPrecisionCache(uniform("int4"), model)
    forward(model, prompt(), cache)
    model.model.layers[1].self_attn.k_proj.weight[12] = torch.nan
    with pytest.raises(ValueError, match="layer 1, head 1: NaN or infinity in the keys"):
        forward(model, prompt(1, 1), cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH}


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"attn_implementation": "eager"}), ("gemma2", {}), ("mimo-v2", {})]
)
def test_models_with_an_attention_of_their_own_keep_it(attended, family, options):
    """Their function, soft cap or sinks: what is stored is read back for them."""
    model = huggingface_models.model(family, torch.float32, **options)
    cache = MixedPrecisionCache(uniform("int4", family), model)
    assert generated(model, prompt(), cache)[0].shape == (1, LENGTH + NEW) and not attended


def test_a_model_that_attends_to_something_else_is_no_silent_error():
    model = huggingface_models.model("llama", torch.float32)
    cache = MixedPrecisionCache(uniform("int4"), model)
    keys, values = torch.randn(2, 1, 2, 1, 12)
    cache.hand(cache.layers[0], keys, values)
    with pytest.raises(RuntimeError, match="layer 0: the model did not ask for the attention to its past"):
        cache.hand(cache.layers[1], keys, values)
    with pytest.raises(RuntimeError, match="layer 0: the model attends to other keys and values than it was given"):
        cache.take(keys.clone(), values, {})


def test_bytes_are_those_of_the_policy_and_little_else_is_resident():
    model = huggingface_models.model("llama", torch.bfloat16, max_position_embeddings=2048)
    cache = MixedPrecisionCache(mixed(), model)
    generated(model, prompt(2, 1100), cache)
    for layer in cache.layers:
        layer.store.settle()
    size = policy_bytes(mixed(), (12, 12), 1100 + NEW - 1)
    assert cache.payload_bytes == 2 * size.payload
    assert cache.scale_bytes == 2 * size.scales + size.once
    held = cache.payload_bytes + cache.scale_bytes
    assert held < cache.resident_bytes < 1.05 * held


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resident_bytes_are_all_that_a_cache_holds(dtype):
    exact = huggingface_models.shared("llama", dtype)
    # Tables that all caches share are made at the first use.
    generated(exact, prompt(2), MixedPrecisionCache(uniform("int4"), exact))
    cache = MixedPrecisionCache(uniform("int4"), exact)
    gc.freeze()  # what there is by now is no longer looked at
    forward(exact, prompt(2, 30), cache)
    forward(exact, prompt(2, 1), cache)
    gc.collect()
    new = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    assert cache.resident_bytes == sum({each.data_ptr(): each.untyped_storage().nbytes() for each in new}.values())


def test_nothing_is_quantized_twice(exact):
    cache = MixedPrecisionCache(uniform("int3"), exact)
    forward(exact, prompt(2), cache)
    before = stored(cache)
    for at in range(40):
        forward(exact, prompt(2, 1, seed=at), cache)
    for old, new in zip(before, stored(cache), strict=True):
        assert torch.equal(old, new[:, :, : old.shape[2]])


@pytest.mark.parametrize("way", ["greedy", "beams", "padded", "chunks"])
def test_a_working_copy_changes_nothing_but_memory(exact, way):
    ids = prompt(3 if "attention_mask" in WAYS[way] else 1)
    caches = [MixedPrecisionCache(mixed(), exact, working_copy=copy) for copy in (False, True)]
    assert same(*(generated(exact, ids, cache, **WAYS[way]) for cache in caches))
    assert caches[0].resident_bytes < caches[1].resident_bytes


# --- what is done to a cache ---


def test_what_comes_later_changes_nothing_before(exact):
    for ids in (prompt(), prompt(seed=4)):
        changed = ids.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
        one, other = (forward(exact, each, MixedPrecisionCache(mixed(), exact)) for each in (ids, changed))
        assert torch.equal(one[:, :5], other[:, :5]) and not torch.equal(one[:, 5], other[:, 5])


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("family", ["llama", "gpt-neox", "mimo-v2"])
def test_a_padded_batch_is_its_sequences_alone(family, chunk):
    """Also where tokens share a scale, or the first ones are exact: padding is none of them."""
    model, ids = huggingface_models.shared(family), prompt(3)
    if family == "mimo-v2":
        model = huggingface_models.model(family)
        model.set_experts_implementation("eager")  # grouped products of experts know no FP64
    grid = mixed_of_width(family)
    together = MixedPrecisionCache(grid, model)
    sequences, *scores = generated(model, ids, together, attention_mask=MASK, prefill_chunk_size=chunk)
    for row, padding in enumerate((4, 1, 0)):
        alone = MixedPrecisionCache(grid, model)
        # The same tokens come together as in the batch.
        sizes = [LENGTH] if chunk is None else [chunk] * (LENGTH // chunk) + [LENGTH % chunk] * (LENGTH % chunk > 0)
        ends = [max(0, sum(sizes[: index + 1]) - padding) for index in range(len(sizes))]
        for start, stop in zip([0, *ends], ends, strict=False):
            if stop > start:
                logits = forward(model, ids[row : row + 1, padding + start : padding + stop], alone)
        for step, expected in enumerate(scores):
            assert torch.allclose(logits[:, -1], expected[row : row + 1].double(), rtol=1e-5, atol=1e-5)
            token = sequences[row : row + 1, LENGTH + step : LENGTH + step + 1]
            if step + 1 < len(scores):
                logits = forward(model, token, alone)


PERMUTED = torch.tensor([2, 0, 0, 1])


@pytest.mark.parametrize("change", ["reorder", "select", "mask", "repeat"])
def test_every_store_follows_what_is_done_to_the_batch(exact, change):
    ids, mask = prompt(4), torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, :4], mask[2, :1] = 0, 0
    cache = MixedPrecisionCache(mixed(), exact)
    forward(exact, ids, cache, mask)
    rows = {"repeat": torch.arange(4).repeat_interleave(3), "mask": torch.tensor([0, 2])}.get(change, PERMUTED)
    {
        "reorder": lambda: cache.reorder_cache(rows),
        "select": lambda: cache.batch_select_indices(rows),
        "mask": lambda: cache.batch_select_indices(torch.tensor([True, False, True, False])),
        "repeat": lambda: cache.batch_repeat_interleave(3),
    }[change]()
    fresh = MixedPrecisionCache(mixed(), exact)
    forward(exact, ids[rows], fresh, mask[rows])
    more = torch.cat((mask[rows], torch.ones(len(rows), 1, dtype=torch.long)), dim=1)
    token = prompt(len(rows), 1, seed=6)
    assert torch.allclose(forward(exact, token, cache, more), forward(exact, token, fresh, more), rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(read(cache), read(fresh), strict=True):
        assert torch.equal(ours, theirs)


def test_codes_and_scales_themselves_are_reordered(exact):
    ids, grid = prompt(4), PrecisionGrid.of_heads([["int4", "bf16"], ["int6-recent2", "int3"], ["int8", "int2"]])
    cache, fresh = MixedPrecisionCache(grid, exact), MixedPrecisionCache(grid, exact)
    forward(exact, ids, cache)
    cache.reorder_cache(PERMUTED)
    forward(exact, ids[PERMUTED], fresh)
    before = stored(cache)
    assert before and all(map(torch.equal, before, stored(fresh)))


def test_cropping_is_as_if_the_tokens_had_never_come(exact):
    ids, seen, more = prompt(2), prompt(2, 3, seed=5), prompt(2, 2, seed=6)
    cache, fresh = (MixedPrecisionCache(mixed(), exact) for _ in range(2))
    for each in (cache, fresh):
        forward(exact, ids, each)
    before = read_without_settling(cache)
    cache.crop(0)
    assert all(map(torch.equal, before, read_without_settling(cache)))
    forward(exact, seen, cache)
    cache.crop(-3)
    assert cache.get_seq_length() == LENGTH
    for each in (cache, fresh):
        forward(exact, more, each)
    for ours, theirs in zip(read(cache), read(fresh), strict=True):
        assert torch.equal(ours, theirs)


def read_without_settling(cache: MixedPrecisionCache) -> list[torch.Tensor]:
    out = []
    for layer in cache.layers:
        back = torch.empty(layer.store.batch, 2 * layer.store.heads, layer.store.length, layer.store.head_dim).double()
        layer.store.reconstruct_into(back)
        out.append(back)
    return out


def test_all_tokens_may_be_cropped(exact):
    cache, fresh = (MixedPrecisionCache(uniform("int4"), exact) for _ in range(2))
    forward(exact, prompt(3), cache)
    cache.crop(-LENGTH)
    assert cache.get_seq_length() == 0
    assert torch.equal(forward(exact, prompt(1, 4), cache), forward(exact, prompt(1, 4), fresh))


def test_a_crop_that_a_scheme_cannot_undo_is_refused_and_drops_nothing(exact):
    grid = PrecisionGrid.of_heads([["int4", "int4"], ["int8", "bf16"], ["int4-k.channel4", "int4"]])
    cache = MixedPrecisionCache(grid, exact)
    forward(exact, prompt(), cache)
    forward(exact, prompt(1, 1), cache)
    with pytest.raises(ValueError, match="layer 2: the last 6 tokens cannot be dropped"):
        cache.crop(-6)
    assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH + 1}
    with pytest.raises(ValueError, match=r"crop\(2\): expected the tokens to drop as a number of 0 or below"):
        cache.crop(2)


def test_a_shorter_prompt_after_reset_finds_a_fresh_cache(exact):
    cache = MixedPrecisionCache(mixed(), exact)
    generated(exact, prompt(3), cache, attention_mask=MASK)
    cache.reset()
    assert cache.get_seq_length() == cache.payload_bytes == 0
    second = generated(exact, prompt(2, 4), cache)
    assert same(second, generated(exact, prompt(2, 4), MixedPrecisionCache(mixed(), exact)))


def test_stores_are_made_with_the_first_layers(exact, monkeypatch):
    """Between those made later there would be gaps. A forward pass that is broken off leaves none behind, neither in
    memory, which ``resident_bytes`` would not count, nor for other sequences."""
    made, store = [], generation_cache.LayerCache

    def making(*given: Any, **named: Any) -> LayerCache:
        made.append(named["layer"])
        return store(*given, **named)

    monkeypatch.setattr(generation_cache, "LayerCache", making)

    def broken(*_: Any) -> None:
        assert made == list(range(LAYERS))
        raise RuntimeError("broken off")

    cache, hook = MixedPrecisionCache(mixed(), exact), exact.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="broken off"):
        forward(exact, prompt(2), cache)
    assert not cache.prepared
    hook.remove()
    cache.reset()
    found = generated(exact, prompt(), cache)
    assert same(found, generated(exact, prompt(), MixedPrecisionCache(mixed(), exact)))


def test_beams_and_assistants_of_a_mixed_policy_are_those_of_the_plain_search(exact):
    """A search by hand: a fresh cache for every beam and step."""
    grid = mixed()
    sequences = generated(exact, prompt(), MixedPrecisionCache(grid, exact), num_beams=2, max_new_tokens=4)[0]
    beams = [(0.0, prompt())]
    for step in range(4):
        found = []
        for score, ids in beams:
            cache = MixedPrecisionCache(grid, exact)
            logits = forward(exact, ids[:, :LENGTH], cache)
            for at in range(LENGTH, ids.shape[1]):
                logits = forward(exact, ids[:, at : at + 1], cache)
            logs = logits[0, -1].log_softmax(-1)
            found += [(score + float(logs[token]), torch.cat((ids, token.view(1, 1)), 1)) for token in logs.topk(4)[1]]
        beams = sorted(found, key=lambda beam: -beam[0])[: 2 if step < 3 else 1]
    assert torch.equal(sequences, beams[0][1])
    assistant = huggingface_models.model("llama")
    assistant.lm_head.weight[::2] *= 0.9
    helped = generated(exact, prompt(), MixedPrecisionCache(uniform("int8"), exact), assistant_model=assistant)[0]
    assert torch.equal(helped, generated(exact, prompt(), MixedPrecisionCache(uniform("int8"), exact))[0])


# --- what is refused ---


def test_one_cache_is_for_one_model_and_one_batch(exact):
    cache = MixedPrecisionCache(mixed(), exact)
    generated(exact, prompt(), cache)
    twin, other = huggingface_models.model("llama"), huggingface_models.model("gpt2")
    for model in (twin, other):
        with pytest.raises(ValueError, match="layer 0: this cache was made for another model: make one for each"):
            forward(model, prompt(1, 1), cache)
    MixedPrecisionCache(mixed(), twin)  # its decoder is watched from now on
    with pytest.raises(ValueError, match="this cache was made for another model: make one for each"):
        forward(twin, prompt(1, 1), cache)
    with pytest.raises(ValueError, match=r"layer 0: 2 sequences in torch.float64, but the cache holds 1 in"):
        forward(exact, prompt(2, 1), cache)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: huggingface_models.model("llama", num_hidden_layers=2), r"precisions for heads \[2, 2, 2\] a layer"),
        (
            lambda: huggingface_models.shared("gpt2"),
            r"precisions for heads \[2, 2, 2\] a layer, but the model has \[4,",
        ),
        (lambda: huggingface_models.model("gpt2", add_cross_attention=True), "gpt2 attends to an encoder"),
    ],
)
def test_a_model_that_the_grid_does_not_fit_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        MixedPrecisionCache(uniform("int4"), model())


def test_a_text_beyond_a_window_is_refused():
    model = huggingface_models.model("gemma3", torch.bfloat16, sliding_window=10)
    cache = MixedPrecisionCache(uniform("int4", "gemma3"), model)
    forward(model, prompt(), cache)
    forward(model, prompt(1, 1), cache)
    with pytest.raises(ValueError, match="11 tokens, but the model has a layer whose attention has a window of 10"):
        forward(model, prompt(1, 1), cache)


def test_what_is_not_known_of_a_model_is_asked_for(exact):
    with pytest.raises(ValueError, match="centred4 needs to know the model: give calibration=, a file of the stage"):
        MixedPrecisionCache(uniform("centred4"), exact)
    with pytest.raises(ValueError, match="prefill 'fast': expected one of exact, stepwise"):
        MixedPrecisionCache(mixed(), exact, "fast")


# --- a policy's file ---


@pytest.fixture
def policy(tmp_path: Path, exact) -> Path:
    path = tmp_path / "policy.json"
    write_json(path, record(uniform("int4"), exact))
    return path


def record(grid: PrecisionGrid, model: Any) -> dict[str, Any]:
    names = sorted({"bf16", *grid.flat()})
    made = policy_record(
        "p",
        "greedy",
        Budget(0.1, "nats"),
        grid,
        0.05,
        3,
        (12, 12),
        64,
        unit="head",
        ladder=names,
        sensitivity="made-up",
    )
    return identified(made, opened(model).identity(model), names)


def test_a_policy_is_taken_from_its_file(policy, exact):
    assert MixedPrecisionCache is kvstages.MixedPrecisionCache
    cache = MixedPrecisionCache.from_policy(str(policy), exact)
    assert same(
        generated(exact, prompt(), cache), generated(exact, prompt(), MixedPrecisionCache(uniform("int4"), exact))
    )


def test_a_policy_for_another_model_or_shape_is_refused(policy, tmp_path):
    twin = huggingface_models.model("llama")
    twin.lm_head.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"policy\.json: made for another model of this shape \(digest of its weights"):
        MixedPrecisionCache.from_policy(policy, twin)
    with pytest.raises(ValueError, match=r"policy\.json: made for a model with key_width 12, value_width 12; this one"):
        MixedPrecisionCache.from_policy(policy, huggingface_models.model("llama", head_dim=8))
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match=r"old\.json: key 'policy' is missing, expected a policy of the stage"):
        MixedPrecisionCache.from_policy(tmp_path / "old.json", twin)


def test_schemes_are_told_what_was_calibrated(tmp_path, exact):
    decoder = HuggingFaceDecoder(exact, "llama", 32, "the limit")
    write_contexts(tmp_path / "calibration.safetensors", calibrate(decoder, prompt(2), 1 << 30), "calibration")
    grid = uniform("lloyd4-k.mean+first1")
    assert precision("lloyd4-k.mean+first1").keys.needs == ("mean",)
    write_json(tmp_path / "policy.json", record(grid, exact))
    cache = MixedPrecisionCache.from_policy(
        tmp_path / "policy.json", exact, "stepwise", calibration=tmp_path / "calibration.safetensors"
    )
    measured = PackedCache(grid, 1, 12, torch.float64, contexts=cache.contexts)
    for at in range(LENGTH):
        ours, theirs = forward(exact, prompt()[:, at : at + 1], cache), decoder(prompt()[:, at : at + 1], measured)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)
