"""Comparison of two runs of a study: byte for byte first, then number for number within a tolerance.

One machine, one thread count and one code give the same bytes, whatever the folder, the time or --cores. Another
machine, thread count or device may sum in another order, so numbers may differ in their last digits; how much is
allowed depends on what a number is and on what the model computed in (``tolerances``): a study in BF16 is BF16 as a
whole; in one of FP32 it is the files, rows and records that name it. Everything that is no floating point number must
be equal: policies, precisions, tokens, codes, counts of bytes, texts. One exception has a name: a policy that differs
only where the scores do not tell its moves apart (``choices``); what is measured with it is then not compared.

CSV tables are compared row by row, JSON records key by key, safetensors tensor by tensor. Pages and pictures are drawn
from the table of their name: where they are not the same bytes, that table speaks for them. manifest.json and
SHA256SUMS say what a run was, not what came out; ``verify`` is for them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.files.read import read_json, read_tensors
from kvstages.provenance.choices import other_choices
from kvstages.provenance.manifest import CHECKSUMS, MANIFEST
from kvstages.provenance.tolerances import DERIVED, PLACE, allowed, kinds, tolerance
from kvstages.provenance.verify import found

if TYPE_CHECKING:
    from torch import Tensor

DRAWN = {".svg", ".png", ".html"}
# How a file, row or record names BF16 arithmetic: by its path or by a value such as bfloat16 or measured-bfloat16.
BF16 = "bfloat16"


@dataclass
class Comparison:
    """The result of ``compare``; paths are seen from the study's folder.

    ``identical``: the same bytes. ``within``: file to the largest part of its tolerance that a number takes up, and
    where. ``choices``: a line for each policy that differs where scores do not tell its moves apart.
    ``outside``: a line for each file and key that differs too much, is in one folder only, or cannot be compared.
    """

    identical: list[str] = field(default_factory=list)
    within: dict[str, tuple[float, str]] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@dataclass
class Judge:
    """Collector of the differences in one file: the worst number within tolerance, and the worst of each key outside.

    ``kinds`` of the file's numbers; whether they are of BF16 arithmetic; policies that are not compared.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    bfloat16: bool = False
    left_out: frozenset[str] = frozenset()
    inside: list[tuple[float, str]] = field(default_factory=list)
    outside: dict[str, tuple[float, str]] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, str]:
        """The number within tolerance that takes up the largest part of it."""
        return max(self.inside, default=(0.0, ""))

    def of(self, *values: Any) -> Judge:
        """The judge for a row or record with these values: another one where they name BF16."""
        named = any(isinstance(value, str) and BF16 in value for value in values)
        return replace(self, bfloat16=True) if named else self

    def number(self, name: str, where: str, a: float, b: float) -> None:
        """Compare two numbers called ``name``, found at ``where``."""
        kind = self.kinds.get(name)
        if a == b or (math.isnan(a) and math.isnan(b)):
            return
        if kind == DERIVED and math.isfinite(a) and math.isfinite(b):
            return
        most = allowed(kind, self.bfloat16, a, b)
        part = abs(a - b) / most if most and math.isfinite(a) and math.isfinite(b) else math.inf
        if part <= 1:
            self.inside.append((part, where))
        elif part > self.outside.get(name, (0.0, ""))[0]:
            self.outside[name] = part, f"{where}: {a!r} and {b!r} differ by more than {most:.3g} ({kind or 'exact'})"

    def distance(self, kind: str, name: str, squares: float, length: float) -> None:
        """Compare a distance, given as the sum of squared differences, with a length, given as a sum of squares."""
        share = math.sqrt(squares / length) if length else math.inf
        most, _ = tolerance(kind, self.bfloat16)
        if share <= most:
            self.inside.append((share / most, name))
        else:
            self.unequal(name, f"{name}: {share:.3g} of their length apart, allowed is {most:g} ({kind})")

    def unequal(self, name: str, line: str) -> None:
        """Note that something under ``name`` must be equal and is not; the first one is kept."""
        self.outside.setdefault(name, (math.inf, line))


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
    choices = other_choices(*folders)
    comparison.choices = sorted(choices.values())
    for name in sorted(names[0] & names[1]):
        a, b = (folder / name for folder in folders)
        if same_bytes(a, b):
            comparison.identical.append(name)
        elif a.parent.name in choices:
            comparison.within[name] = 0.0, ""
        else:
            judge = Judge(kinds(name), whole or BF16 in name or record_in_bfloat16(a), frozenset(choices))
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
    """Two tables with the same columns and as many rows, column by column."""
    one, other = read_cells(a), read_cells(b)
    if one[:1] != other[:1] or not one:
        return judge.unequal("", f"columns {one[:1]} and {other[:1]}")
    for table in (one, other):
        for number, row in enumerate(table):
            if len(row) != len(one[0]):
                return judge.unequal("", f"row {number} has not {len(one[0])} cells")
    rows, twins = ([row for row in table[1:] if not judge.left_out.intersection(row)] for table in (one, other))
    if len(rows) != len(twins):
        return judge.unequal("", f"{len(rows)} and {len(twins)} rows")
    blocks = "block" in one[0]
    for index, name in enumerate(one[0]):
        pairs = [(value(row[index]), value(twin[index])) for row, twin in zip(rows, twins, strict=True)]
        kind = judge.kinds.get(name)
        numbers = all(is_number(x) and is_number(y) and math.isnan(x) == math.isnan(y) for x, y in pairs)
        if kind == PLACE:
            continue
        if numbers and kind == "column":
            compare_columns(name, pairs, judge)
        elif numbers and kind == "agreement" and (blocks or all(isinstance(x, int) or x != x for x, _ in pairs)):
            # Marks of single rows, and shares of the few positions of a block: what counts is their mean.
            judge.number(name, f"{name}, share of rows", sum(abs(x - y) for x, y in pairs if x == x) / len(pairs), 0.0)
        else:
            for number, (x, y) in enumerate(pairs):
                if x == y or (x != x and y != y):
                    continue
                of_row = judge.of(*rows[number], *twins[number])
                compare_values(name, f"{name}, row {number + 1}", x, y, of_row)


