"""What the restrictions of engines cost: which policy each is compared with, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from gappy import write_gappy
from made_up import policy_rows, write_export

from kvstages.analysis.engines import engines


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
