"""What a person sees of ``epcache probe``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from epcache.cli.render import (
    PLAIN_SECONDS,
    LiveView,
    duration,
    next_step,
    note,
    percent,
    screen,
    stream_is_terminal,
    table,
)
from epcache.results import count

if TYPE_CHECKING:
    from epcache.convergence import Convergence
    from epcache.pipelines.probe import ProbeStudy
    from epcache.results import Row
    from epcache.watch import EpochReport

SHOWN = 30
"""Rows of a table; ``rows.jsonl`` has all."""


class ProbeView(LiveView):
    """Shows training, pass by pass."""

    _first: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def start(self, what: str, epochs: int) -> None:
        """A pass begins."""
        self.__exit__()
        if what not in self._said:  # the passes of a study differ in their title alone
            self.message(what)
            self._said.add(what)
        self._started = self._shown = time.monotonic()
        self._first = None
        if self._terminal:
            self._bar = Progress(
                TextColumn("{task.fields[phase]}"),
                BarColumn(bar_width=None),
                TextColumn("epoch {task.completed}/{task.total}"),
                TextColumn("{task.fields[text]}"),
                console=screen(stderr=True),
                transient=True,
                expand=True,
                refresh_per_second=4,
            )
            self._bar.add_task("", total=epochs, phase=what.split()[0], text="")
            self._bar.start()

    def epoch(self, report: EpochReport) -> None:
        """An epoch is through."""
        now = time.monotonic()
        if self._first is None:
            self._first = report.epoch - 1  # what an earlier run did took no time of ours
        rate = (report.epoch - self._first) / max(now - self._started, 1e-9)
        text = f"{duration((report.epochs - report.epoch) / rate)} left"
        if report.loss is not None and report.top1 is not None:
            text = f"loss {report.loss:.3f}  best {report.top1:.4f}  {text}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=report.epoch, text=text)
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self.message(f"epoch {report.epoch}/{report.epochs}  {text}")


def probed(study: ProbeStudy) -> None:
    """The rows, best first, and what to do next."""
    result_table(study.rows, study.rows_path)
    for text in converged(study.convergence):
        note(text)
    if study.exported is not None:
        note(f"wrote {study.exported} in the layout of published heads")
    number = count(len(study.rows), "row")
    next_step(
        f"{number} of this command in {study.rows_path}; store {study.store}", "epcache report"
    )


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table of results."""

    name: str
    text: Callable[[Row], str]
    always: bool = True
    """Otherwise it is shown where rows differ in it, and told below where they do not."""
    spare: int = 0
    """The highest is left out first where a terminal is too narrow; 0 never is."""
    right: bool = True


COLUMNS = (
    Column(name="pooler", text=lambda row: row.classifier, right=False),
    Column(name="layer", text=lambda row: place(row), always=False, right=False),
    Column(name="images", text=lambda row: amount(row), always=False),
    Column(name="tokens", text=lambda row: row.tokens, always=False, spare=6, right=False),
    Column(name="norm", text=lambda row: row.norm, always=False, spare=4, right=False),
    Column(name="M", text=lambda row: some(row.num_queries)),
    Column(name="O", text=lambda row: some(row.dim_out), always=False, spare=3),
    Column(name="params", text=lambda row: some(row.num_params), spare=8),
    Column(name="lr", text=lambda row: some(row.lr)),
    Column(name="decay", text=lambda row: some(row.weight_decay), always=False, spare=2),
    Column(name="k", text=lambda row: some(row.k), always=False, spare=5),
    Column(name="l2", text=lambda row: some(row.l2), always=False, spare=5),
    Column(name="epochs", text=lambda row: some(row.epochs), always=False, spare=7),
    Column(name="seed", text=lambda row: some(row.seed), always=False, spare=1),
    Column(name="val", text=lambda row: percent(row.val_top1)),
    Column(name="test", text=lambda row: percent(row.test_top1)),
    Column(name="best", text=lambda row: percent(row.test_top1_best), spare=9),
    Column(name="epoch", text=lambda row: some(row.best_epoch), spare=10),
    Column(name="run", text=lambda row: row.run, right=False),
)


def result_table(found: Sequence[Row], rows_path: Path) -> None:
    """Rows, best first, in as many columns as there is room for."""
    rows = sorted(found, key=worth, reverse=True)
    shown = rows[:SHOWN]
    columns, same = choose_columns(shown, screen().width if stream_is_terminal(False) else 200)
    table(
        [column.name for column in columns],
        [[column.text(row) for column in columns] for row in shown],
        right=",".join(column.name for column in columns if column.right),
    )
    if len(rows) > SHOWN:
        note(f"and {len(rows) - SHOWN} more in {rows_path}")
    if same:
        note("all: " + ", ".join(same))
    note(explanation(rows))


def choose_columns(rows: Sequence[Row], width: int) -> tuple[list[Column], list[str]]:
    """The columns that tell rows apart and fit, and in words what the rows have in common."""
    columns, same = [], []
    for column in COLUMNS:
        values = {column.text(row) for row in rows}
        known = values - {"-"}  # no difference: it is one of another kind of row
        if column.always or len(known) > 1:
            columns.append(column)
        elif known == values:
            same += [f"{column.name} {value}" for value in known]

    def needed() -> int:
        cells = [[c.name, *(c.text(row) for row in rows)] for c in columns]
        return sum(max(map(len, column)) for column in cells) + 2 * (len(columns) - 1)

    while needed() > width and (spare := [c for c in columns if c.spare]):
        columns.remove(max(spare, key=lambda column: column.spare))
    return columns, same


def worth(row: Row) -> tuple[float, float]:
    """What a table is sorted by: held-out accuracy, then that of the evaluation split."""
    val = row.val_top1 if row.val_top1 is not None else row.test_top1_best
    return (val or 0.0, row.test_top1 or 0.0)


def place(row: Row) -> str:
    """``11``, or ``8-11`` for the average of those layers."""
    first = row.layer - (row.average_layers or 1) + 1
    return str(row.layer) if first == row.layer else f"{first}-{row.layer}"


def amount(row: Row) -> str:
    """``4 shots``, ``10%`` or ``all`` training images."""
    if row.shots is not None:
        return f"{row.shots} shot{'s' * (row.shots > 1)}"
    return "all" if row.share is None else f"{100 * row.share:g}%"


def some(value: float | None) -> str:
    """A number, or ``-``."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def converged(found: Sequence[Convergence]) -> list[str]:
    """``97% of the final accuracy after: ep M=32 6 of 50 epochs, gap 20``."""
    if not found:
        return []
    parts = [
        f"{each.pooler}{'' if each.num_queries is None else f' M={each.num_queries}'} "
        f"{each.epochs_to_share} of {each.epochs}"
        for each in found
    ]
    return [f"epochs to {100 * found[0].share:.0f}% of the final accuracy: {', '.join(parts)}"]


def explanation(rows: Sequence[Row]) -> str:
    """What the columns mean."""
    if all(row.recipe == "imported" for row in rows):
        return "accuracies in %; best: of the head as it came, which was not trained here"
    if all(row.val_top1 is None for row in rows):
        return (
            "accuracies in %; nothing was held out, so the epoch was chosen on the evaluation set"
        )
    few = any(row.shots is not None or row.share is not None for row in rows)
    held = "training images outside the subset" if few else "held-out training images"
    return (
        f"accuracies in %; val: {held}, which chose rate and epoch; test: at that epoch, after "
        f"training on all of {'the subset' if few else 'train'}; best: of the best epoch, as "
        f"published tables print it"
    )
