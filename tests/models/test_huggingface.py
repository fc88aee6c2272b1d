"""Decoders of Hugging Face's, run layer by layer: the executions agree, and agree with the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from huggingface_models import CONTEXT, FAMILIES, LAYERS, VOCABULARY, decoder, model
from torch import Tensor
from transformers import DynamicCache

from kvstages.cache.one_pass import BlockCache
from kvstages.cache.packed import PackedCache
from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.models.decoder import CausalCache
from kvstages.models.huggingface import HuggingFaceDecoder

BLOCKS, TOKENS = 2, 7
PRECISIONS = ("int8", "int4", "bf16", "int3")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes some softmaxes and routers' sums in FP32 whatever the model computes in; here in FP64."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None, **_: softmax(x, dim=dim))
    monkeypatch.setattr(Tensor, "type", lambda x, dtype: x.to(torch.float64 if dtype == torch.float32 else dtype))


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[str, HuggingFaceDecoder]]:
    """A family's decoder in FP64."""
    yield request.param, decoder(request.param)


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (BLOCKS, TOKENS), generator=torch.Generator().manual_seed(seed))


def mixed(heads: int) -> PrecisionGrid:
    """Every precision in every layer, keys and values apart."""
    keys = [[PRECISIONS[(layer + head) % 4] for head in range(heads)] for layer in range(LAYERS)]
    values = [[PRECISIONS[(layer + head + 1) % 4] for head in range(heads)] for layer in range(LAYERS)]
    return PrecisionGrid(tuple(map(tuple, keys)), tuple(map(tuple, values)))


def token_by_token(model: HuggingFaceDecoder, grid: PrecisionGrid, ids: Tensor) -> Tensor:
    shape = model.shape
    cache = PackedCache(grid, len(ids), shape.key_width, model.dtype, ids.shape[1], value_width=shape.value_width)
    return torch.cat([model(ids[:, at : at + 1], cache) for at in range(ids.shape[1])], dim=1)


def test_shape_is_that_of_the_kv_heads(opened):
    family, model = opened
    shape = model.shape
    assert (shape.heads, shape.key_width, shape.value_width) == FAMILIES[family][2]
    assert (shape.layers, shape.vocabulary, shape.width, shape.query_heads) == (LAYERS, VOCABULARY, 40, 4)


@torch.no_grad()
def test_token_by_token_equals_one_pass(opened):
    _, model = opened
    grid = mixed(model.shape.heads)
    one_pass = model(tokens(), BlockCache(grid))
    assert (token_by_token(model, grid, tokens()) - one_pass).abs().max() < 1e-10
    dense = model(tokens(), BlockCache(PrecisionGrid.uniform(LAYERS, model.shape.heads, "bf16")))
    assert (one_pass - dense).abs().max() > 1e-3  # the policy does change the logits


@torch.no_grad()
def test_future_tokens_change_nothing_before_them(opened):
    _, model = opened
    grid = mixed(model.shape.heads)
    changed = tokens()
    changed[:, 4:] = (changed[:, 4:] + 1) % VOCABULARY
    before, after = (model(ids, BlockCache(grid)) for ids in (tokens(), changed))
    assert (before[:, :4] - after[:, :4]).abs().max() < 1e-12
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("layer", range(LAYERS))
def test_running_from_a_layer_equals_the_whole_pass(opened, layer):
    _, model = opened
    grid = mixed(model.shape.heads)
    cache = BlockCache(grid)
    below = model.run_layers(model.embed(tokens()), cache, last=layer)
    repeated = model.logits(model.run_layers(below.repeat(3, 1, 1), cache, first=layer))
    whole = model(tokens(), cache).repeat(3, 1, 1)
    assert (repeated - whole).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("execution", ["one-pass", "token-by-token"])
