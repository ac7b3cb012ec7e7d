"""What a person sees of ``epcache probe``."""

from __future__ import annotations

import shlex
import time
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
    table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from epcache.pipelines.probe import ProbeStudy
    from epcache.results import Row
    from epcache.watch import EpochReport

SHOWN = 30
"""Rows of a table; ``rows.jsonl`` has all."""


class ProbeView(LiveView):
    """Shows training, pass by pass."""

    _first: int | None = None

    def start(self, what: str, epochs: int) -> None:
        """A pass begins."""
        self.__exit__()
        self.message(what)
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
    rows = sorted(study.rows, key=worth, reverse=True)
    table(
        [
            "pooler", "M", "O", "params", "lr", "decay", "seed", "val", "test", "best epoch's",
            "epoch", "run",
        ],
        [cells(row) for row in rows[:SHOWN]],
        right="M,O,params,lr,decay,seed,val,test,best epoch's,epoch",
    )  # fmt: skip
    if len(rows) > SHOWN:
        note(f"and {len(rows) - SHOWN} more in {study.rows_path}")
    note(explanation(rows))
    if study.exported is not None:
        note(f"wrote {study.exported} in the layout of published heads")
    best = study.best
    assert best is not None
    next_step(
        f"{len(rows)} rows in {study.rows_path}; store {study.store}",
        f"epcache knn {shlex.quote(str(study.store))}",
    )


def worth(row: Row) -> tuple[float, float]:
    """What a table is sorted by: scored rows first, then held-out accuracy."""
    val = row.val_top1 if row.val_top1 is not None else row.test_top1_best
    return (val or 0.0, row.test_top1 or 0.0)


def cells(row: Row) -> Sequence[str]:
    """A row of the table."""
    return (
        row.pooler,
        "-" if row.num_queries is None else str(row.num_queries),
        str(row.dim_out),
        f"{row.num_params:,}",
        f"{row.lr:g}",
        f"{row.weight_decay:g}",
        str(row.seed),
        percent(row.val_top1),
        percent(row.test_top1),
        percent(row.test_top1_best),
        "-" if row.best_epoch is None else str(row.best_epoch),
        row.run,
    )


def explanation(rows: Sequence[Row]) -> str:
    """What the columns mean."""
    if all(row.val_top1 is None for row in rows):
        return (
            "accuracies in %; nothing was held out, so the epoch was chosen on the evaluation set"
        )
    return (
        "accuracies in %; val: held-out training images, which chose rate and epoch; test: at that "
        "epoch, after training on all of train; best epoch's: as published tables print it"
    )
