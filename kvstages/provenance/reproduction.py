"""Are two runs of a study the same? Byte for byte first; where not, number for number within a tolerance.

One machine, one thread count and one code give the same bytes, whatever the folder, the time or --cores. Another
machine, thread count or device may sum in another order, so numbers may differ in their last digits; how much is
allowed depends on what a number is (``KINDS``) and on what the model computed in (``FULL`` or ``BFLOAT16``): a study in
BF16 is BF16 as a whole; in one of FP32 it is the files, rows and records that name it. Everything that is no floating
point number must be equal: policies, precisions, tokens, codes, counts of bytes, texts.

The kind of a number is told by its column, key or tensor name, so this needs no list of files. CSV tables are compared
row by row, JSON records key by key, safetensors tensor by tensor. Pages and pictures are drawn from the table of their
name: where they are not the same bytes, that table speaks for them. manifest.json and SHA256SUMS say what a run was,
not what came out; ``verify`` is for them.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.files.read import read_json, read_tensors
from kvstages.provenance.manifest import CHECKSUMS, MANIFEST
from kvstages.provenance.verify import found

if TYPE_CHECKING:
    from torch import Tensor

# Where a run says what it ran on: the reason for a comparison, not its subject.
PLACE = {"device", "threads", "memory_mb"}
DRAWN = {".svg", ".png", ".html"}
# How a file, row or record names BF16 arithmetic: by its path or by a value such as bfloat16 or measured-bfloat16.
BF16 = "bfloat16"
# The first pattern found in a number's name says what it is; a name with none of them is not of the model (settings,
# budgets, bytes) and must be equal but for rounding ("exact").
KINDS = {
    "spread": r" of seeds$",
    "exact": r"budget|bytes|bits|compression|theoretical|learning_rate|^set$",
    "floor": r"floor|bf16_step",
    "disagreement": r"disagreement|agrees_alone",
    "error": r"(?<!reconstruction)_error$",
    "statistic": r"ratio|correlation|share|over_joint|gap|difference|reduction|_less_",
    "argmax": r"agree",
    "deviation": r"logit_deviation",
    "logit": r"logit",
    "loss": r"cross_entropy|perplexity|gradient_norm|loss",
    "probability": r"delta_p",
    "extreme": r"(^|_)p0_1_(reverse_)?kl|(min|lowest)_(reverse_)?kl",
    "tail": r"(^|_)p\d+(_\d+)?_(reverse_)?kl|(max|highest)_(reverse_)?kl",
    "divergence": r"(^|_)kl(_|$)|proxy$|reconstruction_error|^(sum|minimum|median|maximum)$",
}
# Whole numbers that count what may flip by rounding: few rows of a column may differ (kind "flips").
FLIPS = {"agrees", "below_floor"}
# Single positions: a code that rounds the other way moves their KL by half and more, while means hardly move. So these
# columns are compared as a whole: the distance of the two over the length of the longer one. Blocks are few positions:
# the share of their argmaxes that flips is a mean over all of them.
COLUMN = "positions"
Tolerance = tuple[float, float]
# Kind to (relative, absolute): a and b may differ by absolute + relative * max(|a|, |b|). The README, "The same bytes",
# says what was measured. "weights" is the distance of two models over the length of one.
FULL: dict[str, Tolerance] = {
    "spread": (0.75, 1e-9),  # three seeds: their own rows are the ones to judge
    "exact": (1e-12, 0.0),
    "floor": (1.0, 1e-9),  # the rounding itself
    "disagreement": (0.05, 2.0),
    "error": (0.2, 1e-9),
    "statistic": (0.2, 0.02),
    "argmax": (0.0, 0.005),
    "flips": (0.0, 0.005),
    "deviation": (0.1, 1e-3),
    "logit": (0.0, 1e-3),
    "loss": (1e-3, 1e-3),
    "probability": (0.1, 2e-3),
    "extreme": (0.2, 1e-7),  # the few smallest of all positions
    "tail": (0.2, 1e-7),
    "divergence": (0.05, 1e-9),
    COLUMN: (0.2, 0.0),
    "weights": (1e-3, 0.0),
}
# Another order of sums trains other weights, 5e-8 apart, and these round some keys and values the other way.
# These four were set by the one comparison in the README, so that it lies within them is no evidence for them.
ADAPTED: dict[str, Tolerance] = FULL | {
    "argmax": (0.0, 0.01),
    "flips": (0.0, 0.02),
    "loss": (3e-3, 1e-3),
    "extreme": (0.75, 1e-7),
}
# BF16 has 8 bits: any disturbance flips roundings of later layers, which alone moves a KL by some 1e-3.
BFLOAT16: dict[str, Tolerance] = FULL | {
    "spread": (1.0, 1e-9),
    "disagreement": (0.5, 4.0),
    "error": (1.0, 1e-3),
    "statistic": (1.0, 1.0),
    "argmax": (0.0, 0.03),
    "flips": (0.0, 0.03),
    "deviation": (0.5, 0.5),
    "logit": (0.05, 0.5),
    "loss": (0.02, 0.01),
    "probability": (0.5, 0.05),
    "extreme": (0.5, 0.05),
    "tail": (0.5, 0.05),
    "divergence": (0.5, 2e-3),
    COLUMN: (1.0, 0.0),
    "weights": (1e-2, 0.0),
}


@dataclass
class Comparison:
    """What ``compare`` found; paths seen from the study's folder.

    ``identical``: the same bytes. ``within``: file to the largest part of its tolerance that a number takes up, and
    where.
    ``outside``: a line for each file and key that differs too much, is in one folder only, or cannot be compared.
    """

    identical: list[str] = field(default_factory=list)
    within: dict[str, tuple[float, str]] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)


@dataclass
class Judge:
    """Collects what differs in one file: the worst number within tolerance, and each key outside with its worst."""

    tolerances: Mapping[str, Tolerance]
    inside: list[tuple[float, str]] = field(default_factory=list)
    outside: dict[str, tuple[float, str]] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, str]:
        """The number within tolerance that takes up the largest part of it."""
        return max(self.inside, default=(0.0, ""))

    def of(self, *values: Any) -> Judge:
        """The judge of what these values (of a row or record) describe: another one where they name BF16."""
        named = any(isinstance(value, str) and BF16 in value for value in values)
        return replace(self, tolerances=BFLOAT16) if named else self

    def number(self, name: str, where: str, a: float, b: float, kind: str | None = None) -> None:
        """Compare two floating point numbers called ``name``, found at ``where``."""
        kind = kind or kind_of(name)
        relative, absolute = self.tolerances[kind]
        allowed = absolute + relative * max(abs(a), abs(b))
        if a == b or (math.isnan(a) and math.isnan(b)):
            return
        part = abs(a - b) / allowed if allowed and math.isfinite(a) and math.isfinite(b) else math.inf
        if part <= 1:
            self.inside.append((part, where))
        elif part > self.outside.get(name, (0.0, ""))[0]:
            self.outside[name] = part, f"{where}: {a!r} and {b!r} differ by more than {allowed:.3g} ({kind})"

    def distance(self, name: str, where: str, squares: float, length: float, kind: str) -> None:
        """Compare a distance, given as the sum of squared differences, with a length, given as a sum of squares."""
        share = math.sqrt(squares / length) if length else math.inf
        allowed = self.tolerances[kind][0]
        if share <= allowed:
            self.inside.append((share / allowed, where))
        else:
            self.unequal(name, f"{where}: {share:.3g} of their length apart, allowed is {allowed:g} ({kind})")

    def unequal(self, name: str, line: str) -> None:
        """Something under ``name`` that must be equal and is not; the first one is told."""
        self.outside.setdefault(name, (math.inf, line))


def kind_of(name: str) -> str:
    """What a number is, by its column, key or tensor name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "exact")


