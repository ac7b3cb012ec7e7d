"""What the commands that train have in common."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epcache.cli import render, render_studies
from epcache.cli.options import print_json
from epcache.cli.options import running as options
from epcache.cli.render_probe import ProbeView

if TYPE_CHECKING:
    from epcache.pipelines.study import Running, StudyResult

Holdout = Annotated[
    str, typer.Option(help="Share of train that chooses rate, epoch and layer; 0 chooses nothing.")
]


def stores(given: Sequence[Path] | None) -> list[Path]:
    """The stores that were named, or else the one sealed last."""
    from epcache.pipelines.store import find_store

    return list(given or ()) or [find_store(None, say=render.note)]


def running(memory_budget: str | None, device: str, precision: str, again: bool) -> Running:
    """The options that change no result."""
    from epcache.pipelines.study import Running

    return Running(**options(memory_budget, device, precision, again))


@contextlib.contextmanager
def watched(context: typer.Context, *, kept: str = "what is done is") -> Iterator[ProbeView]:
    """Progress; when it is interrupted, how to go on."""
    with ProbeView() as view:
        try:
            yield view
        except KeyboardInterrupt:
            view.message(f"stopped; {kept} kept. Go on with the same command:")
            view.message(shlex.join(["epcache", *context.obj]))
            raise


def show(study: StudyResult, json: bool, render_it: Callable[[], None]) -> None:
    """One JSON object or tables; exit 1 where something failed."""
    if json:
        print_json(study.to_json())
        render_studies.failed(study.failures)
    else:
        render_it()
    if study.failures:
        render.error(
            f"{len(study.failures)} of what was asked for failed, as the table says; the rest is "
            f"done and kept"
        )
        raise typer.Exit(1)
