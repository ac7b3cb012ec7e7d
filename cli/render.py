"""Everything a person sees. Tables and progress use rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from epcache.store.files import format_bytes

if TYPE_CHECKING:
    from epcache.catalog import BackboneEntry
    from epcache.layouts.info import DatasetInfo


PLAIN_SECONDS = 5.0
"""Between two progress lines where there is no terminal."""


def screen(*, stderr: bool = False) -> Console:
    """A console; made anew, so that a test's or a pipe's stream is the one in use."""
    return Console(stderr=stderr, highlight=False, soft_wrap=not stream_is_terminal(stderr))


def stream_is_terminal(stderr: bool) -> bool:
    """Whether a person looks at the stream."""
    return (sys.stderr if stderr else sys.stdout).isatty()


def error(text: str) -> None:
    """One red line."""
    wrap = not stream_is_terminal(stderr=True)
    screen(stderr=True).print(f"[red]error:[/red] {escape(text)}", soft_wrap=wrap)


def note(text: str) -> None:
    """A quiet line on stderr."""
    wrap = not stream_is_terminal(stderr=True)
    screen(stderr=True).print(f"[dim]{escape(text)}[/dim]", soft_wrap=wrap)


def facts(rows: Iterable[tuple[str, str]], *, stderr: bool = False) -> None:
    """Names and values, aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if stream_is_terminal(stderr):
            table.add_row(name, escape(value))
        else:
            screen(stderr=stderr).print(f"{name:<10}{escape(value)}", soft_wrap=True)
    if table.row_count:
        screen(stderr=stderr).print(table)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: str = "") -> None:
    """A table on stdout; columns named in ``right`` (by commas) are aligned to the right."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="right" if column in right.split(",") else "left")
    for row in rows:
        grid.add_row(*(escape(cell) for cell in row))
    console = screen()
    if not stream_is_terminal(stderr=False):
        console.width = 200
    console.print(grid)


def next_step(done: str, command: str) -> None:
    """The last lines of a command: what was written, and what to run next."""
    console = screen()
    console.print(f"[green]{escape(done)}[/green]", soft_wrap=True)
    console.print(f"next: [bold]{escape(command)}[/bold]", soft_wrap=True)


def percent(share: float | None) -> str:
    """``84.03`` for 0.8403; ``-`` where there is none."""
    return "-" if share is None else f"{100 * share:.2f}"


def duration(seconds: float) -> str:
    """``0:42`` or ``3:07:21``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LiveView:
    """What a long command shows on stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._terminal = stream_is_terminal(stderr=True)
        self._bar: Progress | None = None
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        """Nothing to show yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar down, so that the cursor comes back whatever happened."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def message(self, text: str) -> None:
        """One line; above the bar where there is one."""
        console = self._bar.console if self._bar else screen(stderr=True)
        console.print(f"[dim]{escape(text)}[/dim]", soft_wrap=not self._terminal)


class ByteProgress:
    """A bar over bytes, on a terminal."""

    def __init__(self, what: str) -> None:
        self._bar = Progress(
            TextColumn(what),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=screen(stderr=True),
            disable=not stream_is_terminal(stderr=True),
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=1, text="")

    def __enter__(self) -> ByteProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it down."""
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Bytes read of bytes to read."""
        text = f"{format_bytes(done)} of {format_bytes(total)}"
        self._bar.update(self._task, completed=done, total=total, text=text)


def backbones(entries: Sequence[BackboneEntry]) -> None:
    """The aliases."""
    table(
        ["alias", "params", "layers", "width", "pixels", "norm", "weights", "timm name"],
        [
            (
                entry.alias,
                f"{entry.params:,.0f} M" if entry.params >= 1 else f"{entry.params:.1f} M",
                str(entry.layers),
                str(entry.dim),
                str(entry.image_size),
                entry.norm,
                entry.weights,
                entry.timm_name or "-",
            )
            for entry in entries
        ],
        right="params,layers,width,pixels",
    )
    note("any other timm model works by its timm name; your own as package.module:function")


def datasets(found: Sequence[DatasetInfo]) -> None:
    """The data sets."""
    table(
        ["name", "classes", "splits", "download", "title"],
        [
            (
                info.name,
                f"{info.num_classes:,}" if info.num_classes else "any",
                ", ".join(f"{name} {count:,}" for name, count in info.splits.items()) or "any",
                "yes" if info.download else "no",
                info.title,
            )
            for info in found
        ],
        right="classes",
    )
    note("expected layout and source of one: epcache datasets NAME")


def dataset(info: DatasetInfo) -> None:
    """How one data set has to lie on disk."""
    facts(
        [
            ("name", f"{info.name}: {info.title}"),
            ("splits", ", ".join(f"{n} {c:,}" for n, c in info.splits.items()) or "any"),
            ("source", info.source),
            ("licence", info.licence),
        ]
    )
    screen().print(escape(info.layout.rstrip()))


def bench(result: Mapping[str, Any]) -> None:
    """The figures, and what they were measured on."""
    table(
        ["figure", "ours", "reference", "ratio", "target", "n", "reference is"],
        [
            (
                figure["name"],
                f"{figure['ours']:.3g} {figure['unit']}",
                f"{figure['reference']:.3g} {figure['unit']}",
                f"{figure['ratio']:.2f}",
                figure["target"],
                str(figure["num_repeats"]),
                figure["what"] + (f" ({figure['note']})" if figure["note"] else ""),
            )
            for figure in result["figures"]
        ],
        right="ours,reference,ratio,target,n",
    )
    note(", ".join(f"{name} {value}" for name, value in result["hardware"].items()))
