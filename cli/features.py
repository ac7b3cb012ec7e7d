"""``epcache knn`` and ``epcache linear``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

import typer

from epcache.cli import render, render_features
from epcache.cli.options import Json, comma_list, print_json, share
from epcache.cli.store import StorePath

Layer = Annotated[int, typer.Option(help="Block index; -1 is the last.")]
PoolerList = Annotated[
    list[str] | None,
    typer.Option(
        "--pooler", help="cls, gap (mean patch token); repeat or use commas. [default: both]"
    ),
]
Norm = Annotated[
    str, typer.Option(help="final, none, or auto: what the backbone's published protocol does.")
]
Seed = Annotated[int, typer.Option(help="Of the choice of held-out images.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
N = TypeVar("N", int, float)


def knn(
    store: StorePath = None,
    layer: Layer = -1,
    pooler: PoolerList = None,
    norm: Norm = "auto",
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
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Classify by the nearest training images: cosine, weighted votes."""
    from epcache.knn import KS, TEMPERATURES
    from epcache.pipelines import features as pipeline
    from epcache.pipelines.store import find_store

    config = pipeline.KnnConfig(
        store=find_store(store, say=render.note),
        layer=layer,
        poolers=comma_list(pooler),
        norm=norm,
        ks=numbers(k, int, "--k") or KS,
        temperatures=numbers(temperature, float, "--temperature") or TEMPERATURES,
        holdout=judge(holdout),
        seed=seed,
        device=device,
    )
    with render.ByteProgress("pooling") as progress:
        study = pipeline.knn(config, say=render.note, progress=progress.update)
    if json:
        print_json(study.to_json())
    else:
        render_features.knn(study)


def linear(
    store: StorePath = None,
    layer: Layer = -1,
    pooler: PoolerList = None,
    norm: Norm = "auto",
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
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Fit logistic regression and ridge; the penalty is chosen on held-out training images."""
    from epcache.pipelines import features as pipeline
    from epcache.pipelines.store import find_store

    config = pipeline.LinearConfig(
        store=find_store(store, say=render.note),
        layer=layer,
        poolers=comma_list(pooler),
        norm=norm,
        methods=comma_list(method) or pipeline.METHODS,
        l2=numbers(l2, float, "--l2"),
        holdout=share(holdout),
        seed=seed,
        device=device,
    )
    with render.ByteProgress("pooling") as progress:
        study = pipeline.linear(config, say=render.note, progress=progress.update)
    if json:
        print_json(study.to_json())
    else:
        render_features.linear(study)


def judge(text: str) -> float | Literal["auto", "loo"]:
    """``auto``, ``loo``, or a share."""
    if text == "auto":
        return "auto"
    return "loo" if text == "loo" else share(text)


def numbers(values: Sequence[str] | None, kind: Callable[[str], N], option: str) -> tuple[N, ...]:
    """Numbers given by repeats or commas.

    Raises:
        typer.BadParameter: One of them is none.
    """
    try:
        return tuple(kind(value) for value in comma_list(values))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{option} {','.join(values or ())}: expected {what}") from None


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(knn)
    app.command()(linear)
