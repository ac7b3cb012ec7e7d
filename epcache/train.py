"""Train a bank: epochs, evaluation, diverging probes, checkpoints.

Sees streams of (tokens, labels) and a bank; knows nothing of stores, files of results or tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from epcache.bank import ProbeBank, Stack, State
from epcache.optim import StackedOptimizer, learning_rate, make_optimizer
from epcache.store.files import write_durably

Batches = Iterator[tuple[Tensor, Tensor]]


class Stream(Protocol):
    """Where batches of (tokens (B, N, D), labels (B,)) come from."""

    def __len__(self) -> int:
        """Number of rows."""

    def epoch(self, epoch: int, *, drop_last: bool) -> Batches:
        """Training batches of an epoch."""

    def in_order(self) -> Batches:
        """Every row once, for evaluation."""

    def num_steps(self, *, drop_last: bool) -> int:
        """Training batches an epoch."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What all probes of a pass share about their training."""

    epochs: int
    warmup_epochs: float = 0.0
    drop_last: bool = True
    label_smoothing: float = 0.0
    patience: int | None = None
    """Freeze a probe after so many epochs without a better one; None never does."""


@dataclass(kw_only=True)
class Outcome:
    """What became of one probe."""

    train_loss: list[float] = field(default_factory=list)
    """Mean of each epoch's steps."""
    top1: list[float] = field(default_factory=list)
    """After each epoch, on the rows it is judged by; a fraction."""
    top5: list[float] = field(default_factory=list)
    best_epoch: int | None = None
    """From 0, on the rows it is judged by: the first of the best epochs, or, where an epoch is
    chosen for another training, the last that no standard error parts from the best."""
    problem: str | None = None
    """Why it was dropped: None for a probe that trained to the end."""
    best_state: State = field(default_factory=dict)
    """At the best epoch, or at the one that ``Fit`` was told to keep."""
    last_state: State = field(default_factory=dict)


