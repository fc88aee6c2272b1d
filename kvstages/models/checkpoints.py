"""Checkpoints: read without running anything they hold, checked against the decoder, kept as safetensors.

Formats and tensor names: STUDY.md, "Pinned artifacts".
"""

from __future__ import annotations

import pickle
import pickletools
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
from kvstages.files.read import read_tensors
from kvstages.models.config import GPTConfig, check_config
from kvstages.models.gpt2_nano import GPT

# Pickle instructions that look up or call Python objects; a file of plain data has none of them.
CODE_INSTRUCTIONS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"}
SHOWN_NAMES = 3


def read_checkpoint(path: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Shape and FP32 tensors of a checkpoint, ``.pt`` (PyTorch) or ``.safetensors``; ValueError on anything wrong.

    The tensors are exactly those of ``GPT.state_dict()``. Training leftovers beside the model are ignored, and so
    are the ``causal_mask`` buffers, which the decoder here does not keep.
    """
    path = Path(path)
    if path.suffix == ".pt":
        content = load_pickle(path)
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: holds {type(content).__name__}, expected config and model_state_dict")
        missing = [key for key in ("config", "model_state_dict") if key not in content]
        if missing:
            raise ValueError(f"{path}: lacks {' and '.join(missing)}; expected config and model_state_dict")
        config, state = content["config"], content["model_state_dict"]
        if not isinstance(state, Mapping):
            raise ValueError(f"{path}: model_state_dict is {type(state).__name__}, expected tensors by name")
    elif path.suffix == ".safetensors":
        state, record = read_tensors(path)
        if "config" not in record:
            raise ValueError(f"{path}: no model configuration in its header (metadata record, key config)")
        config = record["config"]
    else:
        raise ValueError(f"{path}: a checkpoint ends in .pt or .safetensors")
    shape = check_config(path, config)
    return shape, check_state(path, shape, state)


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
    """What, beside tensors, a pickle that the restricted unpickler refused asks for; read without running it."""
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

    Missing, extra, misshapen, integer and non-finite tensors are all refused.
    """
    if config.num_layers > len(state):
        raise ValueError(f"{path}: config num_layers is {config.num_layers}, but there are {len(state)} tensors in all")
    with torch.device("meta"):
        expected = GPT(config).state_dict()
    masks = {f"blocks.{layer}.causal_mask" for layer in range(config.num_layers)}
    missing = [name for name in expected if name not in state]
    if missing:
        raise ValueError(f"{path}: missing tensors: {shorten(missing)}")
    extra = sorted(str(name) for name in state if name not in expected and name not in masks)
    if extra:
        raise ValueError(f"{path}: tensors that the model does not have: {shorten(extra)}")
    checked = {}
    for name, wanted in expected.items():
        tensor = state[name]
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path}: {name} is {type(tensor).__name__}, expected a tensor")
        if tensor.shape != wanted.shape:
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, expected {list(wanted.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, expected floating point")
        checked[name] = tensor.detach().to("cpu", torch.float32)
        if not checked[name].isfinite().all():
            raise ValueError(f"{path}: {name} holds NaN or infinity")
    return checked


def shorten(names: list[str]) -> str:
    """The first few names and how many more there are."""
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def save_model(path: Path, config: GPTConfig, state: Mapping[str, Tensor]) -> None:
    """Write the decoder's tensors in FP32, with its shape under ``config`` of the record."""
    write_tensors(path, check_state(path, config, state), {"config": config.as_dict()})


def load_model(path: Path, dtype: torch.dtype, device: str | torch.device) -> GPT:
    """The decoder of a model file, in evaluation mode, frozen, its parameters and positions in ``dtype``."""
    config, state = read_checkpoint(path)
    with torch.device("meta"):  # no memory and no random numbers are spent on weights that are replaced at once
        model = GPT(config)
    model.load_state_dict(state, assign=True)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
