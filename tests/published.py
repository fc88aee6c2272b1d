"""Where the published figures stand."""

from __future__ import annotations

from pathlib import Path

import kvstages

PUBLISHED = Path(kvstages.__file__).parent / "analysis" / "published" / "gpt2-nano"
