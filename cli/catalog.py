"""``epcache backbones`` and ``epcache datasets``: what can be named."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from epcache.cli import render
from epcache.cli.options import Json, print_json


def backbones(json: Json = False) -> None:
    """List the backbones that have an alias; any other timm model works by its timm name."""
    from epcache.catalog import list_backbones

    entries = list_backbones()
    if json:
        print_json({"backbones": [asdict(entry) for entry in entries]})
    else:
        render.backbones(entries)


def datasets(
    name: Annotated[str | None, typer.Argument(help="Show this one's expected layout.")] = None,
    json: Json = False,
) -> None:
    """List the data sets, or say how one has to lie on disk and where to get it."""
    from epcache.manifest import dataset_info, list_datasets

    found = [dataset_info(name)] if name else list_datasets()
    if json:
        print_json({"datasets": [asdict(info) for info in found]})
    elif name:
        render.dataset(found[0])
    else:
        render.datasets(found)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(backbones)
    app.command()(datasets)
