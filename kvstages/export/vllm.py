"""vLLM: one ``--kv-cache-dtype`` for the model, and layers that skip it (two tiers; keys and values alike).

Fields: vllm/config/cache.py (``CacheDType``, ``kv_cache_dtype_skip_layers``); bytes of the per-token-head modes: D + 4
and D / 2 + 4 a head, token and side, the FP32 scale within the vector's own slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstages.export.choices import Alternative, each_layer
from kvstages.export.engine import Engine, Format, Layers, Widths

PER_TOKEN_HEAD = ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head")


class VLLM(Engine):
    name = "vllm"
    file = "flags.txt"
    note = "vLLM reads a step's own key and value as they are stored; here a step sees its own exactly."

    def formats(self, widths: Widths) -> list[Format]:
        return [
            Format("bf16", "auto"),
            Format("int8_per_token_head", "int8_per_token_head"),
            Format("int4_per_token_head", "int4_per_token_head"),
            Format("fp8_per_token_head", "fp8_per_token_head", stand_in=False),
            Format("fp8_e4m3", "fp8_e4m3", stand_in=False),
            Format("nvfp4", "nvfp4", stand_in=False),
        ]

    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        # The model's dtype and one other.
        tiers = [index for index, form in enumerate(formats) if form.precision != "bf16"]
        return [each_layer(layers, [(0, 0), (tier, tier)]) for tier in tiers] or [each_layer(layers, [(0, 0)])]

    def text(self, layers: Layers) -> str:
        used = next((keys.word for keys, _ in layers if keys.word != "auto"), "auto")
        skipped = [str(layer) for layer, (keys, _) in enumerate(layers) if keys.word == "auto"]
        if used == "auto" or not skipped:
            return f"--kv-cache-dtype {used}\n"
        return f"--kv-cache-dtype {used} --kv-cache-dtype-skip-layers {' '.join(skipped)}\n"

    def warnings(self, layers: Layers) -> list[str]:
        words = {keys.word for keys, _ in layers}
        found = []
        if words & set(PER_TOKEN_HEAD):
            found.append("The per-token-head dtypes need vLLM's Triton attention backend.")
        if words & {"fp8_e4m3", "nvfp4"}:
            found.append(
                "The scales are the checkpoint's own; without them vLLM takes 1.0. Those measured here are of the "
                "calibration window, one a head."
            )
        return found
