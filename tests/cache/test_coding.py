"""Coding: there and back for every scheme, at any width, with its bytes, and nothing that is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import ANY_WIDTH, WIDE, contexts

from kvstages.cache.coding import codec_of, reconstruct
from kvstages.cache.offsets import Context
from kvstages.cache.quantizer import reconstruct as published
from kvstages.cache.schemes import Method, precision

ALL = [*((name, 5) for name in ANY_WIDTH), *((name, 12) for name in ANY_WIDTH), *((name, 32) for name in WIDE)]


def some(width: int, tokens: int = 11, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_integers_are_the_published_quantizer_number_for_number(bits, dtype):
    x = some(33, dtype=dtype)
    assert torch.equal(reconstruct(x, Method(), bits), published(x, 2 ** (bits - 1) - 1))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(("name", "width"), ALL)
def test_all_come_back_near_where_they_were(name, width, side):
    """The relative squared error is that of so many bits: about 4^-b, within a factor for small vectors and coarse
    scales; an error of the coding itself (a turn the wrong way, a group in another's place) is near 1."""
    found = precision(name)
    x = some(width)
    context = contexts(1, 3, width)[0, side]
    back = reconstruct(x, found.method(side), found.bits, context)
    assert back.shape == x.shape and back.dtype == x.dtype
    bits = found.bits if found.keys.levels != "fp" else found.bits - 3
    assert float((back - x).square().sum() / x.square().sum()) < 6 * 4.0**-bits
    kept = found.method(side).first
    assert torch.equal(back[:, :, :kept], x[:, :, :kept])


@settings(deadline=None)
@given(name=st.sampled_from(ANY_WIDTH), width=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_any_width_can_be_stored(name, width, seed):
    found = precision(name)
    x = some(width, 5, seed=seed)
    context = contexts(1, 3, width, seed)[0, "k"]
    back = reconstruct(x, found.keys, found.bits, context)
    assert back.isfinite().all()
    # One token at a time gives the same codes and scales where tokens have scales of their own.
    if not found.keys.delayed:
        codec = codec_of(found.keys, found.bits, width, context)
        together = codec.encode(x)
        for token in range(5):
            alone = codec.encode(x[:, :, token : token + 1], token)
            assert torch.equal(alone.codes[:, :, 0], together.codes[:, :, token])
            for own, all_of_them in zip(alone.parameters, together.parameters, strict=True):
                assert torch.equal(own[:, :, 0].float(), all_of_them[:, :, token].float())


@pytest.mark.parametrize(("name", "width"), ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_extremes_stay_finite(name, width, dtype):
    found = precision(name)
    context = Context(torch.zeros(3, width), torch.zeros(3, width), torch.full((3,), 5.0))
    zeros = torch.zeros(2, 3, 11, width, dtype=dtype)
    assert not reconstruct(zeros, found.keys, found.bits, context).any()
    for size in (1e-40, 1e-9, 7e4, 3e38):
        x = (some(width).sign() * size).to(dtype)
        assert reconstruct(x, found.keys, found.bits, context).isfinite().all()


@pytest.mark.parametrize(("name", "width"), ALL)
def test_a_larger_offset_than_the_keys_costs_nothing_where_it_is_known(name, width):
    """Keys around their offset come back as those around zero do, whatever the offset's size."""
    found = precision(name)
    if not found.keys.offset:
        return
    context = contexts(1, 3, width)[0, "k"]
    # FP16 holds 300 times these offsets as a quarter's multiples; the values added are FP16's own.
    vector = (300 * getattr(context, found.keys.offset)).half()
    context = Context(vector, vector, context.maximum)
    codec = codec_of(found.keys, found.bits, width, context)
    without = codec_of(found.keys, found.bits, width, Context(vector * 0, vector * 0, context.maximum))
    x = some(width).double()
    shift = vector.double().unsqueeze(1)
    moved = codec.reconstruct(x + shift) - shift
    assert torch.allclose(moved, without.reconstruct(x), atol=1e-9) or float((moved - x).square().mean()) < 0.2


def test_a_group_that_is_not_full_comes_back_as_it_is():
    method = precision("int2-channel4+first1").keys
    x = some(5)
    back = reconstruct(x, method, 2)
    assert torch.equal(back[:, :, 0], x[:, :, 0]) and torch.equal(back[:, :, 9:], x[:, :, 9:])
    assert not torch.equal(back[:, :, 1:9], x[:, :, 1:9])
    assert torch.equal(reconstruct(x[:, :, :4], method, 2), x[:, :, :4])


def test_a_channels_scale_is_of_its_group_of_tokens():
    """Per channel, an outlier channel costs the others nothing; per token it does."""
    x = some(8, 8)
    x[..., 3] *= 1000
    others = [channel for channel in range(8) if channel != 3]
    per_token, per_channel = (reconstruct(x, precision(name).keys, 4) for name in ("int4", "int4-channel4"))
    assert float((per_channel - x)[..., others].square().mean()) < 0.02
    assert float((per_token - x)[..., others].square().mean()) > 0.5


def test_a_group_along_the_head_has_a_scale_of_its_own():
    x = some(8, 8)
    x[..., :4] *= 1000
    back = reconstruct(x, precision("int4-group4").keys, 4)
    assert torch.equal(back[..., 4:], reconstruct(x[..., 4:].contiguous(), Method(), 4))
