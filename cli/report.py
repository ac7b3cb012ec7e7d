"""``epcache report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epcache.cli.options import Json, print_json


def report(
    results: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of results. [default: results of $EPCACHE_HOME]", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write. [default: report in that folder]")
    ] = None,
    json: Json = False,
) -> None:
    """Write results as one page, with figures (PNG, SVG) and tables (CSV, Markdown, LaTeX).

    The page needs no network and no other file.
    """
    from epcache.cli import render_report
    from epcache.pipelines import report as pipeline

    request = pipeline.ReportRequest(results=results, out=out)
    with render_report.ReportView() as view:
        written = pipeline.report(request, say=view.say)
    if json:
        print_json(written.to_json())
    else:
        render_report.reported(written)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)