def compare_columns(name: str, pairs: Sequence[tuple[float, float]], judge: Judge) -> None:
    """Two columns of single positions, by the distance of the two over the length of the longer one."""
    known = [(x, y) for x, y in pairs if x == x]
    squares = sum((x - y) ** 2 for x, y in known)
    if squares:
        judge.distance("column", name, squares, max(sum(x * x for x, _ in known), sum(y * y for _, y in known)))


def compare_records(a: Path, b: Path, judge: Judge) -> None:
    """Two JSON records, key by key."""
    compare_values("", "", read_json(a), read_json(b), judge)


def compare_values(name: str, where: str, a: Any, b: Any, judge: Judge) -> None:
    """Two values of a table or record; ``name`` is the innermost key, ``where`` the way to it."""
    if isinstance(a, dict) and isinstance(b, dict):
        judge = judge.of(*a.values(), *b.values())
        keys = {key for key in a.keys() | b.keys() if judge.kinds.get(key) != PLACE and key not in judge.left_out}
        for key in sorted(keys & (a.keys() ^ b.keys())):
            judge.unequal(key, f"{where}.{key}: only in one of the two".removeprefix("."))
        for key in sorted(keys & a.keys() & b.keys()):
            compare_values(key, f"{where}.{key}" if where else key, a[key], b[key], judge)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            if not (isinstance(x, dict) and x.get("policy") in judge.left_out):
                compare_values(name, f"{where}[{index}]", x, y, judge)
    elif is_number(a) and is_number(b) and (name in judge.kinds or float in (type(a), type(b))):
        judge.number(name, where, float(a), float(b))
    elif a != b or type(a) is not type(b):
        judge.unequal(where, f"{where}: {shown(a)} and {shown(b)}, expected the same".removeprefix(": "))


def is_number(a: Any) -> bool:
    """Whether a value is a number that floating point can hold."""
    return isinstance(a, float) or (isinstance(a, int) and not isinstance(a, bool) and abs(a) < 1 << 63)


def shown(a: Any) -> str:
    """A value, cut short."""
    text = repr(a)
    return text if len(text) <= 60 else f"{text[:57]}..."


def compare_tensors(a: Path, b: Path, judge: Judge) -> None:
    """Two safetensors files: records equal but for the place, whole numbers equal, tensors of a kind number by number,
    and the other floating point tensors as one model, by their distance."""
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
        elif name not in judge.kinds:
            difference = tensor.double() - other[name].double()
            distance += float(difference.square().sum())
            length += float(tensor.double().square().sum())
        else:
            for where, x, y in differing(name, tensor, other[name]):
                judge.number(name, where, x, y)
    if distance or math.isnan(distance):
        judge.distance("weights", "weights", distance, length)


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
