"""A policy's budget: so many nats of the KL proxy, or so many bytes of one cache."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A budget as a configuration and a policy's name write it: 0.01 is nats, 400000B is bytes. It names a folder,
# so its length is limited: no number that Python writes in its shortest form is longer than 24 characters.
NATS = r"[0-9][0-9.eE+-]{0,23}"
BYTES = r"[0-9]{1,15}B"


@dataclass(frozen=True)
class Budget:
    """``amount`` nats of proxy KL, or bytes of one cache, payload and scales; ``measure`` is nats or bytes."""

    amount: float
    measure: str

    def __post_init__(self) -> None:
        if not self.amount >= 0:
            raise ValueError(f"budget {self.amount}: expected 0 {self.measure} or more")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """From its text; ValueError says what a budget looks like."""
        if re.fullmatch(BYTES, text):
            return cls(int(text.removesuffix("B")), "bytes")
        try:
            # Python reads inf, nan and 1_000, too.
            return cls(float(re.fullmatch(NATS, text)[0]), "nats")
        except (TypeError, ValueError):
            raise ValueError(f"budget {text!r}: expected nats, such as 0.01, or bytes, such as 400000B") from None
