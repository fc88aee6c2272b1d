"""Opens the decoder of a stage that measures.

Apart from ``measuring``, which stages that train use too: they open theirs otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.commands.measuring import Measuring

if TYPE_CHECKING:
    from kvstages.models.decoder import Decoder


def opened(how: Measuring, model: Path, calibration: Path | None = None) -> Decoder:
    """The decoder, its weights packed. ``calibration``: what schemes need to know of it, from the stage calibrate."""
    from kvstages.measure.calibration import calibrated
    from kvstages.models.load import open_decoder

    return calibrated(open_decoder(model, how.setting.dtype, how.place).pack(), calibration)
