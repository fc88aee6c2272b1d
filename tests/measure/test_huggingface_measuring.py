"""What measures gpt2-nano measures decoders of Hugging Face's: sweeps, gradients, policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from huggingface_models import LAYERS, VOCABULARY, decoder
from scipy.stats import spearmanr
from torch import Tensor

from kvstages.cache.precision_grid import PrecisionGrid, average_payload_bits
from kvstages.files.atomic import write_table
from kvstages.measure.evaluation import evaluate
from kvstages.measure.execution import dense_grid, window_logits
from kvstages.measure.gradients import window_projections
from kvstages.measure.setting import Setting
from kvstages.measure.sweep import sweep_layer
from kvstages.policies.budgets import Budget
from kvstages.policies.making import allocated_policy
from kvstages.policies.record import check_policy
from kvstages.scores.columns import sweep_table
from kvstages.scores.gather import gather
from kvstages.scores.projections import write_scores
from kvstages.scores.table import read_scores

MEMORY = 1 << 30
# One with two kinds of layers, one with keys and values of different width.
MEASURED = ["gemma3", "mimo-v2"]
CHANGES = [("kv", "int8"), ("v", "int4"), ("k", "bf16-step")]


def tokens(blocks: int = 3, length: int = 8) -> Tensor:
    return torch.randint(VOCABULARY, (blocks, length), generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module", params=MEASURED)
def model(request):
    return decoder(request.param)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_both_executions_sweep_to_the_same_scores(model, layer):
    one_pass, step = (
        sweep_layer(model, tokens(), layer, CHANGES, Setting(execution, "float64"), MEMORY)
        for execution in ("one-pass", "token-by-token")
    )
    for change in CHANGES:
        assert one_pass.kl[change].shape == (model.shape.heads, 3)
        assert torch.allclose(one_pass.kl[change], step.kl[change], rtol=1e-3, atol=1e-12)
        assert (one_pass.kl[change] > 0).all()
        assert torch.allclose(one_pass.error[change], step.error[change])
    assert (one_pass.base_kl == 0).all()


def test_memory_that_splits_a_sweep_changes_nothing(model):
    setting = Setting("one-pass", "float64")
    whole, split = (sweep_layer(model, tokens(2, 6), 1, CHANGES, setting, memory) for memory in (MEMORY, 1))
    for change in CHANGES:
        assert torch.allclose(whole.kl[change], split.kl[change], rtol=1e-3, atol=1e-12)


def test_gradients_in_slices_of_blocks_are_those_of_the_whole_window(model):
    (whole, error), (sliced, other) = (
        window_projections(model, tokens(), ("int8", "int4"), 2, memory) for memory in (MEMORY, 1)
    )
    assert whole.shape == (2, 3, LAYERS, 2 * model.shape.heads, 2)
    assert torch.allclose(whole, sliced, rtol=1e-4, atol=1e-9)
    assert all(torch.allclose(error[change], other[change]) for change in error)


def test_gradients_rank_units_as_the_sweep_does(model):
    """Second order against measured, over all heads' keys and values at INT8."""
    found, _ = window_projections(model, tokens(), ("int8",), 48, MEMORY)
    second_order = found.square().mean(dim=(0, 1))[..., 0] / 2 / tokens().shape[1]
    sweeps = [
        sweep_layer(model, tokens(), layer, [("k", "int8"), ("v", "int8")], Setting("one-pass", "float64"), MEMORY)
        for layer in range(LAYERS)
    ]
    measured = torch.stack([torch.cat([each.kl["k", "int8"], each.kl["v", "int8"]]).mean(dim=1) for each in sweeps])
    assert spearmanr(second_order.flatten(), measured.flatten()).statistic > 0.9
    assert 0.6 < float(second_order.sum() / measured.sum()) < 1.6