def compare(first: Path, second: Path) -> Comparison:
    """Compare two folders of results of a study; ValueError if one is no folder or holds no file."""
    folders = Path(first), Path(second)
    names = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        names.append({path.relative_to(folder).as_posix() for path in found(folder)} - {MANIFEST, CHECKSUMS})
        if not names[-1]:
            raise ValueError(f"{folder}: holds no results to compare")
    comparison = Comparison()
    for name in sorted(names[0] ^ names[1]):
        comparison.outside.append(f"{name}: only in {folders[0] if name in names[0] else folders[1]}")
    whole = any(map(study_in_bfloat16, folders))
    for name in sorted(names[0] & names[1]):
        a, b = (folder / name for folder in folders)
        if same_bytes(a, b):
            comparison.identical.append(name)
        else:
            judge = Judge(
                BFLOAT16
                if whole or BF16 in name or record_in_bfloat16(a)
                else ADAPTED
                if "adaptation" in name
                else FULL
            )
            compare_files(a, b, judge)
            comparison.outside.extend(f"{name}: {line}" for _, line in judge.outside.values())
            if not judge.outside:
                comparison.within[name] = judge.worst
    return comparison


def study_in_bfloat16(folder: Path) -> bool:
    """Whether an evaluation of a study says BF16 without a folder of that name: the study's own arithmetic."""
    evaluations = (path for path in sorted(folder.rglob("evaluation.json")) if BF16 not in path.parts)
    return any(names_bfloat16(path) for path in evaluations)


