"""The packed cache against a plain one: the same values, the study's bytes, nothing quantized twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_model, random_tokens
from plain_cache import PlainCache
from published import PUBLISHED

from kvstages.analysis.published import published_policies
from kvstages.cache import packed as cache_module
from kvstages.cache.interventions import CONTROLS
from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache, measured_bytes
from kvstages.cache.precision_grid import PrecisionGrid, policy_bytes
from kvstages.cache.precisions import BITS
from kvstages.cache.quantizer import neighbour

PRECISIONS = tuple(BITS)


@st.composite
def grids(draw) -> PrecisionGrid:
    """Any precision for each head's keys and values."""
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows = st.lists(
        st.lists(st.sampled_from(PRECISIONS), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
    return PrecisionGrid(*(tuple(map(tuple, draw(rows))) for _ in range(2)))


@settings(deadline=None, max_examples=60)
@given(
    grid=grids(),
    batch=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    arithmetic=st.sampled_from([torch.float32, torch.bfloat16]),
    working_copy=st.booleans(),
    capacity=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_packed_and_plain_cache_give_identical_values(
    grid, batch, head_dim, steps, arithmetic, working_copy, capacity, seed
):
    generator = torch.Generator().manual_seed(seed)
    packed = PackedCache(grid, batch, head_dim, arithmetic, capacity, working_copy)
    plain = PlainCache(grid)
    for new in steps:
        for layer, heads in enumerate(grid.shape):
            keys, values = (
                torch.randn(batch, heads, new, head_dim, generator=generator).to(arithmetic) for _ in range(2)
            )
            expected = plain.update(keys, values, layer)
            for ours, theirs in zip(packed.update(keys, values, layer), expected, strict=True):
                assert torch.equal(ours, theirs)
    assert packed.seen() == sum(steps)
    assert packed.scale_bytes == plain.scale_bytes
    assert packed.payload_bytes == plain.payload_bytes


@given(
    grid=grids(),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    working_copy=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_keys_and_values_of_different_width_are_stored_as_each_alone(grid, widths, steps, working_copy, seed):
    generator = torch.Generator().manual_seed(seed)
    both = PackedCache(grid, 2, widths[0], torch.float32, 2, working_copy, value_width=widths[1])
    # The same grid for a side and its double: what the double reads back is the side's alone.
    alone = [PackedCache(grid, 2, width, torch.float32, 2, working_copy) for width in widths]
    for new in steps:
        for layer, heads in enumerate(grid.shape):
            keys, values = (torch.randn(2, heads, new, width, generator=generator) for width in widths)
            expected = alone[0].update(keys, keys, layer)[0], alone[1].update(values, values, layer)[1]
            for ours, theirs in zip(both.update(keys, values, layer), expected, strict=True):
                assert torch.equal(ours, theirs)
    tokens = sum(steps)
    assert both.payload_bytes + both.scale_bytes == 2 * sum(policy_bytes(grid, widths, tokens))
    assert measured_bytes(grid, widths[0], tokens, widths[1]) == policy_bytes(grid, widths, tokens)


def test_payloads_stay_packed_and_are_never_rewritten():
    """A stored position's bytes are the same after any number of further steps, growth of the storage included."""
    cache = PackedCache(PrecisionGrid.of_heads([["int8", "int4", "bf16"]]), 2, 6, torch.float32, capacity=2)
    first = torch.randn(2, 2, 3, 4, 6)
    cache.update(first[0], first[1], 0)
    layer = cache.layers[0]
    before = {name: layer._stored(name).clone() for name in ("int8", "int4", "scales", "dense")}
    assert {name: (stored.dtype, stored.shape[3]) for name, stored in before.items()} == {
        "int8": (torch.uint8, 6),
        "int4": (torch.uint8, 3),
        "scales": (torch.float16, 1),
        "dense": (torch.bfloat16, 6),
    }
    for _ in range(9):
        cache.update(torch.randn(2, 3, 1, 6), torch.randn(2, 3, 1, 6), 0)
    for name, stored in before.items():
        assert torch.equal(layer._stored(name)[:, :, :4], stored)


@pytest.mark.parametrize("working_copy", [True, False])
def test_each_position_is_quantized_once(monkeypatch, working_copy):
    quantized = []
    original = cache_module.quantize
    monkeypatch.setattr(cache_module, "quantize", lambda x, *rest: quantized.append(x.shape[2]) or original(x, *rest))
    cache = PackedCache(PrecisionGrid.of_heads([["int8", "int4"]]), 1, 4, torch.float32, 1, working_copy)
    for new in (3, 1, 1, 2):
        cache.update(torch.randn(1, 2, new, 4), torch.randn(1, 2, new, 4), 0)
    assert quantized == [3, 1, 1, 2]


def test_storage_grows_by_little_and_seldom():
    cache = PackedCache(PrecisionGrid.of_heads([["int8"]]), 1, 4, torch.float32, capacity=1)
    capacities = []
    for length in range(1, 3001):
        cache.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), 0)
        capacities.append(cache.layers[0].store["int8"].shape[2])
        assert length <= capacities[-1] <= length + max(16, length // 32)
    assert len(set(capacities)) < 130


@pytest.mark.parametrize(
    ("label", "total"), [("bf16", 1_572_864), ("int8", 811_008), ("greedy-0.01", 579_840), ("int4", 417_792)]
)
def test_bytes_of_the_published_policies_by_formula_and_from_real_caches(label, total):
    grid = published_policies(PUBLISHED)[label]["precisions"]
    assert sum(policy_bytes(grid, (64, 64), 64)) == total
    assert sum(measured_bytes(grid, 64, 64)) == total


@given(grid=grids(), head_dim=st.integers(1, 9), tokens=st.integers(1, 5))
def test_measured_bytes_are_the_formulas(grid, head_dim, tokens):
    assert measured_bytes(grid, head_dim, tokens) == policy_bytes(grid, (head_dim, head_dim), tokens)


def test_working_bytes_are_those_of_the_copy_alone():
    grid = PrecisionGrid.of_heads([["bf16", "int4"]])
    shared = PackedCache(grid, 1, 4, torch.bfloat16, 8)
    without = PackedCache(grid, 1, 4, torch.bfloat16, 8, working_copy=False)
    for cache in (shared, without):
        cache.update(torch.ones(1, 2, 3, 4).bfloat16(), torch.ones(1, 2, 3, 4).bfloat16(), 0)
    assert shared.payload_bytes == without.payload_bytes
    assert without.working_bytes == 0
    assert shared.working_bytes == 2 * 3 * 4 * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", ["packed", "block"])
@pytest.mark.parametrize(("kind", "head"), [("keys", 0), ("values", 1)])
def test_what_is_not_finite_names_layer_and_head(bad, make, kind, head):
    grid = PrecisionGrid.of_heads([["int8", "bf16"], ["bf16", "int4"]])
    cache = PackedCache(grid, 1, 4, torch.float32) if make == "packed" else BlockCache(grid)
    keys, values = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    (keys if kind == "keys" else values)[0, head, 1, 2] = bad
    with pytest.raises(ValueError, match=f"layer 1, head {head}: NaN or infinity in the {kind}"):
        cache.update(keys, values, 1)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="layer 0: precision 'int7': 'int7' has 7 bits"):
        PackedCache(PrecisionGrid.of_heads([["int7"]]), 1, 4, torch.float32)


def test_the_model_decodes_through_either_cache_alike():
    model, tokens = random_model(), random_tokens()
    grid = PrecisionGrid(
        (("int4", "int8"), ("bf16", "int3"), ("int8", "bf16")), (("int2",) * 2, ("bf16",) * 2, ("int4", "int8"))
    )
    packed = PackedCache(grid, len(tokens), 8, torch.float32)
    plain = PlainCache(grid)
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 12)):
        assert torch.equal(model(tokens[:, start:stop], packed), model(tokens[:, start:stop], plain))


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_control_intervention_reads_back_neighbours_in_either_cache(control, dtype):
    grid = PrecisionGrid((("bf16", control),), (("bf16", "bf16"),))
    keys, values = torch.randn(2, 1, 2, 3, 4).to(dtype)
    packed, block = (
        PackedCache(grid, 1, 4, dtype, rounding=lambda both, *_: both, dense_storage=dtype),
        BlockCache(grid),
    )
    packed.update(keys, values, 0)
    later = packed.update(torch.ones_like(keys), torch.ones_like(values), 0)
    exact = keys.to(torch.bfloat16).to(dtype)
    seen = block.update(exact, values, 0)
    moved = neighbour(exact[:, 1], dtype if control == "compute-step" else torch.bfloat16)
    assert torch.equal(seen[0][:, 1, :3], moved) and torch.equal(seen[0][:, 1, 3:], exact[:, 1])
    assert torch.equal(seen[0][:, 0, :3], exact[:, 0])
    assert torch.equal(
        later[0][:, 1, :3], neighbour(keys[:, 1], dtype if control == "compute-step" else torch.bfloat16)
    )
    assert torch.equal(later[1][:, :, :3], values)
