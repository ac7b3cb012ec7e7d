"""Which rows of train a probe learns from, is chosen by, and is trained on in the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcache.errors import ConfigError
from epcache.order import nested_share, nested_shots, outside, stratified_holdout
from epcache.store.reader import SplitReader

HELD_SHOTS = 4
"""Most images of a class that choose for a small subset: more would cost more labels than the
subset itself has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainRows:
    """Rows of the training split by what they are for; each array is ascending."""

    rows: NDArray[np.int64]
    """What is trained on in the end, and what a result counts."""
    learn: NDArray[np.int64]
    """What is trained on while choosing."""
    held: NDArray[np.int64]
    """What is chosen by; empty where nothing is chosen. Never among ``learn``."""
    is_outside: bool = False
    """Whether ``held`` lies outside ``rows``: then ``learn`` is all of them."""
    short_classes: tuple[int, ...] = ()
    """Classes that have fewer images than the shots asked for."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    @property
    def all_rows(self) -> NDArray[np.int64]:
        """Every row that is read, ascending."""
        return np.union1d(self.rows, self.held)


def choose_rows(
    split: SplitReader,
    *,
    shots: int | None = None,
    share: float | None = None,
    seed: int = 0,
    holdout: float = 0.0,
) -> TrainRows:
    """Divide the valid rows of a training split.

    All of train, or a subset of which ``holdout`` is no fraction that could be spared: one image a
    class leaves none to hold out. So what chooses for a subset are training images outside it, at
    most ``HELD_SHOTS`` of a class and no more than the subset has of it.

    Args:
        split: The training split.
        shots: Images a class; None is all. A class that has fewer gives all it has.
        share: Share of each class, at least one image; None is all.
        seed: Of the subset and of what is held out.
        holdout: Share of each class to choose by; of a subset only whether it is 0, which chooses
            nothing.

    Raises:
        ConfigError: Nothing is held out though something should be.
    """
    check_subset(shots, share)
    valid = np.flatnonzero(split.valid).astype(np.int64)
    labels = split.labels[valid]
    notes: list[str] = []
    short: list[int] = []
    if shots is None and share is None:
        return _inside(valid, labels, holdout, seed, [], notes)
    if shots is not None:
        chosen, short = nested_shots(labels, shots=shots, seed=seed)
        if short:
            notes.append(
                f"{len(short)} of {len(np.unique(labels))} classes have fewer than {shots} "
                f"training images: all of theirs are taken"
            )
    else:
        assert share is not None
        chosen = nested_share(labels, share=share, seed=seed)
    rows = valid[chosen]
    held = outside(labels, chosen, most=HELD_SHOTS, seed=seed)
    if not holdout:
        held = held[:0]
    elif not len(held):
        notes.append(
            f"the subset is all of train and leaves no image to choose by: {holdout:.0%} of it "
            f"is held out, as without a subset"
        )
        return _inside(rows, split.labels[rows], holdout, seed, short, notes)
    elif missing := len(np.unique(labels)) - len(np.unique(labels[held])):
        notes.append(
            f"{missing} of {len(np.unique(labels))} classes have no training image outside the "
            f"subset of {len(rows):,}: the others choose learning rate and epoch"
        )
    return TrainRows(
        rows=rows,
        learn=rows,
        held=valid[held],
        is_outside=bool(len(held)),
        short_classes=tuple(short),
        notes=tuple(notes),
    )


def check_subset(shots: int | None, share: float | None) -> None:
    """Refuse an amount of training images that cannot be.

    Raises:
        ConfigError: It is one.
    """
    if shots is not None and share is not None:
        raise ConfigError(f"shots={shots} and share={share:g}: give one of the two")
    if shots is not None and shots < 1:
        raise ConfigError(f"shots={shots}: expected a whole number of 1 or more")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"share={share!r}: expected a share of each class, above 0 and at most 1; 0.01 is 1%"
        )


def _inside(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    holdout: float,
    seed: int,
    short: list[int],
    notes: list[str],
) -> TrainRows:
    """A share of every class chooses for the others, which it then joins."""
    learn, held = stratified_holdout(labels, share=holdout, seed=seed)
    if holdout and not len(held):
        raise ConfigError(
            f"holdout={holdout:g} of {len(rows)} training images of {len(np.unique(labels))} "
            f"classes holds out none; use 0 to choose nothing, or more"
        )
    return TrainRows(
        rows=rows,
        learn=rows[learn],
        held=rows[held],
        short_classes=tuple(short),
        notes=tuple(notes),
    )
