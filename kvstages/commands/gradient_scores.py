"""Writing what the stages make that score from gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_scores(
    output_table: Path,
    projections: Path,
    values: Tensor,
    error: dict[tuple[str, str], Tensor],
    precisions: Sequence[str],
    tokens: int,
    window: str,
) -> None:
    """Write the sensitivity table and the projections of precisions (see ``measure.gradients.project``)."""
    from kvstages.files.atomic import write_table, write_tensors
    from kvstages.scores.projections import TENSOR, Projections, record_of, sensitivity_columns

    found = Projections(values.numpy(), tuple(precisions), tokens)
    table = sensitivity_columns(found, {change: each.numpy() for change, each in error.items()})
    write_tensors(projections, {TENSOR: values}, record_of(precisions, tokens, window))
    write_table(output_table, table, ["standard_error"])
