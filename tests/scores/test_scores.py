"""Score tables: read from a sensitivity table, and refused where they are none."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from score_tables import head_table

from kvstages.cache.precision_grid import PrecisionGrid, Unit
from kvstages.cache.precisions import QUANTIZED
from kvstages.models.config import GPTConfig
from kvstages.scores.table import COLUMNS, read_scores, read_setting

SHAPE = GPTConfig(50, 32, 16, 3, 2).shape


def rows(precisions=("int8", "int4", "int3"), parts=("kv", "k", "v")) -> pd.DataFrame:
    """A sensitivity table of 3 layers × 2 heads, in no order; each score tells its place."""
    table = pd.DataFrame(
        [
            (layer, head, part, precision, layer + head / 10 + len(part) / 100 + number / 1000, number, "s", "x", "y")
            for number, precision in enumerate(precisions)
            for part in parts
            for head in range(2)
            for layer in range(3)
        ],
        columns=COLUMNS,
    )
    return table.assign(another_column=1.0)


def read(tmp_path, table: pd.DataFrame, *more, shape=SHAPE):
    table.to_csv(tmp_path / "s.csv", index=False)
    return read_scores(tmp_path / "s.csv", shape, 4, *more)


def test_units_and_precisions_are_picked_from_the_table(tmp_path):
    table = read(tmp_path, rows(), "head", ["int8", "int3"])
    assert (table.layers, table.heads, table.unit, table.source) == (3, 2, "head", "s")
    assert (table.precisions, table.ladder) == (("int8", "int3"), ("bf16", "int8", "int3"))
    assert (table.widths, table.tokens) == ((8, 8), 4)
    assert table.units[3] == Unit(1, 1, "kv")
    assert table.kl[:, 3] == pytest.approx([1.12, 1.122]) and table.error[:, 3].tolist() == [0.0, 2.0]
    assert table.costs[3] == pytest.approx([0, 1.12, 1.122]) and table.costs.shape == (6, 3)
    # Two tensors of 4 tokens: 16 bytes each in BF16, 8 and 2 in INT8, 3 and 2 in INT3.
    assert table.sizes[3].tolist() == [128, 80, 40]
    tensors = read(tmp_path, rows(), "keys-values")
    assert tensors.precisions == ("int8", "int4", "int3") and len(tensors.units) == 12
    assert tensors.kl[1, 5] == pytest.approx(1.011) and tensors.units[5] == Unit(1, 0, "v")
    assert tensors.sizes[5].tolist() == [64, 40, 24, 20]


def test_a_layers_score_is_the_sum_over_its_heads_unless_it_was_measured(tmp_path):
    summed = read(tmp_path, rows(), "layer")
    assert summed.units == [Unit(layer, 0, "layer") for layer in range(3)]
    assert summed.kl[1] == pytest.approx([2 * layer + 0.1 + 2 * 0.021 for layer in range(3)])
    assert summed.error[2].tolist() == [4.0, 4.0, 4.0]
    # Two heads, keys and values of 4 tokens.
    assert summed.sizes[1].tolist() == [256, 160, 96, 80]
    assert summed.dense_bytes == read(tmp_path, rows(), "head").dense_bytes
    whole = rows(parts=("layer",)).query("head == 0").assign(mean_kl=lambda t: 7.0 + t["layer"])
    measured = read(tmp_path, pd.concat([rows(), whole]), "layer", ["int8"])
    assert measured.kl.tolist() == [[7.0, 8.0, 9.0]]
    assert read(tmp_path, pd.concat([rows(), whole]), "head").kl.shape == (3, 6)
    with pytest.raises(ValueError, match=r"sensitivity of layer 1, int8: -1\.0; expected a finite KL"):
        read(tmp_path, whole.assign(mean_kl=-1.0 * whole["layer"]), "layer")
    grid = measured.grid(["int8", "bf16", "int8"])
    assert grid == PrecisionGrid.of_heads([["int8"] * 2, ["bf16"] * 2, ["int8"] * 2])
    assert measured.choice(grid) == ["int8", "bf16", "int8"]
    assert measured.choice(PrecisionGrid.of_heads([["int8", "bf16"]] * 3)) is None


def test_choices_as_a_grid_and_their_proxy():
    table = head_table({"int8": [[0.25, 0.5]], "int4": [[1.0, 2.0]]}, unit="keys-values")
    assert table.grid(["int4", "bf16"]) == PrecisionGrid((("int4",),), (("bf16",),))
    assert table.proxy(["int4", "int8"]) == 1.5 and table.proxy(["bf16", "bf16"]) == 0.0
    assert table.choice(PrecisionGrid((("int4",),), (("bf16",),))) == ["int4", "bf16"]


@pytest.mark.parametrize(
    "grid",
    [
        PrecisionGrid((("int4", "int8"),), (("int4", "int4"),)),
        PrecisionGrid.of_heads([["int4", "int2"]]),
        PrecisionGrid.of_heads([["int4"]]),
        PrecisionGrid.of_heads([["int4", "int8"]] * 2),
    ],
    ids=["keys and values apart", "a precision without scores", "fewer heads", "more layers"],
)
def test_a_grid_that_the_units_cannot_say_has_no_choice(grid):
    table = head_table({"int8": [[0.25, 0.5]], "int4": [[1.0, 2.0]]})
    assert table.choice(PrecisionGrid.of_heads([["int4", "int8"]])) == ["int4", "int8"]
    assert table.choice(grid) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="part"), "column 'part' is missing; found layer, head, precision"),
        (lambda t: t[t["layer"] < 2], "scores of 2 layers × 2 heads, but the model has 3 × 2"),
        (lambda t: t[:0], "no scores, only a header"),
        (lambda t: t[t["part"] != "kv"], r"no scores of the parts kv \(unit head\)"),
        (lambda t: t[t["precision"] != "int4"], r"no int4 scores \(unit head\); it holds int8, int3"),
        (lambda t: t.drop(index=0), "no score of layer 0, head 0, part kv, int8"),
        (lambda t: pd.concat([t, t[:1]]), "two scores of layer 0, head 0, part kv, int8"),
        (lambda t: t.assign(source=["a", *["b"] * (len(t) - 1)]), "scores of the sources a, b, expected one"),
        (lambda t: t.assign(mean_kl="much"), "column 'mean_kl' holds 'much', expected a number"),
        (lambda t: t.assign(layer=t["layer"] + 0.5), r"column 'layer' holds 0\.5, expected 0, 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, change(rows()), "head", ["int8", "int4"])
    assert "s.csv" in str(error.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-11])
def test_a_score_that_is_none_names_the_unit(tmp_path, bad):
    table = rows()
    chosen = (table["layer"] == 1) & (table["head"] == 1) & (table["part"] == "v") & (table["precision"] == "int8")
    table.loc[chosen, "mean_kl"] = bad
    message = f"layer 1, head 1, part v, int8: {bad}; expected a finite KL of 0 or more"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, table, "keys-values")
    assert read(tmp_path, table, "head").kl.shape == (3, 6)


def test_a_file_that_is_no_table_is_named(tmp_path):
    (tmp_path / "s.csv").write_text("")
    with pytest.raises(ValueError, match=r"s\.csv: not a table"):
        read_scores(tmp_path / "s.csv", SHAPE, 4)


@pytest.mark.parametrize("precisions", [["int4", "int8"], ["int8", "int4", "int8"], []])
def test_precisions_come_once_from_most_bytes_to_fewest(tmp_path, precisions):
    with pytest.raises(ValueError, match="expected some, each once, from most bytes to fewest: int8, int4"):
        read(tmp_path, rows(), "head", precisions)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"kl of shape \(1, 3\), expected \(1, 2\)"):
        head_table({"int8": [[0.1, 0.2, 0.3]]}, unit="keys-values")


def test_all_scores_of_a_table_were_measured_in_one_way(tmp_path):
    table = rows()
    table.to_csv(tmp_path / "s.csv", index=False)
    assert read_setting(tmp_path / "s.csv") == {"execution": "x", "compute_dtype": "y"}
    table.loc[0, "compute_dtype"] = "z"
    table.to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(ValueError, match=r"s\.csv: scores measured in 2 ways, expected one"):
        read_setting(tmp_path / "s.csv")


def test_rungs_save_bytes():
    scores = {precision: [[0.1]] for precision in QUANTIZED}
    assert head_table(scores, head_dim=64).ladder == ("bf16", *QUANTIZED)
    # Two elements: INT8 takes 2 + 2 bytes as BF16 does; INT4, INT3 and INT2 take 1 + 2.
    assert head_table(scores, head_dim=2).ladder == ("bf16", "int4")
    assert np.array_equal(head_table(scores, head_dim=2).costs, [[0.0, 0.1]])
