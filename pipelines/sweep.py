"""A grid of probes and classifiers over several stores; what fails is told and the rest goes on."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epcache.errors import ConfigError, EpcacheError
from epcache.estimate import Estimator, PassEstimate
from epcache.hardware import default_budget, pick_precision
from epcache.knn import KS, TEMPERATURES
from epcache.pipelines import features
from epcache.pipelines.readout import FeatureCache
from epcache.pipelines.study import Once, Running, StoreStudy, StudyResult, about, open_stores
from epcache.pipelines.study import finish as finish_study
from epcache.pipelines.study import train as train_probes
from epcache.plan import resolve_device
from epcache.probing import Failure, ProbeConfig, plan_groups
from epcache.results import Row, results_dir
from epcache.store.documents import is_sealed
from epcache.store.reader import Store
from epcache.sweep import FeatureJob, Sweep
from epcache.trials import Machine
from epcache.watch import Observer


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What the command asks."""

    sweep: Sweep
    stores: Sequence[Path]
    running: Running = field(default_factory=Running)


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """What a sweep would do on one store."""

    store: Path
    digest: str
    passes: Sequence[PassEstimate]
    num_features: int
    """Classifiers on pooled features."""
    failures: Sequence[Failure]

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "store": str(self.store),
            "digest": self.digest,
            "passes": [each.to_json() for each in self.passes],
            "features": self.num_features,
            "failures": [asdict(failure) for failure in self.failures],
        }


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep would do."""

    stores: Sequence[StorePlan]

    @property
    def passes(self) -> list[PassEstimate]:
        """Of all stores."""
        return [each for store in self.stores for each in store.passes]

    def to_json(self) -> dict[str, Any]:
        """The object of a dry run."""
        return {
            "stores": [each.to_json() for each in self.stores],
            "probes": sum(each.num_probes for each in self.passes),
            "done": sum(each.num_done for each in self.passes),
            "passes": len(self.passes),
            "features": sum(each.num_features for each in self.stores),
            "estimated_seconds": sum(each.seconds for each in self.passes),
        }


def store_paths(given: Sequence[Path], sweep: Sweep, default: Callable[[], Path]) -> list[Path]:
    """The stores of the command line, else those of the specification, else the default.

    Raises:
        ConfigError: A pattern finds no sealed store.
    """
    if given:
        return list(given)
    paths = []
    for text in sweep.stores:
        pattern = Path(text).expanduser()
        if not glob.has_magic(text):
            paths.append(pattern)
            continue
        top = Path(pattern.anchor)
        found = sorted(top.glob(str(pattern.relative_to(top))))
        sealed = [path for path in found if is_sealed(path)]
        if not sealed:
            raise ConfigError(f"stores {text!r} finds no sealed store; name a folder")
        paths += sealed
    return paths or [default()]


def dry_run(request: SweepRequest, observer: Observer) -> SweepPlan:
    """What would run, what shares a pass, and an estimate; trains nothing."""
    once = Once(observer)
    running = request.running
    device = resolve_device(running.device)
    machine = Machine(
        device=device,
        precision=pick_precision(running.precision, device),
        budget_bytes=running.memory_budget or default_budget(device),
    )
    estimator = Estimator(machine, results_dir())
    found = []
    for store in open_stores(request.stores):
        jobs = request.sweep.jobs(store)
        failures: list[Failure] = []
        plans = plan_groups(
            store, jobs.probes, precision=machine.precision, say=once.message, failures=failures
        )
        found.append(
            StorePlan(
                store=store.path,
                digest=store.digest,
                passes=[estimator.of(plan) for plan in plans],
                num_features=len(jobs.features),
                failures=failures,
            )
        )
    return SweepPlan(stores=found)


def sweep(request: SweepRequest, observer: Observer) -> StudyResult:
    """Do, or go on with, everything that the specification asks."""
    once = Once(observer)
    stores = open_stores(request.stores)
    asked = [request.sweep.jobs(store) for store in stores]
    found = []
    for store, jobs in zip(stores, asked, strict=True):
        rows, failures = classical(store, jobs.features, request.running, once)
        trained, lost = train_probes(store, jobs.probes, request.running, once)
        rows = list({row.run: row for row in [*rows, *trained]}.values())
        found.append(StoreStudy(**about(store), rows=rows, failures=[*failures, *lost]))
    return finish_study(found, once)


def classical(
    store: Store, jobs: Sequence[FeatureJob], running: Running, observer: Observer
) -> tuple[list[Row], list[Failure]]:
    """Rows of the classifiers on pooled features, and what could not be fitted."""
    cache = FeatureCache()
    rows: list[Row] = []
    failures = []
    for job in jobs:
        shared: dict[str, Any] = {
            "store": store.path,
            "poolers": [job.pooler],
            "device": running.device,
            "again": running.again,
            **job.fields,
        }
        try:
            if job.method == "knn":
                knn = features.KnnConfig(
                    **shared, ks=job.ks or KS, temperatures=job.temperatures or TEMPERATURES
                )
                rows += features.knn(knn, say=observer.message, cache=cache).rows
            else:
                linear = features.LinearConfig(**shared, methods=[job.method])
                rows += features.linear(linear, say=observer.message, cache=cache).rows
        except (EpcacheError, RuntimeError) as error:
            where = ProbeConfig(pooler=job.pooler, **job.fields).tokens_title
            failures.append(Failure(what=f"{job.method} {job.pooler}, {where}", reason=str(error)))
    return rows, failures
