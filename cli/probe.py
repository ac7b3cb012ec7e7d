"""``epcache probe``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import render, render_probe
from epcache.cli.features import numbers
from epcache.cli.options import Json, comma_list, print_json, share
from epcache.cli.store import StorePath


def probe(
    context: typer.Context,
    store: StorePath = None,
    pooler: Annotated[
        list[str] | None,
        typer.Option(help="Poolers, trained in one pass: repeat or use commas. [default: ep]"),
    ] = None,
    num_queries: Annotated[
        list[str] | None, typer.Option("--M", "--num-queries", help="Queries. [default: 32 of ep]")
    ] = None,
    dim_out: Annotated[
        list[str] | None, typer.Option(help="Pooled width O. [default: the tokens' width]")
    ] = None,
    layer: Annotated[int, typer.Option(help="Block index; -1 is the last.")] = -1,
    tokens: Annotated[
        str, typer.Option(help="patch, all ([CLS] in front of them), or cls.")
    ] = "patch",
    norm: Annotated[
        str, typer.Option(help="final, none, or auto: what the backbone's protocol does.")
    ] = "auto",
    lr: Annotated[
        list[str] | None, typer.Option(help="Learning rates to try. [default: the recipe's grid]")
    ] = None,
    weight_decay: Annotated[
        list[str] | None, typer.Option(help="Weight decays to try. [default: the recipe's]")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="small: AdamW and a grid of rates. paper: LARS, batch 4096.")
    ] = "small",
    optimizer: Annotated[
        str | None, typer.Option(help="lars, sgd, adamw; needs --lr. [default: the recipe's]")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="[default: the recipe's]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="[default: the recipe's]")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="[default: the recipe's]")] = None,
    shots: Annotated[int | None, typer.Option(help="Training images a class.")] = None,
    views: Annotated[
        int | None, typer.Option(help="Cached views to alternate between. [default: all]")
    ] = None,
    seed: Annotated[
        list[str] | None, typer.Option(help="Of the initial values; several are several probes.")
    ] = None,
    order_seed: Annotated[
        int, typer.Option(help="Of the data order, the held-out images and the shots.")
    ] = 0,
    holdout: Annotated[
        str,
        typer.Option(help="Share of train that chooses rate and epoch; 0 chooses nothing."),
    ] = "0.1",
    memory_budget: Annotated[
        str | None,
        typer.Option(help="Tokens kept in memory, such as 2GB. [default: half of what is free]"),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16. [auto: bfloat16 where the hardware has it]")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    export: Annotated[
        Path | None, typer.Option(help="Write the best ep probe as a published head.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train also what has a result already.")
    ] = False,
    json: Json = False,
) -> None:
    """Train probes on a store: choose on held-out training images, then refit and score.

    Interrupted or killed, the same command goes on from its last epoch.
    """
    from epcache.hardware import parse_bytes
    from epcache.pipelines import probe as pipeline
    from epcache.pipelines.store import find_store

    shared = {
        "layer": layer, "tokens": tokens, "norm": norm, "recipe": recipe, "optimizer": optimizer,
        "epochs": epochs, "batch_size": batch_size, "label_smoothing": label_smoothing,
        "shots": shots, "views": views, "order_seed": order_seed, "holdout": share(holdout),
    }  # fmt: skip
    request = pipeline.ProbeRequest(
        configs=pipeline.make_configs(
            comma_list(pooler) or ("ep",),
            num_queries=numbers(num_queries, int, "--M"),
            dim_outs=numbers(dim_out, int, "--dim-out"),
            lrs=numbers(lr, float, "--lr"),
            weight_decays=numbers(weight_decay, float, "--weight-decay"),
            seeds=numbers(seed, int, "--seed"),
            shared=shared,
        ),
        memory_budget=None if memory_budget is None else parse_bytes(memory_budget),
        device=device,
        precision=precision,
        again=again,
        export=export,
        store=find_store(store, say=render.note),
    )
    with render_probe.ProbeView() as view:
        try:
            study = pipeline.probe(request, view)
        except KeyboardInterrupt:
            view.message("stopped; whole epochs are kept. Go on with the same command:")
            view.message(shlex.join(["epcache", *context.obj]))
            raise
    if json:
        print_json(study.to_json())
    else:
        render_probe.probed(study)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(probe)
