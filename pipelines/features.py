"""k-NN and linear classifiers on pooled features: what tokens are worth untrained."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from epcache.errors import ConfigError
from epcache.knn import KS, TEMPERATURES, KnnResult, check_grid, knn_classify, select_knn
from epcache.linear import CS, LinearResult, fit_logistic, fit_ridge
from epcache.pipelines.readout import (
    FeatureCache,
    FeatureConfig,
    Progress,
    Readout,
    Say,
    Study,
    unique,
)
from epcache.pooled import Pooled
from epcache.subset import TrainRows

METHODS = ("logistic", "ridge")
LOO_ROWS = 50_000
"""Up to so many training images k-NN leaves one out: n * n similarities, minutes on a CPU."""
SHARE = 0.1
Holdout = float | Literal["auto", "loo"]


@dataclass(frozen=True, kw_only=True)
class KnnConfig(FeatureConfig):
    """Options of k-NN."""

    ks: Sequence[int] = KS
    temperatures: Sequence[float] = TEMPERATURES
    holdout: Holdout = "auto"
    """Share of train to score by the rest; 0 for no held-out score. ``loo`` leaves one out, and
    ``auto`` does so up to `LOO_ROWS` images and takes `SHARE` of more."""


@dataclass(frozen=True, kw_only=True)
class LinearConfig(FeatureConfig):
    """Options of the linear classifiers."""

    methods: Sequence[str] = METHODS
    l2: Sequence[float] = ()
    """Penalties to choose from, C of logistic or alpha of ridge; none means the method's grid."""
    holdout: float = SHARE
    """Share of train to choose the penalty on; with 0 there must be just one penalty."""


def knn(
    config: KnnConfig,
    *,
    say: Say,
    progress: Progress | None = None,
    cache: FeatureCache | None = None,
) -> Study:
    """Score every pooler, k and temperature, and append the rows.

    Args:
        config: What to do.
        say: Told what the user should know.
        progress: Told how many bytes of tokens are pooled, and of how many.
        cache: Features that other commands of a study have pooled.
    """
    check_grid(config.ks, config.temperatures)
    readout = Readout.of(config, say=say, progress=progress, cache=cache)
    holdout = _settle(config, readout)
    part = readout.train_rows(0.0 if holdout == "loo" else holdout)
    judged = "outside" if part.is_outside else holdout
    seed = config.seed if config.subset or holdout not in ("loo", 0) else None
    ks, temperatures = readout.clip(config.ks, len(part.rows)), unique(config.temperatures)
    for pooler in readout.poolers:
        asked = [{"k": k, "temperature": t, "seed": seed} for k in ks for t in temperatures]
        runs = [readout.run({"command": "knn", "holdout": judged, **a}, pooler) for a in asked]
        if readout.recall(runs):
            continue
        started = time.monotonic()
        train, test = readout.pooled(pooler)
        fit, pick = train.of_rows(part.rows), train.of_rows(part.all_rows)
        shared: dict[str, Any] = {
            "ks": ks, "temperatures": temperatures,
            "num_classes": readout.num_classes, "device": readout.device,
        }  # fmt: skip
        vals: Sequence[KnnResult | None] = [None] * len(asked)
        if holdout:
            held = None if holdout == "loo" else np.searchsorted(part.all_rows, part.held)
            vals = select_knn(pick.features, pick.labels, holdout_rows=held, **shared).grid
        tests = knn_classify(fit.features, fit.labels, test.features, test.labels, **shared)
        seconds = time.monotonic() - started
        readout.keep(
            [
                readout.row(
                    run, pooler, len(fit),
                    val_top1=None if val is None else val.top1,
                    top1=found.top1, top5=found.top5, seconds=seconds, **a,
                )
                for run, a, val, found in zip(runs, asked, vals, tests, strict=True)
            ]
        )  # fmt: skip
    return readout.finish()


