"""ik_llama.cpp: a cache type for all layers, and others for the first and the last N, keys and values apart.

Flags: common/common.cpp, pull request 1599 of ikawrakow/ik_llama.cpp. Blocks of 32 along D as in llama.cpp; the
rotation of the whole head is asked for (``-khad``, ``-vhad``) and needs a D that is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvstages.cache.schemes import SIDES, precision
from kvstages.export.choices import Alternative, each_side, ends
from kvstages.export.engine import Engine, Format, Layers, Widths
from kvstages.export.llama_cpp import TYPES, sides_option


class IkLlamaCpp(Engine):
    name = "ik-llama-cpp"
    file = "flags.txt"
    note = (
        "ik_llama.cpp stores what is not quantized in FP16, here it is BF16; it reads a step's own key and value as "
        "they are stored, here they are exact."
    )

    def formats(self, widths: Widths) -> list[Format]:
        turned = sides_option(["" if width & (width - 1) else "hadamard" for width in widths])
        return [Format("bf16", "f16"), *(Format(name + turned, name, stand_in) for name, stand_in in TYPES.items())]

    def alternatives(self, layers: int, formats: Sequence[Format]) -> list[Alternative]:
        return [each_side(layers, ends(layers, len(formats)))]

    def text(self, layers: Layers) -> str:
        words = []
        for side, letter in enumerate("kv"):
            runs = [(word, len(list(run))) for word, run in groupby(pair[side].word for pair in layers)]
            first, middle, last = _three(runs)
            words.append(f"-ct{letter} {middle[0]}")
            words += [f"-ct{letter}-{end} {run[0]},{run[1]}" for end, run in (("first", first), ("last", last)) if run]
        quantized = [any(pair[side].word != "f16" for pair in layers) for side in (0, 1)]
        words += [f"-{side}had" for side in SIDES if any(_rotated(pair[SIDES.index(side)], side) for pair in layers)]
        return " ".join([*words, *(["-fa on"] if quantized[1] else [])]) + "\n"

    def warnings(self, layers: Layers) -> list[str]:
        return [
            "Only builds with ik_llama.cpp's pull request 1599 and the fix of 1626 (the last layers' values took the "
            "first layers' type before) read the types of the first and last layers."
        ]


def _rotated(form: Format, side: str) -> bool:
    return form.precision != "bf16" and precision(form.precision).method(side).rotation != ""


def _three(runs: list[tuple[str, int]]) -> tuple:
    """The first, the middle and the last run of layers of one type; what is not there is None."""
    if len(runs) == 1:
        return None, runs[0], None
    if len(runs) == 2:
        return runs[0], runs[1], None
    return runs[0], runs[1], runs[2]
