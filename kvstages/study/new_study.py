"""A new study from a model and texts: which windows, budgets and probes, and the text of its file.

What is chosen follows from the model's shape and the texts' tokens alone, so two people get the same study.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvstages.cache.schemes import INTEGER_BITS, SIDES, bits_per_element, precision
from kvstages.files.ledger import sha256
from kvstages.study.documents import Document, draw_blocks

TEXT_SUFFIXES = (".txt", ".md")
# Documents that few long files are cut into.
LEAST_DOCUMENTS = 16
# Tokens of a validation block and of a calibration block, the longest that fit; validation takes a document's share
# of at most so many tokens in all, calibration so many blocks.
BLOCKS, CALIBRATION_BLOCKS = (512, 256, 128, 64, 32, 16), (64, 32, 16)
VALIDATION_TOKENS = 8192
CALIBRATION_COUNT, MOST_VALIDATION = 16, 32
PROBES, SAMPLE = 16, 24
# Blocks that schemes are screened on before the study; how many of the best ones the study itself then measures.
SCREENED_BLOCKS, BEST = 4, 2
# The published recipe with weights in FP32 and shuffled batches, and a control without noise.
TRAINING = {
    "weights": "float32",
    "order": "shuffled",
    "steps": 50,
    "learning_rate": 1e-6,
    "beta": 1.0,
    "seeds": [1337, 2026, 9001, 1, 2],
}
ADAPTATION = {
    "batch": 4,
    "weight_decay": 0.01,
    "clip": 1.0,
    "policies": ["greedy-0.01", "int4"],
    "arms": {
        "noise": {**TRAINING, "noise": "int4", "control": "control"},
        "control": TRAINING,
    },
}
COMMON = {
    "execution": "one-pass",
    "compute_dtype": "float32",
    "unit": "head",
    "precisions": ["int8", "int4"],
    "allocators": ["greedy", "exact"],
    "budgets": [0.001, 0.01, 0.1],
}


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are and, of folders, all with the suffix of a text; ValueError where there are none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
            if not inside:
                raise ValueError(f"{path}: no text in it, expected files that end in {' or '.join(TEXT_SUFFIXES)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder of texts")
    names = [path.name for path in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]}: the name of two texts, expected file names that differ")
    return found


def local(paths: Sequence[Path]) -> dict[str, Any]:
    """Where files of this machine lie, and their checksums, as a study pins them."""
    whole = [path.expanduser().resolve() for path in paths]
    folder = Path(os.path.commonpath([path.parent for path in whole]))
    files = [{"path": path.relative_to(folder).as_posix(), "sha256": sha256(path)} for path in whole]
    return {"source": "local", "location": str(folder), "files": files}


def parts_of(files: int) -> int:
    """Documents that each of so many files is cut into."""
    return -(-LEAST_DOCUMENTS // files)


def drawn_windows(documents: Sequence[Document], context: int, prefix: int) -> tuple[int, dict[str, dict[str, int]]]:
    """Block and windows of a study of these documents, with ``prefix`` special tokens before each block.

    Blocks are the longest that the context allows and of which the documents hold enough: the validation window takes
    its blocks from half of the documents or more, and the calibration window from others. ValueError where even the
    shortest do not fit.
    """
    for block in [length for length in BLOCKS if length <= context]:
        for share in (4, 2, 1):
            count = min(MOST_VALIDATION, max(2, VALIDATION_TOKENS // block) * share // 4)
            sources = min(count, max(1, len(documents) // 2))
            try:
                taken = draw_blocks(documents, sources, count, block - prefix, 0)
            except (ValueError, ZeroDivisionError):
                continue
            used = {document for document, _ in taken}
            left = [document for document in documents if document not in used]
            for length in [length for length in CALIBRATION_BLOCKS if length <= block]:
                try:
                    of = min(CALIBRATION_COUNT, max(1, len(left)))
                    draw_blocks(left, of, CALIBRATION_COUNT, length - prefix, 0)
                except ValueError:
                    continue
                return block, {
                    "validation": {"documents": sources, "blocks": count, "seed": 0},
                    "calibration": {"documents": of, "blocks": CALIBRATION_COUNT, "seed": 0, "block": length},
                }
    tokens = sum(document.end - document.start for document in documents)
    raise ValueError(
        f"{tokens} tokens in {len(documents)} documents: too short for any windows; expected a few thousand tokens"
    )


def cut_stretches(tokens: int, context: int) -> tuple[int, dict[str, list[int]]]:
    """Block and windows of a shard of so many tokens for gpt2-nano; ValueError where they do not fit."""
    block = min(64, context)
    counts = {"calibration": 8, "adaptation": 56, "reserved": 16, "validation": 32}
    if sum(counts.values()) * block > tokens:
        raise ValueError(f"{tokens} tokens: shorter than the windows, expected {sum(counts.values()) * block} or more")
    windows, start = {}, 0
    for name, count in counts.items():
        windows[name] = [start, start + count * block]
        start += count * block
    return block, windows


def screening_budgets(widths: Sequence[int], tokens: int) -> list[str]:
    """What INT4 takes in a cache of so many tokens, with keys and values of these widths, rounded up to a quarter of a
    bit; and a bit less."""
    sides = zip(SIDES, widths, strict=True)
    bits = sum(width * bits_per_element(precision("int4"), side, width, tokens)[1] for side, width in sides)
    bits /= sum(widths)
    most = math.ceil(4 * bits) / 4
    return [f"{most:g}bits", f"{most - 1:g}bits"]


def best_schemes(proxies: Mapping[str, float]) -> list[str]:
    """The schemes of least proxy."""
    return sorted(proxies, key=proxies.__getitem__)[:BEST]


def screening(schemes: Sequence[str], budgets: Sequence[str]) -> dict[str, Any]:
    """The settings of a screening of some schemes; the study adds the published one, which is named here already."""
    return {
        "schemes": list(dict.fromkeys(["int4", *schemes])),
        "bits": list(INTEGER_BITS),
        "measured": [4],
        "budgets": list(budgets),
        "sample": SAMPLE,
        "most": SAMPLE,
    }


def huggingface_study(
    title: str,
    layers: int,
    heads: int,
    model: Mapping[str, Any],
    text: Mapping[str, Any],
    block: int,
    windows: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of a study of a Hugging Face model."""
    return {
        "title": title,
        "layers": layers,
        "heads": heads,
        "model": {"family": "huggingface", **model},
        "text": dict(text),
        "block": block,
        "windows": dict(windows),
        "sensitivity": "gradients",
        "probes": PROBES,
        "sample": min(SAMPLE, layers * heads),
        **COMMON,
    }


def gpt2_nano_study(
    title: str, layers: int, artifacts: Mapping[str, Any], block: int, windows: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a study of a gpt2-nano checkpoint."""
    return {
        "title": title,
        "layers": layers,
        "artifacts": dict(artifacts),
        "block": block,
        "windows": dict(windows),
        "sensitivity": "measured",
        "probes": PROBES,
        **COMMON,
        "adaptation": ADAPTATION,
    }


def study_text(settings: Mapping[str, Any]) -> str:
    """A study's file."""
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=120)
