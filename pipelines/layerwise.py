"""Which layer is worth most: the same probes on every cached layer, and on averages of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epcache.averaging import averaged_layers
from epcache.errors import ConfigError
from epcache.pipelines.probe import make_configs
from epcache.pipelines.study import Once, Running, StoreStudy, StudyResult, about, open_stores
from epcache.pipelines.study import finish as finish_study
from epcache.pipelines.study import train as train_probes
from epcache.probing import ProbeConfig
from epcache.results import Row, best_row
from epcache.store.reader import Store
from epcache.sweep import stored_layers
from epcache.watch import Observer

POOLERS = ("cls", "gap", "ep")
AVERAGES = (2, 4)
"""Averages of so many of the last layers; AIM reports 4 to 6."""


@dataclass(frozen=True, kw_only=True)
class LayerwiseRequest:
    """What the command asks."""

    stores: Sequence[Path]
    poolers: Sequence[str] = POOLERS
    num_queries: Sequence[int] = ()
    layers: str = "all"
    """all, or block indices by commas."""
    averages: Sequence[int] | None = None
    """Averages of so many of the last layers; None is those of `AVERAGES` that there are."""
    lrs: Sequence[float] = ()
    weight_decays: Sequence[float] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every ``ProbeConfig``."""
    running: Running = field(default_factory=Running)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One pooler over the layers."""

    pooler: str
    num_queries: int | None
    points: Sequence[Row]
    """The chosen probe of each layer, then of each average."""

    @property
    def best(self) -> Row:
        """The point that held-out data chooses."""
        best = best_row(self.points)
        assert best is not None
        return best

    @property
    def last(self) -> Row | None:
        """The point of the last layer alone, what probing without a study would take."""
        single = [row for row in self.points if row.average_layers is None]
        return max(single, key=lambda row: row.layer, default=None)

    @property
    def second(self) -> Row | None:
        """What held-out data would choose if there were no best."""
        return best_row([row for row in self.points if row is not self.best])

    def winner(self) -> dict[str, Any]:
        """The best point and by how much it wins, as JSON types."""
        return {
            "pooler": self.pooler,
            "num_queries": self.num_queries,
            "run": self.best.run,
            "layer": self.best.layer,
            "average_layers": self.best.average_layers or 1,
            "val_top1": self.best.val_top1,
            "test_top1": self.best.score,
            "over_last_layer": gain(self.best, self.last),
            "over_second": gain(self.best, self.second),
        }

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "pooler": self.pooler,
            "num_queries": self.num_queries,
            "points": [
                {
                    "layer": row.layer,
                    "average_layers": row.average_layers or 1,
                    "val_top1": row.val_top1,
                    "test_top1": row.test_top1,
                    "test_top1_best": row.test_top1_best,
                    "run": row.run,
                }
                for row in self.points
            ],
            "winner": self.winner(),
        }


def layerwise(request: LayerwiseRequest, observer: Observer) -> StudyResult:
    """Train, or go on with, the same probes on every layer of every store."""
    once = Once(observer)
    stores = open_stores(request.stores)
    asked = [layer_configs(store, request, once) for store in stores]
    found = []
    for store, configs in zip(stores, asked, strict=True):
        rows, failures = train_probes(store, configs, request.running, once)
        curves = layer_curves(rows)
        extra = {
            "curves": [curve.to_json() for curve in curves],
            "winner": overall(curves).winner() if curves else None,
        }
        found.append(StoreStudy(**about(store), rows=rows, failures=failures, extra=extra))
    return finish_study(found, once)


def layer_configs(store: Store, request: LayerwiseRequest, observer: Observer) -> list[ProbeConfig]:
    """Every pooler on every layer that has its tokens, and on the averages that there are."""
    layers = stored_layers(store, request.layers)
    averages = request.averages
    if averages is None:
        averages = [number for number in AVERAGES if has_average(store, layers[-1], number)]
    places = [(layer, 1) for layer in layers]
    places += [(layers[-1], number) for number in averages if number > 1]
    configs = []
    for layer, number in places:
        averaged_layers(store, layer, number)  # an average that was asked for may not be there
        poolers = [p for p in request.poolers if p != "cls" or store.has_cls(layer)]
        if len(poolers) < len(request.poolers):
            observer.message(f"{store.path} has no [CLS] token: cls is left out")
        if poolers:
            configs += make_configs(
                poolers,
                num_queries=request.num_queries,
                lrs=request.lrs,
                weight_decays=request.weight_decays,
                seeds=[request.shared.get("seed", 0)],
                shared={
                    **{name: value for name, value in request.shared.items() if name != "seed"},
                    "layer": layer,
                    "average_layers": number,
                },
            )
    if not configs:
        raise ConfigError(f"store {store.path} has no [CLS] token; add --pooler gap or ep")
    return configs


def has_average(store: Store, layer: int, number: int) -> bool:
    """Whether the store holds so many layers of one shape, the last of them ``layer``."""
    try:
        return len(averaged_layers(store, layer, number)) == number
    except ConfigError:
        return False


def layer_curves(rows: Sequence[Row]) -> list[Curve]:
    """One for each pooler and number of queries, in the order of the rows."""
    groups: dict[tuple[str, int | None], dict[tuple[int, int], list[Row]]] = {}
    for row in rows:
        if row.score is not None:
            places = groups.setdefault((row.pooler, row.num_queries), {})
            places.setdefault((row.average_layers or 1, row.layer), []).append(row)
    return [
        Curve(
            pooler=pooler,
            num_queries=num_queries,
            points=[best for place in sorted(places) if (best := best_row(places[place]))],
        )
        for (pooler, num_queries), places in groups.items()
    ]


def overall(curves: Sequence[Curve]) -> Curve:
    """The curve whose best point held-out data chooses."""
    best = best_row([curve.best for curve in curves])
    return next(curve for curve in curves if curve.best is best)


def gain(row: Row, other: Row | None) -> dict[str, Any] | None:
    """How much better a row is on the evaluation split and on held-out images than another."""
    if other is None:
        return None
    ours, theirs = row.score, other.score
    assert ours is not None
    assert theirs is not None
    val = None if row.val_top1 is None else row.val_top1 - (other.val_top1 or 0.0)
    return {
        "layer": other.layer,
        "average_layers": other.average_layers or 1,
        "test": ours - theirs,
        "val": val,
    }
