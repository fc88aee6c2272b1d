"""Documents of a shard: which stretch of its tokens is which text, so that windows can be drawn from many texts.

A documents file is JSON: a list of {"document": name, "start": position, "end": position}, in order of position; the
end is not included. ``make-bundled-model`` writes one beside its shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstages.files.read import read_json

KEYS = {"document", "start", "end"}


class Document(NamedTuple):
    """A text's name and its token positions in the shard, the end not included."""

    name: str
    start: int
    end: int


def read_documents(path: Path, tokens: int) -> list[Document]:
    """Documents of a shard of so many tokens; ValueError names ``path``, the entry and what is wrong with it."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a list of documents, each with the keys document, start and end")
    documents: list[Document] = []
    for index, entry in enumerate(entries):
        here = f"{path}: documents[{index}]"
        if not isinstance(entry, dict) or set(entry) != KEYS:
            raise ValueError(f"{here}: expected the keys document, start and end")
        name, start, end = entry["document"], entry["start"], entry["end"]
        if not isinstance(name, str) or not name:
            raise ValueError(f"{here}: document {name!r}, expected a name")
        if any(isinstance(place, bool) or not isinstance(place, int) for place in (start, end)):
            raise ValueError(f"{here} ({name}): from {start!r} to {end!r}, expected token positions")
        reached = documents[-1].end if documents else 0
        if not reached <= start < end <= tokens:
            raise ValueError(
                f"{here} ({name}): from {start} to {end}, expected positions from {reached} to {tokens}, in order"
            )
        if name in {document.name for document in documents}:
            raise ValueError(f"{here}: a second document of the name {name}")
        documents.append(Document(name, start, end))
    return documents


def draw_blocks(
    documents: Sequence[Document], count: int, blocks: int, block: int, seed: int
) -> list[tuple[Document, int]]:
    """``blocks`` blocks from ``count`` documents, as evenly as possible: (document, position of its first token).

    A document is cut from its start into whole blocks of ``block`` tokens, and some of them are taken. What is taken
    follows from checksums of the seed and the names, so anyone can draw the same without this software. By document
    and position. ValueError where too few documents are long enough.
    """
    most = -(-blocks // count)
    fitting = [document for document in documents if document.end - document.start >= most * block]
    if len(fitting) < count:
        raise ValueError(
            f"{len(fitting)} of {len(documents)} documents left are long enough for {most} blocks of {block} tokens, "
            f"expected at least {count}"
        )
    chosen = _by_checksum(fitting, seed, lambda document: document.name)[:count]
    taken = []
    for index, document in enumerate(chosen):
        places = _by_checksum(
            range(document.start, document.end - block + 1, block),
            seed,
            lambda place, own=document: f"{own.name}:{place - own.start}",
        )
        taken += [(document, place) for place in places[: blocks // count + (index < blocks % count)]]
    return sorted(taken, key=lambda pair: pair[1])


def _by_checksum(items: Iterable, seed: int, name) -> list:
    """Items in the order of the SHA-256 of ``SEED:NAME``: as good as a shuffle, and the same everywhere."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}:{name(item)}".encode()).digest())
