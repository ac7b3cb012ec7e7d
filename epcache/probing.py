"""From a sealed store to result rows: what a probe is asked to be, and ``fit_probes``.

Start here; then ``trials.py``, what configs mean on a store, and ``selection.py``, what happens to
the probes of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from epcache.errors import ConfigError, EpcacheError
from epcache.hardware import default_budget, pick_precision
from epcache.plan import resolve_device
from epcache.poolers import pooler_options
from epcache.recipes import OPTIMIZER_NAMES, RECIPES, ResolvedRecipe
from epcache.results import Row, results_dir
from epcache.selection import GroupFit
from epcache.store.reader import Store
from epcache.stream import TOKEN_KINDS, TokenKind
from epcache.subset import check_subset
from epcache.trials import GroupPlan, Machine, Trial, describe
from epcache.watch import Observer, Silent

NORMS = ("auto", "final", "none")
MOST_SEED = 2**63 - 1
"""What torch's generators take."""
MOST_WIDTH = 2**20
"""Of queries and widths: far above any use, and below what no machine could hold."""

STREAM_FIELDS = (
    "layer",
    "average_layers",
    "tokens",
    "norm",
    "views",
    "shots",
    "share",
    "recipe",
    "batch_size",
    "epochs",
    "warmup_epochs",
    "label_smoothing",
    "order_seed",
    "holdout",
)
"""The fields of ``ProbeConfig`` that the probes of a pass share; the others are each its own."""

