"""What the path of a result file tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstages.analysis.arms import arm_and_seed
from kvstages.policies.names import policy_order


def test_the_nearest_folders_tell_arm_and_seed():
    path = "/data/seed-7/repo/results/s/adaptation/noise/seed-1337/bf16/evaluation.json"
    assert arm_and_seed(Path(path)) == ("noise", 1337)
    assert arm_and_seed(Path("/seeds/seed-1/seed-2/curve.csv")) == ("seed-1", 2)


def test_a_path_without_them_is_refused():
    with pytest.raises(ValueError, match=r"curve\.csv: expected a file in a folder ARM/seed-SEED"):
        arm_and_seed(Path("/results/noise/curve.csv"))


def test_policies_in_order():
    expected = [
        "bf16",
        "int8",
        "int2",
        "greedy-0.05",
        "greedy-0.1",
        "exact-9B",
        "exact-10B",
        "exact-0.01",
        "at-random-9B",
    ]
    assert sorted(set(expected), key=policy_order) == expected