def record_in_bfloat16(path: Path) -> bool:
    """Whether the policy or the evaluation that a file lies beside names BF16: tables of steps and positions do not."""
    beside = (path.with_name(name) for name in ("policy.json", "evaluation.json"))
    return path.suffix == ".csv" and any(names_bfloat16(record) for record in beside if record.is_file())


def names_bfloat16(path: Path) -> bool:
    record = read_json(path)
    return isinstance(record, dict) and any(isinstance(value, str) and BF16 in value for value in record.values())


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes, read in pieces."""
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as one, b.open("rb") as other:
        pieces = iter(lambda: one.read(1 << 20), b"")
        return all(piece == other.read(len(piece)) for piece in pieces)


def compare_files(a: Path, b: Path, judge: Judge) -> None:
    """Compare two files that are not the same bytes, by what their ending says they are."""
    if a.suffix in DRAWN:
        if not a.with_suffix(".csv").is_file() or not b.with_suffix(".csv").is_file():
            judge.unequal("", f"differs, and there is no {a.stem}.csv beside it with its numbers")
        return
    comparers: dict[str, Callable[[Path, Path, Judge], None]] = {
        ".csv": compare_tables,
        ".json": compare_records,
        ".safetensors": compare_tensors,
    }
    if a.suffix not in comparers:
        judge.unequal("", "differs, and nothing but bytes can be compared in a file of this kind")
        return
    try:
        comparers[a.suffix](a, b, judge)
    except ValueError as error:
        judge.unequal("", f"cannot be compared ({error})")


def value(text: str) -> Any:
    """A cell as it was written: a whole number, a floating point number, nothing (NaN), or a text."""
    if text == "":
        return math.nan
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def read_cells(path: Path) -> list[list[str]]:
    """Rows of a CSV table, the header first."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a CSV table ({error})") from error


def compare_tables(a: Path, b: Path, judge: Judge) -> None:
    """Two tables with the same columns and as many rows, cell by cell; an argmax may differ in few rows."""
    one, other = read_cells(a), read_cells(b)
    if one[:1] != other[:1]:
        return judge.unequal("", f"columns {one[:1]} and {other[:1]}")
    if len(one) != len(other):
        return judge.unequal("", f"{len(one) - 1} and {len(other) - 1} rows")
    for index, name in enumerate(one[0]):
        if name in PLACE:
            continue
        flips = 0.0
        squares = length = 0.0
        whole = name == "kl" or ("position" in one[0] and kind_of(name) != "exact")
        for number, (row, twin) in enumerate(zip(one[1:], other[1:], strict=True), start=1):
            if len(row) != len(one[0]) or len(twin) != len(one[0]):
                return judge.unequal("", f"row {number} has not {len(one[0])} cells")
            x, y = value(row[index]), value(twin[index])
            if name in FLIPS and isinstance(x, int) and isinstance(y, int):
                flips += x != y
            elif "block" in one[0] and kind_of(name) == "argmax" and is_number(x) and is_number(y):
                flips += abs(x - y)
            elif whole and isinstance(x, float) and isinstance(y, float) and math.isnan(x) == math.isnan(y):
                squares += 0.0 if math.isnan(x) else (x - y) ** 2
                length += 0.0 if math.isnan(x) else max(x * x, y * y)
            elif row[index] != twin[index]:
                spread = " of seeds" if "standard deviation" in row else ""
                compare_values(name + spread, f"{name}, row {number}", x, y, judge.of(*row, *twin))
        if flips:
            judge.number(
                name, f"{name}, share of rows", flips / (len(one) - 1), 0.0, "flips" if name in FLIPS else "argmax"
            )
        if squares or math.isnan(squares):
            judge.distance(name, name, squares, length, COLUMN)


