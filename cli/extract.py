"""``epcache extract``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import render_store
from epcache.cli.options import Json, comma_list, print_json, share


def extract(
    context: typer.Context,
    backbone: Annotated[str, typer.Option(help="Alias, timm name, or package.module:function.")],
    dataset: Annotated[str, typer.Option(help="Data set (epcache datasets) or imagefolder.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the images are. [default: $EPCACHE_DATA/<dataset>]")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="File, random or random:SEED. [default: published ones]")
    ] = None,
    layers: Annotated[str, typer.Option(help="last, all, or block indices: 2,5,-1.")] = "last",
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side. [default: the published protocol's]")
    ] = None,
    views: Annotated[
        int, typer.Option(help="Views of each training image: the crop, then augmented ones.")
    ] = 1,
    split: Annotated[
        list[str] | None, typer.Option(help="Only these splits; repeat or use commas.")
    ] = None,
    shard_rows: Annotated[
        int | None, typer.Option(help="Images a shard file. [default: about 64 MiB]")
    ] = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="Blosc-zstd: about 5% smaller, much slower to read.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Only the first N rows of the shuffled order, for a try.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The store's folder. [default: below $EPCACHE_HOME/stores]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and how long it would take.")
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the data set first, where a source is known.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, float16. [auto: float16 on CUDA, else float32]")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    batch_size: Annotated[
        int | None, typer.Option(help="Images a forward pass. [default: 64 on CUDA, else 16]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Decode threads. [default: one per core]")
    ] = None,
    max_bad: Annotated[
        str, typer.Option(help="Largest share of a split that may be undecodable.")
    ] = "1%",
    seed: Annotated[int, typer.Option(help="Of the stored order and the augmented views.")] = 0,
    rank: Annotated[int, typer.Option(envvar="RANK", help="This process among --world-size.")] = 0,
    world_size: Annotated[
        int, typer.Option(envvar="WORLD_SIZE", help="Processes that share the work.")
    ] = 1,
    json: Json = False,
) -> None:
    """Run a frozen backbone once and keep its tokens in a store.

    Killed or interrupted, the same command goes on where it stopped.
    """
    from epcache.pipelines import extract as pipeline
    from epcache.plan import ExtractConfig

    config = ExtractConfig(
        backbone=backbone,
        dataset=dataset,
        data_dir=data_dir,
        weights=weights,
        layers=layers,
        image_size=image_size,
        views=views,
        splits=comma_list(split),
        shard_rows=shard_rows,
        compress=compress,
        limit=limit,
        out=out,
        precision=precision,
        device=device,
        batch_size=batch_size,
        num_workers=workers,
        max_bad=share(max_bad),
        seed=seed,
        download=download,
        rank=rank,
        world_size=world_size,
        command=shlex.join(["epcache", *rerun_arguments(context.obj)]),
    )
    with render_store.ExtractView() as view:
        if dry_run:
            result = pipeline.estimate(config, view)
        else:
            try:
                result = pipeline.extract(config, view)
            except KeyboardInterrupt:
                view.message("stopped; what was committed is kept. Go on with the same command:")
                view.message(config.command)
                raise
    if json:
        print_json(result)
    elif dry_run:
        render_store.estimate(result, config.command)
    else:
        render_store.extracted(result)


def rerun_arguments(arguments: list[str]) -> list[str]:
    """The command line without what only concerns its output."""
    return [a for a in arguments if a not in ("--json", "--debug", "--dry-run")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(extract)
