"""A KV cache written plainly, for tests: one Python list a head, one token at a time (docs/method.md, "Cache rule")."""

from __future__ import annotations

import torch
from torch import Tensor

M = {"int8": 127, "int4": 7, "int3": 3, "int2": 1}
BITS = {"bf16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}


class PlainCache:
    """Keeps what each head reads back, quantizing every token and head on its own.

    ``shared``: the reference's cache, already run on the same tokens; its errors of rounding to BF16 are added instead
    of rounding anew, as the sweep does in FP32.
    """

    def __init__(self, grid, shared: PlainCache | None = None):
        self.grid, self.shared = grid, shared
        self.error: dict[tuple, list[Tensor]] = {}
        self.past: dict[tuple, list[Tensor]] = {}
        self.payload_bytes = self.scale_bytes = 0

    def store(self, x: Tensor, precision: str) -> Tensor:
        """What one vector [D], already 16 bits wide, reads back as."""
        if precision == "bf16":
            self.payload_bytes += 2 * len(x)
            return x
        m = M[precision]
        scale = min(float(x.float().abs().max()), 65504.0)
        stored = torch.tensor(scale, dtype=torch.float16).float()
        codes = (x.float() * m / stored).round().clamp(-m, m) if stored > 0 else torch.zeros(len(x))
        self.payload_bytes += -(-len(x) * BITS[precision] // 8)
        self.scale_bytes += 2
        return (codes * stored / m).to(x.dtype)

    def round(self, x: Tensor, place: tuple) -> Tensor:
        """One vector [D] as BF16 holds it, or with the error that the reference made there."""
        errors = self.error.setdefault(place, [])
        if self.shared is None:
            stored = x.to(torch.bfloat16).to(x.dtype)
            errors.append(stored - x)
            return stored
        errors.append(self.shared.error[place][len(errors)])
        return x + errors[-1]

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        seen = []
        for kind, new in (("keys", keys), ("values", values)):
            rows = []
            for b in range(new.shape[0]):
                heads = []
                for h in range(new.shape[1]):
                    place = (kind, layer, b, h)
                    past = self.past.setdefault(place, [])
                    vectors = [self.round(vector, place) for vector in new[b, h]]
                    heads.append(torch.stack([*past, *vectors]))
                    past.extend(self.store(vector, getattr(self.grid, kind)[layer][h]) for vector in vectors)
                rows.append(torch.stack(heads))
            seen.append(torch.stack(rows))
        return seen[0], seen[1]

    def mask(self, new: int, layer: int):
        past = len(self.past.get(("keys", layer, 0, 0), []))
        return torch.ones(new, past + new, dtype=torch.bool).tril(past)

    def seen(self) -> int:
        return len(self.past.get(("keys", 0, 0, 0), []))
