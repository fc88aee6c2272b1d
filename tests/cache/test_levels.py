"""Levels: what codes stand for, how far values move, and what is optimal about the Gaussian's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstages.cache.levels import FP4, MANY, gaussian_levels, levels_of
from kvstages.cache.quantizer import reconstruct
from kvstages.cache.schemes import LEVELS, Method

METHODS = {name: Method(name) for name in LEVELS} | {"zero": Method("int", zero=True)}
vectors = hnp.arrays(np.float32, st.integers(1, 33), elements=st.floats(-(2.0**60), 2.0**60, width=32))
plain_vectors = hnp.arrays(np.float32, st.integers(1, 33), elements=st.floats(-100, 100, width=32))


def there_and_back(name: str, bits: int, x: torch.Tensor) -> torch.Tensor:
    levels = levels_of(METHODS[name])
    parameters = levels.fit(x, bits)
    return levels.decode(levels.encode(x, parameters, bits), parameters, bits)


@given(x=plain_vectors)
def test_mid_tread_is_the_published_quantizer(x):
    tensor = torch.from_numpy(x)
    levels = levels_of(METHODS["int"])
    for bits in LEVELS["int"]:
        (scale,) = levels.fit(tensor, bits)
        stored = (scale.half().float(),)
        back = levels.decode(levels.encode(tensor, stored, bits), stored, bits)
        assert torch.equal(back, reconstruct(tensor, 2 ** (bits - 1) - 1))


@given(x=plain_vectors)
def test_uniform_levels_move_a_value_by_half_a_step_at_most(x):
    tensor = torch.from_numpy(x)
    top, width = float(np.abs(x).max()), float(x.max() - x.min())
    assume(top == 0 or top > 1e-30)  # a step has to be a number that FP32 has
    for bits in LEVELS["int"]:
        steps = {"int": top / (2 ** (bits - 1) - 1), "rise": top / 2 ** (bits - 1), "zero": width / (2**bits - 1)}
        for name, step in steps.items():
            assert (there_and_back(name, bits, tensor) - tensor).abs().max() <= step / 2 * (1 + 1e-5) + 1e-5 * top


@given(x=vectors)
@pytest.mark.parametrize("name", ["int", "rise", "lloyd", "fp", "zero"])
def test_a_value_comes_back_as_the_nearest_of_its_levels(name, x):
    """No other code would have been nearer: the codes' values are tried one by one."""
    tensor = torch.from_numpy(x)
    for bits in LEVELS.get(name, LEVELS["int"]):
        check_nearest(name, bits, tensor)


def check_nearest(name: str, bits: int, tensor: torch.Tensor) -> None:
    levels = levels_of(METHODS[name])
    parameters = levels.fit(tensor, bits)
    assume(float(parameters[0]) > 1e-30)
    codes = torch.arange(2**bits, dtype=torch.uint8).view(torch.int8)
    if name in ("int", "rise"):
        # Two's complement of so many bits, as it comes out of storage.
        codes = ((codes.int() << (32 - bits)) >> (32 - bits)).to(torch.int8)
        codes = codes[codes > -(2 ** (bits - 1))] if name == "int" else codes
    values = levels.decode(codes, parameters, bits).double()
    values = values[values.isfinite()]
    back = levels.decode(levels.encode(tensor, parameters, bits), parameters, bits).double()
    nearest = (tensor.double().unsqueeze(-1) - values).abs().amin(dim=-1)
    slack = 1e-5 * float(tensor.abs().max())
    assert ((back - tensor.double()).abs() <= nearest + slack).all()


def test_the_best_levels_for_a_gaussian_are_those_of_the_literature():
    """Max, Quantizing for minimum distortion (1960), table I: levels of 2 and 3 bits, and the distortion."""
    assert np.allclose(gaussian_levels(2)[2:], [0.4528, 1.510], atol=5e-4)
    assert np.allclose(gaussian_levels(3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)
    for bits, distortion in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        assert mean_squared_error(gaussian_levels(bits)) == pytest.approx(distortion, rel=5e-4)


@pytest.mark.parametrize("bits", LEVELS["lloyd"])
def test_no_small_move_of_the_levels_is_better(bits):
    levels = gaussian_levels(bits)
    assert np.array_equal(levels, -levels[::-1]) and (np.diff(levels) > 0).all()
    least = mean_squared_error(levels)
    random = np.random.default_rng(bits)
    for _ in range(20):
        moved = np.sort(levels + random.normal(size=len(levels)) * 1e-3)
        assert mean_squared_error(moved) > least


def mean_squared_error(levels: np.ndarray) -> float:
    """∫ (x − nearest level)² φ(x) dx in closed form: of each cell the moments of the Gaussian."""
    edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
    density = np.exp(-0.5 * edges**2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges])
    mass, first = np.diff(below), -np.diff(density)
    ends = np.where(np.isfinite(edges), edges, 0) * density
    second = mass - np.diff(ends)
    return float((second - 2 * levels * first + levels**2 * mass).sum())


def test_lloyd_max_levels_have_the_gaussians_error():
    x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    assert float((there_and_back("lloyd", 4, x) - x).square().mean()) == pytest.approx(0.009497, rel=0.05)


def test_e2m1_rounds_ties_to_the_even_code():
    levels, one = levels_of(METHODS["fp"]), (torch.ones(1),)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert levels.decode(levels.encode(ties, one, 4), one, 4).tolist() == expected
    assert levels.decode(levels.encode(-ties, one, 4), one, 4).tolist() == [-value for value in expected]
    exact = torch.tensor(FP4)
    assert torch.equal(levels.decode(levels.encode(exact, one, 4), one, 4), exact)


def test_e4m3_holds_its_own_numbers_and_saturates():
    """S.1111.110 is 448, the largest; subnormals are multiples of 2^−9 (OCP 8-bit Floating Point, table 1)."""
    levels, one = levels_of(METHODS["fp"]), (torch.ones(1),)
    x = torch.tensor([448.0, 449.0, 1e9, -1e9, 2.0**-9, 2.0**-10, 17.0, 1.0625])
    back = levels.decode(levels.encode(x, one, 8), one, 8)
    assert back.tolist() == [448.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, 16.0, 1.0]
    assert levels.encode(torch.tensor([448.0]), one, 8).view(torch.uint8).tolist() == [0b0_1111_110]


@pytest.mark.parametrize(("name", "bits"), [*(("lloyd", bits) for bits in LEVELS["lloyd"]), ("fp", 4)])
def test_many_values_have_the_codes_of_few(name, bits):
    """Many are looked up by their upper bits, few are searched for; values on a limit and beside it, zeros, too."""
    kind, one = levels_of(METHODS[name]), (torch.ones(1, 1),)
    values = torch.from_numpy(gaussian_levels(bits)) if name == "lloyd" else torch.tensor(FP4, dtype=torch.float64)
    limits = ((values[1:] + values[:-1]) / 2).float()
    beside = [torch.nextafter(limits, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    rest = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf])
    x = torch.cat((torch.randn(MANY), limits, -limits, *beside, rest)).unsqueeze(0)
    few = torch.cat([kind.encode(part, one, bits) for part in x.split(1000, dim=1)], dim=1)
    assert torch.equal(kind.encode(x, one, bits), few)
