"""The probes of one stream: select on held-out training data, then refit on all of it.

The evaluation split is read by the refit alone. There it is scored after every epoch, but learning
rate, weight decay and epoch are chosen before its first row is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from epcache.bank import ProbeBank
from epcache.hardware import PRECISIONS, describe_device
from epcache.results import Row, append_rows, count, read_rows, run_name
from epcache.runs import RunFiles, Trained
from epcache.store.files import remove_partials
from epcache.stream import PooledSource, Source, TokenKind, TokenSource, TokenStream
from epcache.train import Fit, Outcome
from epcache.trials import GroupPlan, Machine, Trial, describe
from epcache.watch import Observer, report

EVALUATION_ROWS = 256
"""Rows of a batch that is only scored."""


@dataclass(kw_only=True)
class Ledger:
    """What is known of a trial."""

    select: Outcome | None = None
    refit: Outcome | None = None
    seconds: float = 0.0
    row: Row | None = None
    """From this run or an earlier one."""


class GroupFit:
    """Trains the probes of one stream and keeps what comes out.

    Args:
        plan: What to train.
        machine: Where.
        folder: Of the results.
        observer: Told what goes on.
    """

    def __init__(self, plan: GroupPlan, machine: Machine, folder: Path, observer: Observer) -> None:
        self.plan, self.machine, self.folder, self.observer = plan, machine, folder, observer
        self.store, self.trials = plan.store, plan.trials
        self.ledger = {trial.run: Ledger() for trial in self.trials}
        self.checkpoints: list[Path] = []
        self._pooled: dict[tuple[str, TokenKind], PooledSource] = {}

    def run(self, *, again: bool = False) -> list[Row]:
        """Train what has no row yet, append rows, and return one for each trial that has one."""
        held_out = self.plan.held_out
        if not again:
            self._recall()
        todo = [trial for trial in self.trials if self.ledger[trial.run].row is None]
        if len(todo) < len(self.trials):
            self.observer.message(
                f"{len(self.trials) - len(todo)} of {len(self.trials)} probes have a row already "
                f"and are not trained again (--again does)"
            )
        if held_out is not None:
            self._pass("select", todo, *held_out)
            todo = [trial for trial in self._winners() if not self._is_scored(trial)]
        self._pass("refit" if held_out is not None else "train", todo, None, None)
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
            chosen = entry.select.best_epoch
            return None if entry.select.problem or chosen is None else entry.select.top1[chosen]
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
        train = self._source(
            self.plan.train_split, self.plan.rows if learn is None else learn, tokens, is_free
        )
        judged = self.plan.eval_split if held is None else self.plan.train_split
        judge = self._source(judged, held, tokens, is_free)
        learning, judging = self._streams(train, judge)
        chosen = [self._chosen_epoch(trial) for trial in trials]
        checkpoint = self._checkpoint(phase, trials)
        fit = Fit(
            ProbeBank(
                [trial.trainee for trial in trials],
                dim=self.plan.shape.dim,
                grid=self.plan.shape.grid,
                num_classes=len(self.plan.classes),
                device=self.machine.device,
            ),
            learning,
            judging,
            self.plan.schedule,
            checkpoint=checkpoint,
            keep_epochs=[e for e in chosen if e is not None] if phase == "refit" else None,
            steady=phase == "select",
        )
        where = "in memory" if learning.resident else "streamed"
        poolers = ", ".join(dict.fromkeys(trial.config.pooler for trial in trials))
        what = f"{phase} {count(len(trials), 'probe')} ({poolers}) on {len(train):,} images"
        self.observer.start(f"{what}, {where}", self.plan.schedule.epochs)
        if checkpoint.exists():
            goes_on = fit.resume()
            how = "goes on from its last epoch" if goes_on else "starts anew: its file is damaged"
            self.observer.message(f"{phase} {how}")
        return fit.run(lambda state: self.observer.epoch(report(state)))

    def _source(
        self, split: str, rows: NDArray[np.int64] | None, tokens: TokenKind, pooled: bool
    ) -> Source:
        """Rows of a split, None for all that are valid; pooled ones are read once."""
        train = split == self.plan.train_split
        reader = self.store[split]
        valid = np.flatnonzero(reader.valid).astype(np.int64)
        used = self.plan.subset.all_rows if train else valid
        source = TokenSource(
            split=reader,
            layer=self.plan.layer,
            average_layers=self.plan.average_layers,
            tokens=tokens,
            norm=self.plan.norm,
            rows=used,
            dtype=torch.float32 if pooled else PRECISIONS[self.machine.precision],
        )
        index = None if rows is None else np.searchsorted(used, rows)
        if not pooled:
            return source if index is None else source.subset(index)
        if (split, tokens) not in self._pooled:
            views = self.plan.num_views if train else 1
            self._pooled[split, tokens] = PooledSource.of(source, num_views=views)
        kept = self._pooled[split, tokens]
        return kept if index is None or len(index) == len(kept) else kept.subset(index)

    def _streams(self, train: Source, judge: Source) -> tuple[TokenStream, TokenStream]:
        """Both kept in memory where both fit the budget; else one; else none."""
        left = self.machine.budget_bytes
        streams = []
        for source, size, views in (
            (train, self.plan.batch_size, self.plan.num_views),
            (judge, EVALUATION_ROWS, 1),
        ):
            in_memory = isinstance(source, PooledSource)
            stream = TokenStream(
                source,
                batch_size=size,
                device=self.machine.device,
                budget_bytes=source.num_bytes * views if in_memory else left,
                order_seed=self.plan.order_seed,
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
                    config=self.plan.config_json(trial),
                    select=entry.select,
                    final=entry.refit,
                    norm=self.plan.norm,
                )
            )
            rows.append(entry.row)
        if rows:
            append_rows(rows, self.folder)
        for path in self.checkpoints:
            path.unlink(missing_ok=True)
            remove_partials(path)

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
            layer=self.plan.layer,
            norm=self.plan.norm_name,
            tokens=config.tokens,
            views=self.plan.num_views,
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
            share=config.share,
            average_layers=config.average_layers if config.average_layers > 1 else None,
            train_images=len(self.plan.rows),
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


def version() -> str:
    """Of this package."""
    from epcache import __version__

    return __version__
