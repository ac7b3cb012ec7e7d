"""What a pass will take: memory, and time, from a few of its steps on made-up tokens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epcache.bank import ProbeBank
from epcache.hardware import PRECISIONS
from epcache.results import read_rows
from epcache.runs import RunFiles
from epcache.selection import EVALUATION_ROWS
from epcache.stream import TokenSource
from epcache.train import Fit, Schedule
from epcache.trials import GroupPlan, Machine, Trial

STEPS = 3
"""Steps that are timed; the first is thrown away."""
READ_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class PassEstimate:
    """The probes of one stream."""

    title: str
    """``layer 11, 4 shots, patch tokens``."""
    probes: Sequence[str]
    """``ep M=32 x 5``: a pooler and how many probes it has in the pass."""
    num_probes: int
    num_done: int
    """Those that have a row already."""
    train_images: int
    epochs: int
    batch_size: int
    token_bytes: int
    """Of all finished tokens that the pass looks at."""
    in_memory: bool
    """Whether they fit the budget and are read once."""
    seconds: float
    """An estimate."""

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "probes": list(self.probes)}


class Estimator:
    """Times each kind of pass once, however many passes are of that kind.

    Args:
        machine: Where the probes would train.
        folder: Of the results.
    """

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine, self.folder = machine, folder
        self._rows = {row.run for row in read_rows(folder)}
        self._steps: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._reads: dict[tuple[Any, ...], float] = {}

    def of(self, plan: GroupPlan) -> PassEstimate:
        """What one pass will cost."""
        todo = [trial for trial in plan.trials if not self._is_done(trial)]
        kinds: dict[Any, list[Trial]] = {}
        for trial in todo:
            kinds.setdefault(trial.source_kind, []).append(trial)
        token_bytes = sum(self._bytes(plan, kind) for kind in {t.source_kind for t in plan.trials})
        in_memory = token_bytes <= self.machine.budget_bytes
        return PassEstimate(
            title=plan.title,
            probes=_counts(plan.trials),
            num_probes=len(plan.trials),
            num_done=len(plan.trials) - len(todo),
            train_images=len(plan.rows),
            epochs=plan.schedule.epochs,
            batch_size=plan.batch_size,
            token_bytes=token_bytes,
            in_memory=in_memory,
            seconds=sum(self._seconds(plan, members, in_memory) for members in kinds.values()),
        )

    def _is_done(self, trial: Trial) -> bool:
        return trial.run in self._rows and RunFiles(self.folder, trial.run).are_whole

    def _source(self, plan: GroupPlan, trials: Sequence[Trial]) -> TokenSource:
        tokens, is_free = trials[0].source_kind
        return TokenSource(
            split=plan.store[plan.train_split],
            layer=plan.layer,
            average_layers=plan.average_layers,
            tokens=tokens,
            norm=plan.norm,
            rows=plan.subset.all_rows,
            dtype=torch.float32 if is_free else PRECISIONS[self.machine.precision],
        )

    def _bytes(self, plan: GroupPlan, kind: Any) -> int:
        members = [trial for trial in plan.trials if trial.source_kind == kind]
        source = self._source(plan, members)
        judged = int(plan.store[plan.eval_split].valid.sum())
        row_bytes = source.num_bytes // len(source)
        if members[0].config.is_free:
            row_bytes //= source.num_tokens
        return row_bytes * (len(source) * plan.num_views + judged)

    def _seconds(self, plan: GroupPlan, trials: Sequence[Trial], in_memory: bool) -> float:
        """Selection of all, then the refit of one of each family."""
        source = self._source(plan, trials)
        judged = int(plan.store[plan.eval_split].valid.sum())
        winners = list({trial.family: trial for trial in trials}.values())
        learn, held = len(plan.subset.learn), len(plan.subset.held)
        passes = [(trials, learn, held), (winners, len(plan.rows), judged)]
        if plan.held_out is None:
            passes = [(trials, len(plan.rows), judged)]
        seconds = 0.0
        for members, num_train, num_judged in passes:
            step, score = self._measure(plan, members, source)
            steps = max(1, num_train // plan.batch_size)
            scores = -(-num_judged // EVALUATION_ROWS)
            seconds += plan.schedule.epochs * (steps * step + scores * score)
        reads = len(source) * plan.num_views + judged
        again = 1 if in_memory or trials[0].config.is_free else len(passes) * plan.schedule.epochs
        return seconds + reads * again * self._read(plan, source)

    def _measure(
        self, plan: GroupPlan, trials: Sequence[Trial], source: TokenSource
    ) -> tuple[float, float]:
        """Seconds of a step and of scoring a batch."""
        num_tokens = 1 if trials[0].config.is_free else source.num_tokens
        structures = tuple(trial.trainee.structure for trial in trials)
        key = (structures, source.dim, num_tokens, plan.batch_size, len(plan.classes))
        if key not in self._steps:
            bank = ProbeBank(
                [trial.trainee for trial in trials],
                dim=source.dim,
                grid=plan.shape.grid,
                num_classes=len(plan.classes),
                device=self.machine.device,
            )
            streams = [
                MadeUp(size, num_tokens, source, len(plan.classes), self.machine.device)
                for size in (plan.batch_size, EVALUATION_ROWS)
            ]
            Fit(bank, streams[0], streams[1], Schedule(epochs=1)).run()
            self._steps[key] = streams[0].seconds, streams[1].seconds
        return self._steps[key]

    def _read(self, plan: GroupPlan, source: TokenSource) -> float:
        """Seconds to read and finish the tokens of an image."""
        key = (plan.store.digest, source.tokens, source.average_layers, source.norm is None)
        if key not in self._reads:
            rows = np.arange(min(READ_ROWS, len(source)))
            started = time.perf_counter()
            source.read(rows)
            source.release()
            self._reads[key] = (time.perf_counter() - started) / len(rows)
        return self._reads[key]


class MadeUp:
    """A stream of a few equal batches that notes how long each is worked on."""

    def __init__(
        self, size: int, num_tokens: int, source: TokenSource, num_classes: int, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens_BND = torch.randn(size, num_tokens, source.dim, generator=generator)
        labels_B = torch.arange(size) % num_classes
        self._batch = tokens_BND.to(device, source.dtype), labels_B.to(device)
        self._marks: list[float] = []

    @property
    def seconds(self) -> float:
        """Of one batch; the first has costs of its own."""
        return min(after - before for before, after in itertools.pairwise(self._marks[1:]))

    def __len__(self) -> int:
        """Number of rows."""
        return STEPS * len(self._batch[1])

    def num_steps(self, *, drop_last: bool) -> int:
        """Batches an epoch."""
        return STEPS

    def epoch(self, epoch: int, *, drop_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches."""
        return self.in_order()

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches to score."""
        for _ in range(STEPS):
            self._mark()
            yield self._batch
        self._mark()

    def _mark(self) -> None:
        if self._batch[0].is_cuda:
            torch.cuda.synchronize(self._batch[0].device)
        self._marks.append(time.perf_counter())


def _counts(trials: Sequence[Trial]) -> list[str]:
    """``ep M=32 x 5`` for each pooler and number of queries."""
    counts: dict[str, int] = {}
    for trial in trials:
        queries = "" if trial.num_queries is None else f" M={trial.num_queries}"
        name = f"{trial.config.pooler}{queries}"
        counts[name] = counts.get(name, 0) + 1
    return [f"{name} x {number}" for name, number in counts.items()]
