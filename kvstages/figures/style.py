"""How figures look and how they are written: typography, black-and-white line styles, the same bytes each time."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstages.files.atomic import write_bytes, write_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Only fonts that ship with matplotlib, as outlines in the SVG: a figure looks the same on every machine.
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    # A title's place is not looked for again in each drawing.
    "axes.titley": 1.0,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    # What is measured to lay a figure out is what the PNG shows.
    "figure.dpi": 200,
    "savefig.dpi": "figure",
    "svg.hashsalt": "kvstages",
}

# Lines differ in shade, dash and marker, so that none of them alone has to carry the meaning.
LINES = [
    {"color": "#1b1b1b", "linestyle": "-", "marker": "o"},
    {"color": "#0a5fa8", "linestyle": (0, (5, 1.5)), "marker": "s"},
    {"color": "#c4540a", "linestyle": (0, (6, 1.5, 1.2, 1.5)), "marker": "^"},
    {"color": "#4f9d8b", "linestyle": (0, (1.2, 1.2)), "marker": "D"},
    {"color": "#8d5fb5", "linestyle": (0, (3, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#8a8a8a", "linestyle": "-", "marker": "P"},
    {"color": "#c58fb0", "linestyle": (0, (5, 1.5)), "marker": "X"},
    {"color": "#b8a01c", "linestyle": (0, (6, 1.5, 1.2, 1.5)), "marker": "<"},
]


def line_style(index: int) -> dict[str, object]:
    """Style of the index-th line of a figure; styles repeat after eight."""
    return LINES[index % len(LINES)]


def legend_below(figure: Figure, handles: Iterable[Artist], labels: Iterable[str], **look: float) -> None:
    """A legend below the panels, in as many columns as the figure's width holds; ``look`` is for ``Figure.legend``."""
    handles, labels = list(handles), list(labels)
    canvas_of(figure)
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **look)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's own defaults plus ``STYLE``, whatever the user's settings are; put back afterwards.

    The first import of matplotlib fails where a notebook has set MPLBACKEND to a backend that is not installed here;
    figures that are only written need none.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def canvas_of(figure: Figure) -> FigureCanvasAgg:
    """The figure's one canvas of pixels: a text is measured once for all who ask it, from the legend to the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)


def lay_out(figure: Figure) -> None:
    """Give the axes their places, for good: otherwise each drawing of the figure would start with that."""
    canvas_of(figure)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


class NothingToDraw(Exception):
    """A figure has no points; the message says why, and stands in the figure's place."""


def write_figure(output: Path, table: pd.DataFrame, draw: Callable[[pd.DataFrame], Figure]) -> None:
    """Write ``output`` (.svg), and beside it the .png and the table that is drawn as .csv.

    The same table gives the same bytes: no date, no software version, fixed SVG identifiers. A table without points
    gives a figure that says so. ValueError where ``output`` does not end in .svg.
    """
    output = Path(output)
    if output.suffix != ".svg":
        raise ValueError(f"{output}: a figure's output ends in .svg; the .png and .csv are written beside it")
    with style():
        try:
            if table.empty:
                raise NothingToDraw("no unit or policy has the values that it shows")
            figure = draw(table)
        except NothingToDraw as reason:
            figure = note(f"There is nothing to draw: {reason}.")
        lay_out(figure)
        # Figure.savefig would draw each of them twice, the first time to lay it out.
        pictures = {".png": png(figure), ".svg": svg(figure)}
    write_table(output.with_suffix(".csv"), table, table.columns)
    for suffix, picture in pictures.items():
        write_bytes(output.with_suffix(suffix), picture)


def png(figure: Figure) -> bytes:
    """A figure that is laid out, in pixels."""
    file = io.BytesIO()
    canvas_of(figure).print_png(file, metadata={"Software": None})
    return file.getvalue()


def svg(figure: Figure) -> bytes:
    """A figure that is laid out, in lines; its texts too."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file, dpi = io.BytesIO(), figure.dpi
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None})
    figure.dpi = dpi  # an SVG has its own
    return file.getvalue()


def note(text: str) -> Figure:
    """A figure that holds a line of text and no axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 1.0))
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure
