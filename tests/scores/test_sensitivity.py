"""The sensitivity table: gathered from shards, refused where they do not fit together."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvstages.cache.precision_grid import PARTS
from kvstages.files.atomic import write_table
from kvstages.scores.columns import SENSITIVITY_COLUMNS, changes, sweep_table
from kvstages.scores.gather import gather

SETTING = {"execution": "one-pass", "compute_dtype": "float32"}
CHANGES = changes(PARTS, ("int8", "int4", "compute-step", "bf16-step"))


def shard(folder, layer: int, setting=SETTING, blocks: int = 4, wanted=CHANGES, base: float = 0.0):
    rng = np.random.default_rng(layer)
    path = folder / f"layer-{layer:02d}.csv"
    kl, error = ({change: rng.random((3, blocks)) for change in wanted[::-1]} for _ in range(2))
    write_table(path, sweep_table(layer, kl, [base] * blocks, error, setting))
    return path


def test_shards_gather_into_means_and_errors_in_any_order(tmp_path):
    shards = [shard(tmp_path, layer) for layer in range(3)]
    table = gather(shards[::-1], "mine")
    assert list(table.columns) == SENSITIVITY_COLUMNS and len(table) == 3 * 3 * 3 * 2
    assert table.equals(gather(shards, "mine")) and set(table["source"]) == {"mine"}
    assert list(table["precision"][:3]) == ["int8", "int4", "int8"]
    assert list(table["part"][:6:2]) == list(PARTS)
    raw = pd.read_csv(shards[1])

    def rows(precision):
        return raw[(raw["head"] == 2) & (raw["part"] == "k") & (raw["precision"] == precision)]

    row = table[(table["layer"] == 1) & (table["head"] == 2) & (table["part"] == "k") & (table["precision"] == "int4")]
    row = row.iloc[0]
    assert row["mean_kl"] == pytest.approx(rows("int4")["mean_kl"].mean()) and row["blocks"] == 4
    assert row["standard_error"] == pytest.approx(rows("int4")["mean_kl"].std(ddof=1) / 2)
    assert row["reconstruction_error"] == pytest.approx(rows("int4")["reconstruction_error"].mean())
    assert row["floor_kl"] == pytest.approx(rows("compute-step")["mean_kl"].mean())
    assert row["bf16_step_kl"] == pytest.approx(rows("bf16-step")["mean_kl"].mean())
    assert row["below_floor"] == int(row["mean_kl"] < row["floor_kl"])
    assert set(table["below_floor"]) == {0, 1}


def test_a_score_is_what_a_trial_adds_to_the_base(tmp_path):
    alone = gather([shard(tmp_path, 0)], "mine")
    added = gather([shard(tmp_path, 0, base=0.25)], "mine")
    assert np.allclose(alone["mean_kl"] - 0.25, added["mean_kl"])


def test_without_control_interventions_there_is_no_floor_and_nothing_below_it(tmp_path):
    table = gather([shard(tmp_path, 0, wanted=changes(("kv",), ("int8",)))], "mine")
    assert table["floor_kl"].isna().all() and table["bf16_step_kl"].isna().all() and not table["below_floor"].any()


def test_a_single_block_has_no_standard_error(tmp_path):
    assert gather([shard(tmp_path, 0, blocks=1)], "mine")["standard_error"].isna().all()


def test_a_missing_or_repeated_layer_is_refused(tmp_path):
    shards = [shard(tmp_path, layer) for layer in range(3)]
    with pytest.raises(ValueError, match=r"2 sweeps hold the layers \[0, 2\]"):
        gather([shards[0], shards[2]], "mine")
    with pytest.raises(ValueError, match="each once"):
        gather([*shards, shards[1]], "mine")


def test_sweeps_measured_in_different_ways_are_refused(tmp_path):
    other = shard(tmp_path, 1, {**SETTING, "compute_dtype": "bfloat16"})
    with pytest.raises(ValueError, match="different ways"):
        gather([shard(tmp_path, 0), other], "mine")


def test_blocks_that_differ_between_layers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="differ in heads, parts, precisions or blocks"):
        gather([shard(tmp_path, 0), shard(tmp_path, 1, blocks=3)], "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns a, b; expected layer"),
        ("", "not a table"),
        ("layer,head\n", "expected layer, head, part"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        gather([path], "mine")
    assert "x.csv" in str(error.value)
