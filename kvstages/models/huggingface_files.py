"""Files of a Hugging Face decoder: which there are, which are refused and why, and how they are opened.

A model is a folder (config.json and safetensors files, one or several with their index) or one GGUF file. Nothing is
downloaded, nothing is unpickled, and code that a folder brings along is never run.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants as hub
from safetensors import safe_open

from kvstages.files import ledger
from kvstages.files.atomic import atomic_path, write_json
from kvstages.models.config import RECORD, DecoderShape, check_shape
from kvstages.models.huggingface import Bridge, HuggingFaceDecoder, Noting, first_line, kv_shape
from kvstages.models.weights import model_digest

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Layers whose keys and values are those of every past token; the second kind while the text is within a window.
FULL, WINDOWED = ("full_attention",), ("sliding_attention", "chunked_attention")
# Rotary embeddings that change with the length of the text, beyond that which the model was first trained on.
GROWING_ROPES = ("dynamic", "longrope")
# Where no limit is known.
LONGEST_TEXT = 1 << 24


def open_model(path: Path, dtype: torch.dtype, device: str | torch.device) -> HuggingFaceDecoder:
    """The decoder in a folder or a GGUF file, in ``dtype``; ValueError names the path and says why it is refused."""
    path = Path(path)
    # Weights stay in a GGUF file's blocks where a kernel for them is installed; what is measured is the dense model.
    dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if path.suffix == ".gguf" else {}
    for file in [*model_files(path), *filter(Path.is_file, [path / RECORD])]:
        ledger.note(file)
    config = read_config(path)
    limit, limited_by = longest_text(path, config)
    try:
        with alone():
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                **arguments(path),
                **dense,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, in words
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a damaged file makes the library raise has no common kind
        raise ValueError(f"{path}: transformers cannot open it: {first_line(error)}") from error
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise ValueError(f"{path}: {len(missing)} tensors of the model are missing, such as {missing[0]}")
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ValueError(f"{path}: {name} has shape {list(stored)}, but its configuration asks for {list(expected)}")
    if dense:
        model.hf_quantizer = None
    return HuggingFaceDecoder(model.to(device).eval().requires_grad_(False), str(path), limit, limited_by)


def model_files(path: Path) -> list[Path]:
    """Every file that the model is read from; ValueError if one is missing or the path holds another kind of file."""
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: expected a folder with {CONFIG} and {WEIGHTS}, or a file that ends in .gguf")
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path}: no {CONFIG}; expected a folder with {CONFIG} and {WEIGHTS}")
    read_json(path / CONFIG)
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path}: an adapter to another model; merge the two first")
    if (path / WEIGHTS).is_file():
        return [path / CONFIG, path / WEIGHTS]
    if not (path / INDEX).is_file():
        others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        found = f"found {', '.join(others[:3])}" if others else "no weights in it"
        raise ValueError(f"{path}: expected {WEIGHTS}, or {INDEX} and the files that it lists; {found}")
    listed = read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()) or not listed:
        raise ValueError(f"{path / INDEX}: expected a weight_map from tensors to files")
    shards = sorted(set(listed.values()))
    for name in shards:
        if Path(name).name != name:
            raise ValueError(f"{path / INDEX}: {name!r} is not a file of this folder")
        if not (path / name).is_file():
            raise ValueError(f"{path}: the file {name} is missing ({len(shards)} are listed in {INDEX})")
    return [path / CONFIG, path / INDEX, *(path / name for name in shards)]


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file; ValueError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def arguments(path: Path) -> dict[str, str]:
    """The model as arguments of the library's loaders."""
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


def read_config(path: Path) -> transformers.PreTrainedConfig:
    """The configuration of a model that may be measured; ValueError says why not."""
    if path.suffix != ".gguf":
        raw = read_json(path / CONFIG)
        kind = raw.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            remote = "; code that comes with a model (auto_map) is never run" if "auto_map" in raw else ""
            version = f"transformers {transformers.__version__}"
            raise ValueError(f"{path}: its kind of model, {kind!r}, is not one of {version}{remote}")
        if "quantization_config" in raw:
            method = raw["quantization_config"].get("quant_method", "?")
            raise ValueError(f"{path}: its weights are quantized ({method}); expected plain ones, or a GGUF file")
    try:
        with alone():
            config = transformers.AutoConfig.from_pretrained(
                **arguments(path), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a configuration that does not fit its class fails in as many ways as there are classes
        raise ValueError(f"{path}: transformers cannot read its configuration: {first_line(error)}") from error
    check_config(path, config)
    return config


def check_config(path: Path, config: transformers.PreTrainedConfig) -> None:
    """ValueError if the configuration is that of a model whose KV cache is not one of full attention."""
    kind = config.model_type
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or getattr(decoder, "add_cross_attention", False):
        raise ValueError(f"{path}: {kind} attends to an encoder (cross attention); expected a decoder alone")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path}: transformers has no causal language model for {kind}")
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise ValueError(f"{path}: {kind} has latent attention (MLA), whose cache holds no keys and values of heads")
    for layer, (found, _) in enumerate(layer_types(decoder)):
        if found == "dummy":
            raise ValueError(
                f"{path}: layer {layer} has no keys and values of its own (it shares another's, or has none)"
            )
        if found not in FULL + WINDOWED:
            raise ValueError(f"{path}: layer {layer} is {found}; expected full attention in every layer")


