"""What the restrictions of engines cost: which policy each is compared with, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from gappy import write_gappy
from made_up import policy_rows, write_export

from kvstages.analysis.engines import engines
from kvstages.analysis.engines_page import engine_lines, read_engines, verdict
from kvstages.cli import main


def test_each_is_compared_with_the_policy_of_its_bytes(tmp_path):
    path = write_export(tmp_path)
    table = engines(path).set_index("policy")
    means = pd.read_csv(path).groupby("policy")["mean_kl"].mean()
    for policy, base in {
        "vllm-allocated": "vllm-projected",
        "vllm-layer": "vllm-projected",
        "vllm-own": "vllm-projected",
        "modelopt-allocated": "modelopt-projected",
        "modelopt-allocated-own": "own",
    }.items():
        assert table["times_less"][policy] == pytest.approx(means[base] / means[policy])
        assert table["times_less_low"][policy] < table["times_less"][policy] < table["times_less_high"][policy]
    assert table["times_less"][["own", "vllm-projected", "modelopt-projected"]].isna().all()
    assert table["engine"].fillna("").tolist() == ["", *["vllm"] * 4, *["modelopt"] * 4]
    assert table["kind"].tolist()[-1] == "allocated-own" and table["mean_kl"]["own"] == pytest.approx(means["own"])


@pytest.mark.parametrize(
    ("recipes", "said"),
    [
        (["own", "tgi-projected"], "recipe tgi-projected, expected own or one of an engine: vllm"),
        (["own", "vllm-allocated"], "no policy of the recipe vllm-projected"),
        (["vllm-projected", "vllm-allocated-own"], "no policy of the recipe own"),
    ],
)
def test_what_is_no_set_of_engines_is_refused(tmp_path, recipes, said):
    rows = [policy_rows(recipe, np.full(4, 1e-3)) for recipe in recipes]
    write_gappy(tmp_path / "joint.csv", pd.concat(rows))
    with pytest.raises(ValueError, match=rf"joint\.csv: {said}"):
        engines(tmp_path / "joint.csv")


def test_the_page_states_the_tables_numbers_and_who_wins(tmp_path):
    joint = write_export(tmp_path, blocks=16)
    command = ["table", "engines", str(joint), "--output", str(tmp_path / "tables" / "engines.html")]
    assert CliRunner().invoke(main, command).exit_code == 0
    rows = read_engines(tmp_path / "tables")
    table = engines(joint)
    assert [row["mean_kl"] for row in rows] == pytest.approx(table["mean_kl"].tolist(), rel=1e-5)
    text = "\n".join(engine_lines(rows))
    for row in table[table["kind"] == "allocated"].itertuples():
        line = next(line for line in text.splitlines() if line.startswith(f"| {row.engine} | allocated |"))
        assert f"| {row.limit:,} |" in line and f"| {row.times_less:.3g} [" in line
        assert row.times_less_low > 1
        assert f"for {row.engine} {row.times_less:.3g} [" in verdict(rows)
    assert "no established gain" not in verdict(rows)
    ends = {f"times_less{end}": value for end, value in zip(("", "_low", "_high"), (0.5, 0.4, 0.6), strict=True)}
    worse = [row | ends if row["kind"] == "allocated" else row for row in rows]
    worse = [row | {"times_less_documents_low": None} for row in worse]
    assert verdict(worse).count("more KL than the projected policy (0.5 [0.4, 0.6] times less)") == 2
    same = [row | {f"times_less{end}": 1 for end in ("", "_low", "_high")} for row in worse]
    assert "for vllm the projected policy itself" in verdict(same)
    assert read_engines(tmp_path) == []
