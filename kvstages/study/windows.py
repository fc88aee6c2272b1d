"""Windows: the token blocks of a study, from a shard (docs/method.md, "Windows").

A window is a run of token positions, cut in order into blocks, or so many blocks drawn from so many documents. No
document serves two windows that are drawn. A block of T tokens is one sequence with its own cache. B is the number of
blocks of a window. The windows of domains (docs/method.md, "Domains") are drawn from documents by their names, and cut
again into shorter blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstages.files.read import read_record
from kvstages.models.config import DecoderShape
from kvstages.study.documents import Document, draw_blocks, read_documents
from kvstages.study.shards import read_shard

if TYPE_CHECKING:
    from torch import Tensor

# A block of one token predicts nothing, so it has no cross entropy.
SMALLEST_BLOCK = 2
FORM = (
    "NAME=START:END, such as calibration=0:512, or NAME=documents:16,blocks:32,seed:0, perhaps with ,block:64 and "
    ",of:PATTERN|PATTERN"
)
# The key of a study that says into which lengths the windows of domains are cut.
LENGTHS = "domains.lengths"


@dataclass(frozen=True)
class Stretch:
    """Token positions of a shard, the end not included."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"


@dataclass(frozen=True)
class Draw:
    """So many blocks of so many documents, drawn with a seed; of ``block`` tokens, None: as many as the study's.

    ``names``: patterns of the documents to draw from (see ``fits``), none: from all.
    """

    documents: int
    blocks: int
    seed: int
    block: int | None = None
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        own = "" if self.block is None else f",block:{self.block}"
        of = f",of:{'|'.join(self.names)}" if self.names else ""
        return f"documents:{self.documents},blocks:{self.blocks},seed:{self.seed}{own}{of}"


Window = Stretch | Draw


@dataclass(frozen=True)
class Blocks:
    """A window as it was cut: token ids int64 [B, T], the position of each block's first token in the shard [B], and
    the name of each block's document [B], None where the window is a stretch."""

    tokens: np.ndarray
    starts: list[int]
    documents: list[str] | None


def window_of(value: Any) -> Window:
    """A window as a configuration writes it: [start, end], or {documents, blocks, seed} and perhaps its own block."""
    return Draw(**value) if isinstance(value, Mapping) else Stretch(*value)


def parse_windows(texts: list[str]) -> dict[str, Window]:
    """Windows as the command line has them, in the order given; ValueError on another form or a repeated name."""
    windows: dict[str, Window] = {}
    for text in texts:
        name, _, said = text.partition("=")
        stretch = re.fullmatch(r"(-?\d+):(-?\d+)", said)
        drawn = re.fullmatch(r"documents:(\d+),blocks:(\d+),seed:(\d+)(?:,block:(\d+))?(?:,of:(.+))?", said)
        if not re.fullmatch(r"[a-z0-9-]+", name) or not (stretch or drawn):
            raise ValueError(f"window {text!r}: expected {FORM}")
        if name in windows:
            raise ValueError(f"window {name} is given twice")
        numbers = [None if number is None else int(number) for number in (stretch or drawn).groups()[:4]]
        if stretch:
            windows[name] = Stretch(*numbers)
        else:
            windows[name] = Draw(*numbers, tuple(drawn[5].split("|")) if drawn[5] else ())
    return windows


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a document's name is one of ``patterns``: a name, or one with * for any letters and ? for one."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def check_windows(windows: Mapping[str, Window], block: int) -> None:
    """ValueError unless stretches stand in order, do not overlap and hold whole blocks, and draws take a block or more
    of each of their documents."""
    if block < SMALLEST_BLOCK:
        raise ValueError(f"block of {block} tokens: expected at least {SMALLEST_BLOCK}")
    previous, reached = None, 0
    for name, window in windows.items():
        if isinstance(window, Draw):
            if not 1 <= window.documents <= window.blocks:
                raise ValueError(
                    f"window {name}: {window.blocks} blocks of {window.documents} documents, expected at least one "
                    "document and one block of each"
                )
            if window.block is not None and window.block < SMALLEST_BLOCK:
                raise ValueError(f"window {name}: blocks of {window.block} tokens: expected at least {SMALLEST_BLOCK}")
            continue
        start, end = window.start, window.end
        here = f"window {name} ({start} to {end})"
        if start < 0:
            raise ValueError(f"{here} starts before the shard; expected positions of 0 or more")
        if end <= start:
            raise ValueError(f"{here} is empty; expected an end after its start")
        if (end - start) % block:
            raise ValueError(f"{here} holds {end - start} tokens, not a multiple of the block of {block}")
        if start < reached:
            raise ValueError(
                f"{here} starts before {previous} ends at {reached}; windows stand in order and do not overlap"
            )
        previous, reached = name, end


