"""``epcache extract``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import render_store
from epcache.cli.options import Json, comma_list, print_json, share, some
from epcache.errors import ConfigError


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
    rank: Annotated[
        int | None, typer.Option(help="This process among --world-size. [default: $RANK]")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Processes that share the work. [default: $WORLD_SIZE]")
    ] = None,
    json: Json = False,
) -> None:
    """Run a frozen backbone once and keep its tokens in a store.

    Killed or interrupted, the same command goes on where it stopped.
    """
    from epcache.pipelines import extract as pipeline
    from epcache.plan import ExtractConfig

    rank, world_size = ranks(rank, world_size)
    config = ExtractConfig(
        backbone=backbone,
        dataset=dataset,
        data_dir=data_dir,
        weights=weights,
        layers=layers,
        image_size=image_size,
        views=views,
        splits=some(comma_list(split), split, "--split"),
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
    # A backbone of the user's own may print; stdout is for our one object.
    with render_store.ExtractView() as view, contextlib.redirect_stdout(sys.stderr):
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


def ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which part of the work is ours: from the options, else from what a launcher sets.

    Raises:
        ConfigError: One of the two is given without the other, or is no number.
    """
    source = ("--rank", "--world-size")
    if rank is None and world_size is None:
        source = ("$RANK", "$WORLD_SIZE")
        rank, world_size = (from_environment(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        have, lack = source if world_size is None else source[::-1]
        raise ConfigError(
            f"{have} is set and {lack} is not; set both for a run that shares its work, or none"
        )
    return rank, world_size


def from_environment(name: str) -> int | None:
    """A whole number that a launcher set, or None.

    Raises:
        ConfigError: It is no number.
    """
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"${name} is {text!r} in the environment: expected a whole number")
    return None if text is None else int(text)


def rerun_arguments(arguments: list[str]) -> list[str]:
    """The command line without what only concerns its output."""
    return [a for a in arguments if a not in ("--json", "--debug", "--dry-run")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(extract)
