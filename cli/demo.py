"""``epcache demo``."""

from __future__ import annotations

from pathlib import Path

import typer

from epcache.cli import render, render_features, render_probe, render_store
from epcache.cli.options import Json, print_json


def demo(json: Json = False) -> None:
    """Run the whole pipeline on bundled weights and data: no network, no options."""
    from epcache.pipelines import demo as pipeline

    with render_store.ExtractView() as view:
        extracted = pipeline.extract_digits(view)
    store = Path(extracted["store"])
    if not json:
        render_store.extracted(extracted)
    neighbours = pipeline.neighbours(store, render.note)
    with render_probe.ProbeView() as probe_view:
        probes = pipeline.probes(store, probe_view)
    if json:
        studies = {"knn": neighbours.to_json(), "probe": probes.to_json()}
        print_json({"extract": extracted, **studies})
    else:
        render_features.knn(neighbours)
        render_probe.probed(probes)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)
