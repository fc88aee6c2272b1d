"""Labels of points that avoid each other, the points, their error bars, lines of data and the frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstages.figures.style import canvas_of, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure

# Unit directions in the order tried: right and left first, where a label reads best.
_DIRECTIONS = [(1, 0), (-1, 0), (0.8, 0.7), (0.8, -0.7), (-0.8, 0.7), (-0.8, -0.7), (0, 1), (0, -1)]
_DISTANCES = (7, 14, 22, 32, 44, 60, 80)
# Above the grid and below lines of data (matplotlib's 1.5 and 2).
BEFORE_DATA = 1.8
# x and y in data.
Point = tuple[float, float]


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
    from matplotlib.transforms import Bbox

    frame = axes.get_window_extent(renderer)
    pixels = axes.figure.dpi / 72
    taken = [Bbox.from_bounds(x - 4 * pixels, y - 4 * pixels, 8 * pixels, 8 * pixels) for x, y in _display(axes, avoid)]
    taken += [Bbox.from_bounds(x - pixels, y - pixels, 2 * pixels, 2 * pixels) for x, y in _along(axes, 4 * pixels)]
    for text, x, y in labels:
        best = None
        for distance in _DISTANCES:
            for right, up in _DIRECTIONS:
                note = axes.annotate(
                    text, (x, y), (right * distance, up * distance), textcoords="offset points", fontsize=8,
                    ha="left" if right > 0 else "right" if right < 0 else "center",
                    va="bottom" if up > 0.9 else "top" if up < -0.9 else "center",
                    arrowprops={"arrowstyle": "-", "color": "0.55", "lw": 0.6, "shrinkA": 1, "shrinkB": 4}
                    if distance > 10 else None,
                )  # fmt: skip
                note.set_in_layout(False)
                box = note.get_window_extent(renderer) if distance <= 10 else _text_box(note, renderer)
                outside = max(frame.x0 - box.x0, box.x1 - frame.x1, frame.y0 - box.y0, box.y1 - frame.y1, 0)
                cost = 1e3 * outside + sum(_overlap(box, other) for other in taken)
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (cost, note, box)
                else:
                    note.remove()
                if best[0] == 0:
                    break
            if best is not None and best[0] == 0:
                break
        # Lines of the grid and of budgets end where a text begins, those of data do not.
        best[1].set_zorder(BEFORE_DATA)
        best[1].set_bbox({"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"})
        taken.append(best[2].padded(1.5 * pixels))


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


def _text_box(note: object, renderer: object) -> object:
    """Extent of the text alone: the line to the point is thin enough to cross things."""
    from matplotlib.text import Text

    note.update_positions(renderer)
    return Text.get_window_extent(note, renderer)


def _overlap(one: object, other: object) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0
