"""Checkpoints: safe reading, checks against the decoder, and writing as safetensors.

Formats and tensor names: docs/method.md, "Checkpoint".
"""

from __future__ import annotations

import json
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstages.files import ledger
from kvstages.files.atomic import write_tensors
from kvstages.files.read import is_lfs_pointer, read_tensors
from kvstages.models.config import GPTConfig, check_config
from kvstages.models.gpt2_nano import GPT, sinusoidal_positions
from kvstages.models.identity import ORIGIN

# Pickle instructions that look up or call Python objects; a file of plain data has none of them.
CODE_INSTRUCTIONS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"}
SHOWN_NAMES = 3
# What wrappers put before the names of what they wrap: DistributedDataParallel, torch.compile, training frameworks.
WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
SHARD = re.compile(r"-\d+-of-0*(\d+)\.")
POSITIONS = "pos_embedding"


def read_checkpoint(path: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Shape and FP32 tensors of a checkpoint, ``.pt`` (PyTorch) or ``.safetensors``; ValueError on anything wrong.

    The tensors are exactly those of ``GPT.state_dict()``, each with memory of its own. Training leftovers beside the
    model are ignored, and so are the ``causal_mask`` buffers, which the decoder here does not keep; the prefixes of
    wrappers (``module.``, ``_orig_mod.``, ``model.``) are taken off; positions, which are a formula, may be missing.
    """
    path = Path(path)
    check_whole(path)
    if path.suffix == ".pt":
        content = load_pickle(path)
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: holds {type(content).__name__}, expected config and model_state_dict")
        missing = [key for key in ("config", "model_state_dict") if key not in content]
        if missing:
            raise ValueError(
                f"{path}: lacks {' and '.join(missing)}; expected config and model_state_dict, "
                f"found {shorten(sorted(map(str, content))) or 'nothing'}"
            )
        config, state = content["config"], content["model_state_dict"]
        if not isinstance(state, Mapping):
            raise ValueError(f"{path}: model_state_dict is {type(state).__name__}, expected tensors by name")
    else:
        state, record = read_tensors(path)
        if "config" not in record:
            raise ValueError(
                f"{path}: no model configuration in its header (metadata record, key config); expected a file that "
                "`kvstages convert` wrote"
            )
        config = record["config"]
    shape = check_config(path, config)
    return shape, check_state(path, shape, state)


def check_whole(path: Path) -> None:
    """ValueError, with what to do, for a file that points at weights elsewhere, and for other kinds of files."""
    shards = SHARD.search(path.name)
    if path.name.endswith(".index.json"):
        try:
            files = f"{len(set(json.loads(path.read_bytes())['weight_map'].values()))} files"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            files = "several files"
        raise ValueError(f"{path}: an index of weights in {files}, not the weights: join these into one file")
    if path.suffix not in (".pt", ".safetensors"):
        raise ValueError(f"{path}: a checkpoint ends in .pt or .safetensors")
    if shards and int(shards[1]) > 1:
        raise ValueError(f"{path}: one of {shards[1]} files with a part of the weights each: join these into one file")
    if is_lfs_pointer(path):
        raise ValueError(f"{path}: a pointer of Git LFS, not the weights: run `git lfs pull` where it comes from")


def load_pickle(path: Path) -> Any:
    """What a PyTorch file holds, read with ``weights_only=True`` and nothing else; ValueError on any other file."""
    ledger.note(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, before the refusal that says it better
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # garbage makes the restricted unpickler fail in a dozen ways
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it could not be opened; reading garbage gives nameless ones
        names = foreign_objects(path) if isinstance(error, pickle.UnpicklingError) else []
        if names:
            raise ValueError(
                f"{path}: holds more than tensors ({', '.join(names)}) and is refused: loading it could run code"
            ) from error
        raise ValueError(f"{path}: not a readable PyTorch file (truncated, damaged or of another kind)") from error


def foreign_objects(path: Path) -> list[str]:
    """Names of the objects other than tensors that a refused pickle asks for; it is read without running it."""
    found: set[str] = set()
    with suppress(Exception):  # bytes that are no pickle fail in as many ways here
        if zipfile.is_zipfile(path):
            return torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with path.open("rb") as file:
            while True:  # files from before PyTorch 1.6 are several pickles in a row; the last attempt meets the end
                found |= {instruction.name for instruction, _, _ in pickletools.genops(file)}
    return ["a bare pickle with code"] if found & CODE_INSTRUCTIONS else []


def check_state(path: Path, config: GPTConfig, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The decoder's tensors in FP32, in the order of ``GPT.state_dict()``; ValueError names ``path`` and a tensor.

    Missing, extra, misshapen, integer, sparse, empty (meta) and non-finite tensors are all refused.
    """
    if config.num_layers > len(state):
        raise ValueError(f"{path}: config num_layers is {config.num_layers}, but there are {len(state)} tensors in all")
    with torch.device("meta"):
        expected = GPT(config).state_dict()
    masks = {f"blocks.{layer}.causal_mask" for layer in range(config.num_layers)}
    state = unwrapped(path, state)
    if POSITIONS not in state:
        state[POSITIONS] = sinusoidal_positions(config.context_len, config.embedding_dim)
    missing = [name for name in expected if name not in state]
    extra = sorted(name for name in state if name not in expected and name not in masks)
    if missing:
        found = f"; found instead: {shorten(extra)}" if extra else ""
        raise ValueError(f"{path}: missing tensors: {shorten(missing)}{found}")
    if extra:
        raise ValueError(f"{path}: tensors that the model does not have: {shorten(extra)}")
    checked: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, wanted in expected.items():
        check_tensor(f"{path}: {name}", state[name], wanted)
        tensor = state[name].detach().to("cpu", torch.float32)
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinity")
        # Tied tensors share memory, and safetensors writes none that do.
        place = tensor.untyped_storage().data_ptr()
        checked[name] = tensor.clone() if place in memory else tensor
        memory.add(place)
    return checked


def unwrapped(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by their names without the prefixes of wrappers; ValueError where two names become one."""
    names: dict[str, str] = {}
    for name in state:
        plain = WRAPPERS.sub("", str(name))
        if plain in names:
            raise ValueError(f"{path}: {names[plain]} and {name} are both {plain} once prefixes are taken off")
        names[plain] = name
    return {plain: state[name] for plain, name in names.items()}


def check_tensor(where: str, tensor: Any, wanted: Tensor) -> None:
    """ValueError unless ``tensor`` holds floating point numbers in the shape of ``wanted``."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{where} is {type(tensor).__name__}, expected a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{where} is stored as {str(tensor.layout).removeprefix('torch.')}, expected a dense tensor")
    if tensor.shape != wanted.shape:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected {list(wanted.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{where} is {str(tensor.dtype).removeprefix('torch.')}, expected floating point")
    if tensor.is_meta:
        raise ValueError(f"{where} has a shape and no numbers (device meta): save the model with its weights loaded")


def shorten(names: list[str]) -> str:
    """The first few names and how many more there are."""
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def save_model(path: Path, config: GPTConfig, state: Mapping[str, Tensor], origin: str | None = None) -> None:
    """Write the decoder's tensors in FP32, with its shape under ``config`` of the record.

    ``origin``: of an adapted copy, the digest of the weights that it was adapted from (see ``identity``).
    """
    adapted = {} if origin is None else {ORIGIN: origin}
    write_tensors(path, check_state(path, config, state), {"config": config.as_dict(), **adapted})


def load_model(path: Path, dtype: torch.dtype, device: str | torch.device) -> GPT:
    """The decoder of a model file, in evaluation mode, frozen, its parameters and positions in ``dtype``."""
    config, state = read_checkpoint(path)
    with torch.device("meta"):  # no memory and no random numbers are spent on weights that are replaced at once
        model = GPT(config)
    model.load_state_dict(state, assign=True)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
