"""Schemes as data: one spelling each, refused in a line otherwise, and the bytes that they say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstages.cache.schemes import (
    INTEGER_BITS,
    LEVELS,
    NAMED,
    PUBLISHED,
    Method,
    Precision,
    bits_per_element,
    check_width,
    precision,
    stored_bytes,
)

NAMES = [name.format(bits) for name in NAMED for bits in (INTEGER_BITS if "{}" in name else ("",))]
sizes = st.integers(2, 300)


@st.composite
def methods(draw, levels: str) -> Method:
    """Any valid method of some plain levels."""
    stored = draw(st.sampled_from(["fp16", "fp32", "e4m3"]))
    share = draw(st.sampled_from(["token", "group", "channel", "tensor"]))
    if share == "tensor" and levels == "lloyd":
        share = "token"
    whole = share == "tensor"
    return Method(
        levels,
        draw(st.sampled_from(["", "mean", "bias"])),
        draw(st.sampled_from(["", "hadamard", "randomized"]) | sizes.map("hadamard{}".format)),
        "" if whole else draw(st.sampled_from(["", "mse"])),
        "fp16" if whole else stored,
        f"{share}{draw(sizes)}" if share in ("group", "channel") else share,
        levels == "int" and not whole and stored != "e4m3" and draw(st.booleans()),
        draw(st.integers(0, 40)),
        draw(st.integers(0, 40)),
    )


@st.composite
def precisions(draw) -> Precision:
    levels = draw(st.sampled_from(["int", "rise", "lloyd", "fp"]))
    return Precision(draw(methods(levels)), draw(methods(levels)), draw(st.sampled_from(LEVELS[levels])))


@given(precisions())
def test_every_precision_is_read_back_from_its_text(found):
    assert precision(found.text) == found
    # A path, a CSV cell, a word of a shell and of a recipe.
    assert not set(found.text) - set("abcdefghijklmnopqrstuvwxyz0123456789._+-")


@pytest.mark.parametrize("name", NAMES)
def test_a_named_scheme_is_the_one_spelling_of_what_it_stands_for(name):
    found = precision(name)
    assert found.text == name
    assert found.keys.levels == found.values.levels


def test_what_the_words_mean():
    found = precision("lloyd3-k.mean+hadamard+mse+fp32+v.group16+first2+recent8")
    both = {"levels": "lloyd", "rotation": "hadamard", "search": "mse", "stored": "fp32", "first": 2, "recent": 8}
    assert found == Precision(Method(**both, offset="mean"), Method(**both, share="group16"), 3)
    assert precision("int4") == Precision(PUBLISHED, PUBLISHED, 4) and precision("int4").published
    assert not precision("rotated4").published
    assert precision("centred4").keys.offset == "mean" and precision("centred4").values.offset == ""
    assert precision("q4_1").keys == Method("q_1", share="group32", zero=True)
    assert precision("int4_per_token_head").keys == Method("per_token_head", rotation="randomized", stored="fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "int5x",
            "'int5x' is no kind of levels with bits, such as int4, rise4, lloyd4, fp8 or q4_0",
        ),
        ("", "precision '': '' is no kind of levels with bits"),
        ("int7", "precision 'int7': 'int7' has 7 bits; expected 8, 6, 5, 4, 3, 2"),
        ("q6_0", "precision 'q6_0': 'q6_0' has 6 bits; expected 8, 5, 4"),
        ("int4-", "precision 'int4-': unknown option ''"),
        ("int4-clip", "precision 'int4-clip': unknown option 'clip'"),
        ("int4-group1", "unknown option 'group1'"),
        ("int4-first0", "unknown option 'first0'"),
        ("int4-q.mean", "option 'q.mean': expected k. or v. in front, or nothing"),
        ("int4-mean+bias", "options 'mean' and 'bias' exclude each other"),
        ("int4-mean+k.bias", "options 'mean' and 'k.bias' exclude each other"),
        ("rise4-zero", "a zero point goes with int levels"),
        ("lloyd4-tensor", "a static scale of the tensor goes with int, rise or fp levels"),
        ("q4_0-mse", "option 'mse': 'q4_0' is an engine's format, with scales of its own"),
        ("int4-mse+hadamard", "precision 'int4-mse+hadamard': its one spelling is 'int4-hadamard+mse'"),
        ("int4-hadamard", "precision 'int4-hadamard': its one spelling is 'rotated4'"),
        ("int4-k.mse+v.mse", "its one spelling is 'int4-mse'"),
    ],
)
def test_any_other_text_is_refused_in_a_line(text, message):
    with pytest.raises(ValueError) as error:
        precision(text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "side", "tokens", "expected"),
    [
        # Codes of 64 values and a scale a token.
        ("int8", "k", 10, (10 * 64, 10 * 2, 0)),
        ("int6", "k", 10, (10 * 48, 10 * 2, 0)),
        ("int5", "v", 10, (10 * 40, 10 * 2, 0)),
        ("int4-fp32", "v", 10, (10 * 32, 10 * 4, 0)),
        # Two blocks of 34, 18, 20, 22 and 24 bytes a token (ggml-common.h).
        ("q8_0", "k", 3, (3 * 64, 3 * 4, 0)),
        ("q4_0", "k", 3, (3 * 32, 3 * 4, 0)),
        ("q4_1", "k", 3, (3 * 32, 3 * 8, 0)),
        ("q5_0", "k", 3, (3 * 40, 3 * 4, 0)),
        ("q5_1", "k", 3, (3 * 40, 3 * 8, 0)),
        # vLLM: D + 4 and D / 2 + 4 bytes a vector.
        ("int8_per_token_head", "k", 3, (3 * 64, 3 * 4, 0)),
        ("int4_per_token_head", "k", 3, (3 * 32, 3 * 4, 0)),
        # Static scales are FP32.
        ("fp8_e4m3", "k", 3, (3 * 64, 0, 4)),
        ("nvfp4", "k", 3, (3 * 32, 3 * 4, 4)),
        # The first token in 16 bits, the offset in FP16.
        ("centred4", "k", 10, (9 * 32 + 128, 9 * 2, 128)),
        ("centred4", "v", 10, (9 * 32 + 128, 9 * 2, 0)),
        # 70 tokens: two full groups and six exact tokens; a scale and a zero point a channel and group.
        ("kivi4", "k", 70, (64 * 32 + 6 * 128, 2 * 64 * 4, 0)),
        ("kivi4", "v", 70, (70 * 32, 70 * 2 * 4, 0)),
        ("int4-channel32+first2+recent5", "k", 70, (32 * 32 + 38 * 128, 64 * 2, 0)),
    ],
)
def test_bytes_by_hand(name, side, tokens, expected):
    assert stored_bytes(precision(name), side, 64, tokens) == expected


@given(precisions(), st.integers(1, 40), st.integers(1, 60))
def test_a_token_is_stored_once_it_is_due_and_stays_so(found, head_dim, tokens):
    method = found.keys
    stored = [method.stored_tokens(seen) for seen in range(tokens)]
    assert stored == sorted(stored)
    for seen, count in enumerate(stored):
        read = [token for token in range(seen) if 0 <= method.stored_at(token) <= seen]
        assert read == list(range(method.first, method.first + count))


def test_bits_are_a_mean_over_the_steps_and_those_at_the_end():
    int4, kivi4 = precision("int4"), precision("kivi4")
    assert bits_per_element(int4, "k", 64, 512) == (4.25, 4.25)
    # 5 bits where full; after n tokens n mod 32 are exact.
    mean, end = bits_per_element(kivi4, "k", 64, 64)
    assert end == 5
    assert mean == pytest.approx(5 + 11 * sum(n % 32 for n in range(65)) / sum(range(65)))
    # One token of 512 in 16 bits instead of 4.25, one of n after n steps.
    mean, end = bits_per_element(precision("centred4"), "k", 64, 512)
    assert end == pytest.approx(4.25 + 11.75 / 512) and mean == pytest.approx(4.25 + 11.75 * 512 / sum(range(513)))


@given(precisions(), st.integers(1, 40), st.integers(1, 40))
def test_bits_are_those_of_the_bytes(found, head_dim, tokens):
    mean, end = bits_per_element(found, "v", head_dim, tokens)
    sizes = [stored_bytes(found, "v", head_dim, seen) for seen in range(1, tokens + 1)]
    assert end == pytest.approx(8 * sum(sizes[-1][:2]) / (head_dim * tokens))
    assert mean == pytest.approx(8 * sum(sum(size[:2]) for size in sizes) / (head_dim * math.comb(tokens + 1, 2)))


@pytest.mark.parametrize(
    ("name", "width", "message"),
    [
        ("q4_0", 80, "heads of width 80 have no whole groups of 32"),
        ("nvfp4", 40, "heads of width 40 have no whole groups of 16"),
        ("q4_0-hadamard64", 96, "heads of width 96 have no whole rotated blocks of 64"),
        ("int4_per_token_head", 80, "heads of width 80, but the randomized Hadamard matrix has a power of two"),
    ],
)
def test_a_width_that_a_scheme_cannot_store_is_refused(name, width, message):
    with pytest.raises(ValueError, match=message):
        check_width(precision(name), "k", width)
    check_width(precision(name), "k", 128)
