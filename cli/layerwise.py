"""``epcache layerwise``."""

from __future__ import annotations

from typing import Annotated

import typer

from epcache.cli import options, render_studies
from epcache.cli.options import comma_list, numbers, share
from epcache.cli.studies import Holdout, running, show, stores, watched


def layerwise(
    context: typer.Context,
    store: options.StorePaths = None,
    pooler: Annotated[
        list[str] | None,
        typer.Option(help="A curve for each: repeat or use commas. [default: cls,gap,ep]"),
    ] = None,
    num_queries: options.NumQueries = None,
    layers: Annotated[
        str, typer.Option(help="all that are cached, or block indices: 2,5,-1.")
    ] = "all",
    average: Annotated[
        list[str] | None,
        typer.Option(
            help="Also the average of the last so many layers; 0 for none. [default: 2,4 where "
            "there are so many]"
        ),
    ] = None,
    tokens: options.Tokens = "patch",
    norm: options.Norm = "auto",
    lr: options.Lr = None,
    weight_decay: options.WeightDecay = None,
    recipe: options.Recipe = "small",
    optimizer: options.Optimizer = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    seed: Annotated[int, typer.Option(help="Of the initial values.")] = 0,
    holdout: Holdout = "0.1",
    memory_budget: options.MemoryBudget = None,
    precision: options.Precision = "auto",
    device: options.Device = "auto",
    again: options.Again = False,
    json: options.Json = False,
) -> None:
    """Train the same probes on every cached layer, and on averages of the last ones.

    Layers are compared on held-out training images and reported on the
    evaluation split. What has a row already is not trained again: after an
    interruption the same command goes on.
    """
    from epcache.pipelines import layerwise as pipeline

    request = pipeline.LayerwiseRequest(
        stores=stores(store),
        poolers=comma_list(pooler) or pipeline.POOLERS,
        num_queries=numbers(num_queries, int, "--M"),
        layers=layers,
        averages=numbers(average, int, "--average") if average else None,
        lrs=numbers(lr, float, "--lr"),
        weight_decays=numbers(weight_decay, float, "--weight-decay"),
        shared={
            "tokens": tokens, "norm": norm, "recipe": recipe, "optimizer": optimizer,
            "epochs": epochs, "batch_size": batch_size, "seed": seed, "holdout": share(holdout),
        },
        running=running(memory_budget, device, precision, again),
    )  # fmt: skip
    with watched(context) as view:
        study = pipeline.layerwise(request, view)
    show(
        study,
        json,
        lambda: render_studies.layerwise(study, lambda one: pipeline.layer_curves(one.rows)),
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(layerwise)
