"""Pure functions of sizes and seeds: which row comes when.

Only the raw stream of PCG64 is used, which numpy promises not to change, so an order is the same on
every machine and in every year.
"""

from __future__ import annotations

import zlib

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
