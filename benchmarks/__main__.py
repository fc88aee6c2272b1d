"""``python -m benchmarks``: run the cases one after the other, each in its own process, and write tables and a figure.

Each case runs one thread and its seconds are processor time, so that what else the machine does hardly counts. Naive
and ours take turns, so that a drift of the machine's speed meets both. Quote ratios, never seconds: they hold for one
run on one machine only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import start_up, workflow
from kvstages.files.atomic import write_json, write_table
from kvstages.provenance.environment import processor

DTYPES = ("float32", "bfloat16")
# What the libraries take by themselves, and as if the processor had AVX2 alone (other makers' and older ones have).
INSTRUCTIONS = (
    {},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
)
Row = dict[str, Any]


def run_case(name: str, environment: Mapping[str, str] = {}, **options: Any) -> Row:
    """One case in a fresh process of one thread, perhaps with other instructions; its options and its figures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "benchmarks.cases", name, *(f"{key}={value}" for key, value in options.items())]
    finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    row = {"case": name, **options, **json.loads(finished.stdout.splitlines()[-1])}
    print(
        " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
    )
    sys.stdout.flush()
    return row


def sweep_rows() -> Iterator[Row]:
    """Naive, one-pass and token-by-token, in turn, for both shapes and dtypes, and with two sets of instructions."""
    for environment, shape, dtype in itertools.product(INSTRUCTIONS, ("full", "demo"), DTYPES):
        chosen = {"environment": environment, "shape": shape, "dtype": dtype}
        yield run_case("naive", **chosen)
        yield run_case("sweep", execution="one-pass", **chosen)
        yield run_case("naive", **chosen)
        yield run_case("sweep", execution="token-by-token", **chosen)


def study_rows() -> Iterator[Row]:
    """The published configuration at the full shape, and what a step of adaptation takes the plain way."""
    for dtype in DTYPES:
        yield run_case("naive-adaptation", shape="full", dtype=dtype)
        yield run_case("study", shape="full", dtype=dtype, execution="one-pass")


def adaptation_rows() -> Iterator[Row]:
    """A step of adaptation as published and one of ours, and the limit of their ratio."""
    for shape, dtype in (("full", "bfloat16"), ("full", "float32"), ("demo", "float32")):
        yield run_case("adaptation", shape=shape, dtype=dtype)


def scaling_rows() -> Iterator[Row]:
    """One layer's sweep (the lowest) against heads, layers, tokens and block length; FP32, one thread."""
    base = {"shape": "full", "dtype": "float32", "execution": "one-pass", "layers": "0", "depth": 6}
    for heads in (2, 4, 8):
        yield {"against": "heads", **run_case("sweep", **base, heads=heads)}
    for depth in (3, 6, 12):
        yield {"against": "layers", **run_case("sweep", **{**base, "depth": depth})}
    for blocks in (2, 4, 8, 16):
        yield {"against": "tokens", **run_case("sweep", **base, blocks=blocks)}
    for length in (64, 128, 256, 512, 1024):
        yield {"against": "block length", **run_case("sweep", **base, blocks=1024 // length, length=length)}


def gradient_rows() -> Iterator[Row]:
    """Scores from gradients and the sweep: both shapes, and against heads, layers and precisions."""
    for shape in ("demo", "full"):
        yield {"against": "shape", **run_case("gradients", shape=shape)}
    for key, values in (("heads", (2, 4, 8)), ("depth", (3, 6, 12)), ("precisions", (1, 2, 4))):
        for value in values:
            yield {"against": key, **run_case("gradients", shape="demo", **{key: value})}


def decode_rows() -> Iterator[Row]:
    """The mixed policy against BF16 heads, for each context and batch."""
    for context, batch in itertools.product((64, 256, 1024), (1, 8, 32)):
        yield run_case("decode", dtype="bfloat16", context=context, batch=batch)


def profile_rows() -> Iterator[Row]:
    """Shares of a low, a middle and the highest layer's sweep."""
    for dtype, layer in itertools.product(DTYPES, (0, 6, 11)):
        yield run_case("profile", dtype=dtype, layer=layer)


TABLES = {
    "profile": profile_rows,
    "start-up": start_up.rows,
    "workflow": workflow.rows,
    "sweep": sweep_rows,
    "study": study_rows,
    "adaptation": adaptation_rows,
    "scaling": scaling_rows,
    "gradients": gradient_rows,
    "decode": decode_rows,
}


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Rows of different keys as columns; what a row lacks is empty."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    return {name: [row.get(name) for row in rows] for name in names}


def machine() -> Row:
    """What the figures were measured on."""
    import torch

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"Which to measure: {', '.join(TABLES)}. All, if none is named.")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="Folder to write to.")
    arguments = parser.parse_args()
    unknown = set(arguments.tables) - set(TABLES)
    if unknown:
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    write_json(arguments.output / "machine.json", machine())
    for table in arguments.tables or TABLES:
        write_table(arguments.output / f"{table}.csv", columns(list(TABLES[table]())))
    from benchmarks.summary import summarise

    print(summarise(arguments.output))


main()
