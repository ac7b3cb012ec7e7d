"""``epcache demo``."""

from __future__ import annotations

import typer

from epcache.cli import render_store
from epcache.cli.options import Json, print_json


def demo(json: Json = False) -> None:
    """Run the whole pipeline on bundled weights and data: no network, no options."""
    from epcache.pipelines import demo as pipeline

    with render_store.ExtractView() as view:
        result = pipeline.demo(view)
    if json:
        print_json(result)
    else:
        render_store.extracted(result["extract"])


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)