def compare_records(a: Path, b: Path, judge: Judge) -> None:
    """Two JSON records, key by key."""
    compare_values("", "", read_json(a), read_json(b), judge)


def compare_values(name: str, where: str, a: Any, b: Any, judge: Judge) -> None:
    """Two values of a table or record; ``name`` is the innermost key, ``where`` the way to it."""
    if isinstance(a, dict) and isinstance(b, dict):
        judge = judge.of(*a.values(), *b.values())
        for key in sorted((a.keys() ^ b.keys()) - PLACE):
            judge.unequal(key, f"{where}.{key}: only in one of the two".removeprefix("."))
        for key in a.keys() & b.keys():
            if key not in PLACE:
                compare_values(key, f"{where}.{key}" if where else key, a[key], b[key], judge)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            compare_values(name, f"{where}[{index}]", *pair, judge)
    elif is_number(a) and is_number(b) and (kind_of(name) in ("argmax", "disagreement") or float in (type(a), type(b))):
        judge.number(name, where, float(a), float(b))
    elif a != b or type(a) is not type(b):
        judge.unequal(where, f"{where}: {shown(a)} and {shown(b)}, expected the same".removeprefix(": "))


def is_number(a: Any) -> bool:
    return isinstance(a, int | float) and not isinstance(a, bool)


def shown(a: Any) -> str:
    """A value, cut short."""
    text = repr(a)
    return text if len(text) <= 60 else f"{text[:57]}..."


def compare_tensors(a: Path, b: Path, judge: Judge) -> None:
    """Two safetensors files: records equal but for the place, whole numbers equal, logits number by number, and any
    other floating point tensors as one model, by their distance."""
    (one, record), (other, twin) = read_tensors(a), read_tensors(b)
    compare_values("", "record", record, twin, judge)
    if one.keys() != other.keys():
        return judge.unequal("", f"tensors {sorted(one)} and {sorted(other)}")
    distance = length = 0.0
    for name, tensor in one.items():
        if tensor.shape != other[name].shape or tensor.dtype != other[name].dtype:
            judge.unequal(name, f"{name}: {described(tensor)} and {described(other[name])}, expected the same")
        elif not tensor.is_floating_point():
            if not tensor.equal(other[name]):
                judge.unequal(name, f"{name}: whole numbers differ, expected the same")
        elif kind_of(name) == "exact":
            difference = tensor.double() - other[name].double()
            distance += float(difference.square().sum())
            length += float(tensor.double().square().sum())
        else:
            for where, x, y in differing(name, tensor, other[name]):
                judge.number(name, where, x, y)
    if distance or math.isnan(distance):
        judge.distance("weights", "weights", distance, length, "weights")


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def differing(name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, float, float]]:
    """The few numbers of two tensors that decide: where they are furthest apart, in itself and for their size, and any
    that are not finite in one alone."""
    x, y = a.double().flatten(), b.double().flatten()
    gap = (x - y).abs()
    size = x.abs().maximum(y.abs())
    odd = (x.isfinite() != y.isfinite()).double() if gap.numel() else gap
    for scores in (gap.nan_to_num(0.0), (gap / (size + 1.0)).nan_to_num(0.0), odd):
        if scores.numel() and float(scores.max()) > 0:
            index = int(scores.argmax())
            yield f"{name}[{index}]", float(x[index]), float(y[index])
