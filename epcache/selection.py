"""The probes of one stream: select on held-out training data, then refit on all of it.

The evaluation split is read by the refit alone. There it is scored after every epoch, but learning
rate, weight decay and epoch are chosen before its first row is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from epcache.bank import ProbeBank, Trainee
from epcache.errors import ConfigError
from epcache.hardware import PRECISIONS, describe_device
from epcache.order import nested_shots, stratified_holdout
from epcache.pooled import choose_norm
from epcache.poolers import POOLERS, make_pooler, pooler_options
from epcache.recipes import ResolvedRecipe, resolve
from epcache.results import Row, append_rows, read_rows, run_name
from epcache.runs import RunFiles, Trained
from epcache.store.reader import Store
from epcache.stream import PooledSource, Source, TokenKind, TokenSource, TokenStream
from epcache.train import Fit, Outcome, Schedule

if TYPE_CHECKING:
    from epcache.probing import ProbeConfig

EVALUATION_ROWS = 256
"""Rows of a batch that is only scored."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and how the arithmetic is done."""

    device: str
    precision: str
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """How far a pass is."""

    epoch: int
    """Epochs done."""
    epochs: int
    loss: float | None
    """Mean of the last epoch, of the probe that is best so far."""
    top1: float | None
    """Best accuracy of any probe in any epoch so far."""


class Observer(Protocol):
    """What a caller may want to show meanwhile."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def start(self, what: str, epochs: int) -> None:
        """A pass of so many epochs begins."""

    def epoch(self, report: EpochReport) -> None:
        """An epoch is through and scored."""


class Silent:
    """Shows nothing."""

    def message(self, text: str) -> None:
        """Drop it."""

    def start(self, what: str, epochs: int) -> None:
        """Drop it."""

    def epoch(self, report: EpochReport) -> None:
        """Drop it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A probe with everything decided."""

    config: ProbeConfig
    run: str
    """Name, from everything that decides its numbers."""
    num_params: int
    """Trainable ones, the classifier's included."""
    num_queries: int | None
    dim_out: int

    @property
    def trainee(self) -> Trainee:
        """As a bank takes it."""
        config = self.config
        assert config.optimizer is not None
        assert config.lr is not None
        assert config.weight_decay is not None
        return Trainee(
            pooler=config.pooler,
            options=config.pooler_options,
            seed=config.seed,
            optimizer=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
        )

    @property
    def family(self) -> str:
        """Equal for probes that differ in nothing but what is selected."""
        return run_name({**self.config.to_json(), "lr": None, "weight_decay": None})

    @property
    def source_kind(self) -> tuple[TokenKind, bool]:
        """Tokens that it looks at, and whether they are pooled once."""
        return self.config.tokens, self.config.is_free


@dataclass(kw_only=True)
class Ledger:
    """What is known of a trial."""

    select: Outcome | None = None
    refit: Outcome | None = None
    seconds: float = 0.0
    row: Row | None = None
    """From this run or an earlier one."""


