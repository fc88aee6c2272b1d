"""Attention to codes as they are stored: that of the values which the definition reads back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstages.cache import attention
from kvstages.cache.attention import attend
from kvstages.cache.packed import LayerCache, append_all

NAMES = ["int4", "int8", "int3", "int2", "bf16"]
MASKS = {
    "all": lambda batch, tokens: None,
    # Sequence b lacks its first b tokens, and sees its own in any case.
    "padding": lambda batch, tokens: (
        torch.arange(tokens).view(1, 1, 1, -1) >= torch.arange(batch).clamp(max=tokens - 1).view(-1, 1, 1, 1)
    ),
    "bias": lambda batch, tokens: torch.randn(batch, 1, 1, tokens),
}


def layer(row: list[str], batch: int, width: int, tokens: int, dtype: torch.dtype = torch.float32) -> LayerCache:
    """A layer that has stored random tokens."""
    cache = LayerCache(row, batch, width, dtype, torch.bfloat16, capacity=4, working_copy=False)
    if tokens:
        cache.append(values(batch, len(row), tokens, width, dtype))
    return cache


def values(batch: int, rows: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(batch, rows, tokens, width)).bfloat16().to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=8).filter(lambda names: set(names) != {"bf16"}),
    batch=st.integers(1, 3),
    group=st.integers(1, 3),
    width=st.sampled_from([2, 6, 64]),
    tokens=st.integers(1, 40),
    mask=st.sampled_from(sorted(MASKS)),
    most=st.sampled_from([1 << 6, 1 << 9, 1 << 19]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_it_is_the_attention_to_what_is_defined(names, batch, group, width, tokens, mask, most, dtype, seed):
    """In BF16, too, where reading back would round every value once more: only what comes out is rounded."""
    torch.manual_seed(seed)
    names = names[: len(names) // 2 * 2]
    if set(names) == {"bf16"}:
        names[0] = "int4"
    heads = len(names) // 2
    cache = layer(names, batch, width, tokens, dtype)
    assert cache.foldable
    queries = torch.randn(batch, group * heads, 1, width).to(dtype)
    own = values(batch, 2 * heads, 1, width, dtype).chunk(2, dim=1)
    seen = MASKS[mask](batch, tokens + 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "SLICE_CODES", most)
        found = attend(queries, cache, own, 0.3, seen)
    back = torch.empty(batch, 2 * heads, tokens, width)
    cache.reconstruct_into(back)
    keys, stored = (torch.cat(pair, dim=2).double() for pair in zip(back.chunk(2, dim=1), own, strict=True))
    scores = 0.3 * queries.double().unflatten(1, (heads, group)).squeeze(3) @ keys.mT
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
    expected = (scores.softmax(dim=-1) @ stored).flatten(1, 2).unsqueeze(2)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-4)


@pytest.mark.parametrize("most", [1 << 6, 1 << 19])
def test_a_query_that_sees_nothing_takes_nothing(monkeypatch, most):
    monkeypatch.setattr(attention, "SLICE_CODES", most)
    cache, queries = layer(["int4", "int8"], 2, 6, 5), torch.randn(2, 3, 1, 6)
    own = values(2, 2, 1, 6).chunk(2, dim=1)
    seen = torch.tensor([[False] * 6, [True] * 6]).view(2, 1, 1, 6)
    found = attend(queries, cache, own, 0.3, seen)
    assert not found[0].any() and torch.equal(found[1], attend(queries, cache, own, 0.3)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows",
    [[["int4"] * 4] * 3, [["int8"] * 4, ["int4"] * 4], [["int4", "bf16", "int3", "int4"], ["bf16"] * 3 + ["int8"]]],
)
def test_layers_together_store_what_each_would_alone(rows, dtype):
    torch.manual_seed(0)
    new = [values(2, len(row), 3, 6, dtype) for row in rows]
    new[0][0, 1, 0] = 0
    apart, together = ([layer(row, 2, 6, 0, dtype) for row in rows] for _ in range(2))
    for step in range(3):
        append_all(together, [each[:, :, step : step + 1] for each in new])
    for cache, each in zip(apart, new, strict=True):
        cache.append(each)
    for one, other in zip(apart, together, strict=True):
        assert one.length == other.length == 3
        for name in one.store:
            assert torch.equal(one._stored(name), other._stored(name))


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (["bf16", "bf16"], {}),
        (["int4", "int4-first2"], {}),
        (["int4", "int4"], {"working_copy": True}),
        (["int4", "int4"], {"head_dim": 7}),
    ],
)
def test_other_layers_are_read_back(row, options):
    options = {"head_dim": 6, "working_copy": False, **options}
    assert not LayerCache(row, 1, arithmetic=torch.float32, dense_storage=torch.bfloat16, **options).foldable
