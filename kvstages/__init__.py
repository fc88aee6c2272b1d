"""kvstages: how far can each attention head's KV cache be quantized, and what does it do to the output?"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["MixedPrecisionCache", "__version__"]


def __getattr__(name: str) -> Any:
    """``MixedPrecisionCache``, imported when it is asked for: it needs torch and transformers."""
    if name == "MixedPrecisionCache":
        from kvstages.measure.generation_cache import MixedPrecisionCache

        return MixedPrecisionCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
