"""Recipes: how probes are trained, by name; ``resolve`` turns one into numbers for a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epcache.errors import ConfigError

OPTIMIZER_NAMES = ("lars", "sgd", "adamw")
"""The names that `epcache.optim` builds, known here without importing torch."""

SMALL_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""The rates that the ``small`` recipe tries together, half a decade apart.

Settled by four-fold cross-validation on the training split of 1,611 drawings with DINOv2 ViT-S/14
tokens, the evaluation split unread: 3e-3 and 1e-2 are best for linear and for efficient probes;
lower ones are too slow for the schedule. Narrow tokens want 3e-2 and more of a linear probe."""

SMALL_WEIGHT_DECAYS = (0.0, 0.5)
"""Of the ``small`` recipe, each with every rate. On the same folds 0.3 to 1 is worth 1 to 2 points
to efficient probes and keeps high rates from over-fitting; narrow tokens, as the demo's, which are
fitted by long steps, lose by it."""


def small_batch(num_rows: int) -> int:
    """Batch size of the ``small`` recipe: 24 batches an epoch, but of 16 to 256 rows; rounded up.

    So many steps are enough for a schedule that counts epochs, 16 rows are enough for batch
    statistics, and 256 rows keep a bank of probes in memory. Rounding up to what divides the rows
    into equal batches leaves out fewer rows than there are batches, where a fixed size could leave
    out nearly a batch.

    Args:
        num_rows: Training rows.

    Returns:
        At most `num_rows`; below 16 only where there are no more rows.
    """
    wanted = min(256, max(16, num_rows // 24))
    return num_rows // max(1, num_rows // wanted)


def _check_optimizer(name: str) -> None:
    if name not in OPTIMIZER_NAMES:
        raise ConfigError(
            f"unknown optimizer {name!r}; expected one of {', '.join(OPTIMIZER_NAMES)}"
        )


def _check_count(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}, got {value!r}")


def _check_number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what} must be a number, got {value!r}")
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{what} must be finite and 0 or more, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How probes are trained, before the size of the data is known."""

    name: str
    """Name that results carry."""
    optimizer: str
    """One of `OPTIMIZER_NAMES`; its own options keep their defaults."""
    epochs: int
    """Length of the schedule."""
    warmup_epochs: float
    """Linear warm-up from 0; fewer `epochs` than the recipe's keep its share of them."""
    batch_size: int | Callable[[int], int]
    """Rows of a batch, or a function of the number of training rows."""
    lrs: tuple[float, ...]
    """Learning rates at the peak of the schedule, for a batch of `base_batch`; several are swept
    together, in one pass over the data."""
    base_batch: int | None = None
    """The rates are multiplied by batch_size / base_batch; None takes them as they are."""
    weight_decays: tuple[float, ...] = (0.0,)
    """Weight decays; every one is paired with every learning rate of the recipe. Learning rates
    that are asked for come with the first one alone."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    drop_last: bool = True
    """Whether the rows that fill no batch are left out of an epoch; its order decides which."""

    def __post_init__(self) -> None:
        """Refuse what rates and the warm-up cannot be scaled by; the rest is seen in numbers."""
        _check_count("epochs", self.epochs, 1)
        if self.base_batch is not None:
            _check_count("base_batch", self.base_batch, 1)


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe in numbers, for one number of training rows.

    Raises:
        ConfigError: If a value is out of range.
    """

    name: str
    """Recipe that this came from, whatever was changed."""
    num_rows: int
    """Training rows, at least 2."""
    optimizer: str
    """One of `OPTIMIZER_NAMES`."""
    epochs: int
    """Length of the schedule, at least 1."""
    warmup_epochs: float
    """Length of the warm-up, 0 or more and less than `epochs`."""
    batch_size: int
    """Rows of a batch, 2 to `num_rows`: batch statistics of one row are none."""
    lrs: tuple[float, ...]
    """Learning rates at the peak of the schedule, as they are applied."""
    weight_decays: tuple[float, ...]
    """Weight decays, 0 or more."""
    label_smoothing: float
    """Share of the target that is spread over all classes, 0 or more and below 1."""
    drop_last: bool
    """Whether the rows that fill no batch are left out of an epoch."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        _check_optimizer(self.optimizer)
        _check_count("epochs", self.epochs, 1)
        _check_count("batch_size", self.batch_size, 2)
        _check_count("training rows", self.num_rows, 2)
        if self.batch_size > self.num_rows:
            raise ConfigError(
                f"recipe {self.name} has batches of {self.batch_size} rows and there are "
                f"{self.num_rows} to train on; set the batch size to {self.num_rows} or less, or "
                f"take recipe small"
            )
        _check_number("warmup_epochs", self.warmup_epochs)
        if self.warmup_epochs >= self.epochs:
            raise ConfigError(
                f"warmup_epochs is {self.warmup_epochs:g} of {self.epochs} epochs; expected less "
                f"than epochs, so that some are trained at the full rate"
            )
        _check_number("label_smoothing", self.label_smoothing)
        if self.label_smoothing >= 1:
            raise ConfigError(
                f"label_smoothing must be below 1, got {self.label_smoothing!r}; 0.1 is usual"
            )
        for option in ("lrs", "weight_decays"):
            values = getattr(self, option)
            if not values:
                raise ConfigError(f"{option} is empty; give at least one value")
            for value in values:
                _check_number(option, value)
        if 0 in self.lrs:
            raise ConfigError(f"lrs must be above 0, got {_listed(self.lrs)}; 0 trains nothing")

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch, at least 1."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    @property
    def grid(self) -> tuple[tuple[float, float], ...]:
        """The (learning rate, weight decay) pairs to train together, weight decay fastest."""
        return tuple((lr, decay) for lr in self.lrs for decay in self.weight_decays)

    def to_json(self) -> dict[str, Any]:
        """Everything needed to train so again, as JSON types, for results."""
        return {
            "recipe": self.name,
            "optimizer": self.optimizer,
            "epochs": self.epochs,
            "warmup_epochs": self.warmup_epochs,
            "batch_size": self.batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "train_images": self.num_rows,
            "lrs": list(self.lrs),
            "weight_decays": list(self.weight_decays),
            "label_smoothing": self.label_smoothing,
            "drop_last": self.drop_last,
        }


RECIPES: dict[str, Recipe] = {
    # The published recipe, for ImageNet-sized data. Its momentum of 0.9 and trust coefficient of
    # 0.001 are the optimizer's defaults.
    "paper": Recipe(
        name="paper",
        optimizer="lars",
        epochs=90,
        warmup_epochs=10,
        batch_size=4096,
        lrs=(0.1,),
        base_batch=256,
    ),
    # Ours, for CUB-sized data, where the published batch is most of an epoch. AdamW as in public
    # sweeps: the size of its steps depends neither on the gradient's scale nor on the batch, so its
    # rates are taken as they are and one grid serves every backbone; LARS, made for large batches,
    # has the published rate for those alone. A third of the published epochs: accuracies are flat
    # before the end.
    "small": Recipe(
        name="small",
        optimizer="adamw",
        epochs=30,
        warmup_epochs=3,
        batch_size=small_batch,
        lrs=SMALL_LEARNING_RATES,
        weight_decays=SMALL_WEIGHT_DECAYS,
    ),
}
"""Every recipe by name."""


def resolve(
    recipe: str | Recipe,
    num_rows: int,
    *,
    optimizer: str | None = None,
    epochs: int | None = None,
    warmup_epochs: float | None = None,
    batch_size: int | None = None,
    lrs: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
    label_smoothing: float | None = None,
    drop_last: bool | None = None,
) -> ResolvedRecipe:
    """A recipe in numbers; an argument that is not None takes the place of the recipe's own.

    Args:
        recipe: A key of `RECIPES`, or a recipe.
        num_rows: Training rows.
        optimizer: Another optimizer; needs `lrs` too, as rates of one mean nothing to another.
        epochs: Length of the schedule; the warm-up keeps its share.
        warmup_epochs: Length of the warm-up.
        batch_size: Rows of a batch; the recipe's own rates are scaled to it, if it scales any.
        lrs: Learning rates at the peak of the schedule, not scaled by anything; without
            `weight_decays` each comes with the recipe's first one alone.
        weight_decays: Weight decays, each to be paired with each rate.
        label_smoothing: Share of the target that is spread over all classes.
        drop_last: Whether the rows that fill no batch are left out of an epoch.

    Raises:
        ConfigError: If the recipe is unknown, a value is out of range or values do not go together.
    """
    base = find_recipe(recipe) if isinstance(recipe, str) else recipe
    if optimizer is None:
        optimizer = base.optimizer
    _check_optimizer(optimizer)
    if optimizer != base.optimizer and lrs is None:
        raise ConfigError(
            f"recipe {base.name} has learning rates for {base.optimizer}, not for {optimizer}; "
            f"give learning rates with the optimizer"
        )
    _check_count("training images (all, or those of --shots and --share)", num_rows, 2)
    if epochs is None:
        epochs = base.epochs
    _check_count("epochs", epochs, 1)
    if warmup_epochs is None:
        warmup_epochs = base.warmup_epochs * min(1.0, epochs / base.epochs)
    if batch_size is None:
        batch_size = base.batch_size(num_rows) if callable(base.batch_size) else base.batch_size
    _check_count("batch_size", batch_size, 2)
    if weight_decays is None:
        weight_decays = base.weight_decays if lrs is None else base.weight_decays[:1]
    if lrs is None:
        scale = 1.0 if base.base_batch is None else batch_size / base.base_batch
        lrs = [lr * scale for lr in base.lrs]
    return ResolvedRecipe(
        name=base.name,
        num_rows=num_rows,
        optimizer=optimizer,
        epochs=epochs,
        warmup_epochs=warmup_epochs,
        batch_size=batch_size,
        lrs=tuple(lrs),
        weight_decays=tuple(weight_decays),
        label_smoothing=base.label_smoothing if label_smoothing is None else label_smoothing,
        drop_last=base.drop_last if drop_last is None else drop_last,
    )


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: If there is none.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; expected one of {', '.join(RECIPES)}")
    return RECIPES[name]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
