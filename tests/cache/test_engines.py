"""Engines' integer formats against their definitions, worked by hand and element by element in FP32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstages.cache.coding import codec_of, reconstruct
from kvstages.cache.engines import half_away
from kvstages.cache.schemes import precision

blocks = hnp.arrays(np.float32, 32, elements=st.floats(-1000, 1000, width=32))
F = np.float32


def coded(name: str, x: list[float] | np.ndarray):
    """Codes [N] as they stand in storage, parameters and values of one vector."""
    found = precision(name)
    codec = codec_of(found.keys, found.bits, len(x))
    tensor = torch.tensor(np.asarray(x, dtype=np.float32)).view(1, 1, 1, -1)
    found_ = codec.encode(tensor)
    stored = codec.pack(found_)
    assert torch.equal(codec.decode(codec.unpack(stored), torch.float32), codec.decode(found_, torch.float32))
    stream = int.from_bytes(bytes(stored.codes.flatten().tolist()), "little")
    codes = [stream >> (found.bits * index) & (2**found.bits - 1) for index in range(len(x))]
    return codes, [each.flatten().tolist() for each in stored.parameters], codec.decode(found_, torch.float32).flatten()


def by_definition(name: str, x: np.ndarray) -> np.ndarray:
    """ggml/src/ggml-quants.c, quantize_row_*_ref and dequantize_row_*, a block element by element in FP32."""
    bits, kind = int(name[1]), name[-1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if kind == "1":
            low, high = x.min(), x.max()
            d = F(high - low) / F(2**bits - 1)
            inverse = F(1) / d if d else F(0)
            q = [min(2**bits - 1, int(F(F(F(v - low) * inverse) + F(0.5)))) for v in x]
            return np.array([F(F(c) * F(np.float16(d))) + F(np.float16(low)) for c in q], dtype=F)
        if bits == 8:
            d = np.abs(x).max() / F(127)
            inverse = F(1) / d if d else F(0)
            steps = [F(v * inverse) for v in x]
            q = [int(np.copysign(np.floor(np.abs(np.float64(s)) + 0.5), s)) for s in steps]
            return np.array([F(c) * F(np.float16(d)) for c in q], dtype=F)
        half = 2 ** (bits - 1)
        d = x[int(np.argmax(np.abs(x)))] / F(-half)
        inverse = F(1) / d if d else F(0)
        q = [min(2 * half - 1, int(F(F(v * inverse) + F(half + 0.5)))) for v in x]
        return np.array([F(c - half) * F(np.float16(d)) for c in q], dtype=F)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@given(x=blocks.filter(lambda x: np.abs(x).max() == 0 or np.abs(x).max() > 1e-30))
def test_llama_cpp_blocks_are_those_of_the_definition(name, x):
    _, _, values = coded(name, x)
    assert values.numpy().tolist() == by_definition(name, x).tolist()


def test_q4_0_by_hand():
    """The largest magnitude, −4, is −8 steps of 0.5: d = −4 / −8 = 0.5; 3.7 would be 7.4 steps, 4 is 7."""
    codes, (scale,), values = coded("q4_0", [-4.0, 3.7, 4.0, 0.24, 0.25, -0.25, 0.0, 1.0, *[0.0] * 24])
    assert scale == [0.5]
    # code = trunc(x / d + 8.5)
    assert codes[:8] == [0, 15, 15, 8, 9, 8, 8, 10]
    assert values[:8].tolist() == [-4.0, 3.5, 3.5, 0.0, 0.5, 0.0, 0.0, 1.0]


def test_q4_0_has_a_negative_step_where_the_largest_magnitude_is_positive():
    codes, (scale,), values = coded("q4_0", [8.0, -7.0, -8.0, 1.0, *[0.0] * 28])
    assert scale == [-1.0]
    # Of two of one magnitude the first counts; −8 is 8 steps of −1, and 7 is most.
    assert codes[:4] == [0, 15, 15, 7] and values[:4].tolist() == [8.0, -7.0, -7.0, 1.0]


def test_q4_1_by_hand():
    """From −1 to 2: d = 3 / 15, stored as FP16's 0.2; codes are trunc((x + 1) / d + 0.5)."""
    codes, (scale, zero), values = coded("q4_1", [-1.0, 2.0, 0.0, 0.11, -0.9, *[-1.0] * 27])
    assert scale == [float(np.float16(0.2))] and zero == [-1.0]
    assert codes[:5] == [0, 15, 5, 6, 1]
    assert values[:5].tolist() == [float(F(c) * F(np.float16(0.2)) + F(-1)) for c in (0, 15, 5, 6, 1)]


def test_q5_0_and_q5_1_by_hand():
    codes, (scale,), values = coded("q5_0", [-8.0, 8.0, 0.3, -0.3, *[0.0] * 28])
    assert scale == [0.5] and codes[:4] == [0, 31, 17, 15] and values[:4].tolist() == [-8.0, 7.5, 0.5, -0.5]
    codes, (scale, zero), values = coded("q5_1", [0.0, 31.0, 7.4, 7.6, *[0.0] * 28])
    assert (scale, zero) == ([1.0], [0.0]) and codes[:4] == [0, 31, 7, 8] and values[:4].tolist() == [0, 31, 7, 8]


