"""Linear classifiers on pooled features: L2 logistic regression and closed-form ridge.

The penalty is chosen on held-out training rows, always over the whole grid, then all of train is
fitted with it and the evaluation rows are scored once. All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epcache.errors import ConfigError
from epcache.features import (
    Centred,
    FeatureRows,
    Features,
    Labels,
    centred,
    feature_rows,
    positive_integer,
    positive_numbers,
    ranks,
    read,
)
from epcache.softmax import softmax_path

CS = tuple(float(c) for c in 10 ** np.linspace(-6, 5, 45))
LOW_SHOT_CS = tuple(float(c) for c in 10 ** np.linspace(-4, 2, 7))
"""One value a decade, as few images tell no finer. A larger C separates them as perfectly, only
that it takes minutes to converge."""
GRID_PRODUCTS = 300
"""Passes over the data that one C of the grid may cost. On overlapping classes a large C needs
thousands and is never chosen; its grid point then says that it did not converge. The final fit
has no such limit."""

RELATIVE_ALPHAS = tuple(float(a) for a in 10 ** np.linspace(-6, 3, 37))
"""Times the mean eigenvalue of the fitted rows' scatter matrix."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One penalty and how well it did on held-out rows."""

    value: float
    """C of logistic regression, alpha of ridge."""
    val_top1: float
    converged: bool
    """False where Newton's method reached its limit of steps; always true for ridge."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearResult:
    """A linear classifier fitted on all of train, and its accuracies as fractions."""

    method: str
    """``logistic`` or ``ridge``."""
    l2: float
    """The penalty chosen: C (larger is weaker) or alpha (larger is stronger)."""
    scaling: str
    """What was done to features. With ``l2``, `weight` is for L2-normalised vectors; otherwise it
    is for features as they are."""
    val_top1: float | None
    """Held-out accuracy of the chosen penalty; None where there was nothing to choose from."""
    test_top1: float
    test_top5: float
    weight: Tensor
    """(C, D) float64 on the CPU: scores are ``features @ weight.T + bias``."""
    bias: Tensor
    """(C,) float64; logistic regression has -inf for a class without training rows."""
    predictions: Tensor
    """(m,) int64, the class of each evaluation row."""
    grid: tuple[GridPoint, ...]
    """Every penalty tried, in ascending order; empty where there was nothing to choose from."""
    converged: bool
    """Whether the final fit reached its tolerance."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Model:
    """A classifier of features as they are read."""

    penalty: float
    weight_CD: Tensor
    bias_C: Tensor
    converged: bool = True


