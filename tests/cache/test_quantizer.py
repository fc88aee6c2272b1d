"""The quantizer keeps the study's definition to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstages.cache.precisions import BITS, MAX_CODES, QUANTIZED, packed_width, stored_bytes
from kvstages.cache.quantizer import choose_scale, dequantize, neighbour, pack, quantize, reconstruct, unpack
from kvstages.cache.schemes import INTEGER_BITS

vectors = hnp.arrays(
    np.float32, st.integers(1, 33), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False)
)


def by_hand(x: np.ndarray, levels: int) -> tuple[np.float16, list[int], list[float]]:
    """docs/method.md, "Quantizer", element by element, in FP32: round((x · m) / scale), then (q · scale) / m."""
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


@given(x=vectors)
def test_codes_and_values_are_those_of_the_definition(x):
    tensor = torch.from_numpy(x)
    for levels in MAX_CODES.values():
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
    for levels in MAX_CODES.values():
        error = (reconstruct(tensor, levels) - tensor).abs().max()
        assert error <= top / (2 * levels) + top * 2**-11 + 2**-24


def test_round_is_half_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quantize(x, choose_scale(x), 127).tolist() == [127, 0, 2, 2, 0, -2]


def test_the_order_of_operations_is_the_studys():
    """Two hand-worked examples that another order gets wrong in FP32.

    (0.234375 · 127) / 0.46875 is 63.5 and rounds to 64; 0.234375 · (127 / 0.46875) is just below and rounds to 63.
    (7 · 0.484375) / 7 gives the scale back; 7 · (0.484375 / 7) does not.
    """
    x = torch.tensor([0.46875, 0.234375])
    assert quantize(x, choose_scale(x), 127).tolist() == [127, 64]
    assert reconstruct(torch.tensor([0.484375, 0.0]), 7).tolist() == [0.484375, 0.0]


@pytest.mark.parametrize("levels", MAX_CODES.values())
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
    levels = torch.tensor([127.0, 7.0, 3.0, 1.0]).view(-1, 1, 1)
    together = reconstruct(x, levels)
    for head, m in enumerate([127, 7, 3, 1]):
        assert torch.equal(together[:, :, head], reconstruct(x[:, :, head], m))


@given(numbers=hnp.arrays(np.int8, st.tuples(st.integers(1, 4), st.integers(1, 35)), elements=st.integers(-128, 127)))
def test_codes_of_any_bits_are_a_little_endian_stream_of_fields_and_unpacked(numbers):
    """Bit by bit: code i takes bits i·b to (i + 1)·b of the bytes read as one little-endian number; the rest is 0."""
    for bits in INTEGER_BITS:
        # The lower bits of each number, as what they say in two's complement.
        codes = torch.from_numpy(numbers << (8 - bits) >> (8 - bits))
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (len(codes), math.ceil(codes.shape[1] * bits / 8))
        for row, found in zip(codes.tolist(), packed.tolist(), strict=True):
            stream = sum((code % 2**bits) << (bits * index) for index, code in enumerate(row))
            assert int.from_bytes(bytes(found), "little") == stream
        assert torch.equal(unpack(packed, bits, codes.shape[1]), codes)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_the_width_of_a_packed_vector_is_that_of_its_bits(precision):
    for head_dim in range(1, 36):
        packed = pack(torch.zeros(head_dim, dtype=torch.int8), BITS[precision])
        assert len(packed) == packed_width(precision, head_dim)


def test_int4_stands_low_nibble_first_in_twos_complement_with_a_zero_nibble_at_an_odd_end():
    assert pack(torch.tensor([1, -1, 7, -7, 3], dtype=torch.int8), 4).tolist() == [0xF1, 0x97, 0x03]


def test_eight_int3_values_take_three_bytes_and_four_int2_values_one():
    assert pack(torch.tensor([1, -1, 3, -3, 0, 2, -2, 1], dtype=torch.int8), 3).tolist() == [0xF9, 0x0A, 0x39]
    assert pack(torch.tensor([1, -1, 0, 1], dtype=torch.int8), 2).tolist() == [0b01_00_11_01]


@pytest.mark.parametrize(
    ("precision", "head_dim", "expected"),
    [
        ("bf16", 64, (128, 0)),
        ("int8", 64, (64, 2)),
        ("int4", 64, (32, 2)),
        ("int3", 64, (24, 2)),
        ("int2", 64, (16, 2)),
        ("int8", 5, (5, 2)),
        ("int4", 5, (3, 2)),
        ("int3", 5, (2, 2)),
        ("int2", 5, (2, 2)),
    ],
)
def test_bytes_of_a_token_of_one_heads_keys_or_values(precision, head_dim, expected):
    """BF16 2·d, INT8 d + 2, INT4 ⌈d/2⌉ + 2, and so on."""
    assert stored_bytes(precision, "k", head_dim, 1)[:2] == expected


@given(x=hnp.arrays(np.float64, 9, elements=st.floats(-1e30, 1e30).filter(lambda v: abs(v) > 1e-30 or v == 0)))
def test_a_neighbour_is_the_next_value_of_its_dtype_on_one_side(x):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        stored = torch.from_numpy(x).to(dtype)
        moved = neighbour(stored.double(), dtype)
        above, below = (torch.nextafter(stored, torch.full_like(stored, end)) for end in (math.inf, -math.inf))
        # Zero's neighbour is the smallest number there is, on its own side.
        assert ((moved == above) | (moved == below)).all()
        assert torch.equal(neighbour(moved, dtype), stored.double())
