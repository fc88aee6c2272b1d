"""Shades: which precision has which in maps, that of random policies, and whether white text reads on one."""

from __future__ import annotations

from kvstages.cache.precisions import BITS, bits_of

# Lightness rises in even steps, so the precisions read the same in grey.
EVEN = {"bf16": "#1f3d5c", "int8": "#4a76a0", "int4": "#86aac9", "int3": "#bfd3e3", "int2": "#f3f6f9"}


def between(bits: int) -> str:
    """The shade of a precision of so many bits, mixed from those of the nearest precisions above and below it."""
    above = EVEN[min((name for name in EVEN if BITS[name] >= bits), key=BITS.__getitem__)]
    below = EVEN[max((name for name in EVEN if BITS[name] <= bits), key=BITS.__getitem__, default="int2")]
    channels = (f"{(int(above[i : i + 2], 16) + int(below[i : i + 2], 16)) // 2:02x}" for i in (1, 3, 5))
    return f"#{''.join(channels)}"


def shade(precision: str) -> str:
    """The shade of a precision of any scheme: that of its bits."""
    return between(bits_of(precision))


# Marks and bands of random policies, wherever they are drawn.
RANDOM_POLICIES = "#5d8fb8"


def ink(colour: object) -> str:
    """Colour of text on a colour that matplotlib knows: white where that is dark."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    # Relative luminance 0.18 is where black and white text have the same contrast (WCAG).
    return "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18 else "black"
