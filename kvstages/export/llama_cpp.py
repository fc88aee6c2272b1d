"""llama.cpp: ``--cache-type-k`` and ``--cache-type-v``, each for the whole model.

Blocks of 32 along D (``cache.engines``). Quantized types are rotated by llama.cpp itself where D is a multiple of 64
(src/llama-kv-cache.cpp): keys in blocks of the largest 64 · 2^n that divides D, values in blocks of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstages.cache.schemes import SIDES
from kvstages.export.choices import Alternative, each_side
from kvstages.export.engine import Engine, Format, Layers, Widths

# Types, and whether they stand for other quantizers' precisions.
TYPES = {"q8_0": True, "q5_1": False, "q5_0": True, "q4_1": False, "q4_0": True}
# Types that CUDA builds of llama.cpp leave out of flash attention unless they are asked for.
LESS_COMMON = ("q5_1", "q5_0", "q4_1")
ROTATED = 64


def rotation(widths: Widths) -> str:
    """The options of the rotation that llama.cpp applies to heads of some widths; "" for none."""
    largest = ROTATED * ((widths[0] // ROTATED) & -(widths[0] // ROTATED))
    words = [
        "" if width % ROTATED else "hadamard" if block == width else f"hadamard{block}"
        for width, block in zip(widths, (largest, ROTATED), strict=True)
    ]
    return sides_option(words)


def sides_option(words: Sequence[str]) -> str:
    """What ends a precision's name where its keys and its values have an option each; "" for none."""
    if words[0] == words[1]:
        return f"-{words[0]}" if words[0] else ""
    return "-" + "+".join(f"{side}.{word}" for side, word in zip(SIDES, words, strict=True) if word)


class LlamaCpp(Engine):
    name = "llama-cpp"
    file = "flags.txt"
    note = (
        "llama.cpp stores what is not quantized in FP16, here it is BF16; it reads a step's own key and value as they "
        "are stored, here they are exact."
    )

    def formats(self, widths: Widths) -> list[Format]:
        turned = rotation(widths)
        return [Format("bf16", "f16"), *(Format(name + turned, name, stand_in) for name, stand_in in TYPES.items())]

    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        rows = np.repeat(np.arange(len(formats))[:, None], layers, axis=1)
        return [each_side(layers, rows)]

    def text(self, layers: Layers) -> str:
        keys, values = layers[0]
        flash = "" if values.word == "f16" else " --flash-attn on"
        return f"--cache-type-k {keys.word} --cache-type-v {values.word}{flash}\n"

    def warnings(self, layers: Layers) -> list[str]:
        keys, values = layers[0]
        found = ["llama.cpp rotates quantized caches by itself; LLAMA_ATTN_ROT_DISABLE=1 turns that off."]
        if keys.word != values.word or keys.word in LESS_COMMON:
            found.append("On CUDA this pair of types needs a build with GGML_CUDA_FA_ALL_QUANTS.")
        return found if keys.word != "f16" or values.word != "f16" else []
