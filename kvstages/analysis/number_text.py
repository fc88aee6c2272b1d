"""Numbers as the written pages show them."""

from __future__ import annotations


def nats(value: float | None) -> str:
    """A KL in nats with three digits; a dash where there is none."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3g}".replace("-", "−") if abs(value) >= 1e-4 else f"{value:.2e}"
