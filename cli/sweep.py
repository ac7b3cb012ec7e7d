"""``epcache sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epcache.cli import options, render, render_studies
from epcache.cli.options import print_json
from epcache.cli.studies import running, show, watched


def sweep(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="A TOML file.", show_default=False)],
    store: options.StorePaths = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would run, what shares a pass, and how long."),
    ] = False,
    memory_budget: options.MemoryBudget = None,
    precision: options.Precision = "auto",
    device: options.Device = "auto",
    again: options.Again = False,
    json: options.Json = False,
) -> None:
    """Train every combination that a TOML file names; what is done is skipped, what fails is told.

    A line such as pooler = ["ep", "gap"] or lr = [0.001, 0.01] for each of:
    method (probe, knn, ridge, logistic), pooler, M, dim_out, layer,
    average_layers, tokens, norm, recipe, optimizer, lr, weight_decay, epochs,
    warmup_epochs, batch_size, label_smoothing, shots, share, views, seed,
    order_seed, holdout, k, temperature; and stores, folders or patterns.

    Several grids are TOML tables of the name grid, in double brackets; what
    stands above the first counts for all of them.
    """
    from epcache.pipelines import sweep as pipeline
    from epcache.pipelines.store import find_store
    from epcache.sweep import Sweep

    asked = Sweep.load(spec)
    request = pipeline.SweepRequest(
        sweep=asked,
        stores=pipeline.store_paths(store or (), asked, lambda: find_store(None, say=render.note)),
        running=running(memory_budget, device, precision, again),
    )
    if dry_run:
        with watched(context) as view:
            plan = pipeline.dry_run(request, view)
        if json:
            print_json(plan.to_json())
        else:
            render_studies.planned(plan)
        return
    with watched(context) as view:
        study = pipeline.sweep(request, view)
    show(study, json, lambda: render_studies.sweep(study))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sweep)