def cut_windows(
    shard: Path,
    windows: Mapping[str, Window],
    block: int,
    shape: DecoderShape,
    documents: Path | None = None,
    prefix: Sequence[int] = (),
) -> dict[str, Blocks]:
    """The blocks of each window; ValueError names the file, the window and what is wrong.

    Draws take their documents one window after the other, in the order given, from those of the file ``documents`` that
    no other window has touched. Only the ids inside the windows are read: what else the shard holds neither costs nor
    matters. ``prefix``: token ids that every block starts with, before those of the shard.
    """
    check_windows(windows, block)
    lengths = {name: block_of(window, block) for name, window in windows.items()}
    for length in lengths.values():
        if length > shape.context:
            raise ValueError(f"block of {length} tokens is longer than the model's context of {shape.context}")
        if length < len(prefix) + SMALLEST_BLOCK:
            raise ValueError(f"block of {length} tokens: expected {SMALLEST_BLOCK} beside {len(prefix)} special tokens")
    if prefix and not all(0 <= token < shape.vocabulary for token in prefix):
        raise ValueError(f"special tokens {list(prefix)}: not all below the model's vocabulary of {shape.vocabulary}")
    if prefix and any(isinstance(window, Stretch) for window in windows.values()):
        raise ValueError("windows of positions of a shard whose blocks start with special tokens; draw documents")
    tokens = read_shard(shard)
    stretches = [window for window in windows.values() if isinstance(window, Stretch)]
    every: list[Document] = []
    left: list[Document] = []
    if len(stretches) < len(windows):
        if documents is None:
            raise ValueError("a window is drawn from documents, but no documents file is given")
        every = read_documents(documents, len(tokens))
        left = [
            document
            for document in every
            if not any(document.start < window.end and window.start < document.end for window in stretches)
        ]
    found = {}
    for name, window in windows.items():
        own = lengths[name] - len(prefix)
        if isinstance(window, Draw):
            try:
                check_names([document.name for document in every], window.names)
                mine = [document for document in left if not window.names or fits(document.name, window.names)]
                taken = draw_blocks(mine, window.documents, window.blocks, own, window.seed)
            except ValueError as error:
                raise ValueError(f"{documents}: window {name}: {error}") from None
            left = [document for document in left if document not in {used for used, _ in taken}]
            starts, names = [start for _, start in taken], [document.name for document, _ in taken]
        elif window.end > len(tokens):
            raise ValueError(f"{shard}: window {name} ends at {window.end}, past the shard's {len(tokens)} tokens")
        else:
            starts, names = list(range(window.start, window.end, block)), None
        ids = _read_blocks(shard, tokens, name, starts, own, shape.vocabulary)
        started = np.broadcast_to(np.array(prefix, dtype=np.int64), (len(ids), len(prefix)))
        found[name] = Blocks(np.concatenate([started, ids], axis=1), starts, names)
    return found


def check_names(names: Sequence[str], patterns: Iterable[str]) -> None:
    """ValueError names a pattern that fits none of the ``names`` of documents."""
    for pattern in patterns:
        if not any(fits(name, [pattern]) for name in names):
            raise ValueError(f"no document is called {pattern}; there are {len(names)}, the first is {names[0]}")


def check_lengths(lengths: Iterable[int], shape: DecoderShape, prefix: Sequence[int] = ()) -> None:
    """ValueError unless blocks of these lengths fit the model's context and hold tokens beside the ``prefix``; it names
    the key of a study that asked for them."""
    for length in lengths:
        if length > shape.context:
            raise ValueError(f"{LENGTHS}: {length}, expected at most the model's context of {shape.context} tokens")
        if length < len(prefix) + SMALLEST_BLOCK:
            raise ValueError(f"{LENGTHS}: {length}, expected {SMALLEST_BLOCK} beside {len(prefix)} special tokens")


