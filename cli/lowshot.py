"""``epcache lowshot``."""

from __future__ import annotations

from typing import Annotated

import typer

from epcache.cli import options, render_studies
from epcache.cli.options import comma_list, numbers
from epcache.cli.options import share as as_share
from epcache.cli.studies import running, show, stores, watched


def lowshot(
    context: typer.Context,
    store: options.StorePaths = None,
    shots: Annotated[
        list[str] | None,
        typer.Option(help="Training images a class; 0 for none. [default: 1,2,4,8,16]"),
    ] = None,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            help="Shares of each class of train, at least one image; 0 for none. [default: 1%,10%]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Subsets of each size.")] = 3,
    pooler: Annotated[
        list[str] | None,
        typer.Option(help="Poolers of the probes: repeat or use commas. [default: cls,gap,ep]"),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="On [CLS] and mean patch token: knn, ridge, logistic; none for no such. "
            "[default: all three]"
        ),
    ] = None,
    num_queries: options.NumQueries = None,
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
    memory_budget: options.MemoryBudget = None,
    precision: options.Precision = "auto",
    device: options.Device = "auto",
    again: options.Again = False,
    json: options.Json = False,
) -> None:
    """Train on few images a class, on several nested subsets: mean and standard deviation.

    Training images outside the subset, at most 4 a class and no more than it
    has, choose learning rate, epoch, k and penalty. What has a row already is
    not trained again: after an interruption the same command goes on.
    """
    from epcache.pipelines import lowshot as pipeline

    sizes = [
        *(
            pipeline.Size(shots=number)
            for number in (numbers(shots, int, "--shots") if shots else pipeline.SHOTS)
            if number
        ),
        *(
            pipeline.Size(share=part)
            for part in (map(as_share, comma_list(shares)) if shares else pipeline.SHARES)
            if part
        ),
    ]
    asked = comma_list(methods) if methods else pipeline.METHODS
    request = pipeline.LowshotRequest(
        stores=stores(store),
        poolers=comma_list(pooler) or pipeline.POOLERS,
        methods=() if asked == ("none",) else asked,
        sizes=sizes,
        num_seeds=seeds,
        num_queries=numbers(num_queries, int, "--M"),
        lrs=numbers(lr, float, "--lr"),
        weight_decays=numbers(weight_decay, float, "--weight-decay"),
        shared={
            "layer": layer, "average_layers": average_layers, "tokens": tokens, "norm": norm,
            "recipe": recipe, "optimizer": optimizer, "epochs": epochs, "batch_size": batch_size,
        },
        running=running(memory_budget, device, precision, again),
    )  # fmt: skip
    with watched(context) as view:
        study = pipeline.lowshot(request, view)
    show(study, json, lambda: render_studies.lowshot(study, lambda one: pipeline.summary(one.rows)))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(lowshot)
