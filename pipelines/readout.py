"""What k-NN and the linear classifiers share: a store read one way, and the rows written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import epcache
from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.order import stratified_holdout
from epcache.plan import resolve_device
from epcache.pooled import POOLED, Pooled, choose_norm, has_cls, pool_split
from epcache.results import ROWS, Row, append_rows, best_row, results_dir, run_name
from epcache.store.reader import Store, open_store

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What both commands ask; the fields are their options."""

    store: Path
    layer: int = -1
    poolers: Sequence[str] = ()
    """Some of cls and gap; none means those that the store has."""
    norm: str = "auto"
    seed: int = 0
    """Of the choice of held-out rows."""
    device: str = "auto"


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
        return {
            "store": str(self.store),
            "digest": self.digest,
            "results": [row.to_json() for row in self.rows],
            "best": self.best.to_json(),
        }


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
    pool_seconds: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, config: FeatureConfig, *, say: Say, progress: Progress | None) -> Readout:
        """Open the store and settle what the options leave open."""
        store = open_store(config.store)
        layer = store.resolve_layer(config.layer)
        norm_name, norm = choose_norm(store, config.norm)
        poolers = unique(config.poolers)
        if not poolers:
            poolers = tuple(POOLED) if has_cls(store, layer) else ("gap",)
            if "cls" not in poolers:
                say(f"layer {layer} of {store.path} has no [CLS] token: gap only")
        return cls(
            config=config, store=store, layer=layer, norm_name=norm_name, norm=norm,
            device=float64_device(config.device), poolers=poolers, say=say, progress=progress,
        )  # fmt: skip

    @property
    def num_classes(self) -> int:
        """C of the data set, also where a class has no image left."""
        return len(self.store.provenance["dataset"]["classes"])

    def pooled(self) -> Iterator[tuple[str, Pooled, Pooled]]:
        """Each pooler with its features of the train and the evaluation split."""
        dataset = self.store.provenance["dataset"]
        for pooler in self.poolers:
            started = time.monotonic()
            train, test = (
                pool_split(
                    self.store[dataset[name]], layer=self.layer, pooler=pooler, norm=self.norm,
                    progress=self.progress,
                )
                for name in ("train_split", "eval_split")
            )  # fmt: skip
            self.pool_seconds[pooler] = time.monotonic() - started
            yield pooler, train, test

    def holdout(self, labels: NDArray[np.int64], share: float) -> NDArray[np.int64]:
        """Rows to score by the rest, a share of every class; none for a share of 0."""
        if not 0 <= share < 1:
            raise ConfigError(f"--holdout {share:g}: expected a share in [0, 1), such as 10%")
        _, held = stratified_holdout(labels, share=share, seed=self.config.seed)
        if share and not len(held):
            most = int(np.bincount(labels).max())
            raise ConfigError(
                f"--holdout {share:g} takes none of the training images (at most {most} a class); "
                f"try --holdout 50%, or 0 to choose nothing"
            )
        return held

    def clip(self, ks: Sequence[int], train: Pooled) -> tuple[int, ...]:
        """No more neighbours than there are training images."""
        if (most := max(ks, default=0)) > len(train):
            self.say(
                f"k {most} is more than the {len(train)} training images; {len(train)} is used"
            )
        return unique([min(k, len(train)) for k in ks])

    def row(
        self, identity: dict[str, Any], pooler: str, train: Pooled, *,
        val_top1: float | None, top1: float, top5: float, seconds: float, **fields: Any,
    ) -> Row:  # fmt: skip
        """A result row. There are no epochs, so the best and the last are the score itself."""
        where: dict[str, Any] = {
            "digest": self.store.digest, "layer": self.layer, "norm": self.norm_name,
            "pooler": pooler,
        }  # fmt: skip
        return Row(
            run=run_name({**identity, **where}),
            backbone=self.store.provenance["backbone"]["name"],
            dataset=self.store.provenance["dataset"]["name"],
            **where, **fields,
            tokens=POOLED[pooler],
            views=1,
            dim_out=train.features.shape[1],
            train_images=len(train),
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
