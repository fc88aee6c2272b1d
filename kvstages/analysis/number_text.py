"""Numbers as the written pages keep and show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DIGITS = 6


def rounded(value: Any) -> Any:
    """A number to ``DIGITS`` significant digits, whole numbers whole, None for one that is missing; a text as it is."""
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return None
    return int(value) if float(value).is_integer() else float(f"{float(value):.{DIGITS}g}")


def nats(value: float | None) -> str:
    """A KL in nats with three digits; a dash where there is none."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3g}".replace("-", "−") if abs(value) >= 1e-4 else f"{value:.2e}"


def number(value: float | None) -> str:
    """A number with three digits; a dash where there is none."""
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def interval(low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    """An interval behind its number, its ends written by ``form``; nothing where it is not known."""
    return "" if low is None or high is None else f" [{form(low)}, {form(high)}]"
