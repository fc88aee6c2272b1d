"""Texts of a study: UTF-8 files, each a document or cut into several, and their token ids as a shard.

Windows are drawn from whole documents (``documents``), so no two windows share one. A study with few long files asks
for ``parts``: each file is cut at ends of paragraphs into so many documents of about the same length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstages.files import ledger

# Where a text may be cut, best first: ends of paragraphs, of lines, of words.
CUTS = ("\n\n", "\n", " ")


class Text(NamedTuple):
    """A document's name and its text."""

    name: str
    text: str


def read_text(path: Path) -> str:
    """A text file; ValueError, with the place, for bytes that are no UTF-8 text, and for an empty file."""
    ledger.note(path)
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {content[error.start]:#04x} at {error.start})") from None
    if "\0" in text:
        raise ValueError(f"{path}: not text: it holds a zero byte at {content.index(0)}")
    if not text.strip():
        raise ValueError(f"{path}: empty, expected a text")
    return text


def read_texts(paths: Sequence[Path], parts: int = 1) -> list[Text]:
    """The documents of text files, in the order given, named by ``names_of``."""
    found = []
    for path in paths:
        cut = split_text(read_text(path), parts)
        found += map(Text, names_of(path.name, parts), cut)
    return found


def names_of(file: str, parts: int) -> list[str]:
    """Names of the documents of a text file: its own, or FILE/1, FILE/2, ... of its parts."""
    return [file] if parts == 1 else [f"{file}/{place}" for place in range(1, parts + 1)]


def split_text(text: str, parts: int) -> list[str]:
    """A text in at most ``parts`` pieces of about the same length, which together are the text.

    Each cut is at the end of a paragraph that is nearest to its even place, within half a piece; else of a line, or a
    word.
    """
    size = len(text) / parts
    cuts = [0]
    for part in range(1, parts):
        place = round(part * size)
        first, last = max(cuts[-1], place - round(size / 2)), place + round(size / 2)
        for mark in CUTS:
            ends = (text.rfind(mark, first, place), text.find(mark, place - len(mark), last))
            found = [end + len(mark) for end in ends if end >= 0]
            if found:
                place = min(found, key=lambda end, own=place: abs(end - own))
                break
        cuts.append(max(place, cuts[-1]))
    pieces = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [piece for piece in pieces if piece.strip()]


def encode_texts(texts: Sequence[Text], encode: Callable[[str], list[int]]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Token ids [tokens] of documents one after the other, and where each lies: entries of a documents file."""
    ids, entries, start = [], [], 0
    for name, text in texts:
        own = encode(text)
        if not own:
            raise ValueError(f"{name}: its text gives no token")
        ids += own
        entries.append({"document": name, "start": start, "end": start + len(own)})
        start += len(own)
    return np.array(ids, dtype=np.int64), entries
