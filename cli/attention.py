"""``epcache attention``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import render, render_attention
from epcache.cli.options import Json, comma_list, print_json, some
from epcache.cli.store import StorePath


def attention(
    store: StorePath = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="Runs to look into and compare: repeat or use commas. [default: the store's "
            "best run of an attentive pooler]"
        ),
    ] = None,
    boxes: Annotated[
        Path | None,
        typer.Option(
            help="Ground truth, a CSV file path,x0,y0,x1,y1 in pixels. [default: the data set's "
            "own, where it has any]"
        ),
    ] = None,
    images: Annotated[int, typer.Option(help="Images in the gallery; 0 draws none.")] = 6,
    split: Annotated[
        str | None, typer.Option(help="[default: the evaluation split]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Each run gets a folder there. [default: attention, beside the results]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    json: Json = False,
) -> None:
    """Look where trained poolers look: measures of each query, localisation, pictures."""
    from epcache.pipelines import attention as pipeline
    from epcache.pipelines.store import find_store

    runs = some(comma_list(run), run, "--run")
    request = pipeline.AttentionRequest(
        store=store if runs or store else find_store(None, say=render.note),
        runs=runs,
        boxes=boxes,
        num_images=images,
        split=split,
        out=out,
        seed=seed,
        device=device,
    )
    with render_attention.AttentionView() as view:
        study = pipeline.attention(request, view)
    if json:
        print_json(study.to_json())
    else:
        render_attention.attended(study)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(attention)
