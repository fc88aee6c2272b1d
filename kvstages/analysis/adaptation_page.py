"""docs/adaptation.md: what training with a quantized cache did, from the tables of a finished study of adaptation.

``read_adaptation`` puts their numbers into the record docs/findings.json; ``page`` writes the text around them, and
says whichever way the intervals point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstages.analysis.adaptation_effect import EFFECTS, LESS, MORE, ORIGINAL, UNKNOWN, sentence, trained_for
from kvstages.analysis.number_text import interval, number, rounded
from kvstages.files.read import read_columns, read_record

NUMBERS = [
    *("seeds", "mean_kl", "own_kl", "cross_entropy", "bf16_mean_kl", "bf16_cross_entropy", "against_mean_kl"),
    *("against_bf16_mean_kl", "against_own_kl", "against_cross_entropy", "against_bf16_cross_entropy"),
    *(f"{name}{end}" for name in EFFECTS for end in ("", "_low", "_high")),
    *("steps", "learning_rate", "beta", "tokens_seen", "changed_share", "relative_change"),
]
GAPS = ["removed", "own_removed"]
TEXTS = ["arm", "against", "policy", "finding", "weights_dtype", "order", "cache", "trained_policy"]
COMMAND = "kvstages findings --adaptation results/adaptation"
SAID = {LESS: "less", MORE: "**more**", UNKNOWN: "not established"}


def read_adaptation(study: Path) -> dict[str, Any]:
    """What docs/adaptation.md states of the study in the folder ``study``; its rows as the table has them.

    ValueError names a table that lacks a column; OSError one that is missing: the study must be finished.
    """
    manifest = read_record(study / "manifest.json", ["environment", "configuration"])
    environment, settings = manifest["environment"], manifest["configuration"]["study"]
    table = read_columns(study / "tables" / "adaptation.csv", NUMBERS, TEXTS, GAPS)
    # An arm without a policy of its own has an empty cell.
    table[TEXTS] = table[TEXTS].fillna("")
    tried, spent = (
        study / "tables" / "adaptation-settings.csv",
        study.parents[1] / "benchmarks" / study.name / "time.csv",
    )
    return {
        "processor": environment["processor"],
        "torch": environment["packages"]["torch"],
        "title": settings["title"],
        "seeds": int(table["seeds"].max()),
        "documents": _documents(study),
        # Without the row of the model before training.
        "settings": int((read_columns(tried, ["steps"])["steps"] > 0).sum()) if tried.exists() else 0,
        "minutes": _minutes(spent) if spent.exists() else None,
        "rows": [{name: rounded(value) for name, value in row.items()} for row in table.to_dict("records")],
    }


def _documents(study: Path) -> int:
    windows = read_columns(study / "windows.csv", ["block"], ["window", "document"])
    return int(windows[windows["window"] == "validation"]["document"].nunique())


def _minutes(path: Path) -> float:
    """Minutes of CPU that all trainings took, from the table of the stage ``time``."""
    table = read_columns(path, ["cpu_seconds"], ["rule"])
    return rounded(float(table[table["rule"] == "adapt_models"]["cpu_seconds"].sum()) / 60)


def finding(found: Mapping[str, Any]) -> str:
    """The sentence that follows from the intervals of the record."""
    import pandas as pd

    return sentence(pd.DataFrame(found["rows"]))


def brief(found: Mapping[str, Any]) -> str:
    """The finding in short: each arm at the policy that it was trained for, by the KL to its own BF16 cache."""
    own = [row for row in found["rows"] if row["against"] != ORIGINAL and row["policy"] == row["trained_policy"]]
    helps = [row for row in own if (row["own_effect_high"] or 0) < 0]
    shares = ", ".join(f"{_share(row['own_removed'])} at {_named(row)}" for row in helps)
    said = f"removes part of the KL that quantization adds: {shares}" if helps else "shows no gain"
    others = len(own) - len(helps)
    unknown = f" No gain is established for {others} other{'s' * (others != 1)}." if others and helps else ""
    return f"Against a control of the same steps, training {said}.{unknown}"


def page(found: Mapping[str, Any]) -> str:
    """The page docs/adaptation.md."""
    import pandas as pd

    table = pd.DataFrame(found["rows"])
    own = trained_for(table).to_dict("records")
    alone = table[(table["against"] == ORIGINAL)].to_dict("records")
    trained = [row for row in alone if row["policy"] == (row["trained_policy"] or row["policy"])]
    once = {row["arm"]: row for row in alone}.values()
    straight = [row for row in trained if row["cache"] == "straight-through"]
    parts = [
        "# Does training with a quantized cache help?",
        f"Written by `{COMMAND}` from the study `adaptation`: {found['title']}. {found['processor']}, PyTorch "
        f"{found['torch']}; {found['documents']} held-out texts, up to {found['seeds']} seeds. Definitions: "
        "[method](method.md#adaptation). Brackets hold 95 % intervals over seeds and texts. Training sees one text; "
        f"{found['settings']} settings were tried on the reserved text, and the validation texts were measured with "
        "the chosen ones alone. The grids are small; better settings may lie outside. A seed draws the noise and, in "
        "shuffled arms, the order of the batches. Intervals are not corrected for their number.",
        f"**{finding(found)}**",
        "## Against a control of the same steps",
        "Effect: what quantization adds to the KL under the arm, less what it adds under the control; below 0 the "
        "training helps. *Original*: KL to the original model, drift of training included. *Own*: KL to the model's "
        "own BF16 cache, the response alone. Removed: share of what quantization adds under the control.",
        _table(
            ["arm", "policy", "effect, original (nats)", "removed", "effect, own (nats)", "removed", "adds"],
            [
                [
                    row["arm"],
                    row["policy"],
                    _interval(row, "kl_effect"),
                    _share(row["removed"]),
                    _interval(row, "own_effect"),
                    _share(row["own_removed"]),
                    SAID[row["finding"]],
                ]
                for row in own
            ],
        ),
        "## Against the model as it was",
        "What a user of the policy gets: the adapted model with that cache, against the original model with the same "
        "cache. Drift and cross entropy with BF16 are what the training costs where nothing is quantized.",
        _table(
            [
                *("arm", "policy", "KL before (nats)", "KL after", "difference", "removed"),
                *("cross entropy, quantized", "cross entropy, BF16", "drift: KL, BF16"),
            ],
            [
                [
                    row["arm"],
                    row["policy"],
                    number(row["against_mean_kl"]),
                    number(row["mean_kl"]),
                    _interval(row, "kl_difference"),
                    _share(-row["kl_difference"] / row["against_mean_kl"]),
                    _interval(row, "entropy_difference"),
                    _interval(row, "dense_entropy_difference"),
                    number(row["bf16_mean_kl"]),
                ]
                for row in trained
                if row["cache"] != "exact"
            ],
        ),
        _few_bits(straight),
        _cost(list(once), found["minutes"]),
        "## How they were trained",
        _table(
            [
                *("arm", "weights", "order", "seeds", "cache", "steps", "learning rate", "β", "tokens seen"),
                *("changed", "change"),
            ],
            [
                [
                    row["arm"],
                    row["weights_dtype"],
                    row["order"],
                    f"{row['seeds']}",
                    " ".join(filter(None, [row["cache"], row["trained_policy"]])),
                    f"{row['steps']}",
                    f"{row['learning_rate']:g}",
                    f"{row['beta']:g}",
                    f"{row['tokens_seen']:,}",
                    f"{100 * row['changed_share']:.1f} %",
                    f"{row['relative_change']:.2g}",
                ]
                for row in once
            ],
        ),
        "*Changed*: share of the weights that are another number than before. *Change*: norm of the change over the "
        "norm of the weights. One model, one training text, one kind of text: none of this covers others.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _few_bits(straight: Sequence[Mapping[str, Any]]) -> str:
    """Training beside the choice of a better scheme: the KL of both policies before and after."""
    lines = [
        f"- `{row['policy']}`: {number(row['against_mean_kl'])} nats before, {number(row['mean_kl'])} after "
        f"{row['tokens_seen']:,} tokens of straight-through training "
        f"({_share(-row['kl_difference'] / row['against_mean_kl'])} removed)"
        for row in straight
    ]
    return "## Training or a better scheme\n\n" + "\n".join(lines) if lines else ""


def _cost(arms: Sequence[Mapping[str, Any]], minutes: float | None) -> str:
    """What the trainings took together."""
    if minutes is None:
        return ""
    count, steps = sum(row["seeds"] for row in arms), sum(row["seeds"] * row["steps"] for row in arms)
    return (
        f"All {count} trainings together, {steps:,} steps, took {number(minutes)} minutes of one core of this "
        f"processor, {number(60 * minutes / steps)} s a step."
    )


def _named(row: Mapping[str, Any]) -> str:
    """A policy, and the arm that was trained for it where it has another name."""
    return row["policy"] if row["arm"] == row["policy"] else f"{row['policy']} ({row['arm']})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _interval(row: Mapping[str, Any], name: str) -> str:
    return f"{number(row[name])}{interval(row[f'{name}_low'], row[f'{name}_high'], number)}"


def _share(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.1f} %".replace("-", "−")
