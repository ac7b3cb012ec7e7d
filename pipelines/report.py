"""Results as a page, figures and tables; reads the results folder and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epcache.convergence import Convergence, convergence
from epcache.ranks import rank_backbones
from epcache.report.collect import Results, collect
from epcache.report.figures import FIGURES, make_figures
from epcache.report.formats import write_table
from epcache.report.page import make_page
from epcache.report.published import beside
from epcache.report.series import training_curves
from epcache.report.tables import TABLES, make_tables
from epcache.results import results_dir
from epcache.store.files import disk_full_is_clear, write_durably

REPORT = "report"
"""Folder of results."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What the command asks."""

    results: Path | None = None
    """The results folder; None is ``$EPCACHE_HOME/results``."""
    out: Path | None = None
    """Where to write; None is ``report`` in the results folder."""


@dataclass(frozen=True, kw_only=True)
class ReportStudy:
    """What was written."""

    report: Path
    figures: Sequence[Path]
    tables: Sequence[Path]
    num_rows: int
    problems: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """The command's JSON object."""
        return {
            "report": str(self.report),
            "figures": [str(path) for path in self.figures],
            "tables": [str(path) for path in self.tables],
        }


def report(request: ReportRequest, *, say: Callable[[str], None] = lambda _: None) -> ReportStudy:
    """Write ``report.html``, ``figures/`` and ``tables/``.

    Args:
        request: What to do.
        say: Told what goes on.
    """
    folder = request.results or results_dir()
    out = request.out or folder / REPORT
    results = collect(folder)
    ranks = rank_backbones(results.rows)
    published = beside(results)
    with disk_full_is_clear(out):
        clear(out)
        tables = make_tables(results, published, ranks, converged(results))
        table_paths = [path for t in tables.values() for path in write_table(t, out / "tables")]
        pictures = make_figures(results, ranks, out / "figures", say=say)
        page = make_page(results, tables, pictures, published)
    write_durably(out / "report.html", page.encode(), partial_dir=out)
    return ReportStudy(
        report=out / "report.html",
        figures=[path for picture in pictures.values() for path in picture.files],
        tables=table_paths,
        num_rows=len(results.entries),
        problems=results.problems,
    )


def clear(out: Path) -> None:
    """Remove figures and tables of an earlier report; other files of the user stay."""
    for folder, names, endings in (
        ("figures", FIGURES, ("png", "svg")),
        ("tables", TABLES, ("csv", "md", "tex")),
    ):
        for name in names:
            for ending in endings:
                (out / folder / f"{name}.{ending}").unlink(missing_ok=True)


def converged(results: Results) -> list[Convergence]:
    """How soon the runs whose training curves are drawn got as good as they get."""
    runs = [
        curve.entry.row
        for task in results.tasks
        for curve in training_curves(results, task).values()
        if curve.is_final and all(value == value for value in curve.top1)
    ]
    return convergence(runs, results.folder)
