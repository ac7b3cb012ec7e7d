"""Weighted cosine k-nearest neighbours, exact whatever the chunk, the thread or the device.

Unit vectors are rounded to multiples of 2**-26, finer than the float32 they come from. Every
partial sum of a product of two is then a multiple of 2**-52 no larger than 1, which float64 holds
exactly, so a similarity does not depend on the order of summation. Equal rows tie to the bit, and
ties go to the lower row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epcache.errors import DataError
from epcache.features import (
    FeatureRows,
    Features,
    Labels,
    feature_rows,
    positive_integer,
    positive_numbers,
    ranks,
)

KS = (10, 20, 100, 200)
TEMPERATURES = (0.07,)
UNIT = 2.0**26


@dataclass(frozen=True, kw_only=True)
class KnnResult:
    """Accuracies of one k and temperature, as fractions."""

    k: int
    """Neighbours asked for."""
    num_neighbours: int
    """Neighbours that voted: fewer than `k` where there are not so many rows."""
    temperature: float
    """T of the weight exp(similarity / T)."""
    top1: float
    top5: float
    """A class without any vote is never right, however few classes have votes."""


@dataclass(frozen=True, kw_only=True)
class KnnSelection:
    """The k and temperature that classify held-out training rows best."""

    k: int
    temperature: float
    val_top1: float
    grid: tuple[KnnResult, ...]
    """Every combination, scored on the held-out rows."""


def knn_classify(
    train_features: Features,
    train_labels: Labels,
    test_features: Features,
    test_labels: Labels,
    *,
    ks: Sequence[int] = KS,
    temperatures: Sequence[float] = TEMPERATURES,
    num_classes: int,
    chunk_rows: int = 2048,
    device: str | torch.device = "cpu",
) -> list[KnnResult]:
    """Accuracy of every k and temperature, from one search for the largest k.

    Memory beyond the arguments is a few (chunk_rows, chunk_rows) and (chunk_rows, D) blocks. A k
    above the number of training rows lets all of them vote; `num_neighbours` tells. A zero vector
    has similarity 0 to everything.

    Args:
        train_features: (n, D) vectors; they need not be normalised.
        train_labels: (n,) integers in [0, num_classes).
        test_features: (m, D) vectors.
        test_labels: (m,) integers in [0, num_classes).
        ks: Numbers of neighbours.
        temperatures: T in the weight exp(similarity / T); above 0.
        num_classes: Number of classes C.
        chunk_rows: Rows of either side in one block; it does not change the answer.
        device: Where to compute; it must have float64.

    Returns:
        One result for each k and, inside, each temperature, in the order given.

    Raises:
        ConfigError: If an option cannot work.
        DataError: If features and labels do not fit together.

    Source: k-NN of the DINO and DINOv2 evaluations (k 10, 20, 100, 200; T 0.07).
    """
    check_grid(ks, temperatures)
    train = feature_rows(
        train_features, train_labels,
        name="train", num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    test = feature_rows(
        test_features, test_labels,
        name="test", num_classes=num_classes, device=device, chunk_rows=chunk_rows, dim=train.dim,
    )  # fmt: skip
    return _score(train, test, ks, temperatures, num_classes)


def knn_predict(
    train_features: Features,
    train_labels: Labels,
    test_features: Features,
    *,
    k: int,
    temperature: float = TEMPERATURES[0],
    num_classes: int,
    chunk_rows: int = 2048,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Share of the vote that each class has, (m, C) float32 on the CPU, rows summing to 1.

    Arguments and errors are those of `knn_classify`.
    """
    check_grid([k], [temperature])
    train = feature_rows(
        train_features, train_labels,
        name="train", num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    test = feature_rows(
        test_features, np.zeros(len(test_features), np.int64),
        name="test", num_classes=num_classes, device=device, chunk_rows=chunk_rows, dim=train.dim,
    )  # fmt: skip
    votes_MC = torch.empty(len(test), num_classes)
    for start, stop, similarities_BK, labels_BK in _neighbours(train, test, k):
        last = min(k, len(train))
        for _, scores_BC in _votes(similarities_BK, labels_BK, {last}, temperature, num_classes):
            votes_MC[start:stop] = (scores_BC / scores_BC.sum(1, keepdim=True)).cpu()
    return votes_MC


def select_knn(
    train_features: Features,
    train_labels: Labels,
    *,
    holdout_rows: Labels | None = None,
    ks: Sequence[int] = KS,
    temperatures: Sequence[float] = TEMPERATURES,
    num_classes: int,
    chunk_rows: int = 2048,
    device: str | torch.device = "cpu",
) -> KnnSelection:
    """Choose k and temperature without looking at test data.

    Held-out rows are classified by the other rows; equally good choices go to the smallest k, then
    to the lowest temperature.

    Args:
        train_features: (n, D) vectors.
        train_labels: (n,) integers in [0, num_classes).
        holdout_rows: Rows of train to score. None leaves one out: every row is classified by all
            the others, which costs n * n similarities and wastes no row.
        ks: Numbers of neighbours to choose from.
        temperatures: Temperatures to choose from.
        num_classes: Number of classes C.
        chunk_rows: Rows of either side in one block.
        device: Where to compute.

    Raises:
        ConfigError: If an option cannot work.
        DataError: If features and labels do not fit together.
    """
    check_grid(ks, temperatures)
    train = feature_rows(
        train_features, train_labels,
        name="train", num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    if holdout_rows is None and len(train) < 2:
        raise DataError("train has 1 row; leaving one out needs at least 2")
    fit, holdout = (train, train) if holdout_rows is None else train.split(holdout_rows)
    grid = _score(fit, holdout, ks, temperatures, num_classes)
    best = min(grid, key=lambda result: (-result.top1, result.k, result.temperature))
    return KnnSelection(
        k=best.k, temperature=best.temperature, val_top1=best.top1, grid=tuple(grid)
    )


def _score(
    train: FeatureRows,
    test: FeatureRows,
    ks: Sequence[int],
    temperatures: Sequence[float],
    num_classes: int,
) -> list[KnnResult]:
    """Accuracy of every k and temperature; the same rows twice means leaving one out."""
    used = {k: min(k, len(train) - (train is test)) for k in ks}
    wanted = set(used.values())
    right = {(k, t): [0, 0] for k in wanted for t in temperatures}
    labels = test.labels
    for start, stop, similarities_BK, labels_BK in _neighbours(train, test, max(ks)):
        for t in set(temperatures):
            for k, scores_BC in _votes(similarities_BK, labels_BK, wanted, t, num_classes):
                ranks_B = ranks(scores_BC, labels[start:stop], floor=0.0)
                right[k, t][0] += int((ranks_B < 1).sum())
                right[k, t][1] += int((ranks_B < 5).sum())
    return [
        KnnResult(
            k=k,
            num_neighbours=used[k],
            temperature=t,
            top1=right[used[k], t][0] / len(test),
            top5=right[used[k], t][1] / len(test),
        )
        for k in ks
        for t in temperatures
    ]


def _neighbours(
    train: FeatureRows, test: FeatureRows, k: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """For each chunk of test rows, its bounds and its neighbours' similarities and labels.

    Nearest first, (B, K) each; of equally near ones the lower training row first.
    """
    labels = train.labels
    for start, stop in test.chunks():
        test_BD = _unit(test.read(start, stop))
        near_BK = test_BD.new_empty(len(test_BD), 0)
        rows_BK = torch.empty(len(test_BD), 0, dtype=torch.int64, device=test_BD.device)
        for first, last in train.chunks():
            # Adding zero turns -0 into +0: some sorts tell them apart.
            block_BK = (test_BD @ _unit(train.read(first, last)).T).add_(0.0)
            if train is test:
                own = range(max(start, first), min(stop, last))
                block_BK[[i - start for i in own], [i - first for i in own]] = -math.inf
            kept = near_BK.shape[1]
            near_BK = torch.cat([near_BK, block_BK], 1)
            columns_BK = _largest(near_BK, k)
            near_BK = near_BK.gather(1, columns_BK)
            # A spare column, so that there is one to gather before the first chunk is in.
            earlier_BK = torch.cat([rows_BK, rows_BK.new_zeros(len(rows_BK), 1)], 1)
            rows_BK = torch.where(
                columns_BK < kept,
                earlier_BK.gather(1, columns_BK.clamp_max(kept)),
                columns_BK + (first - kept),
            )
        near_BK, order_BK = near_BK.sort(dim=1, descending=True, stable=True)
        yield start, stop, near_BK / UNIT**2, labels[rows_BK.gather(1, order_BK)]


def _largest(values_BK: Tensor, k: int) -> Tensor:
    """Columns of the k largest values of each row, ascending; of equal values the lower columns."""
    if values_BK.shape[1] <= k:
        return torch.arange(values_BK.shape[1], device=values_BK.device).expand_as(values_BK)
    values, columns = values_BK.topk(k + 1, dim=1)
    columns = columns[:, :k]
    # topk chooses among equals as it likes, which matters only where they straddle the edge.
    tied_B = values[:, k] == values[:, k - 1]
    if bool(tied_B.any()):
        columns[tied_B] = values_BK[tied_B].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return columns.sort(dim=1).values


def _unit(features_BD: Tensor) -> Tensor:
    """Unit vectors times 2**26, rounded to integers; the zero vector stays.

    The squares are added by halves, element by element: the norm of a row then never depends on
    what else is in the block, as it may in a library's sum.
    """
    squares = features_BD.square()
    while squares.shape[1] > 1:
        half = (squares.shape[1] + 1) // 2
        squares[:, : squares.shape[1] - half] += squares[:, half:]
        squares = squares[:, :half]
    norms_B1 = squares.sqrt()
    return (features_BD / torch.where(norms_B1 > 0, norms_B1, 1.0) * UNIT).round_()


def _votes(
    similarities_BK: Tensor, labels_BK: Tensor, ks: set[int], temperature: float, num_classes: int
) -> Iterator[tuple[int, Tensor]]:
    """Class scores (B, C) after each k neighbours, in ascending k; one buffer, reused."""
    # Relative to the nearest, so that no temperature overflows; the scores only gain a factor.
    weights_BK = ((similarities_BK - similarities_BK[:, :1]) / temperature).exp()
    scores_BC = weights_BK.new_zeros(len(weights_BK), num_classes)
    for k in range(1, max(ks) + 1):
        # One neighbour at a time: a fixed order of summation on every device.
        scores_BC.scatter_add_(1, labels_BK[:, k - 1 : k], weights_BK[:, k - 1 : k])
        if k in ks:
            yield k, scores_BC


def check_grid(ks: Sequence[int], temperatures: Sequence[float]) -> None:
    """Refuse values that cannot work.

    Raises:
        ConfigError: One is not a positive number, or k is not whole.
    """
    positive_numbers("ks", ks)
    for k in ks:
        positive_integer("k", k)
    positive_numbers("temperatures", temperatures)