def cut_shorter(cut: Mapping[str, Blocks], lengths: Iterable[int], prefix: Sequence[int] = ()) -> dict[str, Blocks]:
    """Each window again in blocks of each of ``lengths``, from the same tokens: NAME-LENGTH.

    A block gives as many shorter ones, one after the other, as their length goes into its own; each starts with the
    ``prefix``, so that a few of the block's last tokens may be left over. ValueError names a window whose blocks are
    shorter.
    """
    found = {}
    for name, blocks in cut.items():
        for length in lengths:
            if length > blocks.tokens.shape[1]:
                raise ValueError(f"window {name}: blocks of {blocks.tokens.shape[1]} tokens, expected {length} to cut")
            step = length - len(prefix)
            offsets = [index * step for index in range(blocks.tokens.shape[1] // length)]
            pieces = np.stack(
                [blocks.tokens[:, len(prefix) + offset : len(prefix) + offset + step] for offset in offsets], axis=1
            ).reshape(-1, step)
            started = np.broadcast_to(np.array(prefix, dtype=np.int64), (len(pieces), len(prefix)))
            starts = [start + offset for start in blocks.starts for offset in offsets]
            of = None if blocks.documents is None else [document for document in blocks.documents for _ in offsets]
            found[f"{name}-{length}"] = Blocks(np.concatenate([started, pieces], axis=1), starts, of)
    return found


def block_of(window: Window, block: int) -> int:
    """Tokens of each block of a window, where the study's blocks have ``block``."""
    return window.block if isinstance(window, Draw) and window.block is not None else block


def read_prefix(path: Path) -> list[int]:
    """Token ids that every block starts with, from the record of the stage tokenize; ValueError on another file."""
    prefix = read_record(path, ["prefix"])["prefix"]
    if not isinstance(prefix, list) or not all(type(token) is int for token in prefix):
        raise ValueError(f"{path}: prefix: expected a list of token ids")
    return prefix


def _read_blocks(
    shard: Path, tokens: np.ndarray, name: str, starts: Sequence[int], block: int, vocabulary: int
) -> np.ndarray:
    """Token ids int64 [B, T] of blocks by their first positions; ValueError names an id outside the vocabulary."""
    places = np.asarray(starts)[:, None] + np.arange(block)
    ids = tokens[places].astype(np.int64)
    beyond = np.argwhere(ids >= vocabulary)
    if len(beyond):
        row, column = beyond[0]
        raise ValueError(
            f"{shard}: token id {ids[row, column]} at position {places[row, column]} (window {name}) is not below "
            f"the model's vocabulary of {vocabulary}"
        )
    return ids


def window_record(cut: Mapping[str, Blocks], block: int) -> dict[str, Any]:
    """What a windows file says beside its tokens: the study's block, and where each block came from."""
    places = {name: {"starts": own.starts, "documents": own.documents} for name, own in cut.items()}
    return {"block": block, "windows": places}


def window_table(cut: Mapping[str, Blocks]) -> dict[str, list[Any]]:
    """Columns of windows.csv: a row a block. ``document`` is empty where the window is a stretch."""
    rows = [
        (name, block, "" if own.documents is None else own.documents[block], start)
        for name, own in cut.items()
        for block, start in enumerate(own.starts)
    ]
    return {name: [row[index] for row in rows] for index, name in enumerate(["window", "block", "document", "start"])}


def check_tokens(tokens: Tensor, shape: DecoderShape, path: Path) -> None:
    """ValueError unless token ids [B, T], read from ``path``, fit the decoder: its context and its vocabulary."""
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(
            f"{path}: a tensor {tuple(tokens.shape)} of {tokens.dtype}, expected token ids [blocks, block]"
        )
    if tokens.shape[1] > shape.context:
        raise ValueError(
            f"{path}: blocks of {tokens.shape[1]} tokens are longer than the model's context of {shape.context}"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= shape.vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{path}: token id {wrong} is outside the model's vocabulary of {shape.vocabulary}")


def load_window(path: Path, name: str, shape: DecoderShape | None = None) -> Tensor:
    """Token blocks int64 [B, T] of one window of a windows file.

    ValueError lists the windows that the file does hold; given a decoder's ``shape``, also where the window was cut
    for another model and does not fit this one.
    """
    from kvstages.files.read import read_tensors

    tensors, _ = read_tensors(path)
    if name not in tensors:
        raise ValueError(f"{path}: no window {name!r}; it holds {', '.join(sorted(tensors))}")
    if shape is not None:
        check_tokens(tensors[name], shape, path)
    return tensors[name]


def window_documents(path: Path, name: str) -> list[str] | None:
    """The name of each block's document [B] of one window of a windows file, None where the file does not say."""
    from kvstages.files.read import read_tensors

    _, record = read_tensors(path)
    return record.get("windows", {}).get(name, {}).get("documents")
