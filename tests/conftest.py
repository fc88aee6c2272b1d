"""A small study for the tests: 2 layers x 2 heads on random weights, in this project's format and the published one."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from warm import warm

from kvstages.files.atomic import write_json, write_tensors, write_text
from kvstages.files.ledger import sha256

REPOSITORY = Path(__file__).parents[1]
# Tensors are small: threads would wait for each other. Where a test asks for several, they sleep while they wait, and
# do not spin. PyTorch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Every worker and every process of a workflow imports the same modules, which are compiled once, whatever is said here.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Imports and tests' names are there to stay: nothing is collected while they are made, and nothing of them after.
gc.disable()
# Fewer draws than Hypothesis makes by default, new ones each time; none fails because a machine is busy.
settings.register_profile("kvstages", max_examples=40, deadline=None)
settings.load_profile("kvstages")
# Run by every Python process of a workflow: writes down which modules of the package a stage imported.
PROBE = """
import atexit, os, sys

def record():
    if sys.argv[0].endswith(os.path.join("kvstages", "__main__.py")):
        names = {name for name in sys.modules if name.split(".")[0] == "kvstages"}
        words = sys.argv[3:] if sys.argv[1] == "--code" else sys.argv[1:]
        lines = " ".join(words[1:]).split(" + ") if words[0] == "several" else [" ".join(words)]
        lines = [line.split()[2 if line.startswith("--code") else 0 :] for line in lines]
        stage = "+".join(sorted({" ".join(line[: 2 if line[0] in ("figure", "table") else 1]) for line in lines}))
        with open(os.path.join(os.environ["PROBED"], f"{stage}.{os.getpid()}"), "w") as file:
            file.write("\\n".join(sorted(names)))

atexit.register(record)
"""
SHAPE = {"vocab_size": 64, "context_len": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2}
REVISION = "0123456789abcdef0123456789abcdef01234567"
# Runs a command for which permissions count: root reads every file, but for these two rights.
AS_ANY_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"] if os.geteuid() == 0 else []
SHARED = {
    "studies": ["small"],
    "device": "cpu",
    "threads": 1,
    "runs_a_job": 100,
    "memory_mb": 1024,
    "container": "kvstages.sif",
}
# What a shell, Snakemake or the report's markup would take for its own, so that each whole run proves the quoting.
TITLE = (
    r"""A small "random" decoder; $(touch ran) `touch ran` 'x' {input} & > ran *bold* _under_ |bar| ``code`` $x^2$ """
    r"""{{ 7 * 7 }} \\ <b>tag</b> </script><script>alert(1)</script> <!-- :raw-html:`<i>` .. include:: secret.txt """
    r""".. _x: javascript:alert(1) ü 图"""
)
STUDY = {
    "title": TITLE,
    "layers": 2,
    "block": 8,
    "windows": {"calibration": [0, 16], "adaptation": [16, 48], "reserved": [48, 64], "validation": [64, 96]},
    "execution": "one-pass",
    "compute_dtype": "float32",
    "sensitivity": "measured",
    "probes": 4,
    "unit": "head",
    "precisions": ["int8", "int4"],
    "allocators": ["greedy"],
    "budgets": [1e-6, 0.5],
    "adaptation": {
        "batch": 2,
        "weight_decay": 0.01,
        "clip": 1.0,
        "policies": ["greedy-1e-06", "int4", "int2"],
        "arms": {
            "noise": {
                **{"weights": "float32", "order": "sequential", "noise": "int4", "seeds": [1337]},
                **{"steps": 2, "learning_rate": 1e-3, "beta": 1.0, "control": "control"},
            },
            "control": {
                **{"weights": "float32", "order": "sequential", "seeds": [1337]},
                **{"steps": 2, "learning_rate": 1e-3, "beta": 1.0},
            },
            "straight-through": {
                **{"weights": "float32", "order": "shuffled", "straight-through": "int2", "seeds": [1337]},
                **{"steps": [1, 2], "learning_rate": 1e-3, "beta": [1.0, 3.0], "control": "chosen-control"},
            },
            "chosen-control": {
                **{"weights": "float32", "order": "shuffled", "seeds": [1337], "settings_of": "straight-through"},
            },
        },
    },
}

GENERATION = {"prompts": 4, "tokens": 3}
# Few schemes, one of which stores tokens late, and few bits.
SCREENING = {
    "schemes": ["int4", "lloyd4-k.mean+mse+first1", "int4-k.channel4+zero"],
    "bits": [8, 4, 2],
    "measured": [4],
    "budgets": ["6bits"],
    "sample": 4,
    "most": 2,
}
EXPORT = {"policy": "greedy-0.5", "engines": ["vllm", "modelopt"]}

# The eight texts of the small study, in two halves.
DOMAINS = {
    "texts": {"early": ["text-0", "text-16", "text-32", "text-48"], "late": ["text-[689]?", "text-1??"]},
    "lengths": [4, 8],
    "calibration": {"documents": 2, "blocks": 2, "seed": 0},
    "validation": {"documents": 2, "blocks": 4, "seed": 0},
    "probes": 2,
    "budgets": ["12bits"],
}

DRAWN = {"documents": 4, "blocks": 4, "seed": 0}

# Every allocator, unit and precision, on few policies.
COMPARISON = {
    "budgets": [0.0003],
    "precisions": ["int8", "int4", "int3", "int2"],
    "random": 3,
    "draws": 50,
    "frontier": 4,
}


def decoder() -> Any:
    """A random decoder of ``SHAPE``, the same each time."""
    import torch

    from kvstages.models.gpt2_nano import GPT, GPTConfig

    torch.manual_seed(7)
    return GPT(GPTConfig(**SHAPE))


def write_tokens(folder: Path, shard: Path) -> None:
    """vocab.json and merges.json of a tokenizer, and a shard of random tokens."""
    import numpy as np

    from kvstages.study.shards import write_shard
    from kvstages.study.text import train_tokenizer

    tokenizer = train_tokenizer(["the cache holds what the head has seen " * 9], 40, "abcdefghijklmnopqrstuvwxyz")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "vocab.json", tokenizer.vocabulary)
    write_text(folder / "merges.json", json.dumps(tokenizer.merges) + "\n")
    write_shard(shard, np.random.default_rng(7).integers(SHAPE["vocab_size"], size=128))


PATHS = {"checkpoint": "model.safetensors", "shard": "held-out.bin", "documents": "documents.json"}


def bundle(folder: Path) -> dict[str, str]:
    """Write the small study's artifacts as this project ships them; artifact to path inside ``folder``."""
    write_tensors(folder / "model.safetensors", decoder().state_dict(), {"config": SHAPE})
    write_tokens(folder, folder / "held-out.bin")
    texts = [{"document": f"text-{place}", "start": place, "end": place + 16} for place in range(0, 128, 16)]
    write_json(folder / "documents.json", texts)
    return PATHS


