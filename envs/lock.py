"""Pin everything that pyproject.toml asks for, by version and sha256: ``make lock`` writes envs/lock.

build.txt builds the packages that are published as source only, common.txt is everything but torch, cpu.txt and
cuda.txt are torch's two builds, the second with the libraries that it needs. uv resolves, for every platform and
every Python that pyproject.toml allows at once; arguments are handed to it, so that ``--upgrade-package NAME`` moves
one package and ``--upgrade`` all of them. Without, each pin that still fits stays. The index of packages knows one
build of torch only, which for Linux is the one for CUDA; the sha256 of the CPU's wheels, which PyTorch's own index
serves, are kept in torch-cpu.sha256.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ENVS = Path(__file__).parent
LOCK = ENVS / "lock"
CPU_WHEELS = LOCK / "torch-cpu.sha256"
HEADER = "# Made by `make lock` from pyproject.toml; not edited by hand (envs/README.md).\n"
# Which packages stand in which file: the first pattern that fits decides.
FILES = {
    "cuda.txt": re.compile(r"(torch|triton|nvidia|cuda)\b"),
    "build.txt": re.compile(r"setuptools=="),
    "common.txt": re.compile(""),
}


def entries(text: str) -> list[str]:
    """The requirements of a lock file, each with its hashes; comments at the margin are no part of any."""
    return re.findall(r"^\w.*\n(?:[ ].*\n)*", text, re.MULTILINE)


def pins(text: str) -> list[str]:
    """The requirements of a lock file as ``name==version ; marker``, without hashes."""
    return [entry.splitlines()[0].removesuffix("\\").rstrip() for entry in entries(text)]


def cpu_build(version: str, wheels: str) -> str:
    """Torch's CPU build as a requirement, from lines of ``sha256sum``; ValueError unless all are of this version."""
    lines = [f"torch=={version}+cpu"]
    for line in wheels.splitlines():
        digest, name = line.split("  ")
        if not name.startswith(f"torch-{version}+cpu-"):
            raise ValueError(f"{CPU_WHEELS}: expected CPU wheels of torch {version}, found {name}")
        lines.append(f"    --hash=sha256:{digest}")
    return " \\\n".join(lines) + "\n"


def split(resolved: str, wheels: str) -> dict[str, str]:
    """What uv resolved, and the CPU's wheels, as the texts of the lock's files."""
    texts = dict.fromkeys([*FILES, "cpu.txt"], HEADER)
    for entry in entries(resolved):
        texts[next(name for name, pattern in FILES.items() if pattern.match(entry))] += entry
        if entry.startswith("torch=="):
            texts["cpu.txt"] += cpu_build(entry.split()[0].removeprefix("torch=="), wheels)
    return texts


def resolve(earlier: list[str], arguments: list[str]) -> str:
    """What uv makes of pyproject.toml, for all platforms; pins of ``earlier`` that still fit are kept."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text("\n".join(earlier) + "\n", encoding="utf-8")
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--all-extras", "--generate-hashes", "--no-header"]
        project = ENVS.parent / "pyproject.toml"
        subprocess.run([*command, *arguments, "--output-file", str(output), str(project)], check=True)
        return output.read_text(encoding="utf-8")


def main() -> None:
    files = [LOCK / name for name in FILES]
    earlier = [pin for path in files if path.exists() for pin in pins(path.read_text(encoding="utf-8"))]
    resolved = resolve(earlier, sys.argv[1:])
    for name, text in split(resolved, CPU_WHEELS.read_text(encoding="utf-8")).items():
        (LOCK / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
