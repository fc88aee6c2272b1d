"""The proof against llama.cpp: its page is made of its results, and its attention reads what it says."""

from __future__ import annotations

import json

import engine_llama_cpp as proof
import pytest
import torch


def test_the_page_is_made_of_the_results():
    begin, end = proof.MARKERS
    shown = proof.PAGE.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    assert shown == proof.page(json.loads(proof.RESULTS.read_text()))


@pytest.mark.parametrize("own", [False, True])
def test_a_query_reads_its_own_key_and_value_exactly_or_as_they_are_stored(own):
    """Two query heads a key head, position by position."""
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    run = proof.AsEngine.__new__(proof.AsEngine)
    run.own, run.read = own, lambda q, k, v: (2 * q, k.round(), v.round())
    found, _ = run.attend(None, q, k, v, None, 0.3)
    for head in range(4):
        for t in range(5):
            keys, values = k[0, head // 2, : t + 1].round(), v[0, head // 2, : t + 1].round()
            scores = keys @ (2 * q[0, head, t]) * 0.3
            if not own:
                values[t], scores[t] = v[0, head // 2, t], k[0, head // 2, t] @ q[0, head, t] * 0.3
            torch.testing.assert_close(found[0, t, head], scores.softmax(dim=0) @ values)
