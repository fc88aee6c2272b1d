"""The sweep against plain interventions, and against itself cut in other ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_model, random_tokens
from plain_cache import PlainCache

from kvstages.execution import dense_grid
from kvstages.metrics import divergence
from kvstages.runtime import Setting
from kvstages.sweep import sweep_layer

MEMORY = 1 << 30
PRECISIONS = ("int8", "int4")


def sweep(model, tokens, layer, setting, memory=MEMORY, precisions=PRECISIONS) -> torch.Tensor:
    """[precisions, H, B]."""
    found = sweep_layer(model, tokens, layer, precisions, setting, memory)
    return torch.stack([found[precision] for precision in precisions])


def naive(model, tokens, layer, precision, head) -> torch.Tensor:
    """One head, one block, one token at a time, as the study has it: mean KL [B]."""
    grid = dense_grid(model)
    grid[layer][head] = precision
    means = []
    for block in tokens:
        caches = PlainCache(grid, model.lm_head.weight.dtype), PlainCache(dense_grid(model), model.lm_head.weight.dtype)
        kl = [divergence(*(model(token.view(1, 1), cache)[0] for cache in caches)) for token in block]
        means.append(torch.cat(kl).mean())
    return torch.stack(means)


@pytest.mark.parametrize("execution", ["parallel", "incremental"])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_sweep_measures_what_plain_interventions_do(execution, layer):
    model, tokens = random_model(3, 2, 5, dtype=torch.float64), random_tokens(3, 9)
    found = sweep(model, tokens, layer, Setting(execution, "float64", "float64"))
    for index, precision in enumerate(PRECISIONS):
        for head in range(2):
            assert torch.allclose(found[index, head], naive(model, tokens, layer, precision, head), rtol=1e-6, atol=0)


@pytest.mark.parametrize("execution", ["parallel", "incremental"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("memory", [MEMORY, 1])
def test_an_intervention_that_changes_nothing_measures_exactly_zero(execution, dtype, memory):
    setting = Setting(execution, dtype, dtype)
    model, tokens = random_model(dtype=setting.dtypes[0]), random_tokens(5, 12)
    for layer in range(3):
        assert sweep(model, tokens, layer, setting, memory, ("bf16",)).abs().max() == 0


@settings(deadline=None, max_examples=25)
@given(
    execution=st.sampled_from(["parallel", "incremental"]),
    blocks=st.integers(1, 5),
    length=st.integers(2, 10),
    heads=st.integers(1, 3),
    head_dim=st.integers(2, 9),
    memory=st.sampled_from([1, 60_000, 300_000]),
    seed=st.integers(0, 50),
)
def test_splitting_for_memory_changes_nothing(execution, blocks, length, heads, head_dim, memory, seed):
    model, tokens = random_model(2, heads, head_dim, seed=seed), random_tokens(blocks, length, seed=seed)
    setting = Setting(execution, "float32", "float32")
    whole, split = sweep(model, tokens, 0, setting), sweep(model, tokens, 0, setting, memory)
    assert (whole - split).abs().max() < 1e-6


@pytest.mark.parametrize("execution", ["parallel", "incremental"])
def test_one_block_at_a_time_equals_all_together(execution):
    model, tokens = random_model(), random_tokens(4, 12)
    setting = Setting(execution, "float32", "float32")
    together = sweep(model, tokens, 1, setting)
    apart = torch.cat([sweep(model, tokens[block : block + 1], 1, setting) for block in range(4)], dim=2)
    assert (together - apart).abs().max() < 1e-6


def test_precisions_apart_equal_precisions_together():
    model, tokens = random_model(), random_tokens()
    setting = Setting("parallel", "float32", "float32")
    together = sweep(model, tokens, 1, setting)
    apart = torch.cat([sweep(model, tokens, 1, setting, precisions=(precision,)) for precision in PRECISIONS])
    assert torch.equal(together, apart)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="layer 3: the model has layers 0 to 2"):
        sweep(random_model(), random_tokens(), 3, Setting("parallel", "float32", "float32"))


def test_progress_ends_at_one():
    told = []
    setting = Setting("incremental", "float32", "float32")
    sweep_layer(random_model(), random_tokens(), 0, PRECISIONS, setting, 1, told.append)
    assert told == sorted(told) and told[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("execution", ["parallel", "incremental"])
@pytest.mark.parametrize("memory", [MEMORY, 150_000])
def test_what_lies_below_the_layer_is_run_once_for_all_interventions(monkeypatch, execution, memory):
    model, tokens = random_model(4, 2, 8), random_tokens(3, 12)
    rows = []
    original = type(model.blocks[0]).projections
    monkeypatch.setattr(
        type(model.blocks[0]),
        "projections",
        lambda block, x: rows.append(x.shape[0] * x.shape[1]) or original(block, x),
    )
    sweep(model, tokens, 2, Setting(execution, "float32", "float32"), memory)
    variants = 1 + 2 * 2
    below, intervened, above = 2, 1, 1
    # The last group may be filled up with the reference; nothing else is run twice.
    needed = tokens.numel() * (below + intervened + variants * above)
    assert needed <= sum(rows) <= needed + tokens.numel() * variants
