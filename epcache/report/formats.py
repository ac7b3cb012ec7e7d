"""A table and the forms it takes: CSV with raw values, Markdown, LaTeX (booktabs) and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NONE = "\N{EN DASH}"
"""Stands where there is no value."""
MOST_STANDING = 14
"""Rows of a table in the page before it scrolls inside its box."""
MOST_PRINTED = 200
"""Rows of a table for people; the CSV has all."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    name: str
    """In the CSV, such as ``test_top1``."""
    label: str
    kind: str = "text"
    """text, count, percent (of a fraction), points (percentage points of a fraction) or number."""

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right."""
        return self.kind != "text"

    def show(self, value: Any) -> str:
        """A value for people; an en dash where there is none."""
        if value is None:
            return NONE
        return SHOW[self.kind](value)


SHOW: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda value: f"{value:,}",
    "percent": lambda value: f"{100 * value:.2f}",
    "points": lambda value: f"{100 * value:+.2f}",
    "number": lambda value: f"{value:.4g}",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns."""

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    is_data: bool = False
    """Too wide for paper: CSV only."""

    def shown(self) -> list[list[str]]:
        """The rows that are printed for people, as text."""
        return [
            [column.show(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows[:MOST_PRINTED]
        ]

    @property
    def cut(self) -> str:
        """A sentence where not all rows are printed."""
        if len(self.rows) <= MOST_PRINTED:
            return ""
        return f"The first {MOST_PRINTED} of {len(self.rows):,} rows; {self.name}.csv has all."


def write_table(table: Table, folder: Path) -> list[Path]:
    """Write a table in its three forms."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {"csv": to_csv(table)}
    if not table.is_data:
        forms |= {"md": to_markdown(table), "tex": to_latex(table)}
    paths = []
    for ending, text in forms.items():
        path = folder / f"{table.name}.{ending}"
        path.write_text(text, encoding="utf-8", newline="")
        paths.append(path)
    return paths


def to_csv(table: Table) -> str:
    """Raw values: accuracies are fractions, nothing is an empty cell."""

    def raw(value: Any) -> Any:
        # the writer quotes line feeds, not lone carriage returns
        return value.replace("\r", " ") if isinstance(value, str) else value

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([raw(value) for value in row] for row in table.rows)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """A pipe table under its title."""
    lines = [
        f"### {markdown(table.title)}",
        "",
        "| " + " | ".join(markdown(column.label) for column in table.columns) + " |",
        "|" + "|".join("---:" if column.is_number else "---" for column in table.columns) + "|",
        *("| " + " | ".join(map(markdown, row)) + " |" for row in table.shown()),
        "",
        *(markdown(text) for text in (table.caption, table.cut) if text),
    ]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    r"""A booktabs table; the document needs \usepackage{booktabs} and nothing else."""
    layout = "".join("r" if column.is_number else "l" for column in table.columns)
    labels = " & ".join(latex(column.label) for column in table.columns)
    lines = [
        *([f"% {table.cut}"] if table.cut else []),
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex(table.title)}. {latex(table.caption)}}}",
        rf"  \label{{tab:epcache-{table.name}}}",
        rf"  \begin{{tabular}}{{{layout}}}",
        r"    \toprule",
        rf"    {labels} \\",
        r"    \midrule",
        *(f"    {' & '.join(map(latex, row))} " + r"\\" for row in table.shown()),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """A table in a box that scrolls by itself, so that the page does not."""
    heads = "".join(
        f'<th scope="col"{_number_class(column)}>{escape(column.label)}</th>'
        for column in table.columns
    )
    rows = "\n".join(
        "<tr>"
        + "".join(
            f"<td{_number_class(column)}>{escape(cell)}</td>"
            for column, cell in zip(table.columns, row, strict=True)
        )
        + "</tr>"
        for row in table.shown()
    )
    caption = escape(" ".join(text for text in (table.caption, table.cut) if text))
    tall = " tall" if len(table.rows) > MOST_STANDING else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n"
        f'<p class="caption">{caption}</p>'
    )


def _number_class(column: Column) -> str:
    return ' class="n"' if column.is_number else ""


def escape(text: object) -> str:
    """For HTML text and attributes."""
    return html.escape(one_line(text))


def markdown(text: object) -> str:
    """For a cell of a Markdown table."""
    plain = html.escape(one_line(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]|~])", r"\\\1", plain)


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    NONE: "--", "±": r"\ensuremath{\pm}", "\N{MINUS SIGN}": r"\ensuremath{-}",
    "[": "{[}", "]": "{]}",
}  # fmt: skip


def latex(text: object) -> str:
    """For LaTeX text; brackets are wrapped, since one after a row's end would be its argument."""
    return "".join(LATEX.get(letter, letter) for letter in one_line(text))


def one_line(text: object) -> str:
    """Without line breaks and control characters, which no format takes."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def short(text: object, most: int) -> str:
    """At most so many letters, the middle left out: both ends of a name tell it from others."""
    plain = one_line(text)
    if len(plain) <= most:
        return plain
    front = (most - 1 + 1) // 2
    return f"{plain[:front]}…{plain[len(plain) - (most - 1 - front) :]}"
