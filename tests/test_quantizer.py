"""The quantizer keeps the study's definition to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstages.quantizer import (
    LEVELS,
    bytes_per_token,
    choose_scale,
    dequantize,
    pack_int4,
    quantize,
    reconstruct,
    unpack_int4,
)

vectors = hnp.arrays(
    np.float32, st.integers(1, 33), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False)
)


def by_hand(x: np.ndarray, levels: int) -> tuple[np.float16, list[int], list[float]]:
    """STUDY.md, element by element, in FP32: round((x · m) / scale), then (q · scale) / m."""
    scale = np.float16(min(np.abs(x).max(), np.float32(65504)))
    wide = np.float32(scale)
    codes, values = [], []
    for element in x:
        with np.errstate(over="ignore"):
            step = np.float32(0) if wide == 0 else np.float32(element * np.float32(levels)) / wide
        step = max(-levels, min(levels, step))
        codes.append(int(np.rint(step)))
        values.append(float(np.float32(np.float32(codes[-1]) * wide) / np.float32(levels)))
    return scale, codes, values


@pytest.mark.parametrize("precision", LEVELS)
@given(x=vectors)
def test_codes_and_values_are_those_of_the_definition(precision, x):
    levels = LEVELS[precision]
    tensor = torch.from_numpy(x)
    scale, codes, values = by_hand(x, levels)
    stored = choose_scale(tensor)
    quantized = quantize(tensor, stored, levels)
    assert stored.dtype == torch.float16 and float(stored) == float(scale)
    assert quantized.dtype == torch.int8 and quantized.tolist() == codes
    assert dequantize(quantized, stored, levels, torch.float32).tolist() == values


@given(x=hnp.arrays(np.float32, 16, elements=st.floats(-100, 100, width=32)))
def test_the_error_is_at_most_half_a_step_and_the_rounding_of_the_scale(x):
    tensor = torch.from_numpy(x)
    top = float(np.abs(x).max())
    for levels in LEVELS.values():
        error = (reconstruct(tensor, levels) - tensor).abs().max()
        assert error <= top / (2 * levels) + top * 2**-11 + 2**-24


def test_round_is_half_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize(x, choose_scale(x), 127).tolist() == [127, 0, 2, 2, 0, -2]


def test_the_order_of_operations_matters_and_is_the_studys():
    """(x · m) / scale and x · (m / scale) give different codes; ours are the former's."""
    x = torch.randn(400_000, 32, generator=torch.Generator().manual_seed(0))
    scale = choose_scale(x)
    codes = quantize(x, scale, 127)
    wide = scale.float().unsqueeze(-1)
    assert torch.equal(codes, ((x * 127) / wide).round().clamp(-127, 127).to(torch.int8))
    assert not torch.equal(codes, (x * (127 / wide)).round().clamp(-127, 127).to(torch.int8))


@pytest.mark.parametrize("levels", LEVELS.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_vectors_give_finite_values(levels, dtype):
    zeros, tiny = torch.zeros(5, dtype=dtype), torch.full((5,), 1e-9, dtype=dtype)
    assert torch.equal(reconstruct(zeros, levels), zeros)
    assert torch.equal(reconstruct(tiny, levels), zeros)
    huge = reconstruct(torch.tensor([3e38, -3e38, 7e4, 1.0], dtype=dtype), levels)
    assert torch.isfinite(huge).all()
    assert huge[0] == torch.tensor(65504.0).to(dtype) and huge[1] == -huge[0] == -huge[2]


def test_a_tensor_of_levels_quantizes_heads_of_mixed_precision_as_apart():
    x = torch.randn(2, 3, 4, 5, 9)
    levels = torch.tensor([127.0, 7.0, 127.0, 7.0]).view(-1, 1, 1)
    together = reconstruct(x, levels)
    for head, m in enumerate([127, 7, 127, 7]):
        assert torch.equal(together[:, :, head], reconstruct(x[:, :, head], m))


@given(codes=hnp.arrays(np.int8, st.tuples(st.integers(1, 4), st.integers(1, 17)), elements=st.integers(-7, 7)))
def test_int4_packs_and_unpacks(codes):
    tensor = torch.from_numpy(codes)
    packed = pack_int4(tensor)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == math.ceil(codes.shape[-1] / 2)
    assert torch.equal(unpack_int4(packed, codes.shape[-1]), tensor)


def test_int4_stands_low_nibble_first_in_twos_complement_with_a_zero_nibble_at_an_odd_end():
    assert pack_int4(torch.tensor([1, -1, 7, -7, 3], dtype=torch.int8)).tolist() == [0xF1, 0x97, 0x03]


@pytest.mark.parametrize(
    ("precision", "head_dim", "expected"),
    [("bf16", 64, (256, 0)), ("int8", 64, (128, 4)), ("int4", 64, (64, 4)), ("int4", 5, (6, 4)), ("int8", 5, (10, 4))],
)
def test_bytes_of_a_token_and_head(precision, head_dim, expected):
    """BF16 4·d, INT8 2·(d + 2), INT4 2·(⌈d/2⌉ + 2)."""
    assert bytes_per_token(precision, head_dim) == expected
