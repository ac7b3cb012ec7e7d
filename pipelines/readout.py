"""What k-NN and the linear classifiers share: a store read one way, and the rows written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import epcache
from epcache.averaging import averaged_layers
from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.plan import resolve_device
from epcache.pooled import POOLED, Pooled, check_pooler, choose_norm, pool_split
from epcache.results import (
    ROWS,
    Row,
    append_rows,
    best_row,
    read_rows,
    results_dir,
    run_name,
    study_json,
)
from epcache.store.reader import Store, open_store
from epcache.subset import TrainRows, choose_rows

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What both commands ask; the fields are their options."""

    store: Path
    layer: int = -1
    average_layers: int = 1
    """Average the tokens of so many layers, the last of them ``layer``."""
    poolers: Sequence[str] = ()
    """Some of cls and gap; none means those that the store has."""
    norm: str = "auto"
    shots: int | None = None
    """Training images a class; None is all."""
    share: float | None = None
    """Share of each class of train, at least one image; None is all."""
    seed: int = 0
    """Of the choice of held-out rows and of the subset."""
    device: str = "auto"
    again: bool = True
    """Compute also what has a row already."""

    def __post_init__(self) -> None:
        """Refuse what cannot be a seed."""
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: expected a whole number of 0 or more")

    @property
    def subset(self) -> dict[str, Any]:
        """What makes the training images fewer than all; nothing where it is all."""
        asked = {"shots": self.shots, "share": self.share}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def which(self) -> dict[str, Any]:
        """What is not as usual: in identities and rows only where it is."""
        averaged = {"average_layers": self.average_layers} if self.average_layers > 1 else {}
        return {**self.subset, **averaged}


class FeatureCache:
    """Features of one way of reading a store, pooled once for all that a study asks of them."""

    def __init__(self) -> None:
        self._way: tuple[Any, ...] = ()
        self._found: dict[tuple[str, str], Pooled] = {}

    def get(
        self, way: tuple[Any, ...], pooler: str, split: str, make: Callable[[], Pooled]
    ) -> Pooled:
        """The features, made now if they are not there; those of another way are let go of."""
        if way != self._way:
            self._way, self._found = way, {}
        if (pooler, split) not in self._found:
            self._found[pooler, split] = make()
        return self._found[pooler, split]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a command found."""

    store: Path
    digest: str
    rows: Sequence[Row]
    """In the order asked for."""
    rows_path: Path
    """Where they were appended."""

    @property
    def best(self) -> Row:
        """The row that held-out data chooses."""
        best = best_row(self.rows)
        assert best is not None
        return best

    def to_json(self) -> dict[str, Any]:
        """The command's JSON object."""
        return study_json(self.store, self.digest, self.rows)


