"""The sensitivity table: gathered from shards, refused where they do not fit together."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvstages.files import write_table
from kvstages.sensitivity import SENSITIVITY_COLUMNS, gather, read_scores
from kvstages.sweep_table import sweep_table

SETTING = {"execution": "parallel", "arithmetic": "float32", "dense_storage": "float32"}


def shard(folder, layer: int, setting=SETTING, blocks: int = 4):
    rng = np.random.default_rng(layer)
    path = folder / f"layer-{layer:02d}.csv"
    write_table(path, sweep_table(layer, {p: rng.random((3, blocks)) for p in ("int4", "int8")}, setting))
    return path


def test_shards_gather_into_means_and_errors_in_any_order(tmp_path):
    shards = [shard(tmp_path, layer) for layer in range(3)]
    table = gather(shards[::-1])
    assert list(table.columns) == SENSITIVITY_COLUMNS and len(table) == 3 * 3 * 2
    assert table.equals(gather(shards))
    assert list(table["precision"][:2]) == ["int8", "int4"]
    raw = pd.read_csv(shards[1])
    rows = raw[(raw["head"] == 2) & (raw["precision"] == "int4")]["mean_kl"]
    row = table[(table["layer"] == 1) & (table["head"] == 2) & (table["precision"] == "int4")].iloc[0]
    assert row["mean_kl"] == pytest.approx(rows.mean()) and row["blocks"] == 4
    assert row["standard_error"] == pytest.approx(rows.std(ddof=1) / 2)
    table.to_csv(tmp_path / "s.csv", index=False)
    assert read_scores(tmp_path / "s.csv")["int4"][1][2] == row["mean_kl"]


def test_a_single_block_has_no_standard_error(tmp_path):
    assert gather([shard(tmp_path, 0, blocks=1)])["standard_error"].isna().all()


def test_a_missing_or_repeated_layer_is_refused(tmp_path):
    shards = [shard(tmp_path, layer) for layer in range(3)]
    with pytest.raises(ValueError, match=r"2 sweeps hold the layers \[0, 2\]"):
        gather([shards[0], shards[2]])
    with pytest.raises(ValueError, match="each once"):
        gather([*shards, shards[1]])


def test_sweeps_measured_in_different_ways_are_refused(tmp_path):
    other = shard(tmp_path, 1, {**SETTING, "arithmetic": "bfloat16"})
    with pytest.raises(ValueError, match="different ways"):
        gather([shard(tmp_path, 0), other])


def test_blocks_that_differ_between_layers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="differ in heads, precisions or blocks"):
        gather([shard(tmp_path, 0), shard(tmp_path, 1, blocks=3)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns a, b; expected layer"),
        ("", "not a table"),
        ("layer,head\n", "expected layer, head, prec"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        gather([path])
    assert "x.csv" in str(error.value)


def test_a_head_without_a_score_is_named(tmp_path):
    table = gather([shard(tmp_path, 0)])
    table[~((table["head"] == 1) & (table["precision"] == "int8"))].to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(ValueError, match="no int8 score for layer 0, head 1"):
        read_scores(tmp_path / "s.csv")
