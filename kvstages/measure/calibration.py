"""Calibration: what quantizer schemes need to know of a model's keys and values before any is stored, in one file.

The means (of the keys before their rotary embedding) and the largest magnitudes come from a pass over a window; the
biases of the keys and the rotary embedding are the model's own.

Axes: L layers, H KV heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvstages.cache.offsets import Context, Contexts, Rotary, mean_before_rotary
from kvstages.cache.one_pass import DenseBlockCache
from kvstages.cache.schemes import SIDES
from kvstages.files.atomic import write_tensors
from kvstages.files.read import read_tensors
from kvstages.measure.execution import blocks_per_pass
from kvstages.models.decoder import Decoder

AXES = {
    "mean": ["side", "layer", "head", "channel"],
    "bias": ["layer", "head", "channel"],
    "maximum": ["side", "layer"],
}
ROTARY = "rotary-{layer:03d}"


class Sums(DenseBlockCache):
    """A pass over blocks, unquantized, that adds up what is to be known of each layer."""

    def __init__(self, model: Decoder, device: torch.device):
        super().__init__(device)
        self.model = model
        self.mean: dict[tuple[int, str], Tensor] = {}
        self.maximum: dict[tuple[int, str], Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values, layer)
        for side, x in (("k", keys), ("v", values)):
            largest = x.abs().amax().float()
            self.maximum[layer, side] = torch.maximum(self.maximum.get((layer, side), largest), largest)
            mean = mean_before_rotary(x, self.model.rotary(layer) if side == "k" else None)
            self.mean[layer, side] = self.mean.get((layer, side), 0) + len(x) * mean
        return keys, values


@torch.no_grad()
def calibrate(
    model: Decoder, tokens: Tensor, memory: int, progress: Callable[[float], None] = lambda done: None
) -> Contexts:
    """What schemes need to know of a model, from the blocks of a window [B, T]: a context of each layer's keys and
    values."""
    sums = Sums(model, tokens.device)
    step = blocks_per_pass(model, *tokens.shape, "one-pass", memory)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        model.run_layers(model.embed(part), sums)
        progress((start + len(part)) / len(tokens))
    contexts = {}
    for (layer, side), total in sums.mean.items():
        own = (model.key_bias(layer), model.rotary(layer)) if side == "k" else (None, None)
        mean = (total / len(tokens)).float()
        maximum = sums.maximum[layer, side].expand(len(mean))
        contexts[layer, side] = Context(mean, own[0], maximum, own[1])
    return contexts


def write_contexts(path: Path, contexts: Contexts, window: str) -> None:
    """Write what ``calibrate`` found, as safetensors in FP32: means [2, L, H, D], the keys' biases [L, H, D], largest
    magnitudes [2, L], and the rotary embeddings' frequencies (FP64)."""
    layers = range(len(contexts) // 2)

    def stacked(name: str, side: str) -> Tensor:
        return torch.stack([getattr(contexts[layer, side], name) for layer in layers]).float().cpu()

    tensors = {name: torch.stack([stacked(name, side) for side in SIDES]) for name in ("mean", "maximum")}
    tensors["maximum"] = tensors["maximum"][..., 0]
    if all(contexts[layer, "k"].bias is not None for layer in layers):
        tensors["bias"] = stacked("bias", "k")
    rotary = {}
    for layer in layers:
        embedding = contexts[layer, "k"].rotary
        if embedding is not None:
            tensors[ROTARY.format(layer=layer)] = embedding.frequencies.cpu()
            rotary[str(layer)] = {"interleaved": embedding.interleaved, "factor": embedding.factor}
    write_tensors(path, tensors, {"axes": AXES, "rotary": rotary, "window": window})


def read_contexts(path: Path, device: torch.device | str = "cpu") -> Contexts:
    """The contexts of a file; ValueError names it, and what is wrong with it."""
    tensors, record = read_tensors(path)
    if record.get("axes") != AXES or not {"mean", "maximum"} <= set(tensors):
        found = ", ".join(sorted(tensors)) or "none"
        raise ValueError(f"{path}: tensors {found}, expected a file of the stage calibrate")
    mean, maximum, bias = tensors["mean"], tensors["maximum"], tensors.get("bias")
    if mean.dim() != 4 or maximum.shape != mean.shape[:2] or (bias is not None and bias.shape != mean.shape[1:]):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{path}: shapes that do not fit: {shapes}")
    contexts = {}
    for index, side in enumerate(SIDES):
        for layer, vectors in enumerate(mean[index].to(device)):
            largest = maximum[index, layer].to(device).expand(len(vectors))
            own = record["rotary"].get(str(layer)) if side == "k" else None
            rotary = None if own is None else Rotary(tensors[ROTARY.format(layer=layer)], **own)
            known = bias[layer].to(device) if side == "k" and bias is not None else None
            contexts[layer, side] = Context(vectors, known, largest, rotary)
    return contexts


def calibrated(model: Decoder, path: Path | None) -> Decoder:
    """A model that schemes know by a file of the stage calibrate; by its key biases alone where there is none.

    ValueError names the file where it is another model's.
    """
    if path is not None:
        contexts, shape = read_contexts(path, model.device), model.shape
        expected = (shape.layers, shape.heads, shape.key_width)
        found = (len(contexts) // 2, *contexts[0, "k"].mean.shape)
        if found != expected:
            raise ValueError(f"{path}: layers, heads and width {found}, but the model has {expected}")
        model.calibrated = contexts
    return model
