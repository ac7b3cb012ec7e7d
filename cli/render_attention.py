"""What a person sees of ``epcache attention``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn

from epcache.cli.render import (
    PLAIN_SECONDS,
    LiveView,
    facts,
    next_step,
    note,
    percent,
    screen,
    table,
)

if TYPE_CHECKING:
    from epcache.pipelines.attention import AttentionStudy, RunStudy

NEARLY_UNIFORM = 0.99
"""Entropy from which a map says nothing."""
SHOWN = 16
"""Queries in the table; all of them are in the file."""
SHORT = {
    "accuracy_drop": "drop",
    "off_centre": "off centre",
    "complementarity": "apart",
    "centroid_in_box": "in box",
}
"""Measures in tables, where their names are long."""


class AttentionView(LiveView):
    """Shows how many images of which run are through."""

    def start(self, what: str, total: int) -> None:
        """A run begins."""
        self.__exit__()
        self._what, self._shown = what, time.monotonic()
        if self._terminal:
            self._bar = Progress(
                TextColumn(what),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:,.0f} of {task.total:,.0f} images"),
                console=screen(stderr=True),
                transient=True,
                expand=True,
                refresh_per_second=4,
            )
            self._bar.add_task("", total=total)
            self._bar.start()

    def images(self, done: int, total: int) -> None:
        """So many images are through."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self.message(f"{self._what}: {done:,} of {total:,} images")


def attended(study: AttentionStudy) -> None:
    """One run in full, several side by side; then where the pictures are."""
    first = study.runs[0]
    facts(
        [("store", str(study.store)), ("images", f"{first.analysis.num_images:,} ({first.split})")]
    )
    if len(study.runs) == 1:
        one_run(first)
    else:
        compare(study.runs)
    where = str(first.folder if len(study.runs) == 1 else first.folder.parent)
    num_pictures = sum(len(run.figures) for run in study.runs)
    next_step(f"attention.json and {num_pictures} pictures in {where}", "epcache report")


def one_run(run: RunStudy) -> None:
    """Its queries, worth most first, and how their measures go together."""
    analysis = run.analysis
    boxed = analysis.num_boxed > 0
    queries = sorted(analysis.queries, key=lambda query: -query.accuracy_drop)
    summary = [
        ("run", f"{run.row.run}: {run.row.pooler}, {len(queries)} maps"),
        ("accuracy", percent(analysis.accuracy)),
    ]
    if analysis.complementarity is not None:
        summary.append(("apart", number(analysis.complementarity)))
    if boxed:
        localised = (
            f"{percent(analysis.max_box_acc_v2)} (version 1 {percent(analysis.max_box_acc_v1)})"
        )
        summary.append(("MaxBoxAcc", f"{localised} on {analysis.num_boxed:,} images"))
    facts(summary)
    table(
        ["query", "drop", "entropy", "centroid", "off centre", "apart", *(["in box"] * boxed)],
        [
            (
                str(query.query),
                points(query.accuracy_drop),
                number(query.entropy),
                f"{query.centroid[0]:.2f} {query.centroid[1]:.2f}",
                number(query.off_centre),
                number(query.complementarity),
                *([percent(query.centroid_in_box)] * boxed),
            )
            for query in queries[:SHOWN]
        ],
        right="query,drop,entropy,centroid,off centre,apart,in box",
    )
    if len(queries) > SHOWN:
        note(f"and {len(queries) - SHOWN} more in {run.folder / 'attention.json'}")
    note(
        "drop: points of accuracy lost when the query's map is made uniform; entropy: 1 is "
        "uniform; centroid: x, y from the top left; apart: total variation distance to other maps"
    )
    if min(query.entropy for query in queries) > NEARLY_UNIFORM:
        note("all maps are nearly uniform: what the pictures show is stretched noise")
    correlations(run)


def correlations(run: RunStudy) -> None:
    """Of the measures, over the queries."""
    found = run.analysis.correlations
    names = [SHORT.get(name, name) for name in found["measures"]]
    if len(run.analysis.queries) < 3:
        note("correlations need three queries")
        return
    table(
        ["correlation", *names],
        [(name, *map(number, row)) for name, row in zip(names, found["matrix"], strict=True)],
        right=",".join(names),
    )


def compare(runs: Sequence[RunStudy]) -> None:
    """Runs beside each other, most accurate first."""
    boxed = any(run.analysis.num_boxed for run in runs)
    table(
        ["run", "pooler", "maps", "accuracy", "largest drop", "entropy", "apart",
         *(["in box", "MaxBoxAccV2", "V1"] * boxed)],
        [run_cells(run, boxed) for run in sorted(runs, key=lambda run: -run.analysis.accuracy)],
        right="maps,accuracy,largest drop,entropy,apart,in box,MaxBoxAccV2,V1",
    )  # fmt: skip
    note(
        "means over the queries; largest drop: points of accuracy lost when the one map that is "
        "worth most is made uniform; apart: total variation distance between two maps"
    )


def run_cells(run: RunStudy, boxed: bool) -> Sequence[str]:
    """A row of the comparison."""
    analysis = run.analysis
    in_box = [query.centroid_in_box for query in analysis.queries]
    inside = [share for share in in_box if share is not None]
    return (
        run.row.run,
        run.row.pooler,
        str(len(analysis.queries)),
        percent(analysis.accuracy),
        points(max(query.accuracy_drop for query in analysis.queries)),
        number(sum(query.entropy for query in analysis.queries) / len(analysis.queries)),
        number(analysis.complementarity),
        *(
            [
                percent(sum(inside) / len(inside) if inside else None),
                percent(analysis.max_box_acc_v2),
                percent(analysis.max_box_acc_v1),
            ]
            * boxed
        ),
    )


def points(share: float) -> str:
    """``1.25`` for 0.0125."""
    return f"{100 * share:.2f}"


def number(value: float | None) -> str:
    """Three digits; ``-`` where there is none."""
    return "-" if value is None else f"{value:.3f}"