def test_q8_0_by_hand():
    """127 is the largest: steps of 1; ties go away from zero. Two blocks have a step each."""
    codes, (scale,), values = coded("q8_0", [127.0, 0.5, 1.5, -2.5, *[0.0] * 28, 254.0, 1.0, *[0.0] * 30])
    assert scale == [1.0, 2.0]
    assert codes[:4] == [127, 1, 2, 256 - 3] and values[:4].tolist() == [127, 1, 2, -3]
    assert codes[32:34] == [127, 1] and values[32:34].tolist() == [254, 2]


def test_llama_cpps_codes_come_from_the_step_before_it_is_rounded():
    """d = 1 / 127 is not FP16's: 0.5 is 63.5 steps of it (64), but 63.49 of the stored one (63)."""
    x = [1.0, 0.5, *[0.0] * 30]
    codes, (scale,), _ = coded("q8_0", x)
    assert 0.5 / scale[0] != 63.5
    assert codes[1] == 64 and codes[0] == 127


def test_int8_per_token_head_by_hand():
    codes, (scale,), values = coded("int8_per_token_head", [127.0, -127.0, 2.6, -0.4])
    assert scale == [1.0] and codes == [127, 256 - 127, 3, 0] and values.tolist() == [127, -127, 3, 0]
    _, (scale,), values = coded("int8_per_token_head", [0.0] * 4)
    assert scale == [float(F(1e-6))] and not values.any()


def test_int4_per_token_head_by_hand():
    """Width 4, after signs and the Hadamard matrix: levels from −5 to 10 in steps of 1, zero at code 5."""
    found = precision("int4_per_token_head")
    codec = codec_of(found.keys, 4, 4)
    x = torch.tensor([-5.0, 10.0, 0.4, 2.6], dtype=torch.float64).view(1, 1, 1, 4)
    stored = codec.encode(codec.turn_back(x).float())
    stream = int.from_bytes(bytes(codec.pack(stored).codes.flatten().tolist()), "little")
    assert [stream >> (4 * index) & 15 for index in range(4)] == [0, 15, 5, 8]
    bits = stored.parameters[0].view(torch.int32)
    assert int(bits) & 15 == 5
    assert float((bits & -16).view(torch.float32)) == pytest.approx(1.0, rel=1e-6)
    back = codec.turn(codec.decode(stored, torch.float64)).flatten()
    assert back.tolist() == pytest.approx([-5, 10, 0, 3], abs=1e-4)


def test_a_vector_of_one_sign_has_its_zero_point_at_an_end():
    """As vLLM has it: the zero is one of the 16 codes, so a range far from zero loses its resolution."""
    found = precision("int4_per_token_head")
    codec = codec_of(found.keys, 4, 2)
    x = codec.turn_back(torch.tensor([[[[10.0, 25.0]]]], dtype=torch.float64)).float()
    assert codec.turn(codec.decode(codec.encode(x), torch.float64)).flatten().tolist() == pytest.approx(
        [10, 15], abs=1e-4
    )


@given(hnp.arrays(np.float64, 9, elements=st.floats(-1e6, 1e6)))
def test_half_away_rounds_as_c_does(x):
    expected = np.copysign(np.floor(np.abs(x.astype(np.float32)).astype(np.float64) + 0.5), x)
    assert half_away(torch.from_numpy(x.astype(np.float32))).tolist() == expected.tolist()


def test_nvfp4_by_hand():
    """Blocks of 16: the step is the largest magnitude / 6, in E4M3 relative to the tensor's largest / (6 · 448)."""
    from kvstages.cache.offsets import Context

    x = torch.zeros(1, 1, 1, 32)
    x[..., :4], x[..., 16:19] = torch.tensor([6.0, -2.4, 0.3, 1.2]), torch.tensor([2688.0, 448.0, 100.0])
    found = precision("nvfp4")
    context = Context(maximum=torch.tensor([2688.0]))
    codec = codec_of(found.keys, 4, 32, context)
    stored = codec.encode(x)
    assert float(codec.static) == 1.0
    assert stored.parameters[0].dtype == torch.float8_e4m3fn and stored.parameters[0].flatten().tolist() == [1.0, 448.0]
    back = codec.decode(stored, torch.float32).flatten()
    assert back[:4].tolist() == [6.0, -2.0, 0.5, 1.0]
    assert back[16:19].tolist() == [2688.0, 448.0, 0.0]
    # A block's step that E4M3 does not hold is rounded: 6.5 / 6 to 1.125, and 6.5 is 5.78 of those steps.
    assert reconstruct(torch.full((1, 1, 1, 16), 6.5), found.keys, 4, context).flatten().tolist() == [6.75] * 16


def test_fp8_has_one_static_scale_and_saturates():
    from kvstages.cache.offsets import Context

    found = precision("fp8_e4m3")
    context = Context(maximum=torch.tensor([224.0]))
    x = torch.tensor([224.0, 300.0, 1.0, 8.6]).view(1, 1, 1, 4)
    assert reconstruct(x, found.keys, 8, context).flatten().tolist() == [224.0, 224.0, 1.0, 9.0]
