"""Matrix products with weights in oneDNN's own layout, and on which processors they are the faster ones.

PyTorch multiplies FP32 matrices on a CPU with MKL, which takes its fastest instructions on Intel's processors only: on
an AMD EPYC with AVX-512 it reached 110 GFLOP/s a core where oneDNN reached 230 to 260; on an Intel Xeon with AVX-512
both were within 20 % of each other. In BF16 PyTorch calls oneDNN anyway, but brings the weight into its layout at
every call, which for a few tokens takes longer than the product. The choice follows from the processor alone, so a
machine always takes the same product and writes the same bytes; another order of sums changes last digits.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CACHE_LINE = 64
# Rows of the products that a packed weight is laid out for; any other number does as well.
PACKED_ROWS = 512
INTEL = "GenuineIntel"


class Packed:
    """Copies of the weights [O, E] of layers with the same input, together, in oneDNN's own layout."""

    def __init__(self, layers: Sequence[nn.Linear]):
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = torch.cat([layer.bias.detach() for layer in layers])
        self.outputs = len(weight)
        # Rows of odd width are slow to write, so outputs are filled up to whole cache lines.
        spare = -self.outputs % (CACHE_LINE // weight.element_size())
        self.weight = torch.ops.mkldnn._reorder_linear_weight(F.pad(weight, (0, 0, 0, spare)), PACKED_ROWS)
        self.bias = F.pad(bias, (0, spare))

    def __call__(self, x: Tensor) -> Tensor:
        """The layers' outputs [..., O] for x [..., E], one layer's after the other's."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")[..., : self.outputs]


class Linear(nn.Linear):
    """nn.Linear; once packed it multiplies with a copy of its weight in oneDNN's own layout."""

    packed: Packed | None = None

    def pack(self) -> None:
        """Keep the copy."""
        self.packed = Packed([self])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.packed is None else self.packed(x)


def vendor() -> str:
    """The maker of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, platform.processor() or platform.machine())


def packs(dtype: torch.dtype, device: torch.device, maker: str) -> bool:
    """Whether packed products are the faster ones for this dtype and device on a processor of this maker."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and torch.backends.mkl.is_available() and maker != INTEL


def product(dtype: torch.dtype, device: torch.device, packed: bool) -> str:
    """What multiplies, in words for the manifest."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} on {device.type}, {'weights packed for oneDNN' if packed else 'the product of PyTorch'}"
