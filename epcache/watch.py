"""What ``fit_probes`` tells while it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from epcache.train import Fit


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
