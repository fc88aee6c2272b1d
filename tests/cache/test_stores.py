"""Both caches under every scheme: one pass equals token by token, bytes are the formula's, and nothing is quantized
twice; sequences can be padded, cropped and picked."""

from __future__ import annotations

import functools

import pytest
import torch
from schemes import ANY_WIDTH, WIDE, contexts

from kvstages.cache.coding import Codec
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache, measured_bytes
from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.cache.schemes import precision
from kvstages.models.block_attention import attend
from kvstages.models.gpt2_nano import attend_through

LAYERS, HEADS, TOKENS = 2, 4, 11
# Odd, no power of two, and one that engines' blocks ask for.
CASES = [*((name, 5) for name in ANY_WIDTH), *((name, 6) for name in ANY_WIDTH[::4]), *((name, 32) for name in WIDE)]


def grid_of(name: str, other: str = "int4-k.recent2") -> PrecisionGrid:
    """A layer of one precision; and one with others beside it, other ones of keys and values of one head included."""
    return PrecisionGrid(
        ((name,) * HEADS, (name, other, "bf16", name)), ((name,) * HEADS, (other, "int4", name, "bf16"))
    )


@functools.cache
def layers_given(width: int) -> torch.Tensor:
    """Each layer's queries, keys and values [L, 3, B, H, T, D]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LAYERS, 3, 2, HEADS, TOKENS, width, generator=generator, dtype=torch.float64)


def one_pass(cache: BlockCache, width: int) -> torch.Tensor:
    """What attention through the cache gives in each layer, [L, B, H, T, D]."""
    return torch.stack([attend_through(cache, *given, layer) for layer, given in enumerate(layers_given(width))])


def steps(cache: PackedCache, width: int, through=attend_through) -> torch.Tensor:
    """The same, token by token."""
    return torch.stack(
        [
            torch.cat([through(cache, *given[..., t : t + 1, :], layer) for t in range(TOKENS)], dim=2)
            for layer, given in enumerate(layers_given(width))
        ]
    )


def turned(cache: PackedCache, queries, keys, values, layer) -> torch.Tensor:
    """Attention that rotates queries and outputs instead of the past, as a decoder that can would do."""
    mask = cache.mask(queries.shape[2], layer)
    keys, values = cache.update(keys, values, layer)
    return cache.outputs(attend(cache.queries(queries, layer), keys, values, mask), layer)


@pytest.mark.parametrize(("name", "width"), CASES)
def test_one_pass_equals_token_by_token(monkeypatch, name, width):
    """Also where rotated queries save rotating the past back."""
    grid, known = grid_of(name), contexts(LAYERS, HEADS, width)
    expected = one_pass(BlockCache(grid, contexts=known), width)

    def packed(working_copy: bool, turned: bool) -> PackedCache:
        return PackedCache(grid, 2, width, torch.float64, 3, working_copy, contexts=known, turned=turned)

    for working_copy in (True, False):
        assert torch.allclose(steps(packed(working_copy, False), width), expected, rtol=0, atol=1e-10)
    backwards = []
    original = Codec.turn_back
    monkeypatch.setattr(Codec, "turn_back", lambda self, x: backwards.append(x.shape[2]) or original(self, x))
    # Without a rotation what is read back is what it would be anyway: once is enough.
    rotated = any(precision(name).method(side).rotation for side in "kv")
    for working_copy in (False, True)[: 1 + rotated]:
        assert torch.allclose(steps(packed(working_copy, True), width, turned), expected, rtol=0, atol=1e-10)
    # What is rotated back is one output a step, never the past.
    assert set(backwards) <= {1}


@pytest.mark.parametrize(("name", "width"), CASES)
def test_bytes_are_counted_from_tensors_and_are_the_formulas(name, width):
    grid, known = grid_of(name), contexts(LAYERS, HEADS, width)
    for tokens in (1, 2, 7, 8):
        assert measured_bytes(grid, width, tokens, contexts=known) == policy_bytes(grid, (width, width), tokens)


def random_steps(sizes, batch=2, width=5, seed=0):
    """Keys and values of some steps, as BF16 holds them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(batch, HEADS, new, width, generator=generator).bfloat16().float() for _ in range(2)]
        for new in sizes
    ]


