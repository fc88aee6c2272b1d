"""A KV cache written plainly, for tests: one Python list a head, one token at a time, straight from STUDY.md."""

from __future__ import annotations

import torch
from torch import Tensor

M = {"int8": 127, "int4": 7}


class PlainCache:
    """Keeps what each head reads back, quantizing every token and head on its own."""

    def __init__(self, precisions, dense_storage: torch.dtype):
        self.precisions, self.dense_storage = precisions, dense_storage
        self.past: dict[tuple, list[Tensor]] = {}
        self.payload_bytes = self.scale_bytes = 0

    def store(self, x: Tensor, precision: str) -> Tensor:
        """What one vector [D] reads back as."""
        if precision == "bf16":
            self.payload_bytes += 2 * len(x)
            return x.to(self.dense_storage).to(x.dtype)
        m = M[precision]
        scale = min(float(x.float().abs().max()), 65504.0)
        stored = torch.tensor(scale, dtype=torch.float16).float()
        codes = (x.float() * m / stored).round().clamp(-m, m) if stored > 0 else torch.zeros(len(x))
        self.payload_bytes += len(x) if precision == "int8" else (len(x) + 1) // 2
        self.scale_bytes += 2
        return (codes * stored / m).to(x.dtype)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        seen = []
        for kind, new in (("keys", keys), ("values", values)):
            rows = []
            for b in range(new.shape[0]):
                heads = []
                for h in range(new.shape[1]):
                    past = self.past.setdefault((kind, layer, b, h), [])
                    heads.append(torch.stack([*past, *new[b, h]]))
                    past.extend(self.store(vector, self.precisions[layer][h]) for vector in new[b, h])
                rows.append(torch.stack(heads))
            seen.append(torch.stack(rows))
        return seen[0], seen[1]

    def mask(self, new: int, layer: int):
        past = len(self.past.get(("keys", layer, 0, 0), []))
        return torch.ones(new, past + new, dtype=torch.bool).tril(past)

    def seen(self) -> int:
        return len(self.past.get(("keys", 0, 0, 0), []))