def published_bundle(folder: Path) -> dict[str, str]:
    """The same artifacts in the published formats: a PyTorch training checkpoint with its leftovers, and folders."""
    import torch

    model = decoder()
    state = dict(model.state_dict())
    mask = torch.ones(SHAPE["context_len"], SHAPE["context_len"]).tril()
    state |= {f"blocks.{layer}.causal_mask": mask for layer in range(SHAPE["num_layers"])}
    optimizer = torch.optim.AdamW(model.parameters())
    (folder / "checkpoints").mkdir(parents=True)
    torch.save(
        {
            "config": SHAPE | {"dropout": 0.0},
            "model_state_dict": state,
            "optimizer_state_dict": optimizer.state_dict(),
            "step": 3,
            "loss": 4.2,
        },
        folder / "checkpoints" / "final.pt",
    )
    write_tokens(folder / "bpe-tokenizer", folder / "bpe-shards" / "train_000000.bin")
    return {
        "checkpoint": "checkpoints/final.pt",
        "shard": "bpe-shards/train_000000.bin",
    }


SERVERS = ExitStack()


def pytest_configure() -> None:
    """One server of programs that start warm for the session, all workers of which inherit where it is."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = SERVERS.enter_context(TemporaryDirectory())
        os.environ["WARM_PYTHON"] = str(SERVERS.enter_context(warm(Path(folder, "warm"))))


def session_python() -> Path:
    """The folder of the program `python` that starts warm."""
    return Path(os.environ["WARM_PYTHON"])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # What tests drop is mostly free at once; cycles wait for 50,000 new objects, not for 700.
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    SERVERS.close()


class Project:
    """A working directory with its own configuration, in which the repository's Snakefile runs."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, snakefile: Path | None = None):
        self.folder = folder
        # Where `run` finds Python, for Snakemake and its jobs; None for the server of the session (warm.py).
        self.python: Path | None = None
        self.snakefile = snakefile or REPOSITORY / "Snakefile"
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": search, "OMP_NUM_THREADS": "1", **(environment or {})}

    def configure(self, study: dict[str, Any], shared: dict[str, Any] = SHARED) -> None:
        """Write config/config.yaml and config/studies/small.yaml (JSON is YAML; windows keep their order)."""
        write_text(self.folder / "config" / "config.yaml", json.dumps(shared))
        write_text(self.folder / "config" / "studies" / "small.yaml", json.dumps(study))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--snakefile", str(self.snakefile), "--cores", "1", *arguments]

    def run(self, *arguments: str, status: int = 0) -> str:
        """What snakemake prints, after checking its exit status. Its processes start warm."""
        python = self.python or session_python()
        done = subprocess.run(
            [str(python / "python"), *self.command(*arguments)[1:]],
            cwd=self.folder,
            env={**self.environment, "PATH": f"{python}{os.pathsep}{self.environment['PATH']}"},
            text=True,
            capture_output=True,
            timeout=3600,
        )
        output = done.stdout + done.stderr
        assert done.returncode == status, output
        return output

    def jobs(self, *arguments: str) -> dict[str, int]:
        """Number of jobs of each rule that snakemake would run now."""
        lines = iter(self.run("--dry-run", *arguments).splitlines())
        for line in lines:
            if line.startswith("job ") and "count" in line:
                next(lines)
                rows = iter(lines.__next__, "")
                counts = {name: int(count) for name, count in (row.split() for row in rows)}
                return {name: count for name, count in counts.items() if name not in ("all", "total")}
        return {}

    def copy(self, folder: Path, snakefile: Path | None = None) -> Project:
        """The same working directory elsewhere, with its results and Snakemake's records, times kept.

        Another process may be using the original: its locks and logs stay there.
        """
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("locks", "log", "report.html"))
        return Project(folder, self.environment, snakefile or self.snakefile)


