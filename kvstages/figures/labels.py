"""Labels of points that avoid each other, the points, their error bars, lines of data and the frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING

from kvstages.figures.style import canvas_of, lay_out

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure

# Unit directions in the order tried: right and left first, where a label reads best.
_DIRECTIONS = [(1, 0), (-1, 0), (0.8, 0.7), (0.8, -0.7), (-0.8, 0.7), (-0.8, -0.7), (0, 1), (0, -1)]
_DISTANCES = (7, 14, 22, 32, 44, 60, 80)
_PLACES = [*product(_DISTANCES, _DIRECTIONS)]
# Above the grid and below lines of data (matplotlib's 1.5 and 2).
BEFORE_DATA = 1.8
# x and y in data.
Point = tuple[float, float]
# x and y of the lower left corner and of the upper right one, in pixels.
Box = tuple[float, float, float, float]


def place_labels(
    figure: Figure, panels: Iterable[tuple[Axes, Sequence[tuple[str, float, float]], Sequence[Point]]]
) -> None:
    """Write each panel's labels (text, x, y in data) where they cover no other label, line or point to avoid.

    A panel is its axes, its labels and those points. Where no place is free the one that covers the least is taken. A
    label away from its point gets a thin line. The figure has all else by now, for it is laid out here.
    """
    lay_out(figure)
    renderer = canvas_of(figure).get_renderer()
    for axes, labels, avoid in panels:
        _place(axes, labels, avoid, renderer)


def _place(
    axes: Axes, labels: Sequence[tuple[str, float, float]], avoid: Sequence[Point], renderer: RendererAgg
) -> None:
    import numpy as np
    from matplotlib.text import Text

    frame = axes.get_window_extent(renderer)
    pixels = axes.figure.dpi / 72
    taken = [_square(point, 4 * pixels) for point in _display(axes, avoid)]
    taken += [_square(point, pixels) for point in _along(axes, 4 * pixels)]
    for text, x, y in labels:
        size = Text(text=text, fontsize=8, figure=axes.figure).get_window_extent(renderer).size
        (at,) = _display(axes, [(x, y)])
        boxes = np.array([_box(at, size, right, up, distance * pixels) for distance, (right, up) in _PLACES])
        outside = np.max(
            [frame.x0 - boxes[:, 0], frame.y0 - boxes[:, 1], boxes[:, 2] - frame.x1, boxes[:, 3] - frame.y1], axis=0
        )
        best = int(np.argmin(1e3 * outside.clip(min=0) + _overlaps(boxes, np.array(taken)).sum(axis=1)))
        distance, (right, up) = _PLACES[best]
        axes.annotate(
            text, (x, y), (right * distance, up * distance), textcoords="offset points", fontsize=8,
            ha=_across(right), va=_upright(up),
            arrowprops={"arrowstyle": "-", "color": "0.55", "lw": 0.6, "shrinkA": 1, "shrinkB": 4}
            if distance > 10 else None,
            # Lines of the grid and of budgets end where a text begins, those of data do not.
            zorder=BEFORE_DATA,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
        margin = 1.5 * pixels
        taken.append(tuple(boxes[best] + (-margin, -margin, margin, margin)))


def _across(right: float) -> str:
    """Which end of a text is at its place."""
    return "left" if right > 0 else "right" if right < 0 else "center"


def _upright(up: float) -> str:
    return "bottom" if up > 0.9 else "top" if up < -0.9 else "center"


def _box(at: Point, size: Sequence[float], right: float, up: float, distance: float) -> Box:
    """Where a text of some size would stand, so many pixels away from its point."""
    width, height = size
    left = at[0] + right * distance - width * {"left": 0.0, "center": 0.5, "right": 1.0}[_across(right)]
    bottom = at[1] + up * distance - height * {"bottom": 0.0, "center": 0.5, "top": 1.0}[_upright(up)]
    return left, bottom, left + width, bottom + height


def _square(point: Point, half: float) -> Box:
    x, y = point
    return x - half, y - half, x + half, y + half


def _overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Area that each of some boxes [P, 4] shares with each of others [Q, 4]: [P, Q]."""
    import numpy as np

    low = np.maximum(boxes[:, None, :2], others[:, :2])
    high = np.minimum(boxes[:, None, 2:], others[:, 2:])
    return (high - low).clip(min=0).prod(axis=-1)


def _display(axes: Axes, points: Sequence[Point]) -> list[Point]:
    return [tuple(axes.transData.transform(point)) for point in points]


def _along(axes: Axes, step: float) -> Iterator[Point]:
    """Points of the lines of data, at most ``step`` pixels apart."""
    for line in axes.lines:
        if line.get_zorder() > BEFORE_DATA and line.get_linestyle() != "None":
            ends = line.get_transform().transform(line.get_xydata())
            for (x, y), (right, up) in pairwise(ends):
                count = 1 + int(max(abs(right - x), abs(up - y)) / step)
                yield from ((x + (right - x) * part / count, y + (up - y) * part / count) for part in range(count))