class Fit:
    """One pass of training over a stream.

    Args:
        bank: The probes, at their initial values.
        train: Rows to learn from.
        judge: Rows whose accuracy is taken after every epoch.
        schedule: Epochs and the like.
        checkpoint: File to go on from and to write after every epoch; None keeps none.
        keep_epochs: For each trainee the epoch whose state is kept; None keeps its best.
        steady: Take the last epoch within one standard error of the best instead of the best. The
            accuracy of few rows jumps from epoch to epoch while the rate is high, and the highest
            jump says little about the next training; with many rows the two are the same.
    """

    def __init__(
        self,
        bank: ProbeBank,
        train: Stream,
        judge: Stream,
        schedule: Schedule,
        *,
        checkpoint: Path | None = None,
        keep_epochs: Sequence[int] | None = None,
        steady: bool = False,
    ) -> None:
        self.bank, self.train, self.judge, self.schedule = bank, train, judge, schedule
        self.keep_epochs, self.steady = keep_epochs, steady
        self.outcomes = [Outcome() for _ in bank.trainees]
        self.checkpoint = checkpoint
        self.epoch = 0
        self._optimizers = [self._optimizer(stack) for stack in bank.stacks]

    def _optimizer(self, stack: Stack) -> StackedOptimizer:
        trainees = [self.bank.trainees[i] for i in stack.members]
        decay = torch.tensor([trainee.weight_decay for trainee in trainees])
        return make_optimizer(trainees[0].optimizer, stack.params, decay)

    def run(self, on_epoch: Callable[[Fit], None] = lambda fit: None) -> list[Outcome]:
        """Train to the end of the schedule; returns an outcome for each trainee of the bank."""
        if self.epoch == 0:
            self.resume()
        while self.epoch < self.schedule.epochs and self.bank.stacks:
            self._train_epoch()
            self._judge_epoch()
            self.epoch += 1
            self._save()
            on_epoch(self)
        return self.outcomes

    def _train_epoch(self) -> None:
        num_steps = self.train.num_steps(drop_last=self.schedule.drop_last)
        batches = self.train.epoch(self.epoch, drop_last=self.schedule.drop_last)
        totals = [torch.zeros(len(s.members), device=self.bank.device) for s in self.bank.stacks]
        active = [self._active(stack) for stack in self.bank.stacks]
        for number, (tokens, labels) in enumerate(batches):
            losses, gradients = self.bank.loss_and_gradients(
                tokens, labels, label_smoothing=self.schedule.label_smoothing
            )
            step = self.epoch * num_steps + number
            for index, stack in enumerate(self.bank.stacks):
                self._optimizers[index].step(
                    gradients[index], self._rates(stack, step, num_steps), active[index]
                )
                totals[index] += losses[index]
        for total, stack in zip(totals, self.bank.stacks, strict=True):
            for member, loss in zip(stack.members, (total / num_steps).tolist(), strict=True):
                self.outcomes[member].train_loss.append(loss)
        self._drop_diverged()

    def _rates(self, stack: Stack, step: int, num_steps: int) -> Tensor:
        peak = torch.tensor([self.bank.trainees[i].lr for i in stack.members], dtype=torch.float64)
        return learning_rate(
            step,
            steps_per_epoch=num_steps,
            epochs=self.schedule.epochs,
            warmup_epochs=self.schedule.warmup_epochs,
            peak=peak,
        )

    def _active(self, stack: Stack) -> Tensor | None:
        """Which probes still learn; None where all do."""
        if self.schedule.patience is None:
            return None
        return torch.tensor([not self._is_frozen(i) for i in stack.members])

    def _is_frozen(self, member: int) -> bool:
        top1, patience = self.outcomes[member].top1, self.schedule.patience
        return bool(top1) and patience is not None and self.epoch - top1.index(max(top1)) > patience

    def _drop_diverged(self) -> None:
        """A probe whose loss or values are not finite leaves the bank; the others never notice."""
        for index, stack in enumerate(self.bank.stacks):
            finite = torch.ones(len(stack.members), dtype=torch.bool)
            for value in (*stack.params.values(), *stack.buffers.values()):
                finite &= value.detach().view(len(finite), -1).isfinite().all(1).cpu()
            for row, member in enumerate(stack.members):
                outcome = self.outcomes[member]
                finite[row] &= bool(torch.tensor(outcome.train_loss[-1]).isfinite())
                if not finite[row]:
                    rate = self.bank.trainees[member].lr
                    outcome.problem = f"diverged in epoch {self.epoch} (lr {rate:g}); lower it"
            if not finite.all():
                kept = finite.nonzero()[:, 0].tolist()
                stack.keep(kept)
                self._optimizers[index].keep(kept)
        alive = [index for index, stack in enumerate(self.bank.stacks) if stack.members]
        self._optimizers = [self._optimizers[index] for index in alive]
        self.bank.stacks = [self.bank.stacks[index] for index in alive]

    def _judge_epoch(self) -> None:
        top1, top5 = evaluate(self.bank, self.judge)
        for stack in self.bank.stacks:
            for row, member in enumerate(stack.members):
                outcome = self.outcomes[member]
                outcome.top1.append(top1[member])
                outcome.top5.append(top5[member])
                better = self._is_better(outcome.top1)
                if better:
                    outcome.best_epoch = self.epoch
                if better if self.keep_epochs is None else self.epoch == self.keep_epochs[member]:
                    outcome.best_state = stack.state(row)
                if self.epoch + 1 == self.schedule.epochs:
                    outcome.last_state = stack.state(row)

    def _is_better(self, top1: Sequence[float]) -> bool:
        """Whether the last of these accuracies takes the place of what was chosen before."""
        *earlier, last = top1
        best = max(earlier, default=-1.0)
        if not self.steady or last > best:
            return last > best
        return last >= best - standard_error(best, len(self.judge))

    def _save(self) -> None:
        """Everything a later run needs to go on exactly; tensors and JSON, nothing pickled."""
        if self.checkpoint is None:
            return
        tensors: State = {}
        for index, stack in enumerate(self.bank.stacks):
            values = {**stack.params, **stack.buffers}
            tensors |= {f"{index}/stack/{name}": value.detach() for name, value in values.items()}
            state = self._optimizers[index].state_dict()
            tensors |= {f"{index}/optimizer/{name}": value for name, value in state.items()}
        for member, outcome in enumerate(self.outcomes):
            tensors |= {f"best/{member}/{k}": v for k, v in outcome.best_state.items()}
        plain = [
            {k: v for k, v in asdict(o).items() if not k.endswith("_state")} for o in self.outcomes
        ]
        about = {
            "epoch": self.epoch,
            "outcomes": plain,
            "members": [stack.members for stack in self.bank.stacks],
            "key": self._key(),
        }
        data = safetensors.torch.save(
            {name: value.contiguous().cpu() for name, value in tensors.items()},
            {"fit": json.dumps(about)},
        )
        write_durably(self.checkpoint, data, partial_dir=self.checkpoint.parent)

    def resume(self) -> bool:
        """Go on from a checkpoint of exactly this pass, if there is one; any other is ignored."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        found = read_checkpoint(self.checkpoint)
        if found is None or found[0].get("key") != self._key():
            return False
        about, tensors = found
        self.epoch = about["epoch"]
        self.outcomes = [Outcome(**plain) for plain in about["outcomes"]]
        for name, value in tensors.items():
            if name.startswith("best/"):
                _, member, key = name.split("/", 2)
                self.outcomes[int(member)].best_state[key] = value
        self._restore_stacks(about["members"], tensors)
        if self.epoch == self.schedule.epochs:
            for stack in self.bank.stacks:
                for row, trained in enumerate(stack.members):
                    self.outcomes[trained].last_state = stack.state(row)
        return True

    def _restore_stacks(
        self, members: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]
    ) -> None:
        """Bring the stacks to the members and values that were saved."""
        saved = {tuple(group) for group in members}
        alive = []
        for stack, optimizer in zip(self.bank.stacks, self._optimizers, strict=True):
            kept = next((group for group in saved if set(group) <= set(stack.members)), ())
            if not kept:
                continue
            rows = [stack.members.index(member) for member in kept]
            stack.keep(rows)
            optimizer.keep(rows)
            alive.append((stack, optimizer))
        self.bank.stacks = [stack for stack, _ in alive]
        self._optimizers = [optimizer for _, optimizer in alive]
        for index, (stack, optimizer) in enumerate(alive):
            with torch.no_grad():
                for name, value in stack.params.items():
                    value.copy_(tensors[f"{index}/stack/{name}"])
            for name in stack.buffers:
                stack.buffers[name] = tensors[f"{index}/stack/{name}"].to(self.bank.device)
            prefix = f"{index}/optimizer/"
            optimizer.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )

    def _key(self) -> str:
        trainees = [{**asdict(t), "options": dict(t.options)} for t in self.bank.trainees]
        how = [asdict(self.schedule), self.keep_epochs, self.steady]
        return json.dumps([trainees, how], sort_keys=True)


def read_checkpoint(path: Path) -> tuple[dict[str, Any], State] | None:
    """What ``Fit`` saved; None for a file that is damaged or none of ours."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["fit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, safetensors.SafetensorError):
        return None
    return (about, tensors) if isinstance(about, dict) else None


