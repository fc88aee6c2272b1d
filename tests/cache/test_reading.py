"""What is read back in BF16 by way of tables is the definition's, to the bit."""

from __future__ import annotations

import pytest
import torch

from kvstages.cache import reading
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.cache.precisions import BITS, MAX_CODES
from kvstages.cache.quantizer import choose_scale, dequantize, pack, quantize
from kvstages.cache.reading import expand, multipliers, read_into, slices


@pytest.mark.parametrize("name", MAX_CODES)
def test_every_scale_and_code_is_read_as_defined(name):
    levels = MAX_CODES[name]
    scales = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)
    codes = torch.arange(-levels, levels + 1, dtype=torch.int8)
    # Whole bytes of them.
    codes = torch.cat((codes, codes[: -len(codes) % 8])).expand(len(scales), -1).clone()
    codes[scales == 0] = 0
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    expand(out, pack(codes, BITS[name]), multipliers(levels), BITS[name])
    expected = dequantize(codes, scales, levels, torch.bfloat16)
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_scale_over_m_alone_would_not_do():
    scales = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    assert ((scales / 7 * 7).bfloat16() != scales.bfloat16()).any()
    assert ((multipliers(7) * 7).bfloat16() == scales.bfloat16()).all()


@pytest.mark.parametrize("most", [64, 2000, 1 << 20])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1]])
@pytest.mark.parametrize("width", [16, 5])
@pytest.mark.parametrize("name", MAX_CODES)
def test_tensors_are_read_alike_whatever_comes_together(monkeypatch, name, width, rows, most):
    monkeypatch.setattr(reading, "SLICE_HALVES", most)
    x = torch.randn(3, len(rows), 37, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, 0, 3] = 0
    scale = choose_scale(x)
    codes = quantize(x, scale, MAX_CODES[name])
    room = torch.zeros(3, len(rows), 50, codes.shape[3], dtype=torch.int8)
    room[:, :, :37] = codes
    packed = pack(room, BITS[name])[:, :, :37]
    found = torch.full((3, 4, 37, width), 9.0, dtype=torch.bfloat16)
    read_into(found, rows, name, packed, scale)
    expected = torch.full_like(found, 9.0)
    expected[:, rows] = dequantize(codes, scale, MAX_CODES[name], torch.bfloat16)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_a_long_prompt_is_stored_in_slices_as_in_one_go():
    grid = PrecisionGrid.of_heads([["int4", "bf16"], ["int8", "int3-first2"]])
    tokens, width = 2100, 64
    assert len(slices(tokens, 4 * width)) > 1
    generator = torch.Generator().manual_seed(2)
    caches = [PackedCache(grid, 1, width, torch.bfloat16, working_copy=copy) for copy in (True, False)]
    for new in (tokens, 1, 1):
        both = torch.randn(2, 2, 1, 2, new, width, generator=generator).bfloat16()
        for layer, (keys, values) in enumerate(both):
            one, other = (cache.update(keys, values, layer) for cache in caches)
            assert all(map(torch.equal, one, other))


def test_slices_cover_a_text_evenly():
    assert slices(10, 3, 12) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert slices(4099, 64, 1 << 18) == [slice(0, 2050), slice(2050, 4099)]
    assert slices(5, 100, 10) == [slice(at, at + 1) for at in range(5)]
    assert slices(0, 64) == []
