"""Labels stand where they can be read."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvstages.figures.labels import place_labels


@pytest.mark.parametrize("ends", [((0, 1), (0.5, 0.5)), ((0, 1), (0, 1)), ((0.5, 0.5), (0, 1))])
def test_a_label_covers_neither_its_point_nor_a_line_of_data(ends):
    figure = Figure()
    axes = figure.subplots()
    axes.plot(*ends)
    place_labels(figure, [(axes, [("a name", 0.5, 0.5)], [(0.5, 0.5)])])
    (label,) = axes.texts
    box = Text.get_window_extent(label, FigureCanvasAgg(figure).get_renderer())
    (x, right), (y, up) = ends
    for step in range(1001):
        at = axes.transData.transform((x + (right - x) * step / 1000, y + (up - y) * step / 1000))
        assert not box.contains(*at)


def test_lines_below_the_data_end_where_a_label_begins():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0, 0])
    budget = axes.axhline(0.5, zorder=1)
    place_labels(figure, [(axes, [("a name", 0.5, 0.5)], [(0.5, 0.5)])])
    (label,) = axes.texts
    assert budget.get_zorder() < label.get_zorder() < axes.lines[0].get_zorder()
    assert label.get_bbox_patch().get_facecolor() == (1, 1, 1, 1)
