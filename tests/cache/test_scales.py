"""Scales: the search never does worse than the plain scale, and what is stored is what is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstages.cache import scales
from kvstages.cache.coding import codec_of
from kvstages.cache.levels import levels_of
from kvstages.cache.offsets import Context
from kvstages.cache.schemes import Method, precision

SEARCHED = ["int8", "int4", "int2", "rise3", "lloyd4", "lloyd2", "fp4", "fp8"]


@given(
    x=hnp.arrays(np.float32, (3, 8), elements=st.floats(-1000, 1000, width=32)),
    name=st.sampled_from(SEARCHED),
    more=st.sampled_from(["", "+fp32", "+e4m3", "+group4", "+channel3", "+zero"]),
)
def test_the_search_is_never_worse_than_the_plain_scale(x, name, more):
    if more == "+zero" and not name.startswith("int"):
        more = ""
    x = torch.from_numpy(x).view(1, 1, 3, 8)
    context = Context(maximum=x.abs().max().view(1))
    errors = []
    for text in (f"{name}-mse{more}", f"{name}-{more[1:]}".rstrip("-")):
        found = precision({"fp8-fp32": "fp8_per_token_head"}.get(text, text))
        codec = codec_of(found.keys, found.bits, 8, context)
        # Each vector that has a scale of its own.
        wrong = codec._apart((codec.reconstruct(x) - x).double()).square().sum(dim=-1)
        errors.append(wrong)
    assert (errors[0] <= errors[1] * (1 + 1e-6) + 1e-12).all()


def error_of(x, name, scale):
    """Squared error [...] of vectors x [..., N] under stored scales [..., 1]."""
    found = precision(name)
    levels, wide = levels_of(found.keys), (scale.half().float(),)
    return (levels.decode(levels.encode(x, wide, found.bits), wide, found.bits) - x).double().square().sum(-1)


@pytest.mark.parametrize("name", SEARCHED[:-2])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_search_comes_near_the_best_scale_there_is(name, heavy):
    """A fine grid of 200 scales finds a few hundredths less error, for vectors with outliers, too."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    if heavy:
        x[:, :2] *= 4
    found = precision(f"{name}-mse")
    (plain,) = levels_of(found.keys).fit(x, found.bits)
    fine = torch.stack([error_of(x, name, plain * factor) for factor in torch.logspace(-0.6, 0.5, 200)]).amin(dim=0)
    (chosen,), _ = scales.choose(x, found.keys, found.bits, None)
    errors = error_of(x, name, chosen)
    assert errors.sum() < 1.09 * fine.sum()
    assert (errors <= error_of(x, name, plain) * (1 + 1e-9)).all()


def test_the_search_finds_the_same_however_many_scales_are_tried_together(monkeypatch):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for name in ("int4-mse", "lloyd3-mse", "int4-mse+zero"):
        found = precision(name)
        together, codes = scales.choose(x, found.keys, found.bits, None)
        with monkeypatch.context() as patch:
            patch.setattr(scales, "TRIED_TOGETHER", 1)
            alone, others = scales.choose(x, found.keys, found.bits, None)
        assert all(torch.equal(a, b) for a, b in zip((codes, *together), (others, *alone), strict=True))


def test_the_search_clips_an_outlier_where_that_pays():
    x = torch.ones(1, 64)
    x[0, 0] = 1.6
    (plain,), (searched,) = (scales.choose(x, precision(name).keys, 2, None)[0] for name in ("int2", "int2-mse"))
    assert float(plain) == pytest.approx(1.6, rel=1e-3) and float(searched) < 1.1


@pytest.mark.parametrize(
    ("stored", "dtype", "most"), [("fp16", torch.float16, 65504), ("fp32", torch.float32, 2.0**100)]
)
def test_what_is_too_large_for_a_scale_saturates(stored, dtype, most):
    (kept,) = scales.store((torch.tensor([1.0, 3e38, float("inf")]),), Method(stored=stored), None)
    assert kept.dtype == dtype and kept.tolist() == [1.0, most, most]


def test_e4m3_scales_are_relative_to_the_tensors():
    """The largest scale that the calibration saw is E4M3's largest number."""
    method = Method("rise", stored="e4m3")
    static = scales.static_scale(method, 4, torch.tensor([56.0]))
    assert static.tolist() == [56 / 448]
    (kept,) = scales.store((torch.tensor([[56.0], [7.0], [100.0]]),), method, static)
    assert kept.float().tolist() == [[448.0], [56.0], [448.0]]
    assert scales.widen((kept,), static)[0].tolist() == [[56.0], [7.0], [56.0]]
