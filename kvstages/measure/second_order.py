"""Units measured by themselves, wherever they are: for the check of scores from gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvstages.measure.setting import Setting
from kvstages.measure.sweep import sweep_layer
from kvstages.models.decoder import Decoder
from kvstages.scores.second_order import Key, Measured
from kvstages.stats.bootstrap import standard_error


def measure_units(
    model: Decoder,
    tokens: Tensor,
    keys: list[Key],
    setting: Setting,
    memory: int,
    progress: Callable[[float], None] = lambda done: None,
) -> dict[Key, Measured]:
    """KL of each unit at its precision, all else in BF16, on blocks [B, T]: as a sweep measures it, layer by layer."""
    found = {}
    layers = sorted({layer for layer, *_ in keys})
    for done, layer in enumerate(layers):
        own = [(head, (part, name)) for at, head, part, name in keys if at == layer]
        changes = list(dict.fromkeys(change for _, change in own))
        swept = sweep_layer(model, tokens, layer, changes, setting, memory, only=set(own))
        for head, change in own:
            kl = swept.kl[change][head].numpy()
            found[layer, head, *change] = Measured(float(kl.mean()), standard_error(kl))
        progress((done + 1) / len(layers))
    return found
