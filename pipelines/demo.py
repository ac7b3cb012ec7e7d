"""The whole pipeline on what the package brings: a tiny masked autoencoder and real digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epcache.pipelines import extract, features, probe
from epcache.pipelines.readout import Study
from epcache.plan import ExtractConfig
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
