"""Offsets: a rotary embedding's turn, its inverse, and the mean of keys before it."""

from __future__ import annotations

import math

import pytest
import torch
from schemes import rotary

from kvstages.cache.offsets import Context, Rotary, joined, mean_before_rotary
from kvstages.cache.schemes import Method, precision


def test_a_pair_is_turned_by_its_position_times_its_frequency():
    quarter = Rotary(torch.tensor([math.pi / 2], dtype=torch.float64))
    x = torch.tensor([[1.0, 2.0, 9.0]]).expand(4, 3)
    expected = [[1, 2, 9], [-2, 1, 9], [-1, -2, 9], [2, -1, 9]]
    assert torch.allclose(quarter.turn(x, 0, 4), torch.tensor(expected, dtype=torch.float64))


def test_pairs_stand_half_the_turned_width_apart_or_side_by_side():
    frequencies = torch.tensor([math.pi / 2, 0.0], dtype=torch.float64)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for interleaved, expected in ((False, [-3, 2, 1, 4]), (True, [-2, 1, 3, 4])):
        turned = Rotary(frequencies, interleaved).turn(x, 1, 1)
        assert torch.allclose(turned, torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_turning_back_is_the_inverse(interleaved, factor):
    x = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    embedding = Rotary(rotary(9).frequencies, interleaved, factor)
    there = embedding.turn(x, 0, 7)
    assert not torch.allclose(there, x.double(), atol=0.1)
    assert torch.allclose(embedding.turn(there, 0, 7, back=True), x.double())


def test_the_mean_is_that_of_keys_before_their_embedding_without_the_first_tokens():
    generator = torch.Generator().manual_seed(0)
    embedding = rotary(9)
    before = torch.randn(3, 2, 12, 9, generator=generator) + torch.randn(2, 1, 9, generator=generator)
    keys = embedding.turn(before, 0, 12)
    keys[:, :, :4] = 1e6
    assert torch.allclose(mean_before_rotary(keys, embedding), before[:, :, 4:].double().mean(dim=(0, 2)))
    assert torch.allclose(mean_before_rotary(before, None), before[:, :, 4:].double().mean(dim=(0, 2)))
    # A block shorter than what is left out still has a mean: of its last token.
    assert torch.allclose(mean_before_rotary(before[:, :, :2], None), before[:, :, 1].double().mean(dim=0))


def test_an_offset_is_kept_in_fp16_and_turned_to_the_position():
    method = Method(offset="mean")
    mean = torch.tensor([[1.0, 1 / 3], [5.0, 6.0]])
    plain = Context(mean).stored(method, "cpu")
    assert plain.offset.dtype == torch.float16 and plain.nbytes == 8 and plain.maximum is None
    assert torch.equal(plain.at(0, 5), mean.half().double().unsqueeze(1))
    quarter = Rotary(torch.tensor([math.pi / 2], dtype=torch.float64))
    turned = Context(mean, rotary=quarter).stored(method, "cpu")
    assert torch.allclose(turned.at(3, 2)[1], torch.tensor([[6.0, -5.0], [5.0, 6.0]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("int4-mean", "the mean"),
        ("debiased4", "the bias"),
        ("nvfp4", "the largest magnitude"),
        ("fp8_e4m3", "the largest magnitude"),
    ],
)
def test_what_is_not_known_is_named(name, what):
    with pytest.raises(ValueError, match=f"{what} is not known; expected a context that has it"):
        Context().stored(precision(name).keys, "cpu")


def test_what_is_stored_of_some_heads():
    context = Context(torch.arange(6.0).view(3, 2), None, torch.tensor([1.0, 2.0, 3.0]))
    found = context.stored(Method(offset="mean", stored="e4m3"), "cpu", torch.tensor([2, 0]))
    assert found.offset.tolist() == [[4, 5], [0, 1]] and found.maximum.tolist() == [3, 1]


def test_a_head_without_offset_has_zero_beside_one_that_has():
    with_one = Context(torch.tensor([[1.0, 2.0]]), rotary=rotary(2)).stored(Method(offset="mean"), "cpu")
    both = joined([with_one, Context().stored(Method(), "cpu"), with_one])
    assert both.offset.tolist() == [[1, 2], [0, 0], [1, 2]] and both.rotary is with_one.rotary
    assert not both.at(3, 4)[1].any()
    assert joined([Context().stored(Method(), "cpu")] * 2).offset is None
