"""Shades: which precision has which in maps, that of random policies, and whether white text reads on one."""

from __future__ import annotations

# Lightness rises in even steps, so the precisions read the same in grey.
PRECISIONS = {"bf16": "#1f3d5c", "int8": "#4a76a0", "int4": "#86aac9", "int3": "#bfd3e3", "int2": "#f3f6f9"}
# Marks and bands of random policies, wherever they are drawn.
RANDOM_POLICIES = "#5d8fb8"


def ink(colour: object) -> str:
    """Colour of text on a colour that matplotlib knows: white where that is dark."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    # Relative luminance 0.18 is where black and white text have the same contrast (WCAG).
    return "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18 else "black"
