"""Feature vectors with labels, checked once and read a chunk at a time.

What k-NN and the linear classifiers have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epcache.errors import ConfigError, DataError

Features = Tensor | NDArray[Any]
"""(n, D) vectors of any real type, a memory map too; they are read as float32."""
Labels = Tensor | NDArray[Any] | Sequence[int]
"""(n,) integers."""

SCALINGS = ("none", "l2", "standard")
KEPT_BYTES = 2**29
"""Converted to float64 once, not on every pass, when this holds it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Labelled vectors that are read a chunk at a time."""

    features: Features
    all_labels: NDArray[np.int64]
    """Labels of all `features`, not only of `rows`."""
    rows: NDArray[np.int64]
    """Which of the features, in ascending order."""
    device: torch.device
    chunk_rows: int

    def __len__(self) -> int:
        """How many rows."""
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Width D of a vector."""
        return int(self.features.shape[1])

    @property
    def labels(self) -> Tensor:
        """(len(self),) int64 on the device."""
        return torch.from_numpy(self.all_labels[self.rows]).to(self.device)

    def read(self, start: int, stop: int) -> Tensor:
        """Vectors of some of the rows, (B, D) float64 on the device, float32 in precision."""
        rows = self.rows[start:stop]
        if isinstance(self.features, Tensor):
            part = self.features.detach()[torch.from_numpy(rows).to(self.features.device)]
        else:
            part = torch.from_numpy(np.asarray(self.features[rows]))
        return part.to(self.device, torch.float32).double()

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Bounds of chunks of at most `chunk_rows` rows."""
        for start in range(0, len(self), self.chunk_rows):
            yield start, min(start + self.chunk_rows, len(self))

    def split(self, holdout_rows: Labels) -> tuple[FeatureRows, FeatureRows]:
        """The rows to fit and the rows held out.

        Raises:
            ConfigError: If rows repeat, do not exist, or leave nothing on either side.
        """
        holdout = integers(holdout_rows, "held-out rows")
        if len(holdout) and not (holdout.min() >= 0 and holdout.max() < len(self)):
            wrong = holdout[(holdout < 0) | (holdout >= len(self))][0]
            raise ConfigError(f"held-out row {wrong} is not one of the {len(self)} training rows")
        unique = np.unique(holdout)
        if len(unique) < len(holdout):
            raise ConfigError(f"{len(holdout) - len(unique)} held-out rows repeat; give each once")
        if not 0 < len(unique) < len(self):
            raise ConfigError(
                f"{len(unique)} of {len(self)} training rows are held out; expected at least one "
                "to score and one to fit"
            )
        rest = np.setdiff1d(self.rows, self.rows[unique])
        return replace(self, rows=rest), replace(self, rows=self.rows[unique])


def feature_rows(
    features: Features,
    labels: Labels,
    *,
    name: str,
    num_classes: int,
    device: str | torch.device = "cpu",
    chunk_rows: int,
    dim: int | None = None,
) -> FeatureRows:
    """Check vectors and labels, in one pass that keeps nothing.

    Args:
        features: (n, D) vectors.
        labels: (n,) integers in [0, num_classes).
        name: What errors call them, such as ``train``.
        num_classes: Number of classes C.
        device: Where to compute.
        chunk_rows: How many rows to read at a time.
        dim: The width they must have, if another set has fixed it.

    Raises:
        ConfigError: If an option cannot work.
        DataError: If shapes do not fit, labels are out of range or a vector is not finite.
    """
    positive_integer("num_classes", num_classes)
    positive_integer("chunk_rows", chunk_rows)
    if not isinstance(features, Tensor) and np.asarray(features[:0]).dtype.kind not in "fiu":
        raise DataError(f"{name} features have type {features.dtype}; expected numbers")
    if features.ndim != 2 or 0 in features.shape:
        shape = tuple(features.shape)
        raise DataError(f"{name} features have shape {shape}; expected (n, D), both at least 1")
    if dim is not None and features.shape[1] != dim:
        raise DataError(
            f"{name} features have width {features.shape[1]}, train features {dim}; "
            "both must come from one layer and pooler"
        )
    classes = integers(labels, f"{name} labels")
    if len(classes) != len(features):
        raise DataError(f"{name} has {len(features)} features but {len(classes)} labels")
    wrong = np.flatnonzero((classes < 0) | (classes >= num_classes))
    if len(wrong):
        raise DataError(
            f"{name} row {wrong[0]} has label {classes[wrong[0]]}; expected 0 to {num_classes - 1}"
        )
    rows = FeatureRows(
        features=features,
        all_labels=classes,
        rows=np.arange(len(classes), dtype=np.int64),
        device=torch.device(device),
        chunk_rows=chunk_rows,
    )
    for start, stop in rows.chunks():
        finite = rows.read(start, stop).isfinite().all(1)
        if not bool(finite.all()):
            row = start + int(finite.logical_not().nonzero()[0, 0])
            raise DataError(f"{name} row {row} is not finite in float32; extract it again")
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Centred:
    """Features less their mean, for models with a free intercept; float64, a chunk at a time."""

    rows: FeatureRows
    unit: bool
    """Vectors are L2-normalised before all else."""
    mean_D: Tensor
    scale_D: Tensor
    """Each feature is divided by it: ones, or its standard deviation."""
    kept: tuple[Tensor, ...]
    """The chunks, if they are small enough to be worth keeping."""

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, D) and labels (B,) of each chunk."""
        labels = self.rows.labels
        for number, (start, stop) in enumerate(self.rows.chunks()):
            part = self.kept[number] if self.kept else self._read(start, stop)
            yield part, labels[start:stop]

    def _read(self, start: int, stop: int) -> Tensor:
        return (read(self.rows, start, stop, unit=self.unit) - self.mean_D) / self.scale_D

    def to_raw(self, weight_CD: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias for features as they are read, from those for centred ones."""
        weight_CD = weight_CD / self.scale_D
        return weight_CD, bias_C - weight_CD @ self.mean_D

    def basis(self) -> tuple[Tensor, Tensor]:
        """Principal axes (D, R), orthonormal, and the sums of squares along them (R,), above 0.

        Of the two products, D x D and n x n, the smaller one is decomposed; n x n by the singular
        values of the features themselves, which keeps their full precision.
        """
        num_rows, dim = len(self.rows), self.rows.dim
        if num_rows < dim:
            features_ND = torch.cat([part for part, _ in self.chunks()])
            _, singular, axes_RD = torch.linalg.svd(features_ND, full_matrices=False)
            squares, axes = singular.square(), axes_RD.T
        else:
            gram_DD = torch.zeros(dim, dim, dtype=torch.float64, device=self.mean_D.device)
            for part, _ in self.chunks():
                gram_DD += part.T @ part
            squares, axes = torch.linalg.eigh(gram_DD)
        real = squares > squares.max() * max(num_rows, dim) * torch.finfo(torch.float64).eps
        return axes[:, real].contiguous(), squares[real]


def read(rows: FeatureRows, start: int, stop: int, *, unit: bool) -> Tensor:
    """Vectors of some of the rows, (B, D) float64, L2-normalised if asked; zero stays zero."""
    part = rows.read(start, stop)
    if not unit:
        return part
    norms_B1 = torch.linalg.vector_norm(part, dim=1, keepdim=True)
    return part / torch.where(norms_B1 > 0, norms_B1, 1.0)


def centred(rows: FeatureRows, scaling: str) -> Centred:
    """Centre features, after scaling them.

    Args:
        rows: What to fit.
        scaling: ``none``, ``l2`` (each vector to length 1) or ``standard`` (each feature to
            standard deviation 1; a constant one stays).
    """
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling {scaling!r} is unknown; expected one of {', '.join(SCALINGS)}")
    unit = scaling == "l2"
    mean_D = torch.zeros(rows.dim, dtype=torch.float64, device=rows.device)
    for start, stop in rows.chunks():
        mean_D += read(rows, start, stop, unit=unit).sum(0) / len(rows)
    scale_D = torch.ones_like(mean_D)
    if scaling == "standard":
        squares_D = torch.zeros_like(mean_D)
        for start, stop in rows.chunks():
            squares_D += (read(rows, start, stop, unit=unit) - mean_D).square().sum(0)
        # What rounding alone leaves of a constant feature must not be blown up.
        deviation_D = (squares_D / len(rows)).sqrt()
        scale_D = torch.where(deviation_D > 1e-7 * mean_D.abs(), deviation_D, 1.0)
    result = Centred(rows=rows, unit=unit, mean_D=mean_D, scale_D=scale_D, kept=())
    if 8 * len(rows) * rows.dim > KEPT_BYTES:
        return result
    return replace(result, kept=tuple(part for part, _ in result.chunks()))


def ranks(scores_BC: Tensor, labels_B: Tensor, *, floor: float) -> Tensor:
    """How many classes come before the right one; of equal scores the lower class comes first.

    Args:
        scores_BC: Higher is better.
        labels_B: The right classes.
        floor: A right class that scores no more than this counts as last.

    Returns:
        (B,) int64; 0 is right.
    """
    own_B1 = scores_BC.gather(1, labels_B[:, None])
    lower_BC = torch.arange(scores_BC.shape[1], device=labels_B.device) < labels_B[:, None]
    before_BC = (scores_BC > own_B1) | ((scores_BC == own_B1) & lower_BC)
    return torch.where(own_B1[:, 0] > floor, before_BC.sum(1), scores_BC.shape[1] + 5)


def positive_integer(name: str, value: object) -> None:
    """Refuse anything but a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def positive_numbers(name: str, values: Sequence[float]) -> None:
    """Refuse an empty grid and anything but positive finite numbers."""
    if len(values) == 0:
        raise ConfigError(f"{name} is empty; give at least one value")
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be positive finite numbers, got {value!r}")


def integers(values: Labels, name: str) -> NDArray[np.int64]:
    """A vector of integers from whatever holds them."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        shape = tuple(array.shape)
        raise DataError(f"{name} have type {array.dtype}, shape {shape}; expected integers, (n,)")
    return array.astype(np.int64)