def standard_error(accuracy: float, num_rows: int) -> float:
    """Of an accuracy measured on so many rows."""
    return math.sqrt(max(0.0, accuracy * (1 - accuracy)) / num_rows)


@torch.no_grad()
def evaluate(bank: ProbeBank, stream: Stream) -> tuple[dict[int, float], dict[int, float]]:
    """Top-1 and top-5 accuracy of each probe, by its position in the bank."""
    right1 = [torch.zeros(len(s.members), device=bank.device) for s in bank.stacks]
    right5 = [torch.zeros(len(s.members), device=bank.device) for s in bank.stacks]
    seen = 0
    for tokens, labels in stream.in_order():
        seen += len(labels)
        for index, logits_PBC in enumerate(bank.logits(tokens, training=False)):
            # Classes that score no less than the right one: its rank, ties counted against it.
            # A comparison and a sum cost a tenth of sorting out the five largest.
            places = labels[None, :, None].expand(len(logits_PBC), -1, 1)
            rank_PB = (logits_PBC >= logits_PBC.gather(2, places)).sum(2)
            right1[index] += (rank_PB == 1).sum(1)
            right5[index] += ((rank_PB >= 1) & (rank_PB <= 5)).sum(1)
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for result, right in zip(found, (right1, right5), strict=True):
        for stack, counts in zip(bank.stacks, right, strict=True):
            result.update(zip(stack.members, (counts / max(seen, 1)).tolist(), strict=True))
    return found
