"""Opening a decoder of any family: the one place that knows which families there are.

``model.safetensors`` of this project (from the stage ``convert``) is gpt2-nano; a folder, its record or a GGUF file is
a model of Hugging Face's, whose library is imported for such a one only.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from kvstages.models.checkpoints import load_model
from kvstages.models.config import RECORD, is_huggingface, model_folder
from kvstages.models.decoder import Decoder
from kvstages.models.identity import read_identity
from kvstages.models.weights import check_weights

HUGGINGFACE = "kvstages.models.huggingface_files"


def open_decoder(path: Path, dtype: torch.dtype, device: str | torch.device) -> Decoder:
    """The decoder of a file or folder, in evaluation mode and frozen; ValueError names the path and what is wrong."""
    path, device = Path(path), torch.device(device)
    check_dtype(dtype, device)
    if is_huggingface(path):
        folder = model_folder(path)
        decoder = huggingface_files(folder).open_model(folder, dtype, device)
        if (folder / RECORD).is_file():
            check_weights(str(folder), read_identity(folder), decoder.model)
        return decoder
    return load_model(path, dtype, device)


def huggingface_files(path: Path) -> ModuleType:
    """The module that opens a model of Hugging Face's; ValueError names the path where the library is not installed.

    Imported by name: what it does is part of the code of a stage only where that opens such a model (provenance/code).
    """
    try:
        return import_module(HUGGINGFACE)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: this needs {error.name}: pip install 'kvstages[huggingface]'") from error


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """ValueError if the device cannot compute in this dtype."""
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ValueError(f"{torch.cuda.get_device_name(device)} does not compute in bfloat16; take float32")
