"""ModelOpt checkpoints: ``hf_quant_config.json`` with an algorithm for each layer's cache.

FP8 (E4M3, a static scale), NVFP4 (blocks of 16), FP8 keys with NVFP4 values; layers that are not listed stay as they
are. Fields: ``kv_cache_quant_algo`` MIXED_PRECISION with ``kv_cache_quantized_layers``, by Model-Optimizer's pull
request 2272.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvstages.export.choices import Alternative, each_layer
from kvstages.export.engine import Engine, Format, Layers, Widths

# How the layers of Llama-like models are called in their checkpoints.
LAYER = "model.layers.{}.self_attn"
ALGORITHMS = {("FP8", "FP8"): "FP8", ("NVFP4", "NVFP4"): "NVFP4", ("FP8", "NVFP4"): "FP8_K_NVFP4_V"}


class ModelOpt(Engine):
    name = "modelopt"
    file = "hf_quant_config.json"
    note = "ModelOpt's scales are one a layer and side, here one a head."

    def formats(self, widths: Widths) -> list[Format]:
        return [Format("bf16", "BF16"), Format("fp8_e4m3", "FP8"), Format("nvfp4", "NVFP4")]

    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        allowed = {("BF16", "BF16"), *ALGORITHMS}
        indices = range(len(formats))
        pairs = [(k, v) for k in indices for v in indices if (formats[k].word, formats[v].word) in allowed]
        return [each_layer(layers, pairs)]

    def text(self, layers: Layers) -> str:
        algorithms = [ALGORITHMS.get((keys.word, values.word)) for keys, values in layers]
        quantization: dict[str, Any] = {"kv_cache_quant_algo": None}
        if len(set(algorithms)) == 1:
            quantization["kv_cache_quant_algo"] = algorithms[0]
        else:
            quantization = {
                "kv_cache_quant_algo": "MIXED_PRECISION",
                "kv_cache_quantized_layers": {
                    LAYER.format(layer): {"quant_algo": algorithm}
                    for layer, algorithm in enumerate(algorithms)
                    if algorithm is not None
                },
                "kv_cache_schema_version": 1,
            }
        record = {"producer": {"name": "modelopt"}, "quantization": quantization}
        return json.dumps(record, indent=2) + "\n"

    def warnings(self, layers: Layers) -> list[str]:
        algorithms = {ALGORITHMS.get((keys.word, values.word)) for keys, values in layers}
        found = [
            "The checkpoint must hold the scales of keys and values (ModelOpt's calibration writes them); this file "
            "does not.",
            f"Layers are named {LAYER.format('N')}, as in Llama-like checkpoints.",
        ]
        if len(algorithms) > 1:
            found.append(
                "Reading an algorithm a layer was not merged in vLLM when this was written (its pull request 56116, "
                "November 2026), and takes whole layers of FP8 or NVFP4 only."
            )
        return found
