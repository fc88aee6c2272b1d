"""A table of results as a small page of HTML that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages.files.atomic import write_table, write_text

if TYPE_CHECKING:
    import pandas as pd

# Everything is scoped to .kvstages: the report's front page holds the same markup.
CSS = """
.kvstages { font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", Arial, sans-serif; color: #1b1b1b; margin: 1.2rem; }
.kvstages h1 { font-size: 1.25rem; margin: 0 0 .8rem; }
.kvstages .scroll { overflow-x: auto; margin: 0 0 1.2rem; }
.kvstages table { border-collapse: collapse; border-top: 2px solid #1b1b1b; border-bottom: 2px solid #1b1b1b; margin: 0;
  font-size: 13px; width: auto; }
.kvstages caption { text-align: left; font-weight: 600; padding: 0 0 .4rem; }
.kvstages th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid #1b1b1b; max-width: 8.5rem; }
.kvstages th, .kvstages td { text-align: right; padding: .3rem .38rem; font-variant-numeric: tabular-nums; }
.kvstages td { white-space: nowrap; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
.kvstages tr > :first-child { padding-left: .2rem; }
.kvstages .text { text-align: left; }
.kvstages .interval { display: block; font-size: 11px; color: #555; }
.kvstages .published { color: #4a4a4a; font-style: italic; background: #f5f5f3; }
.kvstages .strong td { font-weight: 600; }
.kvstages .notes { font-size: 12px; color: #333; max-width: 62rem; padding-left: 1.1rem; margin: 0; list-style: disc; }
.kvstages .notes li { margin: .15rem 0; }
""".strip()


NO_ROWS = "There is nothing to show: too few units or policies, or none with the values of this table."


@dataclass(frozen=True)
class Column:
    """Header, the table's column, how a value is written, and whether its intervals stand below it: NAME_low and
    NAME_high in brackets, and NAME_documents_low and NAME_documents_high, where the table has them, in braces.

    A column ``published_NAME`` of the table follows the column NAME by itself.
    """

    header: str
    name: str
    write: Callable[[Any], str]
    interval: bool = False


@dataclass(frozen=True)
class Section:
    """One table of a page; rows whose column emphasis[0] holds emphasis[1] are set in bold."""

    caption: str
    columns: Sequence[Column]
    table: pd.DataFrame
    emphasis: tuple[str, str] | None = None


def page(title: str, sections: Sequence[Section], notes: Sequence[str]) -> str:
    """The page. The part between its <main> tags, style included, also fits into another page."""
    body = "\n".join(_section(section) for section in sections)
    items = "\n".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'</head>\n<body>\n<main class="kvstages">\n<style>\n{CSS}\n</style>\n<h1>{html.escape(title)}</h1>\n'
        f'{body}\n<ul class="notes">\n{items}\n</ul>\n</main>\n</body>\n</html>\n'
    )


def write_page(output: Path, table: pd.DataFrame, text: str) -> None:
    """Write a page (.html) and, beside it, its table (.csv); ValueError where ``output`` does not end in .html."""
    if output.suffix != ".html":
        raise ValueError(f"{output}: a table's output ends in .html; the .csv is written beside it")
    write_table(output.with_suffix(".csv"), table, table.columns)
    write_text(output, text)


def _section(section: Section) -> str:
    heads, rows = [], []
    for column in section.columns:
        kind = "text" if column.write is str else ""
        heads.append(f"<th{_kind(kind)}>{html.escape(column.header)}</th>")
        if f"published_{column.name}" in section.table:
            heads.append('<th class="published">published</th>')
    table = section.table.astype(object)
    for row in table.where(table.notna(), None).to_dict("records"):
        cells = []
        for column in section.columns:
            kind = "text" if column.write is str else ""
            cells.append(f"<td{_kind(kind)}>{_value(column, row)}</td>")
            if f"published_{column.name}" in row:
                cells.append(f'<td class="published">{_write(column.write, row[f"published_{column.name}"])}</td>')
        strong = section.emphasis is not None and row[section.emphasis[0]] == section.emphasis[1]
        rows.append(f"<tr{_kind('strong' if strong else '')}>{''.join(cells)}</tr>")
    if not rows:
        rows.append(f'<tr><td class="text" colspan="{len(heads)}">{NO_ROWS}</td></tr>')
    return (
        f'<div class="scroll">\n<table>\n<caption>{html.escape(section.caption)}</caption>\n'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>\n</div>"
    )


def _kind(name: str) -> str:
    return f' class="{name}"' if name else ""


def _value(column: Column, row: dict[str, Any]) -> str:
    written = _write(column.write, row[column.name])
    if not column.interval or row[f"{column.name}_low"] is None:
        return written
    written += _interval(column, row, "", "[]")
    return written + (
        _interval(column, row, "documents_", "{}") if row.get(f"{column.name}_documents_low") is not None else ""
    )


def _interval(column: Column, row: dict[str, Any], kind: str, brackets: str) -> str:
    low, high = (_write(column.write, row[f"{column.name}_{kind}{end}"]) for end in ("low", "high"))
    return f'<span class="interval">{brackets[0]}{low.removesuffix(" %")}, {high}{brackets[1]}</span>'


def _write(write: Callable[[Any], str], value: Any) -> str:
    return "–" if value is None else html.escape(write(value))


def divergence(value: float) -> str:
    """Four digits; powers of ten below 0.0001 (0.001528, −9.261 × 10⁻⁶); 0 is 0."""
    if value == 0:
        return "0"
    if abs(value) >= 1e-4:
        return f"{value:#.4g}".rstrip(".").replace("-", "−")
    mantissa, exponent = f"{value:.3e}".replace("-", "−", int(value < 0)).split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def percent(value: float) -> str:
    """A share as per cent with two decimals."""
    return f"{100 * value:.2f} %"


def count(value: float) -> str:
    """A whole number with separators; a mean of whole numbers with one decimal."""
    return f"{int(value):,}" if value == int(value) else f"{value:,.1f}"


def factor(value: float) -> str:
    """A compression factor."""
    return f"{value:.2f}×"


def decimal(places: int) -> Callable[[float], str]:
    """Writer of numbers with so many decimals."""
    return lambda value: f"{value:,.{places}f}".replace("-", "−")


def share(value: float) -> str:
    """A share as per cent with one decimal, and a real minus."""
    return f"{decimal(1)(100 * value)} %"
