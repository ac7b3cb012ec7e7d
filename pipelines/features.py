"""k-NN and linear classifiers on pooled features: what tokens are worth untrained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from epcache.errors import ConfigError
from epcache.knn import KS, TEMPERATURES, KnnResult, knn_classify, select_knn
from epcache.linear import CS, LinearResult, fit_logistic, fit_ridge
from epcache.pipelines.readout import FeatureConfig, Progress, Readout, Say, Study, unique
from epcache.results import Row

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


def knn(config: KnnConfig, *, say: Say, progress: Progress | None = None) -> Study:
    """Score every pooler, k and temperature, and append the rows.

    Args:
        config: What to do.
        say: Told what the user should know.
        progress: Told how many bytes of tokens are pooled, and of how many.
    """
    readout = Readout.of(config, say=say, progress=progress)
    for pooler, train, test in readout.pooled():
        started = time.monotonic()
        holdout = _settle(config.holdout, len(train), say)
        seed = None if holdout in ("loo", 0) else config.seed
        held = None if holdout == "loo" else readout.holdout(train.labels, float(holdout))
        ks, temperatures = readout.clip(config.ks, train), unique(config.temperatures)
        shared: dict[str, Any] = {
            "ks": ks, "temperatures": temperatures,
            "num_classes": readout.num_classes, "device": readout.device,
        }  # fmt: skip
        vals: Sequence[KnnResult | None] = [None] * (len(ks) * len(temperatures))
        if holdout:
            vals = select_knn(train.features, train.labels, holdout_rows=held, **shared).grid
        tests = knn_classify(train.features, train.labels, test.features, test.labels, **shared)
        seconds = readout.pool_seconds[pooler] + time.monotonic() - started
        rows: list[Row] = []
        for val, found in zip(vals, tests, strict=True):
            asked = {"k": found.k, "temperature": found.temperature, "seed": seed}
            rows.append(
                readout.row(
                    {"command": "knn", "holdout": holdout, **asked}, pooler, train,
                    val_top1=None if val is None else val.top1,
                    top1=found.top1, top5=found.top5, seconds=seconds, **asked,
                )
            )  # fmt: skip
        readout.keep(rows)
    return readout.finish()


def linear(config: LinearConfig, *, say: Say, progress: Progress | None = None) -> Study:
    """Fit every pooler and method, and append the rows; arguments as `knn`."""
    _check_linear(config)
    readout = Readout.of(config, say=say, progress=progress)
    for pooler, train, test in readout.pooled():
        held = readout.holdout(train.labels, config.holdout) if config.holdout else None
        for method in unique(config.methods):
            started = time.monotonic()
            data = (train.features, train.labels, test.features, test.labels)
            result = _fit(method, data, held, config.l2, readout)
            _tell_convergence(result, pooler, say)
            seed = config.seed if config.holdout else None
            identity = {
                "command": "linear", "method": method, "l2": sorted(set(config.l2)) or None,
                "holdout": config.holdout, "seed": seed,
            }  # fmt: skip
            row = readout.row(
                identity, pooler, train,
                val_top1=result.val_top1, top1=result.test_top1, top5=result.test_top5,
                seconds=readout.pool_seconds[pooler] + time.monotonic() - started,
                num_params=result.weight.numel() + result.bias.numel(),
                method=method, l2=result.l2, seed=seed,
            )  # fmt: skip
            readout.keep([row])
    return readout.finish()


def _settle(holdout: Holdout, num_rows: int, say: Say) -> Literal["loo"] | float:
    """What ``auto`` means for so many training images."""
    if holdout != "auto":
        return holdout
    if num_rows <= LOO_ROWS:
        return "loo"
    say(f"{num_rows:,} training images: {SHARE:.0%} are held out, not one at a time")
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
    data: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]],
    held: NDArray[np.int64] | None,
    l2: Sequence[float],
    readout: Readout,
) -> LinearResult:
    shared: dict[str, Any] = {
        "num_classes": readout.num_classes, "holdout_rows": held, "device": readout.device,
    }  # fmt: skip
    if method == "ridge":
        return fit_ridge(*data, alphas=l2 or None, **shared)
    return fit_logistic(*data, cs=l2 or CS, **shared)


def _tell_convergence(result: LinearResult, pooler: str, say: Say) -> None:
    if failed := [f"{p.value:.3g}" for p in result.grid if not p.converged]:
        say(f"{result.method} on {pooler} did not converge for C {', '.join(failed)}")
    if not result.converged:
        say(f"{result.method} on {pooler}: the final fit (C {result.l2:.3g}) did not converge")
