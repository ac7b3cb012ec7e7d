"""What the studies have in common: several stores, probes that may fail, one kind of answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epcache.convergence import Convergence, best_convergence
from epcache.pipelines.features import KnnConfig, knn
from epcache.probing import Failure, ProbeConfig, fit_probes
from epcache.ranks import Ranking, rank_backbones
from epcache.results import ROWS, Row, best_row, read_rows, results_dir, study_json
from epcache.store.reader import Store, open_store
from epcache.watch import EpochReport, Observer


@dataclass(frozen=True, kw_only=True)
class Running:
    """How the probes of a study are run; nothing of it changes a result."""

    memory_budget: int | None = None
    device: str = "auto"
    precision: str = "auto"
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreStudy:
    """What a study found on one store."""

    store: Path
    digest: str
    backbone: str
    dataset: str
    rows: Sequence[Row]
    failures: Sequence[Failure] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The study's own part of the JSON object, as JSON types."""

    @property
    def best(self) -> Row | None:
        """The row that held-out data chooses."""
        return best_row(self.rows)

    @property
    def convergence(self) -> list[Convergence]:
        """Of the best probe of each pooler."""
        return best_convergence(self.rows, results_dir())

    def to_json(self) -> dict[str, Any]:
        """The object of one store."""
        return {
            **study_json(self.store, self.digest, self.rows),
            **self.extra,
            "convergence": [each.to_json() for each in self.convergence],
            "failures": [asdict(failure) for failure in self.failures],
        }


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What a study found on all its stores."""

    stores: Sequence[StoreStudy]
    rankings: Sequence[Ranking] = ()
    """Of the backbones; none for a single store."""

    @property
    def rows_path(self) -> Path:
        """Where the rows lie."""
        return results_dir() / ROWS

    @property
    def failures(self) -> list[Failure]:
        """Of all stores."""
        return [failure for each in self.stores for failure in each.failures]

    def to_json(self) -> dict[str, Any]:
        """The command's JSON object: of one store its own, of several a list of them."""
        if len(self.stores) == 1:
            return self.stores[0].to_json()
        return {
            "stores": [each.to_json() for each in self.stores],
            "ranks": [ranking.to_json() for ranking in self.rankings],
        }


class Once:
    """An observer that says the same thing once: a study asks one thing of many passes."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._said: set[str] = set()

    def message(self, text: str) -> None:
        """One line for the user."""
        if text not in self._said:
            self._said.add(text)
            self._observer.message(text)

    def start(self, what: str, epochs: int) -> None:
        """A pass begins."""
        self._observer.start(what, epochs)

    def epoch(self, report: EpochReport) -> None:
        """An epoch is through."""
        self._observer.epoch(report)


def open_stores(paths: Sequence[Path]) -> list[Store]:
    """Each store once, before any of them is read for long."""
    stores = {store.digest: store for store in map(open_store, paths)}
    return list(stores.values())


def train(
    store: Store,
    configs: Sequence[ProbeConfig],
    running: Running,
    observer: Observer,
) -> tuple[list[Row], list[Failure]]:
    """A row for each probe that trained to the end, each once, and what did not."""
    failures: list[Failure] = []
    rows = fit_probes(
        store,
        configs,
        memory_budget=running.memory_budget,
        device=running.device,
        precision=running.precision,
        progress=observer,
        again=running.again,
        failures=failures,
    )
    return list({row.run: row for row in rows}.values()), failures


def finish(found: Sequence[StoreStudy], observer: Observer) -> StudyResult:
    """With ranks where there are backbones to rank, from all rows that their stores have.

    k-NN on the last layer costs seconds, so it is not left to the user to run it first.
    """
    if len({each.backbone for each in found}) < 2:
        return StudyResult(stores=found)
    for each in found:
        if any(row.pooler == "ep" for row in each.rows):
            knn(KnnConfig(store=each.store, again=False), say=lambda text: None)
    digests = {each.digest for each in found}
    rows = [row for row in read_rows(results_dir()) if row.digest in digests]
    return StudyResult(stores=found, rankings=rank_backbones(rows))


def about(store: Store) -> dict[str, Any]:
    """The first fields of a `StoreStudy`."""
    return {
        "store": store.path,
        "digest": store.digest,
        "backbone": store.provenance["backbone"]["name"],
        "dataset": store.provenance["dataset"]["name"],
    }
