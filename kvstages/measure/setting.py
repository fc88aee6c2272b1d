"""What a stage computes on and in: device, threads, determinism, and the dtypes by name."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch

from kvstages.files import ledger

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
EXECUTIONS = ("one-pass", "token-by-token")


@dataclass(frozen=True)
class Setting:
    """How a study is measured: token by token or a block at a time, and the dtype that the model computes in.

    What a cache holds is a separate matter: unquantized heads are BF16 in either case (see ``rounding``).
    """

    execution: str
    compute_dtype: str

    def __post_init__(self) -> None:
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution {self.execution!r}: expected one of {', '.join(EXECUTIONS)}")
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype {self.compute_dtype!r}: expected one of {', '.join(DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return DTYPES[self.compute_dtype]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def prepare(device: str, threads: int) -> torch.device:
    """Switch on deterministic algorithms, fix the number of CPU threads, and resolve auto, cpu or cuda.

    Sums in floating point may differ between thread counts, so the count is part of a study's configuration. The ledger
    gets what matrix products depend on besides: the CPU's instructions that PyTorch uses, or the name of the GPU.
    ValueError if CUDA is asked for where there is none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r}: expected auto, cpu or cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("device cuda: PyTorch finds no CUDA device here; set device to cpu or auto")
    torch.set_num_threads(threads)
    # Deterministic algorithms or an error. use_deterministic_algorithms does the same and imports PyTorch's compiler.
    torch.set_deterministic_debug_mode("error")
    # Determinism does not need every new tensor filled with NaN: nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if device == "cpu" or not available:
        ledger.state(product=f"CPU, {torch.backends.cpu.get_cpu_capability()}")
        return torch.device("cpu")
    ledger.state(product=f"CUDA, {torch.cuda.get_device_name()}")
    # cuBLAS is deterministic only with a fixed workspace, and the fused attention kernels' backward passes are not.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")
