"""Pure functions of sizes and seeds: which row comes when.

Only the raw stream of PCG64 is used, which numpy promises not to change, so an order is the same on
every machine and in every year.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def shuffled(num_rows: int, *, seed: int, salt: str) -> NDArray[np.int64]:
    """A permutation of ``num_rows`` rows.

    Args:
        num_rows: How many.
        seed: The user's seed.
        salt: What the permutation is for, so that two uses of one seed differ.

    Returns:
        (num_rows,) int64.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(salt.encode())]))
    return np.argsort(stream.random_raw(num_rows), kind="stable").astype(np.int64)


def store_order(num_rows: int, *, seed: int, split: str) -> NDArray[np.int64]:
    """The order in which a split's rows are stored, so that contiguous reads mix the classes."""
    return shuffled(num_rows, seed=seed, salt=f"store/{split}")


def epoch_order(
    num_rows: int, *, seed: int, epoch: int, block_rows: int, window_blocks: int
) -> NDArray[np.int64]:
    """The order of one epoch: blocks of neighbours in random order, mixed within a window.

    A store's rows are class-mixed already, so reading whole blocks costs no randomness that
    matters and keeps a disk reading forward. The order is the same whether the tokens lie in memory
    or are streamed.

    Args:
        num_rows: How many.
        seed: Of the data order.
        epoch: From 0; every epoch has an order of its own.
        block_rows: Neighbours that are read together.
        window_blocks: Blocks whose rows are mixed with each other; what a stream holds in memory.

    Returns:
        (num_rows,) int64, a permutation.
    """
    blocks = np.array_split(
        np.arange(num_rows, dtype=np.int64), range(block_rows, num_rows, block_rows)
    )
    sequence = shuffled(len(blocks), seed=seed, salt=f"blocks/{epoch}")
    windows = []
    for number, start in enumerate(range(0, len(blocks), window_blocks)):
        rows = np.concatenate([blocks[i] for i in sequence[start : start + window_blocks]])
        windows.append(rows[shuffled(len(rows), seed=seed, salt=f"rows/{epoch}/{number}")])
    return np.concatenate(windows) if windows else np.zeros(0, np.int64)


def stratified_holdout(
    labels: NDArray[np.int64], *, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split rows into those to train on and those held out, class by class.

    Every class gives ``share`` of its rows, rounded, but keeps at least one to train on; a class of
    one row gives none.

    Args:
        labels: (n,) class of each row.
        share: Of each class to hold out, in [0, 1).
        seed: Of the choice.

    Returns:
        Positions to train on and positions held out, both ascending.
    """
    held = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        mixed = rows[shuffled(len(rows), seed=seed, salt=f"holdout/{label}")]
        held.append(mixed[: min(round(len(rows) * share), len(rows) - 1)])
    out = np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), out), out


def nested_shots(
    labels: NDArray[np.int64], *, shots: int, seed: int
) -> tuple[NDArray[np.int64], list[int]]:
    """At most ``shots`` rows of each class; fewer shots are a subset of more with the same seed.

    Returns:
        Positions, ascending, and the classes that have fewer rows than asked.
    """
    counts = np.bincount(labels)
    short = [int(label) for label in np.flatnonzero((counts > 0) & (counts < shots))]
    return _of_each_class(labels, lambda rows: rows[:shots], seed=seed), short


def nested_share(labels: NDArray[np.int64], *, share: float, seed: int) -> NDArray[np.int64]:
    """A share of each class, rounded, but at least one row; nested, with ``nested_shots`` too.

    Returns:
        Positions, ascending.
    """
    return _of_each_class(labels, lambda rows: rows[: max(1, round(len(rows) * share))], seed=seed)


def outside(
    labels: NDArray[np.int64], chosen: NDArray[np.int64], *, most: int, seed: int
) -> NDArray[np.int64]:
    """Rows to judge a small subset by: none of it, and no more of a class than it has itself.

    They come from the far end of the order whose beginning ``nested_shots`` takes, so that larger
    subsets are judged by the same rows and more.

    Args:
        labels: (n,) class of each row.
        chosen: Positions of the subset.
        most: Rows a class at most.
        seed: Of the subset.

    Returns:
        Positions, ascending; none of a class that lies in the subset as a whole.
    """
    taken = np.zeros(len(labels), bool)
    taken[chosen] = True

    def last(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        left = rows[~taken[rows]]
        wanted = min(most, len(rows) - len(left), len(left))
        return left[len(left) - wanted :]

    return _of_each_class(labels, last, seed=seed)


def _of_each_class(
    labels: NDArray[np.int64],
    take: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    *,
    seed: int,
) -> NDArray[np.int64]:
    """What ``take`` leaves of each class's rows, which it gets in the order of their class."""
    chosen = [np.zeros(0, np.int64)]
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen.append(take(rows[shuffled(len(rows), seed=seed, salt=f"shots/{label}")]))
    return np.sort(np.concatenate(chosen))
