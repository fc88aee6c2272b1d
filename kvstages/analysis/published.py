"""Published figures of a study, read from its folder under this project's names.

The folder ``kvstages/published/gpt2-nano`` holds the JSON files of the write-up that this project repeats (source:
its README.md, docs/method.md, "Published study"). No number is changed in reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.files.read import read_record
from kvstages.policies.names import policy_name

SHIPPED = Path(__file__).parent / "published"

_BITS = {16: "bf16", 8: "int8", 4: "int4"}
_LABELS = {"uniform_int8": "int8", "uniform_int4": "int4", "all_bf16": "bf16"}
_GREEDY = "greedy_kl_budget_"
# The adapted models were measured with the mixed policy of the first budget (docs/method.md, "Adaptation").
_ADAPTED_POLICY = policy_name("greedy", "0.01")
_METRICS = {
    "calibration_proxy_gap": "proxy_gap",
    "held_out_ce": "cross_entropy",
    "token_agreement_rate": "agreement",
    "avg_payload_bits": "average_payload_bits",
    "cache_payload_bytes": "payload_bytes",
    "cache_scale_bytes": "scale_bytes",
    "cache_total_bytes": "total_bytes",
    "full_precision_cache_bytes": "bf16_bytes",
    "compression_factor_vs_full_precision": "compression",
    "first_disagreement_position_mean": "first_disagreement_mean",
    "sequences_with_disagreement": "sequences_with_disagreement",
    "total_sequences": "sequences",
    "tokens_per_second": "tokens_per_second",
    **{name: name for name in ("mean_kl", "p50_kl", "p95_kl", "p99_kl", "max_kl", "perplexity", "max_logit_deviation")},
}


def published_folder(name: str) -> Path:
    """Folder of published figures: one that ships with the project, by its name, or any other by its path.

    ValueError where there is neither.
    """
    for folder in (SHIPPED / name, Path(name)):
        if folder.is_dir():
            return folder
    shipped = ", ".join(sorted(folder.name for folder in SHIPPED.iterdir()))
    raise ValueError(f"published figures {name!r}: no such folder, and none that ships with the project ({shipped})")


def published_files(name: str) -> list[str]:
    """The files in a folder of published figures, by their paths; none of those that ship with the project."""
    folder = published_folder(name)
    return [] if folder.parent == SHIPPED else [path.as_posix() for path in sorted(folder.glob("*.json"))]


def published_name(label: str) -> str:
    """This project's name of a published policy; ValueError on a label that is none of the published ones."""
    if label.startswith(_GREEDY):
        return policy_name("greedy", label.removeprefix(_GREEDY))
    if label not in _LABELS:
        raise ValueError(f"published policy {label!r}: expected {', '.join(_LABELS)} or {_GREEDY}BUDGET")
    return _LABELS[label]


def published_sensitivities(folder: Path) -> dict[str, list[list[float]]]:
    """Mean KL of each single-head intervention: precision -> layers x heads."""
    record = read_record(folder / "sensitivity.json", ["int8", "int4"])
    return {precision: record[precision] for precision in ("int8", "int4")}


def published_policies(folder: Path) -> dict[str, dict[str, Any]]:
    """Policies by name: precisions (a ``PrecisionGrid``), proxy, bytes, and the greedy steps where they were published.

    A step has step (from 1), layer, head, part, from, to, added_kl, bytes_saved and proxy, as the columns of steps.csv.
    """
    policies = {}
    for entry in _read_list(folder / "policies.json"):
        steps = [
            {
                "step": number,
                "layer": step["layer"],
                "head": step["head"],
                "part": "kv",
                "from": _BITS[step["from_bits"]],
                "to": _BITS[step["to_bits"]],
                "added_kl": step["delta_kl"],
                "bytes_saved": step["delta_bytes"],
                "proxy": step["cumulative_kl"],
            }
            for number, step in enumerate(entry.get("steps", []), start=1)
        ]
        policies[published_name(entry["label"])] = {
            "precisions": PrecisionGrid.of_heads([_BITS[bits] for bits in layer] for layer in entry["bits_per_layer"]),
            "proxy": entry["predicted_kl"],
            "proxy_steps": entry["num_steps"],
            "average_payload_bits": entry["avg_payload_bits"],
            "payload_bytes": entry["cache_bytes"]["payload_bytes"],
            "scale_bytes": entry["cache_bytes"]["scale_bytes"],
            "total_bytes": entry["cache_bytes"]["total_bytes"],
            "steps": steps,
        }
    return policies


def published_validation(folder: Path) -> dict[str, dict[str, Any]]:
    """Held-out metrics by policy, under the keys of evaluation.json."""
    rows = read_record(folder / "validation.json", ["results"])["results"]
    return {published_name(row["policy_label"]): _metrics(row) for row in rows}


def published_adaptation(folder: Path) -> dict[int, dict[str, Any]]:
    """Adapted seeds: "policies" (metrics by cache policy) and "curve" (rows in the columns of curve.csv).

    Steps count from 0, as published; the gradient norm was not published.
    """
    record = read_record(folder / "adaptation.json", ["seeds"])
    return {
        entry["seed"]: {
            "policies": {
                _ADAPTED_POLICY: _metrics(entry["validation"]),
                "bf16": _metrics(entry["full_precision_validation"]),
            },
            "curve": [
                {"step": row["step"], "loss": row["loss"], "cross_entropy": row["ce"], "kl": row["kl"]}
                for row in entry["train_curves"]
            ],
        }
        for entry in record["seeds"]
    }


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    return {ours: row[theirs] for theirs, ours in _METRICS.items() if theirs in row}


def _read_list(path: Path) -> list[dict[str, Any]]:
    from kvstages.files.read import read_json

    entries = read_json(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expected a list of policies, found {type(entries).__name__}")
    return entries
