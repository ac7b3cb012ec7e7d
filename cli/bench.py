"""``epcache bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from epcache.cli import render
from epcache.cli.options import Json, comma_list, print_json
from epcache.errors import ConfigError

NAMES = ("extract", "write", "read", "memory", "step", "bank", "linear", "epochs")


def bench(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Some of {', '.join(NAMES)}; repeat or use commas.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure this machine: what caching costs and what it gives, as ratios in one run."""
    names = comma_list(only) or NAMES
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--only {name}: expected some of {', '.join(NAMES)}")
    from epcache.pipelines import bench as pipeline

    result = pipeline.bench(names, render.note)
    if json:
        print_json(result)
    else:
        render.bench(result)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)