@dataclass(frozen=True, kw_only=True)
class Readout:
    """A store with one way of reading it, and how its rows are written."""

    config: FeatureConfig
    store: Store
    layer: int
    norm_name: str
    norm: FinalNorm | None
    device: str
    poolers: tuple[str, ...]
    say: Say
    progress: Progress | None
    known: Mapping[str, Row]
    """Rows of earlier runs that need not be computed again."""
    cache: FeatureCache
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        config: FeatureConfig,
        *,
        say: Say,
        progress: Progress | None,
        cache: FeatureCache | None = None,
    ) -> Readout:
        """Open the store and settle what the options leave open."""
        store = open_store(config.store)
        layer = averaged_layers(store, config.layer, config.average_layers)[-1]
        norm_name, norm = choose_norm(store, config.norm)
        poolers = unique(config.poolers)
        if not poolers:
            poolers = tuple(POOLED) if store.has_cls(layer) else ("gap",)
            if "cls" not in poolers:
                say(f"layer {layer} of {store.path} has no [CLS] token: gap only")
        for pooler in poolers:
            check_pooler(store, layer, pooler)
        return cls(
            config=config, store=store, layer=layer, norm_name=norm_name, norm=norm,
            device=float64_device(config.device), poolers=poolers, say=say, progress=progress,
            known={} if config.again else {row.run: row for row in read_rows(results_dir())},
            cache=FeatureCache() if cache is None else cache,
        )  # fmt: skip

    @property
    def num_classes(self) -> int:
        """C of the data set, also where a class has no image left."""
        return len(self.store.provenance["dataset"]["classes"])

    def train_rows(self, holdout: float) -> TrainRows:
        """What is fitted and what chooses, of all of train or of the subset asked for."""
        if not 0 <= holdout < 1:
            raise ConfigError(f"--holdout {holdout:g}: expected a share in [0, 1), such as 10%")
        found = choose_rows(
            self.store[self.store.provenance["dataset"]["train_split"]],
            **self.config.subset, seed=self.config.seed, holdout=holdout,
        )  # fmt: skip
        for note in found.notes:
            self.say(note)
        return found

    def pooled(self, pooler: str) -> tuple[Pooled, Pooled]:
        """Features of the valid rows of the train and of the evaluation split."""
        config, dataset = self.config, self.store.provenance["dataset"]
        way = (self.store.digest, self.layer, config.average_layers, self.norm_name)

        def features(split: str) -> Pooled:
            def make() -> Pooled:
                return pool_split(
                    self.store[split], layer=self.layer, pooler=pooler, norm=self.norm,
                    average_layers=config.average_layers, progress=self.progress,
                )  # fmt: skip

            return self.cache.get(way, pooler, split, make)

        return features(dataset["train_split"]), features(dataset["eval_split"])

    def clip(self, ks: Sequence[int], num_rows: int) -> tuple[int, ...]:
        """No more neighbours than there are training images."""
        if (most := max(ks, default=0)) > num_rows:
            self.say(f"k {most} is more than the {num_rows} training images; {num_rows} is used")
        return unique([min(k, num_rows) for k in ks])

    def run(self, identity: Mapping[str, Any], pooler: str) -> str:
        """Name of a result, from everything that decides it."""
        return run_name({**identity, **self._where(pooler), **self.config.which})

    def recall(self, runs: Sequence[str]) -> bool:
        """Take the rows of an earlier run, if all of these are there."""
        found = [self.known[run] for run in runs if run in self.known]
        if len(found) == len(runs):
            self.rows.extend(found)
        return len(found) == len(runs)

    def row(
        self, run: str, pooler: str, num_rows: int, *,
        val_top1: float | None, top1: float, top5: float, seconds: float, **fields: Any,
    ) -> Row:  # fmt: skip
        """A result row. There are no epochs, so the best and the last are the score itself."""
        return Row(
            run=run,
            backbone=self.store.provenance["backbone"]["name"],
            dataset=self.store.provenance["dataset"]["name"],
            **self._where(pooler), **self.config.which, **fields,
            tokens=POOLED[pooler],
            views=1,
            dim_out=self.store.spec.layers[self.layer].dim,
            train_images=num_rows,
            val_top1=val_top1,
            test_top1=None if val_top1 is None else top1,
            test_top1_best=top1,
            test_top1_last=top1,
            test_top5=top5,
            seconds=round(seconds, 3),
            device=self.device,
            precision="float64",
            epcache_version=epcache.__version__,
        )  # fmt: skip

    def _where(self, pooler: str) -> dict[str, Any]:
        return {
            "digest": self.store.digest, "layer": self.layer, "norm": self.norm_name,
            "pooler": pooler,
        }  # fmt: skip

    def keep(self, rows: Sequence[Row]) -> None:
        """Append rows as soon as they are there, so that an interrupted command keeps them."""
        append_rows(rows, results_dir())
        self.rows.extend(rows)

    def finish(self) -> Study:
        """All that was found."""
        return Study(
            store=self.store.path, digest=self.store.digest, rows=tuple(self.rows),
            rows_path=results_dir() / ROWS,
        )  # fmt: skip


def float64_device(name: str) -> str:
    """A device that computes in float64; ``auto`` is CUDA, else the CPU.

    Raises:
        ConfigError: The machine has no such device, or it lacks the type.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if resolve_device(name).startswith("mps"):
        raise ConfigError(f"--device {name} has no float64, which k-NN and linear need; use cpu")
    return name


def unique(values: Sequence[T]) -> tuple[T, ...]:
    """Each value once, in the order given."""
    return tuple(dict.fromkeys(values))
