"""The figures: one file each, with its entry (``FIGURE``) and the same two functions.

``numbers(...)`` reads a study's files into the table of what will be drawn; ``draw(table)`` draws that table and
nothing else. ``write_figure`` writes the drawing as SVG and PNG and the table as CSV, so the CSV is exactly what the
figure shows. A new figure is a new file here, and its caption in ``report/``.
"""
