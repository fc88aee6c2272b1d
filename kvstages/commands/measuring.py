"""How a stage measures, as one value made of the options that its command line has for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.commands import options

if TYPE_CHECKING:
    import torch

    from kvstages.measure.setting import Setting


@dataclass(frozen=True)
class Measuring:
    """What a stage computes in and on: execution and dtype, device, CPU threads, and the memory of a pass in MB."""

    setting: Setting
    place: torch.device
    threads: int
    memory_mb: int

    @property
    def memory(self) -> int:
        """The memory of a pass in bytes."""
        return self.memory_mb << 20

    def record(self, window: str) -> dict[str, str | int]:
        """What a result says of how it was measured, and on which window."""
        computed = {"device": self.place.type, "threads": self.threads, "memory_mb": self.memory_mb}
        return {**self.setting.as_dict(), **computed, "window": window}

    def by_block(self, table: dict[str, list[Any]], windows: Path, window: str) -> dict[str, list[Any]]:
        """A table with a column ``block``, with the document of each row's block and how it was measured."""
        from kvstages.study.windows import window_documents

        documents = window_documents(windows, window)
        held = [documents[block] if documents else "" for block in table["block"]]
        measured = {key: [value] * len(held) for key, value in {"window": window, **self.setting.as_dict()}.items()}
        return {**table, "document": held, **measured}


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every stage that measures, handed to its command as one argument ``how``."""

    @wraps(command)
    def with_how(
        execution: str, compute_dtype: str, device: str, threads: int, memory_mb: int, **arguments: Any
    ) -> None:
        from kvstages.measure.setting import Setting, prepare

        how = Measuring(Setting(execution, compute_dtype), prepare(device, threads), threads, memory_mb)
        command(how=how, **arguments)

    for option in (options.memory, options.threads, options.device, options.compute_dtype, options.execution):
        with_how = option(with_how)
    return with_how