def linear(
    config: LinearConfig,
    *,
    say: Say,
    progress: Progress | None = None,
    cache: FeatureCache | None = None,
) -> Study:
    """Fit every pooler and method, and append the rows; arguments as `knn`."""
    _check_linear(config)
    readout = Readout.of(config, say=say, progress=progress, cache=cache)
    part = readout.train_rows(config.holdout)
    seed = config.seed if config.holdout or config.subset else None
    for pooler, method in itertools.product(readout.poolers, unique(config.methods)):
        identity = {
            "command": "linear", "method": method, "l2": sorted(set(config.l2)) or None,
            "holdout": "outside" if part.is_outside else config.holdout, "seed": seed,
        }  # fmt: skip
        run = readout.run(identity, pooler)
        if readout.recall([run]):
            continue
        started = time.monotonic()
        train, test = readout.pooled(pooler)
        result, val_top1 = _fit(method, train, test, part, config.l2, readout)
        _tell_convergence(result, pooler, say)
        row = readout.row(
            run, pooler, len(part.rows),
            val_top1=val_top1, top1=result.test_top1, top5=result.test_top5,
            seconds=time.monotonic() - started,
            num_params=result.weight.numel() + result.bias.numel(),
            method=method, l2=result.l2, seed=seed,
        )  # fmt: skip
        readout.keep([row])
    return readout.finish()


def _settle(config: KnnConfig, readout: Readout) -> Literal["loo"] | float:
    """What ``auto`` means for so many training images."""
    if config.holdout != "auto":
        return config.holdout
    if config.subset:
        return SHARE
    train = readout.store[readout.store.provenance["dataset"]["train_split"]]
    if (num_rows := int(train.valid.sum())) <= LOO_ROWS:
        return "loo"
    readout.say(f"{num_rows:,} training images: {SHARE:.0%} are held out, not one at a time")
    return SHARE


def _check_linear(config: LinearConfig) -> None:
    for method in config.methods:
        if method not in METHODS:
            raise ConfigError(f"--method {method}: expected some of {', '.join(METHODS)}")
    if config.l2 and len(set(config.methods)) > 1:
        raise ConfigError("--l2 is C of logistic but alpha of ridge; choose one with --method")
    if not config.holdout and len(set(config.l2)) != 1:
        raise ConfigError(
            "--holdout 0 leaves nothing to choose a penalty on; give one --method and one --l2"
        )


def _fit(
    method: str,
    train: Pooled,
    test: Pooled,
    part: TrainRows,
    l2: Sequence[float],
    readout: Readout,
) -> tuple[LinearResult, float | None]:
    """The classifier of the rows that count, and its held-out accuracy."""
    shared: dict[str, Any] = {"num_classes": readout.num_classes, "device": readout.device}

    def fit(
        rows: NDArray[np.int64],
        judge: Pooled,
        penalties: Sequence[float],
        held: NDArray[np.int64] | None,
    ) -> LinearResult:
        some = train.of_rows(rows)
        data = (some.features, some.labels, judge.features, judge.labels)
        if method == "ridge":
            return fit_ridge(*data, alphas=penalties or None, holdout_rows=held, **shared)
        return fit_logistic(*data, cs=penalties or CS, holdout_rows=held, **shared)

    held = np.searchsorted(part.all_rows, part.held) if len(part.held) else None
    if not part.is_outside:
        result = fit(part.rows, test, l2, held)
        return result, result.val_top1
    # What chose for a subset is not fitted in the end, so the penalty comes from a fit of its own
    chosen = fit(part.all_rows, train.of_rows(part.held), l2, held)
    return fit(part.rows, test, [chosen.l2], None), chosen.val_top1


def _tell_convergence(result: LinearResult, pooler: str, say: Say) -> None:
    if failed := [f"{p.value:.3g}" for p in result.grid if not p.converged]:
        say(f"{result.method} on {pooler} did not converge for C {', '.join(failed)}")
    if not result.converged:
        say(f"{result.method} on {pooler}: the final fit (C {result.l2:.3g}) did not converge")