def fit_logistic(
    train_features: Features,
    train_labels: Labels,
    eval_features: Features,
    eval_labels: Labels,
    *,
    num_classes: int,
    holdout_rows: Labels | None,
    cs: Sequence[float] = CS,
    scaling: str = "none",
    tolerance: float = 1e-5,
    chunk_rows: int = 8192,
    device: str | torch.device = "cpu",
) -> LinearResult:
    """Multinomial logistic regression, C chosen on held-out rows.

    Minimises ``C * sum_i CE_i + |W|^2 / 2``, the bias free, as scikit-learn does. Two classes have
    two weight vectors here; scikit-learn gives them one, and needs 2 C for the same answer. Equally
    good C go to the smallest. Beyond a few chunks, memory holds about eight (C, D) matrices, a
    (D, D) one and, where each fits in half a GiB, float64 copies of the features and of the
    probabilities.

    Args:
        train_features: (n, D) vectors.
        train_labels: (n,) integers in [0, num_classes).
        eval_features: (m, D) vectors.
        eval_labels: (m,) integers in [0, num_classes).
        num_classes: Number of classes C.
        holdout_rows: Rows of train to choose C on; None if `cs` holds one value.
        cs: Values of C; any order.
        scaling: ``none`` (as the DINOv2 evaluation), ``l2`` (vectors of length 1) or ``standard``
            (standard deviation 1 in each fit's own rows).
        tolerance: Relative error of W at which a fit is done.
        chunk_rows: Rows to read at a time.
        device: Where to compute; it must have float64.

    Raises:
        ConfigError: If an option cannot work.
        DataError: If features and labels do not fit together.

    Source: logistic regression of the DINOv2 evaluation (45 C from 1e-6 to 1e5, 10% held out).
    """
    positive_numbers("cs", cs)
    positive_numbers("tolerance", [tolerance])
    train, test = _sets(
        train_features, train_labels, eval_features, eval_labels,
        num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    if holdout_rows is None and len(set(cs)) > 1:
        raise ConfigError(
            f"{len(set(cs))} values of C and no held-out rows to choose on; "
            "pass holdout_rows or one C"
        )

    def path(
        rows: FeatureRows, values: Sequence[float], most_products: int | None = None
    ) -> Iterator[_Model]:
        data = centred(rows, scaling)
        for fit in softmax_path(
            data,
            num_classes=num_classes,
            cs=values,
            tolerance=tolerance,
            most_products=most_products,
        ):
            yield _Model(
                penalty=fit.c,
                weight_CD=fit.weight_CD,
                bias_C=fit.bias_C,
                converged=fit.converged,
            )

    unit, values, grid = scaling == "l2", sorted(set(cs)), []
    if holdout_rows is not None:
        fit_rows, holdout = train.split(holdout_rows)
        for model in path(fit_rows, values, GRID_PRODUCTS):
            top1, _, _ = _evaluate(model, holdout, unit=unit)
            grid.append(GridPoint(value=model.penalty, val_top1=top1, converged=model.converged))
    # max keeps the first of equals, the smallest C.
    best = max(grid, key=lambda point: point.val_top1) if grid else None
    (final,) = path(train, [best.value if best else values[0]])
    return _result("logistic", final, test, scaling, best, grid)


def fit_ridge(
    train_features: Features,
    train_labels: Labels,
    eval_features: Features,
    eval_labels: Labels,
    *,
    num_classes: int,
    holdout_rows: Labels | None = None,
    alphas: Sequence[float] | None = None,
    scaling: str = "none",
    chunk_rows: int = 8192,
    device: str | torch.device = "cpu",
) -> LinearResult:
    """Least squares on one-hot targets with an L2 penalty, alpha chosen on held-out rows.

    Minimises ``sum_i |y_i - W x_i - b|^2 + alpha |W|^2``, the bias free. One decomposition of the
    centred features, D x D or n x n, serves every alpha. scikit-learn's RidgeClassifier has targets
    of -1 and 1, which doubles W and changes no prediction. Equally good alphas go to the largest.

    Args:
        train_features: (n, D) vectors.
        train_labels: (n,) integers in [0, num_classes).
        eval_features: (m, D) vectors.
        eval_labels: (m,) integers in [0, num_classes).
        num_classes: Number of classes C.
        holdout_rows: Rows of train to choose alpha on. None leaves one out, in closed form: every
            row is scored by the fit to all others (with `scaling` ``standard``, their scale still
            comes from all rows).
        alphas: Penalties, in any order; None is `RELATIVE_ALPHAS` times the mean eigenvalue of the
            rows fitted, which does with features of any size.
        scaling: ``none``, ``l2`` (vectors of length 1) or ``standard``.
        chunk_rows: Rows to read at a time.
        device: Where to compute; it must have float64.

    Raises:
        ConfigError: If an option cannot work.
        DataError: If features and labels do not fit together.
    """
    if alphas is not None:
        positive_numbers("alphas", alphas)
    train, test = _sets(
        train_features, train_labels, eval_features, eval_labels,
        num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    unit = scaling == "l2"
    everything = _Ridge(centred(train, scaling), num_classes)
    if holdout_rows is None:
        values = everything.grid(alphas)
        tops = everything.leave_one_out(values) if len(values) > 1 else []
    else:
        fit_rows, holdout = train.split(holdout_rows)
        part = _Ridge(centred(fit_rows, scaling), num_classes)
        values = part.grid(alphas)
        tops = [_evaluate(part.model(alpha), holdout, unit=unit)[0] for alpha in values]
    grid = [
        GridPoint(value=alpha, val_top1=top1, converged=True)
        for alpha, top1 in zip(values, tops, strict=False)
    ]
    best = max(reversed(grid), key=lambda point: point.val_top1) if grid else None
    final = everything.model(best.value if best else values[0])
    return _result("ridge", final, test, scaling, best, grid)


class _Ridge:
    """Ridge regression of centred one-hot targets, ready for any alpha."""

    def __init__(self, data: Centred, num_classes: int) -> None:
        self.data = data
        self.axes_DR, self.squares_R = data.basis()
        counts_C = torch.bincount(data.rows.labels, minlength=num_classes).double()
        self.targets_C = counts_C / len(data.rows)
        moments_CD = self.axes_DR.new_zeros(num_classes, data.rows.dim)
        for features_BD, labels_B in data.chunks():
            # Features are centred, so the targets need not be.
            moments_CD.T.add_(features_BD.T @ self.one_hot(labels_B))
        self.moments_CR = moments_CD @ self.axes_DR

    def one_hot(self, labels_B: Tensor) -> Tensor:
        """(B, C) float64."""
        return torch.nn.functional.one_hot(labels_B, len(self.targets_C)).double()

    def grid(self, alphas: Sequence[float] | None) -> list[float]:
        """The alphas to try, ascending."""
        if alphas is not None:
            return sorted(set(alphas))
        mean = float(self.squares_R.mean()) if len(self.squares_R) else 1.0
        return [alpha * mean for alpha in RELATIVE_ALPHAS]

    def model(self, alpha: float) -> _Model:
        """The solution for one alpha."""
        weight_CD = (self.moments_CR / (self.squares_R + alpha)) @ self.axes_DR.T
        weight_CD, bias_C = self.data.to_raw(weight_CD, self.targets_C)
        return _Model(penalty=alpha, weight_CD=weight_CD, bias_C=bias_C)

    def leave_one_out(self, alphas: Sequence[float]) -> list[float]:
        """Top-1 of each alpha when every row is scored by the fit to all other rows.

        A row's residual without it is its residual divided by 1 - h, where h is what the row adds
        to its own fit.
        """
        num_rows = len(self.data.rows)
        if num_rows < 2:
            raise ConfigError("train has 1 row; leaving one out needs at least 2: pass one alpha")
        right = [0] * len(alphas)
        for features_BD, labels_B in self.data.chunks():
            along_BR = features_BD @ self.axes_DR
            truth_BC = self.one_hot(labels_B)
            for number, alpha in enumerate(alphas):
                shrink_R = 1 / (self.squares_R + alpha)
                fitted_BC = self.targets_C + along_BR @ (self.moments_CR * shrink_R).T
                own_B1 = 1 / num_rows + (along_BR.square() @ shrink_R)[:, None]
                scores_BC = truth_BC - (truth_BC - fitted_BC) / (1 - own_B1)
                right[number] += int((ranks(scores_BC, labels_B, floor=-torch.inf) < 1).sum())
        return [count / num_rows for count in right]


def _sets(
    train_features: Features,
    train_labels: Labels,
    eval_features: Features,
    eval_labels: Labels,
    *,
    num_classes: int,
    device: str | torch.device,
    chunk_rows: int,
) -> tuple[FeatureRows, FeatureRows]:
    """Both sets, checked."""
    positive_integer("num_classes", num_classes)
    train = feature_rows(
        train_features, train_labels,
        name="train", num_classes=num_classes, device=device, chunk_rows=chunk_rows,
    )  # fmt: skip
    test = feature_rows(
        eval_features, eval_labels,
        name="eval", num_classes=num_classes, device=device, chunk_rows=chunk_rows, dim=train.dim,
    )  # fmt: skip
    return train, test


def _evaluate(model: _Model, rows: FeatureRows, *, unit: bool) -> tuple[float, float, Tensor]:
    """Top-1, top-5 and predictions; a class of score -inf is never right."""
    labels, predictions, top1, top5 = rows.labels, [], 0, 0
    for start, stop in rows.chunks():
        scores_BC = read(rows, start, stop, unit=unit) @ model.weight_CD.T + model.bias_C
        ranks_B = ranks(scores_BC, labels[start:stop], floor=-torch.inf)
        top1 += int((ranks_B < 1).sum())
        top5 += int((ranks_B < 5).sum())
        predictions.append(scores_BC.argmax(1).cpu())
    return top1 / len(rows), top5 / len(rows), torch.cat(predictions)


def _result(
    method: str,
    model: _Model,
    test: FeatureRows,
    scaling: str,
    best: GridPoint | None,
    grid: Sequence[GridPoint],
) -> LinearResult:
    """Score the evaluation rows, once."""
    top1, top5, predictions = _evaluate(model, test, unit=scaling == "l2")
    return LinearResult(
        method=method,
        l2=model.penalty,
        scaling=scaling,
        val_top1=best.val_top1 if best else None,
        test_top1=top1,
        test_top5=top5,
        weight=model.weight_CD.cpu(),
        bias=model.bias_C.cpu(),
        predictions=predictions,
        grid=tuple(grid),
        converged=model.converged,
    )
