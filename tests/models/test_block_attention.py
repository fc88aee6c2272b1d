"""Attention of a block in pieces gives what PyTorch's gives at once, whatever each query sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvstages.cache.one_pass import causal_mask, offers_of
from kvstages.cache.schemes import PUBLISHED, precision
from kvstages.models.block_attention import PIECE_QUERIES, attend, pieces

METHODS = {
    "published": (PUBLISHED,),
    # Keys stay exact until 16 are there, values are stored at once: three kinds of offers.
    "delayed": (precision("int4-k.channel16").method("k"), PUBLISHED),
    "heads": (PUBLISHED, precision("int4-first3").method("k"), PUBLISHED, PUBLISHED),
}


def mask_of(kind: str, tokens: int) -> torch.Tensor:
    return causal_mask(tokens, "cpu") if kind == "causal" else offers_of(METHODS[kind], tokens, "cpu").mask


@pytest.mark.parametrize("kind", ["causal", *METHODS])
@pytest.mark.parametrize("tokens", [63, 64, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_pieces_give_what_all_queries_at_once_give(kind, tokens, dtype):
    mask = mask_of(kind, tokens)
    queries = torch.randn(2, 2, tokens, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = torch.randn(2, 2, 2, mask.shape[-1], 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    limit = 1e-6 if dtype == torch.float32 else 2**-6
    assert (attend(queries, keys, values, mask) - expected).abs().max() <= limit


@pytest.mark.parametrize("kind", ["causal", *METHODS])
def test_a_piece_is_given_all_that_its_queries_see_and_less_than_all(kind):
    mask = mask_of(kind, 256)
    positions = torch.arange(mask.shape[-1]).view(1, 1, -1, 1)
    found = pieces(mask)
    assert [piece.queries for piece in found] == [slice(start, start + PIECE_QUERIES) for start in range(0, 256, 32)]
    for piece in found:
        given = piece.of(positions).flatten()
        rows = mask[..., piece.queries, :]
        assert torch.equal(rows[..., given], piece.mask)
        assert rows.sum() == piece.mask.sum()
    assert sum(piece.mask.numel() for piece in found) < 0.7 * mask.numel()


def test_where_gradients_are_asked_for_all_queries_go_at_once():
    mask = causal_mask(64, "cpu")
    queries, keys, values = torch.randn(3, 1, 1, 64, 4).requires_grad_().unbind()
    found = attend(queries, keys, values, mask)
    assert torch.equal(found, scaled_dot_product_attention(queries, keys, values, attn_mask=mask))
    assert type(found.grad_fn) is type(scaled_dot_product_attention(queries, keys, values, attn_mask=mask).grad_fn)
