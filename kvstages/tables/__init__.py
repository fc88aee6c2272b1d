"""The tables of results: one file each, with its entry (``TABLE``) and one function ``make``.

``make`` returns (table, page): one tidy DataFrame, and the page laid out from it. Where the study repeats a published
one, the folder of published figures (``published``) adds a column ``published_...`` beside each measured column that
was published. ``study`` is the study's title, for the title of the page. A new table is a new file here, and its
caption in ``report/``.
"""