def layer_types(config: transformers.PreTrainedConfig) -> list[tuple[str, int | None]]:
    """The kind of each layer as the library's caches name it, and its window where it has one."""
    names, settings = transformers.cache_utils.get_layer_types_and_kwargs(config)
    return [(name, each.get("sliding_window")) for name, each in zip(names, settings, strict=True)]


def longest_text(path: Path, config: transformers.PreTrainedConfig) -> tuple[int, str]:
    """The number of tokens up to which every layer is full attention at fixed positions, and what sets that limit."""
    decoder = config.get_text_config(decoder=True)
    limits = [(LONGEST_TEXT, "the limit")]
    if isinstance(positions := getattr(decoder, "max_position_embeddings", None), int):
        limits.append((positions, "the model's context"))
    for layer, (kind, window) in enumerate(layer_types(decoder)):
        if kind in WINDOWED:
            if not isinstance(window, int):
                raise ValueError(f"{path}: layer {layer} is {kind} of no known window")
            limits.append((window, f"the window of layer {layer}'s attention"))
    ropes = getattr(decoder, "rope_parameters", None) or {}
    for rope in [ropes, *(each for each in ropes.values() if isinstance(each, dict))]:
        if rope.get("rope_type") in GROWING_ROPES:
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(decoder, "original_max_position_embeddings", None)
            if isinstance(original, int):
                limits.append((original, f"the length from which its rotary embedding ({rope['rope_type']}) changes"))
    return min(limits)


def planned_shape(path: Path) -> DecoderShape:
    """The shape of the model in a folder or a GGUF file, from its configuration alone: no weights are read.

    It runs once without numbers. ValueError names the path and says why a model is refused; whether its layers run one
    by one, only its weights tell.
    """
    config = read_config(path)
    limit, _ = longest_text(path, config)
    noting = Noting()
    try:
        with alone(), torch.device("meta"):
            # Without numbers the kernel of experts takes BF16 alone.
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long), cache=Bridge(noting), use_cache=True).logits
        decoder = config.get_text_config(decoder=True)
        heads, key_width, value_width = kv_shape(noting.shapes, decoder.num_hidden_layers)
    except Exception as error:  # whatever the code of five hundred families may raise
        raise ValueError(f"{path}: its shape is not known from its configuration: {first_line(error)}") from error
    queries = getattr(decoder, "num_attention_heads", None) or heads
    width = model.get_input_embeddings().weight.shape[-1]
    return DecoderShape(
        decoder.num_hidden_layers, heads, key_width, value_width, logits.shape[-1], limit, width, queries
    )


def convert(source: Path, folder: Path, layers: int | None = None, heads: int | None = None) -> None:
    """Make a folder that every stage can open: the model of a GGUF file, dequantized to FP32, and its record.

    A folder stays as it is, and gets the record: ``source`` and ``folder`` are then the same. ValueError names the path
    and says why a model is refused, as one is that has not as many layers or KV heads as asked for.
    """
    if source.is_dir() and source.resolve() != folder.resolve():
        raise ValueError(f"{source}: a folder is measured where it is; its record is written into it, not to {folder}")
    decoder = open_model(source, torch.float32, "cpu")
    check_shape(source, decoder.shape, layers, heads)
    if not source.is_dir():
        with tempfile.TemporaryDirectory() as made:
            decoder.model.save_pretrained(made, max_shard_size="1TB")
            for name in (CONFIG, WEIGHTS):
                with atomic_path(folder / name) as temporary:
                    shutil.copyfile(Path(made, name), temporary)
    files = {file.name: ledger.sha256(file) for file in model_files(folder)}
    write_json(folder / RECORD, record(source, decoder) | {"sha256": files})


def record(path: Path, decoder: HuggingFaceDecoder) -> dict[str, Any]:
    """The record of a model that every output has: family, architecture, shape, and form of its weights."""
    return {
        "family": "huggingface",
        "architecture": type(decoder.model).__name__,
        "transformers": transformers.__version__,
        "shape": decoder.shape.as_dict(),
        "weights": {**weights_record(path), "digest": model_digest(decoder.model)},
    }


def weights_record(path: Path) -> dict[str, Any]:
    """The format of a model's weights, how many tensors it keeps in which form, and whether it is measured with those
    values themselves or dequantized."""
    if path.suffix == ".gguf":
        import gguf

        kinds = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)
    else:
        kinds = Counter()
        for file in model_files(path):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as tensors:
                    kinds.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
    gguf_file = path.suffix == ".gguf"
    return {
        "format": "gguf" if gguf_file else "safetensors",
        "dequantized": gguf_file,
        "tensors": dict(sorted(kinds.items())),
    }


@contextmanager
def alone() -> Iterator[None]:
    """Keep the library to files on the disk, without progress bars or advice: what a stage prints is its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Neither the bar over a GGUF file's tensors asks anyone, nor what fetches kernels where their package is installed.
    online, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        hub.HF_HUB_OFFLINE = online