def cache_of(name: str, batch: int = 2, width: int = 5, working_copy: bool = True, padding=None) -> PackedCache:
    grid = PrecisionGrid.uniform(1, HEADS, name)
    known = contexts(1, HEADS, width)
    return PackedCache(grid, batch, width, torch.float32, 2, working_copy, contexts=known, padding=padding)


@pytest.mark.parametrize("name", ANY_WIDTH)
def test_each_token_is_quantized_once_and_its_bytes_stay(monkeypatch, name):
    quantized = []
    original = Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda self, x, start=0: quantized.append((start, x.shape[2])) or original(self, x, start)
    )
    cache = cache_of(name)
    kept = []
    for keys, values in random_steps((3, 1, 1, 4, 1, 1, 2)):
        cache.update(keys, values, 0)
        for _, store in cache.layers[0].groups:
            kept += [(each, each.length, each.tensor.clone()) for each in store._growing()]
    for growing, length, stored in kept:
        assert torch.equal(growing.tensor[:, :, :length].float(), stored.float())
    # Keys' and values' tokens each come in turn, without gap or overlap.
    for method in (precision(name).keys, precision(name).values):
        starts = [start for start, _ in quantized]
        assert min(starts) == method.first
    assert len(set(quantized)) * 2 >= len(quantized)


@pytest.mark.parametrize("working_copy", [True, False])
@pytest.mark.parametrize("name", ANY_WIDTH)
def test_left_padding_changes_nothing(name, working_copy):
    """Sequences of 9, 6 and 4 tokens in one batch read back what each does by itself: padding takes no part in groups
    that share a scale, and does not count as first tokens."""
    padding = torch.tensor([0, 3, 5])
    sizes = (4, 2, 1, 1, 1)
    given = random_steps(sizes, batch=3)
    together = cache_of(name, 3, working_copy=working_copy, padding=padding)
    # What is read back is good until the next step.
    seen = [[x.clone() for x in together.update(keys, values, 0)] for keys, values in given]
    alone_bytes = 0
    for row, pad in enumerate(padding.tolist()):
        alone = cache_of(name, 1, working_copy=working_copy)
        start = 0
        for (keys, values), size, both in zip(given, sizes, seen, strict=True):
            skip = min(max(0, pad - start), size)
            start += size
            if skip == size:
                continue
            own = alone.update(keys[row : row + 1, :, skip:], values[row : row + 1, :, skip:], 0)
            for ours, theirs in zip(both, own, strict=True):
                assert torch.allclose(ours[row, :, pad:], theirs[0], atol=1e-6)
        alone.settle()
        alone_bytes += alone.payload_bytes
    together.settle()
    assert together.payload_bytes == alone_bytes