def test_a_policy_is_evaluated_and_its_bytes_are_those_of_both_widths(model):
    shape, setting = model.shape, Setting("one-pass", "float64")
    grid = PrecisionGrid(
        keys=tuple(("int8",) * shape.heads for _ in range(LAYERS)),
        values=tuple(("int4", "bf16")[: shape.heads] for _ in range(LAYERS)),
    )
    bits = average_payload_bits(grid, shape.widths)
    record = {"policy": "mixed", "precisions": grid.as_record(), "proxy": 0.1, "average_payload_bits": bits}
    parts = [logits for _, logits in window_logits(model, tokens(), dense_grid(model), setting, MEMORY)]
    summary, table = evaluate(model, tokens(), record, torch.cat(parts), setting, MEMORY)
    keys, values = shape.widths
    assert summary["payload_bytes"] == LAYERS * 8 * (2 * keys + -(-values // 2) + 2 * values)
    assert summary["scale_bytes"] == LAYERS * 8 * 3 * 2
    assert summary["bf16_bytes"] == LAYERS * 8 * 2 * 2 * (keys + values)
    assert summary["reconstruction_bytes"] == LAYERS * 8 * 2 * (2 * keys + values)
    assert np.asarray(table["kl"])[table["position"] == 0] == pytest.approx(0, abs=1e-12)
    assert summary["mean_kl"] > 0


@pytest.mark.parametrize("unit", ["head", "keys-values", "layer"])
def test_keys_and_values_of_different_width_go_from_scores_to_an_evaluation(unit, tmp_path):
    """Measured where the unit is the layer, else from gradients; allocated in bytes, checked as a policy, evaluated."""
    made, ids, setting = decoder("mimo-v2"), tokens(), Setting("one-pass", "float64")
    shape, path = made.shape, tmp_path / "scores.csv"
    assert shape.key_width != shape.value_width
    if unit == "layer":
        for layer in range(LAYERS):
            swept = sweep_layer(made, ids, layer, [("layer", "int8"), ("layer", "int4")], setting, MEMORY)
            columns = sweep_table(layer, swept.kl, swept.base_kl.tolist(), swept.error, setting.as_dict())
            write_table(tmp_path / f"{layer}.csv", columns)
        write_table(path, gather([tmp_path / f"{layer}.csv" for layer in range(LAYERS)], "made").to_dict("list"),
                    ["standard_error", "floor_kl", "bf16_step_kl"])  # fmt: skip
    else:
        values, error = window_projections(made, ids, ("int8", "int4"), 8, MEMORY)
        errors = {change: each.numpy() for change, each in error.items()}
        write_scores(path, tmp_path / "p.safetensors", values.numpy(), errors, ("int8", "int4"), 8, "calibration")
    table = read_scores(path, shape, 8, unit)
    keys, values = shape.widths
    dense = LAYERS * shape.heads * 2 * (keys + values) * 8
    assert table.dense_bytes == dense
    record, _ = allocated_policy("exact", "exact", Budget(0.45 * dense, "bytes"), table)
    grid = check_policy(record, shape)
    assert table.choice(grid) is not None and len(set(grid.flat())) > 1
    reference = torch.cat([logits for _, logits in window_logits(made, ids, dense_grid(made), setting, MEMORY)])
    summary, _ = evaluate(made, ids, record, reference, setting, MEMORY)
    assert summary["total_bytes"] == record["bytes"]["total"] <= 0.45 * dense
    assert summary["average_payload_bits"] == record["average_payload_bits"]
    bits = {"bf16": 16, "int8": 8, "int4": 4}
    by_hand = sum(
        width * bits[name]
        for width, side in zip(shape.widths, (grid.keys, grid.values), strict=True)
        for row in side
        for name in row
    )
    assert record["average_payload_bits"] == by_hand / (LAYERS * shape.heads * (keys + values))
    with pytest.raises(ValueError, match="but its precisions give"):
        check_policy({**record, "average_payload_bits": 4.0}, shape)
    assert summary["mean_kl"] > 0
