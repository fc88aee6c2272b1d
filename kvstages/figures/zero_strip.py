"""A logarithmic axis that also shows zeros: a grey strip below the smallest decade, with the tick label 0.

The KL of the BF16 cache, and of the first position of every block, is exactly 0; leaving it out would hide the very
thing the other values are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# Sums in double precision leave this much; the allocator treats it as 0, too (docs/method.md, "Allocation").
ROUND_OFF = 1e-12


class ZeroStrip:
    """Scales one axis of ``axes`` logarithmically over ``values``, with a strip for those up to ``round_off``, if any.

    ``place`` maps values to coordinates on that axis.
    """

    def __init__(self, axes: Axes, which: str, values: Iterable[float], round_off: float = ROUND_OFF) -> None:
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

        values = list(values)
        self.round_off = round_off
        positive = [value for value in values if value > round_off] or [1e-3]
        low, high = math.log10(min(positive)), math.log10(max(positive))
        low, high = low - 0.04 * (high - low) - 0.04, high + 0.04 * (high - low) + 0.04
        if high - low < 1:
            low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
        self.has_zeros = len(positive) < len(values) or not any(value > round_off for value in values)
        depth = 0.07 * (high - low)
        self.zero = 10 ** (low - depth)
        bottom = low - 2 * depth if self.has_zeros else low

        axis = axes.xaxis if which == "x" else axes.yaxis
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        (axes.set_xlim if which == "x" else axes.set_ylim)(10**bottom, 10**high)
        decades = range(math.ceil(low), math.floor(high) + 1)
        every = max(1, -(-len(decades) // 10))
        shown = [(10.0**decade, f"$10^{{{decade}}}$") for decade in decades if decade % every == 0]
        minor = [
            factor * 10.0**decade
            for decade in range(math.floor(low), math.ceil(high))
            for factor in range(2, 10)
            if low <= math.log10(factor * 10.0**decade) <= high
        ]
        if len(shown) < 2:
            shown += [(value, f"{value:.0e}".replace("e-0", "e-")) for value in minor[:: max(1, len(minor) // 4)]]
            shown.sort()
        if self.has_zeros:
            shown.insert(0, (self.zero, "0"))
            (axes.axvspan if which == "x" else axes.axhspan)(10**bottom, 10**low, color="0.93", linewidth=0, zorder=0)
        axis.set_major_locator(FixedLocator([value for value, _ in shown]))
        axis.set_major_formatter(FixedFormatter([label for _, label in shown]))
        axis.set_minor_locator(FixedLocator(minor if every == 1 else []))
        axis.set_minor_formatter(NullFormatter())

    def place(self, values: Iterable[float]) -> np.ndarray:
        """Coordinates of values: themselves, or the middle of the strip for those that count as 0."""
        import numpy as np

        values = np.asarray(values, dtype=float)
        return np.where(values > self.round_off, values, self.zero)
