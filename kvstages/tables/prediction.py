"""Predictions of joint KL against measured ones: plain sums of scores, and sums with interactions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.analysis.entries import Entry, Input
from kvstages.analysis.prediction import PREDICTORS, summarise
from kvstages.tables.notes import PROXY_NOTE, page_title
from kvstages.tables.page import Column, Section, count, decimal, page

if TYPE_CHECKING:
    import pandas as pd

TABLE = Entry(
    number=9,
    title="Predicted and measured joint KL",
    inputs={
        "predictions": Input("prediction_files", "predictions.csv"),
        "held_out": Input(
            "predicted_joint_files", "joint.csv", "joint.csv of the same policies on the held-out window.", several=True
        ),
    },
)

NOTES = [
    "Every prediction is made on the calibration window: from the measured scores of single units, from gradients with "
    "the units added up, or from gradients with all interactions of units (to second order).",
    "Rank correlation: Spearman's, of prediction and joint KL over the policies. Ratio: joint KL / prediction, its "
    "quantiles over the policies. Brackets hold the 95 % interval (bootstrap over blocks); on the calibration window "
    "prediction and joint KL are drawn together.",
    "Below 1e-4 nats the joint KL is mostly that of BF16 roundings of keys and values that a joint run in FP32 flips; "
    "no score and no gradient counts them.",
    "Policies of a frontier differ by orders of magnitude, and any prediction orders them well. Random policies of "
    "equal bytes are the hard test.",
]


def make(predictions: Path, held_out: Sequence[Path], study: str | None = None) -> tuple[pd.DataFrame, str]:
    """Rows by window, set of policies and prediction."""
    table = summarise(predictions, held_out)
    columns = [
        Column("policies", "set", str),
        Column("prediction", "predictor", str),
        Column("number", "policies", count),
        Column("rank correlation", "rank_correlation", decimal(3), interval=True),
        Column("median ratio", "median_ratio", decimal(3), interval=True),
        Column("5 % of the ratio", "p5_ratio", decimal(2)),
        Column("95 % of the ratio", "p95_ratio", decimal(2)),
    ]
    shown = table.assign(predictor=table["predictor"].map(PREDICTORS))
    sections = [
        Section(f"Joint KL on the {window} window", columns, shown[shown["window"] == window])
        for window in ("calibration", "validation")
    ]
    return table, page(page_title(study, "predicted joint KL"), sections, [*NOTES, PROXY_NOTE])
