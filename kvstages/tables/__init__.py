"""The tables of results: one file each, with one function that returns (table, page).

Each is built as one tidy DataFrame, and laid out from it as a page. Where the study repeats a published one, the folder
of published figures (``published``) adds a column ``published_...`` beside each measured column that was published.
``study`` is the study's title, for the title of the page. A new table is a new file here and a command in
``kvstages/commands/table.py``.
"""
