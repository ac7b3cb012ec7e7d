"""``epcache knn`` and ``epcache linear``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from epcache.cli import options, render, render_features
from epcache.cli.options import comma_list, numbers, print_json, share_of
from epcache.cli.options import share as as_share
from epcache.cli.store import StorePath

PoolerList = Annotated[
    list[str] | None,
    typer.Option(
        "--pooler", help="cls, gap (mean patch token); repeat or use commas. [default: both]"
    ),
]
Seed = Annotated[int, typer.Option(help="Of the choice of held-out images and of the subset.")]


def knn(
    store: StorePath = None,
    layer: options.Layer = -1,
    average_layers: options.AverageLayers = 1,
    pooler: PoolerList = None,
    norm: options.Norm = "auto",
    shots: options.Shots = None,
    share: options.Share = None,
    k: Annotated[
        list[str] | None, typer.Option(help="Neighbours that vote. [default: 10,20,100,200]")
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(help="T of a vote's weight exp(cosine / T). [default: 0.07]"),
    ] = None,
    holdout: Annotated[
        str,
        typer.Option(
            help="Share of train that is scored to choose k; loo leaves one out; 0 chooses "
            "nothing. [auto: loo up to 50,000 images, else 10%]"
        ),
    ] = "auto",
    seed: Seed = 0,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Classify by the nearest training images: cosine, weighted votes."""
    from epcache.knn import KS, TEMPERATURES
    from epcache.pipelines import features as pipeline

    config = pipeline.KnnConfig(
        **shared(store, pooler, layer, average_layers, norm, shots, share, seed, device),
        ks=numbers(k, int, "--k") or KS,
        temperatures=numbers(temperature, float, "--temperature") or TEMPERATURES,
        holdout=judge(holdout),
    )
    with render.ByteProgress("pooling") as progress:
        study = pipeline.knn(config, say=render.note, progress=progress.update)
    if json:
        print_json(study.to_json())
    else:
        render_features.knn(study)


def linear(
    store: StorePath = None,
    layer: options.Layer = -1,
    average_layers: options.AverageLayers = 1,
    pooler: PoolerList = None,
    norm: options.Norm = "auto",
    shots: options.Shots = None,
    share: options.Share = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="logistic, ridge; repeat or use commas. [default: both]"),
    ] = None,
    l2: Annotated[
        list[str] | None,
        typer.Option(
            help="Penalties to choose from: C of logistic (larger is weaker) or alpha of ridge "
            "(larger is stronger). [default: 45 of C, 37 of alpha]"
        ),
    ] = None,
    holdout: Annotated[
        str, typer.Option(help="Share of train that chooses the penalty; 0 with a single --l2.")
    ] = "10%",
    seed: Seed = 0,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Fit logistic regression and ridge; the penalty is chosen on held-out training images."""
    from epcache.pipelines import features as pipeline

    config = pipeline.LinearConfig(
        **shared(store, pooler, layer, average_layers, norm, shots, share, seed, device),
        methods=comma_list(method) or pipeline.METHODS,
        l2=numbers(l2, float, "--l2"),
        holdout=as_share(holdout),
    )
    with render.ByteProgress("pooling") as progress:
        study = pipeline.linear(config, say=render.note, progress=progress.update)
    if json:
        print_json(study.to_json())
    else:
        render_features.linear(study)


def shared(
    store: Path | None,
    pooler: list[str] | None,
    layer: int,
    average_layers: int,
    norm: str,
    shots: int | None,
    share: str | None,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """What both commands ask, as the fields of ``FeatureConfig``."""
    from epcache.pipelines.store import find_store

    return {
        "store": find_store(store, say=render.note), "poolers": comma_list(pooler),
        "layer": layer, "average_layers": average_layers, "norm": norm, "shots": shots,
        "share": share_of(share), "seed": seed, "device": device,
    }  # fmt: skip


def judge(text: str) -> float | Literal["auto", "loo"]:
    """``auto``, ``loo``, or a share."""
    if text == "auto":
        return "auto"
    return "loo" if text == "loo" else as_share(text)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(knn)
    app.command()(linear)
