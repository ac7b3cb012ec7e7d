"""``epcache probe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import options, render, render_probe
from epcache.cli.options import comma_list, numbers, print_json, running, share_of
from epcache.cli.options import share as as_share
from epcache.cli.store import StorePath
from epcache.cli.studies import watched


def probe(
    context: typer.Context,
    store: StorePath = None,
    pooler: Annotated[
        list[str] | None,
        typer.Option(help="Poolers, trained in one pass: repeat or use commas. [default: ep]"),
    ] = None,
    num_queries: options.NumQueries = None,
    dim_out: Annotated[
        list[str] | None, typer.Option(help="Pooled width O. [default: the tokens' width]")
    ] = None,
    layer: options.Layer = -1,
    average_layers: options.AverageLayers = 1,
    tokens: options.Tokens = "patch",
    norm: options.Norm = "auto",
    lr: options.Lr = None,
    weight_decay: options.WeightDecay = None,
    recipe: options.Recipe = "small",
    optimizer: options.Optimizer = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    label_smoothing: Annotated[float | None, typer.Option(help="[default: the recipe's]")] = None,
    shots: options.Shots = None,
    share: options.Share = None,
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
        typer.Option(
            help="Share of train that chooses rate and epoch; 0 chooses nothing. With --shots or "
            "--share, training images outside the subset choose."
        ),
    ] = "0.1",
    memory_budget: options.MemoryBudget = None,
    precision: options.Precision = "auto",
    device: options.Device = "auto",
    export: Annotated[
        Path | None, typer.Option(help="Write the best ep probe as a published head.")
    ] = None,
    imported: Annotated[
        Path | None,
        typer.Option("--import", help="Score a published EP head; nothing is trained."),
    ] = None,
    again: options.Again = False,
    json: options.Json = False,
) -> None:
    """Train probes on a store: choose on held-out training images, then refit and score.

    Interrupted or killed, the same command goes on from its last epoch.
    """
    from epcache.pipelines import probe as pipeline
    from epcache.pipelines.store import find_store

    if imported is not None:
        refuse_training(
            pooler=pooler, M=num_queries, dim_out=dim_out, lr=lr, weight_decay=weight_decay,
            optimizer=optimizer, epochs=epochs, batch_size=batch_size, shots=shots, share=share,
            label_smoothing=label_smoothing, views=views, seed=seed, export=export,
            average_layers=None if average_layers == 1 else average_layers,
        )  # fmt: skip
    shared = {
        "layer": layer, "average_layers": average_layers, "tokens": tokens, "norm": norm,
        "recipe": recipe, "optimizer": optimizer, "epochs": epochs, "batch_size": batch_size,
        "label_smoothing": label_smoothing, "shots": shots, "share": share_of(share),
        "views": views, "order_seed": order_seed, "holdout": as_share(holdout),
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
        **running(memory_budget, device, precision, again),
        export=export,
        store=find_store(store, say=render.note),
    )
    with watched(context, kept="whole epochs are") as view:
        if imported is None:
            study = pipeline.probe(request, view)
        else:
            study = pipeline.score_head(request, imported)
    if json:
        print_json(study.to_json())
    else:
        render_probe.probed(study)


def refuse_training(**given: object) -> None:
    """An imported head brings all of this along.

    Raises:
        typer.BadParameter: Something was given.
    """
    if names := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise typer.BadParameter(
            f"--import scores a trained head as it is; leave out {', '.join(names)}"
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(probe)
