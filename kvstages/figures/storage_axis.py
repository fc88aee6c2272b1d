"""The storage axis that two figures share: bytes of one cache below, compression against BF16 above."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def storage_axis(axes: Axes, table: pd.DataFrame) -> None:
    """Scale x in KiB from the columns total_bytes, bf16_bytes and, if there, tokens_per_cache of ``table``."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    full = table["bf16_bytes"].max() / 1024
    smallest = table["total_bytes"].min() / 1024
    margin = 0.09 * max(full - smallest, 0.2 * full)
    axes.set_xlim(smallest - margin, full + margin)
    tokens = f"{int(table['tokens_per_cache'].iloc[0])} tokens" if "tokens_per_cache" in table else "one block"
    axes.set_xlabel(f"cache of {tokens}, batch 1: payload plus scales (KiB)")
    above = axes.secondary_xaxis("top", functions=(lambda kib: _over(full, kib), lambda factor: _over(full, factor)))
    factors = [1.0]
    for factor in (1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8):
        # Those that fit, and whose labels keep apart.
        if smallest - margin / 2 <= full / factor <= full / factors[-1] - 0.5 * margin:
            factors.append(factor)
    above.xaxis.set_major_locator(FixedLocator(factors))
    above.xaxis.set_minor_locator(NullLocator())
    above.xaxis.set_major_formatter(FuncFormatter(lambda factor, _: f"{factor:g}×"))
    above.set_xlabel("compression against BF16")


def _over(full: float, values: object) -> object:
    """full / values, for both directions of the axis; matplotlib also asks for 0."""
    import numpy as np

    values = np.asarray(values, dtype=float)
    return full / np.where(np.abs(values) < 1e-9, 1e-9, values)