class GroupFit:
    """Probes that share a stream.

    Args:
        store: Sealed.
        configs: Of one stream.
        machine: Where to train.
        folder: Of the results.
        observer: Told what goes on.

    Raises:
        ConfigError: A config does not fit the store.
    """

    def __init__(
        self,
        store: Store,
        configs: Sequence[ProbeConfig],
        machine: Machine,
        folder: Path,
        observer: Observer,
    ) -> None:
        self.store, self.machine, self.folder, self.observer = store, machine, folder, observer
        first = configs[0]
        dataset = store.provenance["dataset"]
        self.classes: tuple[str, ...] = tuple(dataset["classes"])
        self.train_split, self.eval_split = dataset["train_split"], dataset["eval_split"]
        self.layer = store.resolve_layer(first.layer)
        self.shape = store.spec.layers[self.layer]
        self.norm_name, self.norm = choose_norm(store, first.norm)
        self.num_views = self._views(first.views)
        self.rows = self._train_rows(first)
        self.recipes = [resolve_recipe(config, len(self.rows)) for config in configs]
        self.trials = self._make_trials(configs)
        self.ledger = {trial.run: Ledger() for trial in self.trials}
        self.checkpoints: list[Path] = []
        self._pooled: dict[tuple[str, TokenKind], PooledSource] = {}

    def _views(self, asked: int | None) -> int:
        has = self.store[self.train_split].num_views
        if asked is not None and asked > has:
            raise ConfigError(
                f"views={asked}: store {self.store.path} has {has}. Run: epcache extract "
                f"--views {asked} ..."
            )
        return asked or has

    def _train_rows(self, config: ProbeConfig) -> NDArray[np.int64]:
        """Valid rows of the training split, of the subset asked for."""
        split = self.store[self.train_split]
        rows = np.flatnonzero(split.valid).astype(np.int64)
        if config.shots is None:
            return rows
        chosen, short = nested_shots(split.labels[rows], shots=config.shots, seed=config.order_seed)
        if short:
            self.observer.message(
                f"{len(short)} of {len(self.classes)} classes have fewer than {config.shots} "
                f"training images: all of theirs are taken"
            )
        return rows[chosen]

    def _make_trials(self, configs: Sequence[ProbeConfig]) -> list[Trial]:
        trials: dict[str, Trial] = {}
        for config, recipe in zip(configs, self.recipes, strict=True):
            decided = replace(
                config,
                layer=self.layer,
                norm=self.norm_name,
                views=self.num_views,
                tokens="cls" if config.pooler == "cls" else config.tokens,
            )
            for one in decided.expand(recipe):
                trial = self._make_trial(one)
                trials.setdefault(trial.run, trial)
        return list(trials.values())

    def _make_trial(self, config: ProbeConfig) -> Trial:
        if POOLERS[config.pooler].needs_grid and config.tokens != "patch":
            raise ConfigError(
                f"pooler {config.pooler} needs the grid of patch tokens and got tokens="
                f"{config.tokens}; use patch"
            )
        options = config.pooler_options
        with torch.device("meta"):
            pooler = make_pooler(config.pooler, dim=self.shape.dim, grid=self.shape.grid, **options)
        own = sum(p.numel() for p in pooler.parameters() if p.requires_grad)
        identity = {
            "command": "probe",
            "digest": self.store.digest,
            "precision": "float32" if config.is_free else self.machine.precision,
            **config.to_json(),
        }
        return Trial(
            config=config,
            run=run_name(identity),
            num_params=own + (pooler.dim_out + 1) * len(self.classes),
            num_queries={**pooler_options(config.pooler), **options}.get("num_queries"),
            dim_out=pooler.dim_out,
        )

    @cached_property
    def held_out(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in ``rows`` to train on and to choose by."""
        config = self.trials[0].config
        labels = self.store[self.train_split].labels[self.rows]
        learn, held = stratified_holdout(labels, share=config.holdout, seed=config.order_seed)
        if not len(held):
            raise ConfigError(
                f"holdout={config.holdout:g} of {len(self.rows)} training images of "
                f"{len(self.classes)} classes holds out none; use 0 to choose nothing, or more"
            )
        return learn, held

    def run(self, *, again: bool = False) -> list[Row]:
        """Train what has no row yet, append rows, and return one for each trial that has one."""
        selecting = self.trials[0].config.holdout > 0
        if not again:
            self._recall()
        todo = [trial for trial in self.trials if self.ledger[trial.run].row is None]
        if len(todo) < len(self.trials):
            self.observer.message(
                f"{len(self.trials) - len(todo)} of {len(self.trials)} probes have a row already "
                f"and are not trained again (--again does)"
            )
        if selecting:
            learn, held = self.held_out
            self._pass("select", todo, learn, held)
            todo = [trial for trial in self._winners() if not self._is_scored(trial)]
        self._pass("refit" if selecting else "train", todo, None, None)
        self._finish()
        found = (self.ledger[trial.run].row for trial in self.trials)
        return [row for row in found if row is not None]

    def _recall(self) -> None:
        done = {row.run: row for row in read_rows(self.folder)}
        for run, entry in self.ledger.items():
            if RunFiles(self.folder, run).are_whole:
                entry.row = done.get(run)

    def _val_top1(self, trial: Trial) -> float | None:
        entry = self.ledger[trial.run]
        if entry.select is not None:
            return None if entry.select.problem else max(entry.select.top1)
        return entry.row.val_top1 if entry.row else None

    def _winners(self) -> list[Trial]:
        """Of each family the best on held-out data; the first of equals."""
        best: dict[str, tuple[float, Trial]] = {}
        for trial in self.trials:
            top1 = self._val_top1(trial)
            if top1 is not None and (trial.family not in best or top1 > best[trial.family][0]):
                best[trial.family] = top1, trial
        return [trial for _, trial in best.values()]

    def _is_scored(self, trial: Trial) -> bool:
        row = self.ledger[trial.run].row
        return row is not None and row.test_top1 is not None

    def _chosen_epoch(self, trial: Trial) -> int | None:
        entry = self.ledger[trial.run]
        if entry.select is not None:
            return entry.select.best_epoch
        return entry.row.best_epoch if entry.row else None

    def _pass(
        self,
        phase: str,
        trials: Sequence[Trial],
        learn: NDArray[np.int64] | None,
        held: NDArray[np.int64] | None,
    ) -> None:
        """Train trials; those that see the same tokens together."""
        kinds: dict[tuple[TokenKind, bool], list[Trial]] = {}
        for trial in trials:
            kinds.setdefault(trial.source_kind, []).append(trial)
        for members in kinds.values():
            started = time.monotonic()
            outcomes = self._fit(phase, members, learn, held)
            seconds = time.monotonic() - started
            for trial, outcome in zip(members, outcomes, strict=True):
                entry = self.ledger[trial.run]
                entry.seconds += seconds
                if phase == "select":
                    entry.select = outcome
                else:
                    entry.refit = outcome
                if outcome.problem:
                    self.observer.message(f"{describe(trial)}: {outcome.problem}")

    def _fit(
        self,
        phase: str,
        trials: Sequence[Trial],
        learn: NDArray[np.int64] | None,
        held: NDArray[np.int64] | None,
    ) -> list[Outcome]:
        tokens, is_free = trials[0].source_kind
        train: Source = self._source(self.train_split, tokens, pooled=is_free)
        judge = train if held is not None else self._source(self.eval_split, tokens, pooled=is_free)
        if learn is not None and held is not None:
            train, judge = train.subset(learn), judge.subset(held)
        learning, judging = self._streams(train, judge)
        chosen = [self._chosen_epoch(trial) for trial in trials]
        fit = Fit(
            ProbeBank(
                [trial.trainee for trial in trials],
                dim=self.shape.dim,
                grid=self.shape.grid,
                num_classes=len(self.classes),
                device=self.machine.device,
            ),
            learning,
            judging,
            self._schedule,
            checkpoint=self._checkpoint(phase, trials),
            keep_epochs=[e for e in chosen if e is not None] if phase == "refit" else None,
        )
        where = "in memory" if learning.resident else "streamed"
        what = f"{phase} {count(len(trials), 'probe')} on {len(train):,} images ({where})"
        self.observer.start(what, self._schedule.epochs)
        return fit.run(lambda state: self.observer.epoch(report(state)))

    @property
    def _schedule(self) -> Schedule:
        recipe = self.recipes[0]
        return Schedule(
            epochs=recipe.epochs,
            warmup_epochs=recipe.warmup_epochs,
            drop_last=recipe.drop_last,
            label_smoothing=recipe.label_smoothing,
        )

    def _source(self, split: str, tokens: TokenKind, *, pooled: bool) -> Source:
        """All rows of a split that count."""
        if (split, tokens) in self._pooled and pooled:
            return self._pooled[split, tokens]
        train = split == self.train_split
        reader = self.store[split]
        source = TokenSource(
            split=reader,
            layer=self.layer,
            tokens=tokens,
            norm=self.norm,
            rows=self.rows if train else np.flatnonzero(reader.valid).astype(np.int64),
            dtype=torch.float32 if pooled else PRECISIONS[self.machine.precision],
        )
        if not pooled:
            return source
        self._pooled[split, tokens] = PooledSource.of(
            source, num_views=self.num_views if train else 1
        )
        return self._pooled[split, tokens]

    def _streams(self, train: Source, judge: Source) -> tuple[TokenStream, TokenStream]:
        """Both kept in memory where both fit the budget; else one; else none."""
        left = self.machine.budget_bytes
        streams = []
        for source, size, views in (
            (train, self.recipes[0].batch_size, self.num_views),
            (judge, EVALUATION_ROWS, 1),
        ):
            in_memory = isinstance(source, PooledSource)
            stream = TokenStream(
                source,
                batch_size=size,
                device=self.machine.device,
                budget_bytes=source.num_bytes * views if in_memory else left,
                order_seed=self.trials[0].config.order_seed,
                num_views=views,
            )
            if stream.resident and not in_memory:
                left -= stream.num_bytes
            streams.append(stream)
        return streams[0], streams[1]

    def _checkpoint(self, phase: str, trials: Sequence[Trial]) -> Path:
        name = run_name({"phase": phase, "runs": [trial.run for trial in trials]})
        path = self.folder / "checkpoints" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoints.append(path)
        return path

    def _finish(self) -> None:
        """Write runs, then rows, then let go of the checkpoints: each makes the next unneeded."""
        rows = []
        for trial in self.trials:
            entry = self.ledger[trial.run]
            if not any(o is not None and o.last_state for o in (entry.select, entry.refit)):
                continue
            entry.row = self._row(trial, entry)
            RunFiles(self.folder, trial.run).write(
                Trained(
                    row=entry.row,
                    config=self._config_json(trial),
                    select=entry.select,
                    final=entry.refit,
                    norm=self.norm,
                )
            )
            rows.append(entry.row)
        if rows:
            append_rows(rows, self.folder)
        for path in self.checkpoints:
            path.unlink(missing_ok=True)

    def _row(self, trial: Trial, entry: Ledger) -> Row:
        config, final = trial.config, entry.refit
        if final is not None and not final.last_state:
            final = None  # diverged on all of train: its selection still stands
        chosen = self._chosen_epoch(trial)
        row = Row(
            run=trial.run,
            backbone=self.store.provenance["backbone"]["name"],
            dataset=self.store.provenance["dataset"]["name"],
            digest=self.store.digest,
            layer=self.layer,
            norm=self.norm_name,
            tokens=config.tokens,
            views=self.num_views,
            pooler=config.pooler,
            num_queries=trial.num_queries,
            dim_out=trial.dim_out,
            num_params=trial.num_params,
            recipe=config.recipe,
            optimizer=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            batch_size=config.batch_size,
            epochs=config.epochs,
            seed=config.seed,
            shots=config.shots,
            train_images=len(self.rows),
            val_top1=self._val_top1(trial),
            best_epoch=chosen,
            seconds=entry.seconds + (entry.row.seconds if entry.row else 0.0),
            device=describe_device(self.machine.device),
            precision="float32" if config.is_free else self.machine.precision,
            epcache_version=version(),
        )
        if final is None:
            return row
        epoch = final.best_epoch if chosen is None else chosen
        assert epoch is not None
        return replace(
            row,
            test_top1=None if chosen is None else final.top1[epoch],
            test_top1_best=max(final.top1),
            test_top1_last=final.top1[-1],
            best_epoch=epoch,
            test_top5=final.top5[epoch],
        )

    def _config_json(self, trial: Trial) -> dict[str, Any]:
        """Everything needed to repeat the run and to build its probe."""
        return {
            "store": str(self.store.path),
            "digest": self.store.digest,
            "probe": trial.config.to_json(),
            "precision": self.machine.precision,
            "dim": self.shape.dim,
            "grid": list(self.shape.grid),
            "num_prefix": self.shape.num_prefix,
            "classes": list(self.classes),
            "train_split": self.train_split,
            "eval_split": self.eval_split,
        }


def resolve_recipe(config: ProbeConfig, num_rows: int) -> ResolvedRecipe:
    """The recipe in numbers, with the config's own in place."""
    return resolve(
        config.recipe,
        num_rows,
        optimizer=config.optimizer,
        epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        batch_size=config.batch_size,
        lrs=None if config.lr is None else (config.lr,),
        weight_decays=None if config.weight_decay is None else (config.weight_decay,),
        label_smoothing=config.label_smoothing,
    )


def describe(trial: Trial) -> str:
    """``ep M=32, lr 0.01``, for messages."""
    queries = "" if trial.num_queries is None else f" M={trial.num_queries}"
    return f"{trial.config.pooler}{queries}, lr {trial.config.lr:g}, seed {trial.config.seed}"


def count(number: int, noun: str) -> str:
    """``1 probe``, ``2 probes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def report(fit: Fit) -> EpochReport:
    """Where a pass stands."""
    alive = [outcome for outcome in fit.outcomes if outcome.top1 and not outcome.problem]
    best = max(alive, key=lambda outcome: max(outcome.top1), default=None)
    return EpochReport(
        epoch=fit.epoch,
        epochs=fit.schedule.epochs,
        loss=best.train_loss[-1] if best else None,
        top1=max(best.top1) if best else None,
    )


def version() -> str:
    """Of this package."""
    from epcache import __version__

    return __version__
