"""The whole pipeline on what the package brings: a tiny masked autoencoder and real digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epcache.pipelines import attention as looking
from epcache.pipelines import extract, features, probe
from epcache.pipelines import layerwise as studies
from epcache.pipelines import report as reporting
from epcache.pipelines.readout import Study
from epcache.pipelines.study import StoreStudy, StudyResult
from epcache.plan import ExtractConfig
from epcache.results import best_row
from epcache.watch import Observer

RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Wide enough for linear probes, which like large rates, and for EP, which likes small ones."""


def extract_digits(observer: extract.Observer) -> dict[str, Any]:
    """Extract all layers of the bundled backbone over the bundled digits."""
    config = ExtractConfig(
        backbone="digits_mae",
        dataset="digits",
        layers="all",
        command="epcache demo",
    )
    return extract.extract(config, observer)


def neighbours(store: Path, say: Callable[[str], None]) -> Study:
    """k-NN on [CLS] and on the mean patch token of the last layer."""
    return features.knn(features.KnnConfig(store=store, ks=(10, 20)), say=say)


def probes(store: Path, observer: Observer) -> probe.ProbeStudy:
    """Linear probes and EP on the last layer, five learning rates each, trained together."""
    configs = probe.make_configs(
        ["ep", "gap", "cls"], num_queries=(8,), lrs=RATES, shared={"epochs": 20}
    )
    return probe.probe(probe.ProbeRequest(store=store, configs=configs), observer)


def layers(store: Path, observer: Observer) -> StudyResult:
    """Linear probes on every layer: few epochs, two rates."""
    request = studies.LayerwiseRequest(
        stores=[store],
        poolers=("cls", "gap"),
        averages=(),
        lrs=RATES[2:4],
        shared={"epochs": 10},
    )
    return studies.layerwise(request, observer)


def layer_curves(study: StoreStudy) -> list[studies.Curve]:
    """As the layers' table shows them."""
    return studies.layer_curves(study.rows)


def attention(
    store: Path, probes: probe.ProbeStudy, observer: looking.Observer
) -> looking.AttentionStudy:
    """Where the best EP probe looks."""
    best = best_row([row for row in probes.rows if row.pooler == "ep"])
    assert best is not None
    request = looking.AttentionRequest(store=store, runs=[best.run], num_images=4)
    return looking.attention(request, observer)


def report(say: Callable[[str], None]) -> reporting.ReportStudy:
    """Everything on one page."""
    return reporting.report(reporting.ReportRequest(), say=say)
