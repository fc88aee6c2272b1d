"""The shape of a decoder, read from a model file without importing torch.

Stages that only need the shape (windows, allocate) start in a fraction of the time that torch takes to import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvstages.files import ledger
from kvstages.files.read import read_json

# A safetensors file opens with the length of its JSON header, little-endian, in this many bytes. The format allows
# headers of at most 100 MB, so a longer one means that the file is something else.
HEADER_LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000
# Any number of a shape above this is no model's (and shapes of weights stay far below 2^63).
LARGEST_SIZE = 1 << 24

# How names of single files with weights end; what ends otherwise is a folder or a GGUF file, of Hugging Face's.
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
# What a folder with a model of Hugging Face's holds beside it: family, shape, and the form in which weights were kept.
RECORD = "decoder.json"


@dataclass(frozen=True)
class DecoderShape:
    """Shape of a decoder of any family: layers, KV heads in each layer, and widths.

    ``context`` is the longest text for which every layer attends to every token before. ``width`` is that of the hidden
    states, and ``query_heads`` attend to the KV heads; both serve estimates of memory alone.
    """

    layers: int
    heads: int
    key_width: int
    value_width: int
    vocabulary: int
    context: int
    width: int
    query_heads: int

    @property
    def widths(self) -> tuple[int, int]:
        """Width of a head's keys and of its values."""
        return self.key_width, self.value_width

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class GPTConfig:
    """Shape of gpt2-nano; the keys are those of the published checkpoint's ``config``."""

    vocab_size: int
    context_len: int
    embedding_dim: int
    num_layers: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.embedding_dim // self.num_heads

    @property
    def shape(self) -> DecoderShape:
        """The same in the terms of all families."""
        return DecoderShape(
            layers=self.num_layers,
            heads=self.num_heads,
            key_width=self.head_dim,
            value_width=self.head_dim,
            vocabulary=self.vocab_size,
            context=self.context_len,
            width=self.embedding_dim,
            query_heads=self.num_heads,
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def check_config(path: Path, config: Any) -> GPTConfig:
    """The shape that a checkpoint's ``config`` describes; ValueError names ``path``, the key and what is wrong.

    ``dropout`` is tolerated (docs/method.md, "Checkpoint"): it acts in training only. Any other unknown key is
    refused, since it may describe an architecture that this code does not have.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}: config is {type(config).__name__}, expected a mapping of the model's shape")
    names = [field.name for field in fields(GPTConfig)]
    missing = [name for name in names if name not in config]
    if missing:
        raise ValueError(f"{path}: config lacks {', '.join(missing)}")
    unknown = sorted(str(key) for key in config if key not in {*names, "dropout"})
    if unknown:
        raise ValueError(f"{path}: config has unknown keys {', '.join(unknown)}; expected {', '.join(names)}")
    for name in names:
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: config {name} is {value!r:.60}, expected a whole number of at least 1")
        if value > LARGEST_SIZE:
            raise ValueError(
                f"{path}: config {name} is above {LARGEST_SIZE}, expected the shape of a model that exists"
            )
    shape = GPTConfig(**{name: config[name] for name in names})
    if shape.embedding_dim % shape.num_heads:
        raise ValueError(
            f"{path}: config embedding_dim {shape.embedding_dim} is not a multiple of num_heads {shape.num_heads}"
        )
    if shape.embedding_dim % 2:
        raise ValueError(f"{path}: config embedding_dim {shape.embedding_dim} is odd; positions need sine and cosine")
    return shape


def is_huggingface(path: Path) -> bool:
    """Whether a model is one of Hugging Face's: by its name alone, for it need not be there yet."""
    path = Path(path)
    return path.name == RECORD or path.suffix not in FILE_SUFFIXES


def model_folder(path: Path) -> Path:
    """The folder of a model that is named by its record, as in a workflow, whose inputs are files; any other path as it
    is."""
    path = Path(path)
    return path.parent if path.name == RECORD else path


def check_shape(path: Path, shape: DecoderShape, layers: int | None, heads: int | None = None) -> None:
    """ValueError that names ``path`` if its model has not as many layers, or KV heads, as its study says."""
    for what, found, expected in (("layers", shape.layers, layers), ("KV heads", shape.heads, heads)):
        if expected not in (None, found):
            raise ValueError(f"{path}: a model of {found} {what}, expected {expected}, as its study says")


def read_shape(path: Path) -> DecoderShape:
    """Shape of the decoder of a model.safetensors of this project, or of a folder with one of Hugging Face's.

    ValueError names the path and what is wrong with it.
    """
    if not is_huggingface(path):
        return read_config(path).shape
    path = model_folder(path)
    record = path / RECORD
    if not record.is_file():
        raise ValueError(f"{path}: no {RECORD} in it, which says what shape it has; make it with `kvstages convert`")
    found = read_json(record)
    shape = found.get("shape") if isinstance(found, Mapping) else None
    names = [field.name for field in fields(DecoderShape)]
    if not isinstance(shape, Mapping) or set(shape) != set(names):
        raise ValueError(f"{record}: expected a shape with {', '.join(names)}")
    for name, value in shape.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
            raise ValueError(
                f"{record}: shape {name} is {value!r:.60}, expected a whole number from 1 to {LARGEST_SIZE}"
            )
    return DecoderShape(**shape)


def read_config(path: Path) -> GPTConfig:
    """Shape of the decoder in a model.safetensors of this project; ValueError on any other file.

    Reads the header only: 8 bytes of length, then JSON, whose ``__metadata__`` holds the record that
    ``files.write_tensors`` keeps.
    """
    ledger.note(path)
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        header = file.read(length) if 0 < length <= LARGEST_HEADER else b""
    try:
        metadata = json.loads(header).get("__metadata__", {}) if len(header) == length else None
    except (ValueError, AttributeError, RecursionError):
        metadata = None
    if metadata is None:
        raise ValueError(f"{path}: not a safetensors file, or a truncated one")
    try:
        record = json.loads(metadata["record"])
        config = record["config"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path}: no model configuration in its header; make it with `kvstages convert`") from None
    return check_config(path, config)