FREE_POOLERS = ("cls", "gap")
"""Without parameters (gap: unless it projects), so that tokens are pooled once for all epochs."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """One probe, or with ``lr=None`` one for each pair of the recipe's grid.

    Raises:
        ConfigError: A value cannot work; the message names the field, the value, what is allowed
            and what to do.
    """

    pooler: str = "ep"
    """A key of ``epcache.poolers.POOLERS``."""
    num_queries: int | None = None
    """M, for poolers that have queries to choose; None is the pooler's default."""
    dim_out: int | None = None
    """O, for poolers that project; None is the token width."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The pooler's further options (``epcache.poolers.pooler_options``)."""
    optimizer: str | None = None
    """One of lars, sgd, adamw; None is the recipe's."""
    lr: float | None = None
    """At the peak of the schedule; None tries those of the recipe, with each of its decays."""
    weight_decay: float | None = None
    """None is the recipe's; with a rate of one's own, its first."""
    seed: int = 0
    """Of the initial values alone; the data order has ``order_seed``."""

    layer: int = -1
    """Block index; negative ones count from the end."""
    average_layers: int = 1
    """Tokens are averaged over so many layers, each after its norm; the last of them is layer."""
    tokens: TokenKind = "patch"
    """patch, all ([CLS] in front of them) or cls; the cls pooler reads cls whatever is asked."""
    norm: str = "auto"
    """final applies the backbone's last norm, none does not, auto is as its protocol has it."""
    views: int | None = None
    """Cached views to alternate between, epoch by epoch; None is all that the store has."""
    shots: int | None = None
    """Training images a class; None is all."""
    share: float | None = None
    """Share of each class of train, at least one image; None is all."""
    recipe: str = "small"
    """A key of ``epcache.recipes.RECIPES``: what everything left at None comes from."""
    batch_size: int | None = None
    epochs: int | None = None
    warmup_epochs: float | None = None
    label_smoothing: float | None = None
    order_seed: int = 0
    """Of the order of batches, of what is held out and of what ``shots`` takes."""
    holdout: float = 0.1
    """Share of each class of train that learning rate and epoch are chosen on; 0 chooses nothing
    and trains on all. With ``shots`` or ``share``, training images outside the subset choose."""

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without a store."""
        self._check_pooler()
        _one_of("tokens", self.tokens, TOKEN_KINDS)
        _one_of("norm", self.norm, NORMS)
        _one_of("recipe", self.recipe, tuple(RECIPES))
        if self.optimizer is not None:
            _one_of("optimizer", self.optimizer, OPTIMIZER_NAMES)
        for name in ("views", "shots", "epochs", "average_layers"):
            _at_least(name, getattr(self, name), 1)
        _at_least("batch_size", self.batch_size, 2, why="batch statistics of one image are none")
        for name in ("seed", "order_seed"):
            _at_least(name, getattr(self, name), 0, most=MOST_SEED)
        if not isinstance(self.layer, int):
            raise ConfigError(f"layer={self.layer!r}: expected a block index such as 11 or -1")
        for name in ("lr", "weight_decay", "warmup_epochs", "label_smoothing"):
            _number(name, getattr(self, name))
        if self.lr == 0:
            raise ConfigError("lr=0: expected more than 0, as 0 trains nothing; try 0.001")
        if not 0 <= self.holdout < 1:
            raise ConfigError(
                f"holdout={self.holdout!r}: expected a share of train, 0 or more and below 1; "
                f"0.1 is usual"
            )
        _number("share", self.share)
        check_subset(self.shots, self.share)

    def _check_pooler(self) -> None:
        allowed = pooler_options(self.pooler)
        for name in ("num_queries", "dim_out"):
            value = getattr(self, name)
            _at_least(name, value, 1, most=MOST_WIDTH)
            if value is not None and name not in allowed:
                raise ConfigError(f"{name}={value}: pooler {self.pooler} has none; leave it out")
            if name in self.options:
                raise ConfigError(f"options: {name} is a field of its own; give {name}= instead")
        for name in self.options:
            if name not in allowed:
                takes = ", ".join(allowed) or "no options"
                raise ConfigError(
                    f"options: pooler {self.pooler} has no {name!r}; it takes {takes}"
                )

    @property
    def pooler_options(self) -> dict[str, Any]:
        """All options that the pooler is built with, without those left at their defaults."""
        sizes = {"num_queries": self.num_queries, "dim_out": self.dim_out}
        return {**self.options, **{k: v for k, v in sizes.items() if v is not None}}

    @property
    def is_free(self) -> bool:
        """Whether the pooler has no parameters."""
        return self.pooler in FREE_POOLERS and not self.options.get("value", False)

    @property
    def stream(self) -> tuple[Any, ...]:
        """What it shares with the other probes of its pass."""
        return tuple(getattr(self, name) for name in STREAM_FIELDS)

    def expand(self, recipe: ResolvedRecipe) -> list[ProbeConfig]:
        """With a recipe's numbers in place of None; one config for each pair of its grid.

        Args:
            recipe: Resolved with this config's own values.
        """
        shared = replace(
            self,
            optimizer=recipe.optimizer,
            epochs=recipe.epochs,
            warmup_epochs=recipe.warmup_epochs,
            batch_size=recipe.batch_size,
            label_smoothing=recipe.label_smoothing,
        )
        return [replace(shared, lr=lr, weight_decay=decay) for lr, decay in recipe.grid]

    @property
    def title(self) -> str:
        """``ep M=32, layer 11, 4 shots``, for messages."""
        queries = "" if self.num_queries is None else f" M={self.num_queries}"
        return f"{self.pooler}{queries}, {self.tokens_title}"

    @property
    def tokens_title(self) -> str:
        """``layer 11``, ``layer 11, average of 4, 1% of train``, for messages."""
        parts = [f"layer {self.layer}"]
        if self.average_layers > 1:
            parts.append(f"average of {self.average_layers}")
        if self.shots is not None:
            parts.append(f"{self.shots} shot{'s' * (self.shots > 1)}")
        if self.share is not None:
            parts.append(f"{100 * self.share:g}% of train")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON types only; what came with later versions only where it is not the default."""
        data = {**asdict(self), "options": dict(self.options)}
        for name, default in (("average_layers", 1), ("share", None)):
            if data[name] == default:
                del data[name]
        return data


def group_by_stream(configs: Sequence[ProbeConfig]) -> list[list[int]]:
    """Positions of configs that can train in one pass; groups in order of their first member."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, config in enumerate(configs):
        groups.setdefault(config.stream, []).append(position)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that was asked for and could not be done."""

    what: str
    """Such as ``ep M=32, lr 10, seed 0, layer 11``."""
    reason: str


