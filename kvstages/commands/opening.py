"""The decoder of a stage that measures: apart from how it measures, which a stage that trains one knows, too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.commands.measuring import Measuring

if TYPE_CHECKING:
    from kvstages.models.decoder import Decoder


def opened(how: Measuring, model: Path, calibration: Path | None = None) -> Decoder:
    """The decoder that measures, its weights packed; schemes know it by a file of the stage calibrate."""
    from kvstages.measure.calibration import calibrated
    from kvstages.models.load import open_decoder

    return calibrated(open_decoder(model, how.setting.dtype, how.place).pack(), calibration)
