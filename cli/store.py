"""``epcache info`` and ``epcache verify``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import render, render_store
from epcache.cli.options import Json, print_json

StorePath = Annotated[
    Path | None,
    typer.Argument(help="The store. [default: the one sealed last]", show_default=False),
]


def info(store: StorePath = None, json: Json = False) -> None:
    """Say what is in a store."""
    from epcache.pipelines import store as pipeline

    result = pipeline.info(pipeline.find_store(store, say=render.note, sealed=False))
    if json:
        print_json(result)
    else:
        render_store.info(result)


def verify(store: StorePath = None, json: Json = False) -> None:
    """Read every byte of a store and hold it against its journal and its seal."""
    from epcache.pipelines import store as pipeline

    path = pipeline.find_store(store, say=render.note, sealed=False)
    with render.ByteProgress("reading") as progress:
        found = pipeline.verify_store(path, progress=progress.update)
    if json:
        problems = [asdict(problem) for problem in found.problems]
        print_json(
            {
                "store": str(path),
                "ok": found.ok,
                "shards_checked": found.shards_checked,
                "problems": problems,
            }
        )
    else:
        render_store.verified(path, found)
    if not found.ok:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(info)
    app.command()(verify)
