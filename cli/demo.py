"""``epcache demo``."""

from __future__ import annotations

from pathlib import Path

import typer

from epcache.cli import (
    render,
    render_attention,
    render_features,
    render_probe,
    render_report,
    render_store,
    render_studies,
)
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
    if not json:
        render_features.knn(neighbours)
        render_probe.probed(probes)
    with render_probe.ProbeView() as probe_view:
        layers = pipeline.layers(store, probe_view)
    with render_attention.AttentionView() as attention_view:
        attention = pipeline.attention(store, probes, attention_view)
    with render_report.ReportView() as report_view:
        report = pipeline.report(report_view.say)
    if json:
        found = {
            "knn": neighbours.to_json(),
            "probe": probes.to_json(),
            "layerwise": layers.to_json(),
            "attention": attention.to_json(),
            "report": report.to_json(),
        }
        print_json({"extract": extracted, **found})
    else:
        render_studies.layerwise(layers, pipeline.layer_curves)
        render_attention.attended(attention)
        render_report.reported(report)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)
