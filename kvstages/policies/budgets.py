"""A policy's budget: so many nats of the KL proxy, so many bytes of one cache, or so many bits a stored element."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A budget as a configuration and a policy's name write it: 0.01 is nats, 400000B is bytes, 4.25bits is bits. It names a
# folder, so its length is limited (no number that Python writes in its shortest form is longer than 24 characters), and
# bits have one spelling.
NATS = r"[0-9][0-9.eE+-]{0,23}"
BYTES = r"[0-9]{1,15}B"
BITS = r"[1-9][0-9]?(?:\.[0-9]{0,5}[1-9])?bits"
DENSE_BITS = 16


@dataclass(frozen=True)
class Budget:
    """``amount`` nats of proxy KL, bytes of a cache, or bits a stored element of it; ``measure``: nats, bytes or bits.

    Bytes and bits count everything that a cache stores: payload, scales, exact tokens, and what is stored once.
    """

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
        if re.fullmatch(BITS, text):
            return cls(float(text.removesuffix("bits")), "bits")
        try:
            # Python reads inf, nan and 1_000, too.
            return cls(float(re.fullmatch(NATS, text)[0]), "nats")
        except (TypeError, ValueError):
            raise ValueError(
                f"budget {text!r}: expected nats, such as 0.01, or bytes, such as 400000B, or bits an element, "
                "such as 4.25bits"
            ) from None

    def of_cache(self, dense_bytes: int) -> Budget:
        """The same in bytes, of a cache that takes ``dense_bytes`` in BF16, where it is in bits."""
        if self.measure != "bits":
            return self
        return Budget(int(self.amount * dense_bytes / DENSE_BITS), "bytes")