def plan_groups(
    store: Store,
    configs: Sequence[ProbeConfig],
    *,
    precision: str,
    say: Callable[[str], None],
    failures: list[Failure] | None = None,
) -> list[GroupPlan]:
    """What configs mean on a store, a plan for each pass, before anything is trained.

    Args:
        store: Sealed.
        configs: The probes.
        precision: Of the matrix products.
        say: Told what the user should know.
        failures: Gets the configs that do not fit the store; None raises at the first.

    Raises:
        ConfigError: A config does not fit the store, and ``failures`` is None.
    """
    plans = []
    for positions in group_by_stream(configs):
        group = [configs[i] for i in positions]
        try:
            plans.append(GroupPlan(store, group, precision=precision, say=say))
        except ConfigError:
            if failures is None:
                raise
            if group := [c for c in group if _fits(store, c, precision, failures)]:
                plans.append(GroupPlan(store, group, precision=precision, say=say))
    return plans


def _fits(store: Store, config: ProbeConfig, precision: str, failures: list[Failure]) -> bool:
    """Whether a config can be planned at all; if not, why is noted."""
    try:
        GroupPlan(store, [config], precision=precision, say=lambda text: None)
    except ConfigError as error:
        failure = Failure(what=config.title, reason=str(error))
        if failure not in failures:  # the rates and seeds of a grid fail for one reason
            failures.append(failure)
        return False
    return True


def fit_probes(
    store: Store,
    configs: Sequence[ProbeConfig],
    *,
    memory_budget: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    results_dir: Path | None = None,
    progress: Observer | None = None,
    again: bool = False,
    failures: list[Failure] | None = None,
) -> list[Row]:
    """Train probes on a store and keep what came out.

    Of probes that differ in nothing but learning rate and weight decay the best on held-out
    training data is trained again on all of it and scored on the evaluation split. The others keep
    their row, with ``val_top1`` alone.

    Args:
        store: Sealed.
        configs: The probes; those that share a stream train in one pass over it.
        memory_budget: Bytes of tokens to keep in memory; None is half of what is free. What does
            not fit is streamed from the store, with the same result.
        device: auto, cpu, cuda, ...
        precision: Of the matrix products: auto, float32 or bfloat16.
        results_dir: Where rows and runs are kept; None is ``$EPCACHE_HOME/results``.
        progress: Told what goes on.
        again: Train also what has a row already.
        failures: Gets what could not be trained, and why, while the others go on; None raises at
            the first, but for probes that diverge, which are only told.

    Returns:
        A row for each probe that trained to the end, in the order of passes, configs and grid.

    Raises:
        ConfigError: A config does not fit the store.
    """
    device = resolve_device(device)
    machine = Machine(
        device=device,
        precision=pick_precision(precision, device),
        budget_bytes=default_budget(device) if memory_budget is None else memory_budget,
    )
    folder = default_results() if results_dir is None else results_dir
    observer = progress or Silent()
    # Every plan before the first training: one wrong config stops all, and at once
    plans = plan_groups(
        store, configs, precision=machine.precision, say=observer.message, failures=failures
    )
    rows: list[Row] = []
    for number, plan in enumerate(plans, start=1):
        if len(plans) > 1:
            observer.message(f"pass {number} of {len(plans)}: {plan.title}")
        fit = GroupFit(plan, machine, folder, observer)
        try:
            rows += fit.run(again=again)
        except (EpcacheError, RuntimeError) as error:  # the latter is torch out of memory
            if failures is None:
                raise
            reason = str(error).strip().split("\n", 1)[0]
            failures += [Failure(what=_title(trial), reason=reason) for trial in plan.trials]
        else:
            if failures is not None:
                failures += _diverged(fit)
    return rows


def _diverged(fit: GroupFit) -> list[Failure]:
    """The probes of a pass that did not train to the end."""
    problems = [
        (trial, outcome.problem)
        for trial in fit.trials
        for outcome in (fit.ledger[trial.run].select, fit.ledger[trial.run].refit)
        if outcome is not None
    ]
    return [Failure(what=_title(trial), reason=p) for trial, p in problems if p is not None]


def _title(trial: Trial) -> str:
    return f"{describe(trial)}, {trial.config.tokens_title}"


default_results: Callable[[], Path] = results_dir
"""``fit_probes`` has an argument of that name."""


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _at_least(
    name: str, value: int | None, least: int, *, most: int | None = None, why: str = ""
) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        reason = f" ({why})" if why else ""
        raise ConfigError(f"{name}={value!r}: expected a whole number of {least} or more{reason}")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value!r}: expected {most} at most")


def _number(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r}: expected a number")
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value!r}: expected a finite number, 0 or more")
