"""``epcache poolers``: every pooler with its size and its work."""

from __future__ import annotations

from typing import Annotated

import typer

from epcache.cli import render_features
from epcache.cli.options import Json, print_json


def poolers(
    dim: Annotated[int, typer.Option(help="Token width.")] = 768,
    classes: Annotated[int, typer.Option(help="Classes of the linear head on top.")] = 1000,
    grid: Annotated[str, typer.Option(help="Patch tokens: 14 is 14 x 14; or 16x12.")] = "14",
    json: Json = False,
) -> None:
    """List the poolers: trainable parameters and multiply-adds an image, the head included."""
    sides = parse_grid(grid)
    from epcache.poolers import describe_poolers

    found = describe_poolers(dim, classes, sides)
    if json:
        print_json({"poolers": found})
    else:
        render_features.poolers(found, dim=dim, classes=classes, grid=sides)


def parse_grid(text: str) -> tuple[int, int]:
    """``14`` or ``16x12`` (height x width).

    Raises:
        typer.BadParameter: It is neither.
    """
    sides = text.split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) for side in sides):
        raise typer.BadParameter(f"--grid {text}: expected 14 or 16x12")
    return int(sides[0]), int(sides[-1])


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(poolers)