def test_variants_are_policies_with_one_head_changed(opened, execution):
    _, model = opened
    layer, shape = 1, model.shape
    base = mixed(shape.heads)
    grids = {None: base, "k": base.with_layer(layer, "k", "int2"), "kv": base.with_layer(layer, "kv", "int2")}
    choices = [(-1, None), (0, "k"), (shape.heads - 1, "kv")]
    found = run_variants(model, execution, layer, grids, choices)
    for (head, part), own in zip(choices, found, strict=True):
        keys, values = ([list(row) for row in side] for side in (base.keys, base.values))
        for side, name in ((keys, "k"), (values, "v")):
            if part is not None and name in part:
                side[layer][head] = "int2"
        expected = model(tokens(), BlockCache(PrecisionGrid.of_record({"keys": keys, "values": values})))
        assert (own - expected).abs().max() < 1e-10


def run_variants(model, execution, layer, grids, choices) -> Tensor:
    """Logits [n, B, T, V] of interventions on one layer, by the decoder's ``branch``."""
    ids, shape = tokens(), model.shape
    rows = len(choices) * BLOCKS
    if execution == "one-pass":
        caches = {key: BlockCache(grid) for key, grid in grids.items()}
        below = model.run_layers(model.embed(ids), caches[None], last=layer)
        x = model.branch(below, layer, caches)(choices)
        x = model.run_layers(x, caches[None], first=layer + 1)
        return model.logits(x).unflatten(0, (len(choices), -1))

    def packed(grid: PrecisionGrid, batch: int) -> PackedCache:
        return PackedCache(grid, batch, shape.key_width, model.dtype, TOKENS, value_width=shape.value_width)

    caches, above = {key: packed(grid, BLOCKS) for key, grid in grids.items()}, packed(grids[None], rows)
    steps = []
    for at in range(TOKENS):
        below = model.run_layers(model.embed(ids[:, at : at + 1], at), caches[None], last=layer)
        x = model.branch(below, layer, caches)(choices)
        steps.append(model.logits(model.run_layers(x, above, first=layer + 1)))
    return torch.cat(steps, dim=1).unflatten(0, (len(choices), -1))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_all_bf16_equals_the_librarys_own_cache(family):
    """In BF16 arithmetic bit for bit: what a cache holds in BF16 is then what the model computed."""
    model = decoder(family, torch.bfloat16)
    dense = PrecisionGrid.uniform(LAYERS, model.shape.heads, "bf16")
    own, cache = token_by_token(model, dense, tokens()), DynamicCache(config=model.model.config)
    for at in range(TOKENS):
        expected = model.model(tokens()[:, at : at + 1], cache=cache, use_cache=True).logits
        assert torch.equal(own[:, at : at + 1], expected)


@torch.no_grad()
def test_without_quantization_and_rounding_it_is_the_library(opened):
    _, model = opened
    expected = model.model(tokens(), use_cache=False).logits
    assert (model(tokens(), CausalCache()) - expected).abs().max() < 1e-12
    assert (model(tokens(), BlockCache(mixed(model.shape.heads))) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_logits_of_some_positions_are_those_of_all(opened):
    _, model = opened
    x = model.run_layers(model.embed(tokens()), CausalCache())
    parts = torch.cat([model.logits(x[:, :3]), model.logits(x[:, 3:])], dim=1)
    assert (parts - model.logits(x)).abs().max() < 1e-12


def test_text_beyond_the_limit_is_refused():
    long = HuggingFaceDecoder(model("llama"), "folder", 6, "the window of layer 0's attention")
    with pytest.raises(ValueError, match=r"^folder: 7 tokens, but the window of layer 0's attention is 6 tokens$"):
        long.embed(tokens())
    with pytest.raises(ValueError, match="8 tokens"):
        long.embed(tokens()[:, :2], start=6)
    assert long.embed(tokens()[:, :2], start=4).shape == (BLOCKS, 2, 40)
    assert long.shape.context == 6 < CONTEXT


def test_nothing_of_the_model_is_left_changed(opened):
    _, model = opened
    assert not any("forward" in vars(layer) for layer in model.layers)
