"""How few labels are enough: probes and classical classifiers on nested subsets of train."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from epcache.errors import ConfigError
from epcache.linear import LOW_SHOT_CS
from epcache.pipelines import features
from epcache.pipelines.probe import make_configs
from epcache.pipelines.readout import FeatureCache
from epcache.pipelines.study import Once, Running, StoreStudy, StudyResult, about, open_stores
from epcache.pipelines.study import finish as finish_study
from epcache.pipelines.study import train as train_probes
from epcache.pooled import POOLED
from epcache.probing import ProbeConfig
from epcache.results import Row, best_row, results_dir
from epcache.store.files import write_durably
from epcache.store.reader import Store
from epcache.subset import TrainRows, choose_rows
from epcache.watch import Observer

POOLERS = ("cls", "gap", "ep")
METHODS = ("knn", "ridge", "logistic")
SHOTS = (1, 2, 4, 8, 16)
SHARES = (0.01, 0.1)
KS = (1, 5, 10, 20, 50)


@dataclass(frozen=True, kw_only=True)
class Size:
    """An amount of training images."""

    shots: int | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        """``4 shots`` or ``10%``."""
        if self.shots is not None:
            return f"{self.shots} shot{'s' * (self.shots > 1)}"
        assert self.share is not None
        return f"{100 * self.share:g}%"

    @property
    def fields(self) -> dict[str, Any]:
        """Of a config."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LowshotRequest:
    """What the command asks."""

    stores: Sequence[Path]
    poolers: Sequence[str] = POOLERS
    """Of the probes; kNN, ridge and logistic regression take those of them that they can."""
    methods: Sequence[str] = METHODS
    sizes: Sequence[Size] = (
        *(Size(shots=shots) for shots in SHOTS),
        *(Size(share=share) for share in SHARES),
    )
    num_seeds: int = 3
    num_queries: Sequence[int] = ()
    lrs: Sequence[float] = ()
    weight_decays: Sequence[float] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every ``ProbeConfig``."""
    running: Running = field(default_factory=Running)

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without a store."""
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"--methods {method}: expected some of {', '.join(METHODS)}")
        if self.num_seeds < 1:
            raise ConfigError(f"--seeds {self.num_seeds}: expected 1 or more")
        if not self.sizes:
            raise ConfigError("no subset is asked for; give --shots or --shares")
        if not self.poolers and not self.methods:
            raise ConfigError("nothing is asked for; give --pooler or --methods")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One classifier on subsets of one size: what its seeds have in common."""

    classifier: str
    """``ep M=32``, ``ridge gap``, ..."""
    size: Size
    top1: Sequence[float]
    """On the evaluation split, a value a seed."""
    train_images: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.top1)

    @property
    def text(self) -> str:
        """``84.1±0.5``, in percent."""
        spread = "" if self.std is None else f"±{100 * self.std:.1f}"
        return f"{100 * self.mean:.1f}{spread}"

    @property
    def std(self) -> float | None:
        """Sample standard deviation over the seeds; None of a single one."""
        return statistics.stdev(self.top1) if len(self.top1) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "classifier": self.classifier,
            **asdict(self.size),
            "train_images": self.train_images,
            "num_seeds": len(self.top1),
            "mean": self.mean,
            "std": self.std,
            "top1": list(self.top1),
        }


def lowshot(request: LowshotRequest, observer: Observer) -> StudyResult:
    """Train, or go on with, every classifier on every subset of every store."""
    once = Once(observer)
    stores = open_stores(request.stores)
    kept = [keep_subsets(store, request.sizes, request.num_seeds, once) for store in stores]
    asked = [
        shot_configs(store, request, subsets, once)
        for store, subsets in zip(stores, kept, strict=True)
    ]
    found = []
    for store, subsets, configs in zip(stores, kept, asked, strict=True):
        rows = classical(store, request, subsets, once)
        trained, failures = train_probes(store, configs, request.running, once)
        rows += trained
        extra = {
            "summary": [cell.to_json() for cell in summary(rows)],
            "subsets": subsets,
        }
        found.append(StoreStudy(**about(store), rows=rows, failures=failures, extra=extra))
    return finish_study(found, once)


def shot_configs(
    store: Store,
    request: LowshotRequest,
    subsets: Sequence[Mapping[str, Any]],
    observer: Observer,
) -> list[ProbeConfig]:
    """Every pooler on every subset; the seed is of the subset and of the initial values.

    A batch size that was asked for is an upper limit: one shot has no more than its images.
    """
    poolers = list(request.poolers)
    if "cls" in poolers and not store.has_cls(request.shared.get("layer", -1)):
        observer.message(f"{store.path} has no [CLS] token: cls is left out")
        poolers.remove("cls")
    if not poolers:
        return []
    configs = []
    for subset in subsets:
        amount = {name: subset[name] for name in ("shots", "share")}
        shared = {**request.shared, **amount, "order_seed": subset["seed"]}
        if shared.get("batch_size") is not None:
            shared["batch_size"] = min(shared["batch_size"], subset["num_images"])
        configs += make_configs(
            poolers,
            num_queries=request.num_queries,
            lrs=request.lrs,
            weight_decays=request.weight_decays,
            seeds=[subset["seed"]],
            shared=shared,
        )
    return configs


def classical(
    store: Store,
    request: LowshotRequest,
    subsets: Sequence[Mapping[str, Any]],
    observer: Observer,
) -> list[Row]:
    """kNN, ridge and logistic regression on the same subsets."""
    poolers = [pooler for pooler in request.poolers if pooler in POOLED]
    poolers = [p for p in poolers if p != "cls" or store.has_cls(request.shared.get("layer", -1))]
    shared: dict[str, Any] = {
        "store": store.path,
        "poolers": poolers or ["gap"],
        "device": request.running.device,
        "again": request.running.again,
        **{
            name: request.shared[name]
            for name in ("layer", "average_layers", "norm")
            if name in request.shared
        },
    }
    cache = FeatureCache()
    rows: list[Row] = []
    for subset in subsets:
        asked = {**shared, **{name: subset[name] for name in ("shots", "share", "seed")}}
        for method in request.methods:
            if method == "knn":
                ks = [k for k in KS if k <= subset["num_images"]]
                knn = features.KnnConfig(**asked, ks=ks)
                rows += features.knn(knn, say=observer.message, cache=cache).rows
                continue
            penalties = LOW_SHOT_CS if method == "logistic" else ()
            linear = features.LinearConfig(**asked, methods=[method], l2=penalties)
            rows += features.linear(linear, say=observer.message, cache=cache).rows
    return rows


def classifier(row: Row) -> str:
    """What a table calls it."""
    queries = "" if row.num_queries is None else f" M={row.num_queries}"
    return row.classifier + queries


def summary(rows: Sequence[Row]) -> list[Cell]:
    """A cell for each classifier and size: of every seed the row that held-out images choose."""
    groups: dict[tuple[str, Size], dict[int | None, list[Row]]] = {}
    for row in rows:
        if row.score is not None:
            key = classifier(row), Size(shots=row.shots, share=row.share)
            groups.setdefault(key, {}).setdefault(row.seed, []).append(row)
    cells = []
    for (name, size), seeds in groups.items():
        best = [one for group in seeds.values() if (one := best_row(group)) is not None]
        cells.append(
            Cell(
                classifier=name,
                size=size,
                top1=[row.score for row in best if row.score is not None],
                train_images=best[0].train_images,
            )
        )
    return cells


def keep_subsets(
    store: Store, sizes: Sequence[Size], num_seeds: int, observer: Observer
) -> list[dict[str, Any]]:
    """Write which images every subset has; returns what a reader needs to find and judge them."""
    split = store[store.provenance["dataset"]["train_split"]]
    samples = split.samples()
    folder = results_dir() / "subsets"
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in range(num_seeds):
        smaller: dict[str, TrainRows] = {}
        for size in sizes:
            part = choose_rows(split, **size.fields, seed=seed, holdout=0.1)
            for note in part.notes:
                observer.message(note)
            name = subset_name(store, size, seed)
            contains = [one for one, other in smaller.items() if is_within(other, part)]
            smaller[name] = part
            about_it = {
                "name": name,
                **asdict(size),
                "seed": seed,
                "num_images": len(part.rows),
                "num_held_out": len(part.held),
                "short_classes": len(part.short_classes),
            }
            document = {
                **about_it,
                "store": str(store.path),
                "digest": store.digest,
                "split": split.name,
                "contains": contains,
                "rows": part.rows.tolist(),
                "paths": [samples[row].path for row in part.rows],
                "held_out_rows": part.held.tolist(),
                "held_out_paths": [samples[row].path for row in part.held],
            }
            path = folder / f"{name}.json"
            data = (json.dumps(document, indent=1) + "\n").encode()
            write_durably(path, data, partial_dir=folder)
            found.append({**about_it, "file": str(path)})
    return found


def subset_name(store: Store, size: Size, seed: int) -> str:
    """``digits-5d9ada42-4shots-seed0``, ``digits-5d9ada42-1percent-seed0``."""
    amount = size.name.replace(" ", "").replace("%", "percent")
    dataset = re.sub(r"[^\w.-]+", "_", store.provenance["dataset"]["name"])  # it may hold a slash
    return f"{dataset}-{store.digest[:8]}-{amount}-seed{seed}"


def is_within(small: TrainRows, large: TrainRows) -> bool:
    """Whether every image of one subset is in the other."""
    return bool(np.isin(small.rows, large.rows).all())