def test_the_mask_hides_padding_from_all_but_itself():
    cache = cache_of("int4-channel3+zero", 2, padding=torch.tensor([0, 2]))
    first = cache.mask(3, 0)
    assert first[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]
    cache.update(*random_steps((3,))[0], 0)
    assert cache.mask(1, 0)[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("working_copy", [True, False])
@pytest.mark.parametrize("name", [*ANY_WIDTH, "int4", "bf16"])
@pytest.mark.parametrize("padded", [False, True])
def test_what_the_last_step_brought_can_be_dropped_as_if_it_had_never_come(name, working_copy, padded):
    padding = torch.tensor([1, 3]) if padded else None
    given = random_steps((5, 1, 4, 1, 1))
    for dropped in (0, 2, 4):
        cropped, fresh = (cache_of(name, working_copy=working_copy, padding=padding) for _ in range(2))
        for keys, values in given[:3]:
            cropped.update(keys, values, 0)
        cropped.crop(dropped)
        for keys, values in given[:2]:
            fresh.update(keys, values, 0)
        if dropped < 4:
            fresh.update(*(x[:, :, : 4 - dropped] for x in given[2]), 0)
        assert cropped.seen() == fresh.seen()
        for keys, values in given[3:]:
            for ours, theirs in zip(cropped.update(keys, values, 0), fresh.update(keys, values, 0), strict=True):
                assert torch.allclose(ours, theirs, atol=1e-6)
        for cache in (cropped, fresh):
            cache.settle()
        assert cropped.payload_bytes == fresh.payload_bytes and cropped.scale_bytes == fresh.scale_bytes


def test_more_can_be_dropped_where_tokens_have_scales_of_their_own():
    given = random_steps((5, 1, 1, 1))
    cropped, fresh = cache_of("centred4"), cache_of("centred4")
    for keys, values in given:
        cropped.update(keys, values, 0)
    cropped.crop(8)
    assert cropped.payload_bytes == 0
    for keys, values in given:
        for ours, theirs in zip(cropped.update(keys, values, 0), fresh.update(keys, values, 0), strict=True):
            assert torch.equal(ours, theirs)


def test_a_crop_that_would_need_tokens_to_be_exact_again_is_refused_and_drops_nothing():
    cache = cache_of("int4-channel3+zero")
    for keys, values in random_steps((7, 1)):
        cache.update(keys, values, 0)
    # Six tokens are stored in two groups since the second step.
    with pytest.raises(ValueError, match=r"layer 0: the last 3 tokens cannot be dropped: .* at most 2 can"):
        cache.crop(3)
    assert cache.seen() == 8
    cache.crop(2)
    assert cache.seen() == 6
    with pytest.raises(ValueError, match="layer 0: 7 tokens to drop of 6"):
        cache.crop(7)


@pytest.mark.parametrize("working_copy", [True, False])
@pytest.mark.parametrize("name", [*ANY_WIDTH, "int4", "bf16"])
@pytest.mark.parametrize("padded", [False, True])
def test_sequences_are_picked_with_all_that_is_stored_of_them(name, working_copy, padded):
    padding = torch.tensor([2, 0, 2]) if padded else None
    rows = torch.tensor([2, 0, 0, 1])
    given = random_steps((5, 1, 1), batch=3)
    picked = cache_of(name, 3, working_copy=working_copy, padding=padding)
    fresh = cache_of(name, 4, working_copy=working_copy, padding=padding[rows] if padded else None)
    for keys, values in given:
        picked.update(keys, values, 0)
        fresh.update(keys[rows], values[rows], 0)
    picked.select(rows)
    for keys, values in random_steps((1, 1), batch=4, seed=1):
        for ours, theirs in zip(picked.update(keys, values, 0), fresh.update(keys, values, 0), strict=True):
            assert torch.equal(ours, theirs)
    assert picked.payload_bytes == fresh.payload_bytes


@pytest.mark.parametrize("make", ["packed", "block"])
def test_what_a_scheme_needs_and_does_not_find_is_said_with_layer_and_side(make):
    grid = PrecisionGrid((("int4",), ("centred4",)), (("int4",), ("int4",)))
    with pytest.raises(ValueError, match="layer 1, keys in centred4: the mean is not known"):
        if make == "packed":
            PackedCache(grid, 1, 4, torch.float32)
        else:
            BlockCache(grid).update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 1)
    with pytest.raises(ValueError, match="layer 0, values in q4_0: heads of width 5 have no whole groups of 32"):
        PackedCache(PrecisionGrid((("int4",),), (("q4_0",),)), 1, 5, torch.float32)


@pytest.mark.parametrize("name", ["centred4", "int4-channel3+zero", "q4_0"])
def test_what_is_not_finite_names_layer_and_head_and_is_not_stored(name):
    width = 32
    grid = PrecisionGrid.uniform(2, HEADS, name)
    known = contexts(2, HEADS, width)
    keys, values = torch.zeros(1, HEADS, 3, width), torch.zeros(1, HEADS, 3, width)
    values[0, 1, 2, 4] = torch.nan
    packed = PackedCache(grid, 1, width, torch.float32, contexts=known)
    for cache in (packed, BlockCache(grid, contexts=known)):
        with pytest.raises(ValueError, match="layer 1, head 1: NaN or infinity in the values"):
            cache.update(keys, values, 1)
    assert packed.payload_bytes == 0
