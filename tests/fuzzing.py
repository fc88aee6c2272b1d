"""Hostile files for every reader: what is mutated, how, and what must not happen.

Plain seeded mutation: the same seed gives the same inputs. Half of them are bytes of a right file that were flipped,
cut, repeated or replaced, half of them (of JSON, YAML and CSV) right structures with a wrong value somewhere. A reader
may take the file or raise ValueError or OSError with a line that names it. It must not raise anything else, take long,
take gigabytes, open anything for writing, start a program or call the network.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstages.cli import one_line

SECONDS = 5.0
MEGABYTES = 768
NUMBERS = [
    b"-1", b"0", b"1e400", b"-1e400", b"1" + b"0" * 30, b"NaN", b"Infinity", b"9" * 5000, b"18446744073709551615",
    b"0.1e-999",
]  # fmt: skip
WORDS = [
    b"../../x", b"/etc/passwd", b"$(touch x)", b"`touch x`", b"; touch x", b"' \"", b"\0", b"\xff\xfe",
    "ü\u2028".encode(),
]  # fmt: skip
STRUCTURE = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"null", b"true", b"[" * 1200, b'{"a":' * 1200, b"&a [*a]",
    b"!!python/name:os.system", b"2001-99-99", b"!!int x", b"!!binary x", b"<<: x",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 10**30, -(10**30), 0.5, -0.0, float("inf"), float("nan"), 1e308, "", " ", "x", "../x",
    "/x", "\0", "$(touch x)", "a;b", "1e400", [], {}, [[]], [None], {"x": None}, {"": []}, [10**30] * 3, "x" * 10000,
    "\ud800", 2**63, 2**64, "٣",
]  # fmt: skip


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """A few bytes flipped, cut, repeated, swapped for others, or replaced by something that a parser minds."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(data) + 1)
        to = min(len(data), at + chance.choice([1, 2, 4, 8, 64]))
        kind = chance.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at:to]
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = data[at:to] * chance.choice([1, 2, 50])
        elif kind == 4:
            data[at:to] = chance.choice(NUMBERS)
        elif kind == 5:
            data[at:to] = chance.choice(WORDS)
        elif kind == 6:
            data[at:to] = chance.choice(STRUCTURE)
        else:
            data[at:to] = struct.pack("<q", chance.choice([0, -1, 1, 2**31 - 1, 2**62, chance.getrandbits(62)]))
    return bytes(data)


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place inside a structure: its container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def mutated_structure(value: Any, chance: random.Random) -> Any:
    """A structure with one or two values replaced, removed, renamed or nested."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2])):
        places = list(nodes(value))
        if not places:
            return chance.choice(VALUES)
        container, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind <= 2:
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind == 3:
            del container[key]
        elif kind == 4:
            container[key] = [container[key]]
        elif isinstance(container, dict):
            container[chance.choice(["x", "", "..", "\n", "policy "])] = container.pop(key)
        else:
            container.append(copy.deepcopy(container[key]))
    return value


def mutated_table(text: str, chance: random.Random) -> str:
    """A CSV table with cells, rows or columns that are wrong."""
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(chance.choice([1, 1, 2, 5])):
        row = chance.choice(rows)
        kind = chance.randrange(5)
        if kind <= 1:
            row[chance.randrange(len(row))] = chance.choice([*NUMBERS, *WORDS]).decode("latin-1")
        elif kind == 2 and len(row) > 1:
            del row[chance.randrange(len(row))]
        elif kind == 3:
            rows.append(list(row))
        elif len(rows) > 1:
            rows.remove(row)
    return "\n".join(map(",".join, rows)) + "\n"


@dataclass(frozen=True)
class Target:
    """A reader, right files for it, and how many hostile ones of a hundred thousand it gets."""

    name: str
    file: str
    seeds: list[bytes]
    read: Callable[[Path], Any]
    share: int
    structured: str = ""

    def input(self, chance: random.Random) -> bytes:
        seed = chance.choice(self.seeds)
        if not self.structured or chance.random() < 0.5:
            return mutated_bytes(seed, chance)
        if self.structured == "csv":
            return mutated_table(seed.decode(), chance).encode("utf-8", "surrogatepass")
        text = json.dumps(mutated_structure(json.loads(seed), chance))
        return text.encode("utf-8", "surrogatepass")


FORBIDDEN = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate", "os.system",
    "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "socket.getaddrinfo",
    "shutil.rmtree", "shutil.copyfile",
}  # fmt: skip
_watching: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None:
        return
    if event in FORBIDDEN:
        _watching.append(f"{event}{arguments!r}")
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _watching.append(f"open for writing: {arguments[0]!r}")


sys.addaudithook(_audit)


@contextmanager
def watched() -> Iterator[list[str]]:
    """What Python does meanwhile that a reader has no business to do."""
    global _watching
    seen = _watching = []
    try:
        yield seen
    finally:
        _watching = None


@contextmanager
def little_memory(megabytes: int = MEGABYTES) -> Iterator[None]:
    """Allocations of gigabytes fail: the address space may grow by so much and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (megabytes << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attack(target: Target, count: int, folder: Path, seed: int = 0) -> dict[str, int]:
    """Give ``count`` hostile files to a reader; how many were taken and how many refused.

    AssertionError shows the file (as Python would write it) and what happened.
    """
    chance = random.Random(f"{target.name} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / target.file
    outcome = {"taken": 0, "refused": 0}
    with little_memory():
        for _ in range(count):
            data = target.input(chance)
            path.write_bytes(data)
            began = time.process_time()
            with watched() as seen:
                try:
                    target.read(path)
                except (ValueError, OSError) as error:
                    problem = None
                    line = one_line(error)
                    if target.file not in line:
                        problem = f"does not name the file: {line}"
                    result = "refused"
                except BaseException as error:
                    problem, result = f"{type(error).__name__}: {error}"[:2000], "crashed"
                else:
                    problem, result = None, "taken"
            took = time.process_time() - began
            if took > SECONDS:
                problem = f"took {took:.1f} s"
            if seen:
                problem = f"did {seen}"
            if problem is not None:
                shown = data if len(data) < 3000 else data[:3000] + b"..."
                raise AssertionError(f"{target.name}: {result}, {problem}\n{shown!r}")
            outcome[result] += 1
    left = sorted(item.name for item in folder.iterdir())
    assert left == [target.file], f"{target.name}: left {left}"
    return outcome


def as_bytes(write: Callable[[Path], None], path: Path) -> bytes:
    """The bytes of the file that ``write`` writes."""
    write(path)
    data = path.read_bytes()
    path.unlink()
    return data


def torch_bytes(content: Any, **options: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()