def study_of(source: dict[str, Any], folder: Path, paths: dict[str, str]) -> dict[str, Any]:
    """The small study with its artifacts taken from ``source`` (source, location, revision), pinned from ``folder``.

    Where there are documents, the validation window is drawn from them."""
    files = {name: {"path": path, "sha256": sha256(folder / path)} for name, path in paths.items()}
    windows = STUDY["windows"] | ({"validation": DRAWN} if "documents" in paths else {})
    return {**STUDY, "artifacts": {**source, "files": files}, "windows": windows}


def whole_study_of(source: dict[str, Any], folder: Path, paths: dict[str, str]) -> dict[str, Any]:
    """The same with everything that a study can have."""
    more = {"comparison": COMPARISON, "screening": SCREENING, "export": EXPORT, "generation": GENERATION}
    return {**study_of(source, folder, paths), **more, "domains": DOMAINS}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random tensors each time."""
    if "torch" in sys.modules:
        # The CPU's alone: torch.manual_seed notes each time from where it was called, for GPUs that are found later.
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Student's t to three digits instead of five, which no share of a thousand trials tells apart."""
    from kvstages.stats import crossed

    def forget() -> None:
        for known in (crossed.t_quantile, crossed._angles):
            known.cache_clear()

    monkeypatch.setattr(crossed, "STEPS", 5000)
    forget()
    yield
    forget()


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that the first process of the session to need it builds, and that all of them share."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, complete = shared / name, shared / f"{name}.complete"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            complete.touch()
    return folder


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the small study's artifacts, and their paths in it."""
    return built_once(tmp_path_factory, "artifacts", bundle), PATHS


@pytest.fixture
def project(tmp_path: Path, artifacts: tuple[Path, dict[str, str]]) -> Project:
    """A fresh working directory with the small study, its artifacts in a local folder; nothing has run."""
    project = Project(tmp_path / "project")
    project.configure(study_of({"source": "local", "location": str(artifacts[0])}, *artifacts))
    return project


@pytest.fixture(scope="session")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stages of the whole runs write down what they imported."""
    return built_once(tmp_path_factory, "probed", lambda folder: None)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory, probed: Path) -> dict[str, str]:
    """The environment in which they do so."""
    folder = built_once(tmp_path_factory, "probe", lambda path: write_text(path / "sitecustomize.py", PROBE))
    return {"PYTHONPATH": str(folder), "PROBED": str(probed)}


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, artifacts: tuple[Path, dict[str, str]], probe: dict[str, str]
) -> Project:
    """The small study, bundled with its working directory, run from nothing to its manifest; to be copied or read."""

    def build(folder: Path) -> None:
        project = Project(folder, probe)
        shutil.copytree(artifacts[0], folder / "resources" / "bundled" / "small")
        project.configure(whole_study_of({"source": "bundled", "location": "resources/bundled/small"}, *artifacts))
        project.run("--cores", "2")

    return Project(built_once(tmp_path_factory, "finished", build), probe)
