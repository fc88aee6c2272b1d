"""KVTuner: bits of each layer's keys and values, as YAML, to write and to read.

Its presets ({layer: {nbits_key, nbits_value}}) come without a quantizer. It has two: *per-token* (a step and a zero
point for each vector) and *kivi* (keys by channel, values by token, in groups of 32).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from kvstages.cache.precision_grid import PrecisionGrid
from kvstages.export.choices import Alternative, each_layer
from kvstages.export.engine import Engine, Format, Layers, Widths
from kvstages.files import ledger

BITS = (8, 4, 2)
QUANTIZERS = {"per-token": "int{}-zero", "kivi": "kivi{}"}
KEYS = ("nbits_key", "nbits_value")


class KVTuner(Engine):
    name = "kvtuner"
    file = "kvtuner.yaml"
    note = (
        "The quantizer is KVTuner's per-token one; its zero point is a whole number of steps, here it is in FP16. "
        "Bytes are those of packed codes, which not every backend of KVTuner packs."
    )

    def formats(self, widths: Widths) -> list[Format]:
        return [Format(QUANTIZERS["per-token"].format(bits), str(bits)) for bits in BITS]

    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        return [each_layer(layers, [(k, v) for k in range(len(formats)) for v in range(len(formats))])]

    def text(self, layers: Layers) -> str:
        lines = [
            f"{layer}:\n  nbits_key: {keys.word}\n  nbits_value: {values.word}\n"
            for layer, (keys, values) in enumerate(layers)
        ]
        return "".join(lines)

    def warnings(self, layers: Layers) -> list[str]:
        return ["KVTuner is research code, on an old interface of transformers' caches."]


def read_preset(path: Path, heads: int, quantizer: str) -> PrecisionGrid:
    """The policy of a preset for a model of so many KV heads a layer, with a quantizer of ``QUANTIZERS``.

    ValueError names ``path`` and what is not {layer: {nbits_key, nbits_value}} for the layers 0, 1, ...
    """
    ledger.note(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML ({error})") from None
    if not isinstance(found, dict) or list(found) != list(range(len(found))) or not found:
        raise ValueError(f"{path}: expected the layers 0, 1, ... as keys, in order")
    rows: list[list[str]] = []
    for layer, bits in found.items():
        if not isinstance(bits, dict) or set(bits) != set(KEYS):
            raise ValueError(f"{path}: layer {layer}: {bits!r}, expected the keys {' and '.join(KEYS)}")
        for key in KEYS:
            if bits[key] not in BITS or isinstance(bits[key], bool):
                raise ValueError(f"{path}: layer {layer}, {key}: {bits[key]!r}, expected {', '.join(map(str, BITS))}")
        rows.append([QUANTIZERS[quantizer].format(bits[key]) for key in KEYS])
    return PrecisionGrid(*(tuple((row[side],) * heads for row in rows) for side in (0, 1)))
