"""Token arrays over shard files: slices without a copy, rows gathered in any order.

An uncompressed shard is mapped and its front is used as it lies; of a compressed one, chunks are
decoded when they are asked for. Neither way goes through a Zarr library, and both give the same
values.
"""

from __future__ import annotations

import itertools
import math
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epcache.errors import StoreError
from epcache.store.shard import decode_index, decompress_chunk
from epcache.store.spec import MISSING_CHUNK, TokenArraySpec

MAX_OPEN_SHARDS = 256
"""Python keeps a file descriptor per map, and 1024 is a common limit for a process."""

DECODED_BYTES = 512 * 2**20
"""Decoded chunks of a compressed store that are kept."""


class TokenArray:
    """Array-like (n, num_tokens, dim) of float16 over shard files; it indexes as NumPy does.

    A slice inside one shard is a read-only view of the map; everything else is copied.
    """

    dtype = np.dtype(np.float16)
    ndim = 3

    def __init__(self, store: Path, spec: TokenArraySpec, shards: ShardCache) -> None:
        self.spec = spec
        self.shape = (spec.num_rows, spec.num_tokens, spec.dim)
        self._store = store
        self._shards = shards

    def __len__(self) -> int:
        """Number of rows."""
        return self.spec.num_rows

    def __repr__(self) -> str:
        """``TokenArray(1297, 64, 96) float16``."""
        return f"TokenArray{self.shape} float16"

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Rows by number, slice, integers or mask; further indices apply to tokens and width."""
        first, *rest = expand_ellipsis(key if isinstance(key, tuple) else (key,))
        if isinstance(first, slice):
            rows = self._slice(*first.indices(len(self)))
            return rows[(slice(None), *rest)] if rest else rows
        index = row_index(first, len(self))
        if index.ndim == 0:
            row = int(index)
            values: NDArray[Any] = self._slice(row, row + 1, 1)[(0, *rest)]
            return values
        rows = self.take(index)
        return rows[(np.arange(len(rows)), *rest)] if rest else rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All rows, copied."""
        if copy is False:
            raise ValueError("a store's array cannot be one array in memory without a copy")
        return self[:].astype(dtype or self.dtype, copy=True)

    def take(self, rows: ArrayLike, out: NDArray[np.float16] | None = None) -> NDArray[np.float16]:
        """Gather rows in the given order, repeats allowed.

        Args:
            rows: (B,) integers; negative ones count from the end.
            out: (B, num_tokens, dim) float16 to fill, so that a stream can reuse its buffers.

        Returns:
            ``out`` or a new array.

        Raises:
            IndexError: A row is not in the array.
        """
        index = np.atleast_1d(row_index(rows, len(self)))
        shape = (len(index), *self.shape[1:])
        if out is None:
            out = np.empty(shape, np.float16)
        elif out.shape != shape or out.dtype != np.float16:
            raise ValueError(f"out is {out.dtype} {out.shape}, expected float16 {shape}")
        # Neighbours are copied together, so one loop serves reading in order and at random.
        parts, local = np.divmod(index, self._shards.part_rows(self.spec))
        for start, stop in runs_of_neighbours(index, parts):
            first = int(local[start])
            out[start:stop] = self._part(int(parts[start]))[first : first + stop - start]
        return out

    def _slice(self, start: int, stop: int, step: int) -> NDArray[np.float16]:
        if step == 1 and start < stop:
            size = self._shards.part_rows(self.spec)
            part = start // size
            if (stop - 1) // size == part:
                return self._part(part)[start - part * size : stop - part * size]
        return self.take(np.arange(start, stop, step))

    def _part(self, part: int) -> NDArray[np.float16]:
        return self._shards.get(self._store, self.spec, part)


class ShardCache:
    """The parts used last: whole shards, mapped; or decoded chunks of a compressed store.

    Several threads may read through one cache.
    """

    def __init__(self, capacity: int = MAX_OPEN_SHARDS) -> None:
        self.capacity = capacity
        self._open: OrderedDict[tuple[str, int], NDArray[np.float16]] = OrderedDict()
        self._lock = threading.Lock()

    def part_rows(self, array: TokenArraySpec) -> int:
        """Rows in all parts but the last."""
        return array.chunk_rows if array.geometry.compress else array.geometry.shard_rows

    def get(self, store: Path, array: TokenArraySpec, part: int) -> NDArray[np.float16]:
        """Rows (at most part_rows, num_tokens, dim) of a part; read-only."""
        key = (array.path, part)
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        if array.geometry.compress:
            shard, chunk = divmod(part, array.chunks_per_shard)
            found = load_chunk(store / array.shard_path(shard), array, shard, chunk)
        else:
            found = load_shard(store / array.shard_path(part), array, part)
        with self._lock:
            self._open[key] = found
            while len(self._open) > self._most(array):
                self._open.popitem(last=False)  # a view that is still used keeps its map alive
        return found

    def release(self) -> None:
        """Unload the pages of all maps; views of them stay valid and fetch pages anew."""
        with self._lock:
            for values in self._open.values():
                base: Any = values
                while isinstance(base, np.ndarray | memoryview):
                    base = base.base if isinstance(base, np.ndarray) else base.obj
                if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                    base.madvise(mmap.MADV_DONTNEED)

    def _most(self, array: TokenArraySpec) -> int:
        if array.geometry.compress:
            return max(1, DECODED_BYTES // array.chunk_bytes)
        return self.capacity


def load_shard(path: Path, array: TokenArraySpec, shard: int) -> NDArray[np.float16]:
    """Map the rows of an uncompressed shard.

    Raises:
        StoreError: The file is missing, has the wrong size or a damaged index.
    """
    mapped, index = map_shard(path, array, shard)
    chunks = np.arange(len(index), dtype=np.uint64) * np.uint64(array.chunk_bytes)
    if (index[:, 0] != chunks).any() or (index[:, 1] != array.chunk_bytes).any():
        raise StoreError(f"shard {path} is not as epcache writes it; run: epcache verify")
    shape = (array.shard_num_rows(shard), array.num_tokens, array.dim)
    return np.frombuffer(mapped, "<f2", math.prod(shape)).reshape(shape)


def load_chunk(path: Path, array: TokenArraySpec, shard: int, chunk: int) -> NDArray[np.float16]:
    """Decode the rows of one chunk of a compressed shard.

    Raises:
        StoreError: The file is missing or damaged.
    """
    mapped, index = map_shard(path, array, shard)
    offset, num_bytes = index[chunk].tolist()
    rows = np.empty((array.chunk_rows, array.num_tokens, array.dim), np.float16)
    decompress_chunk(mapped[offset : offset + num_bytes], rows)
    rows = rows[: array.shard_num_rows(shard) - chunk * array.chunk_rows]
    rows.flags.writeable = False
    return rows


def map_shard(
    path: Path, array: TokenArraySpec, shard: int
) -> tuple[mmap.mmap, NDArray[np.uint64]]:
    """A shard file's bytes, and offset and length of each chunk that it has.

    Raises:
        StoreError: The file is missing, cut off, or its index is damaged.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StoreError(f"shard {path} cannot be read ({error}); run: epcache verify") from None
    if len(mapped) < array.index_bytes:
        raise StoreError(f"shard {path} is cut off; run: epcache verify")
    index = decode_index(mapped[-array.index_bytes :], path)[: array.shard_num_chunks(shard)]
    if (index == MISSING_CHUNK).any() or index.sum(axis=1).max() > len(mapped):
        raise StoreError(f"shard {path} lacks chunks; run: epcache verify")
    return mapped, index


def runs_of_neighbours(
    index: NDArray[np.int64], parts: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Borders [start, stop) of the runs of consecutive rows that lie in one part."""
    breaks = (np.diff(index) != 1) | (np.diff(parts) != 0)
    if len(index):
        yield from itertools.pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(index)])


def runs_of_equal(values: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Borders [start, stop) of the runs of one value."""
    if len(values):
        borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
        yield from itertools.pairwise(borders)


def row_index(rows: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """Row numbers from 0, from integers (negative ones count from the end) or a mask.

    Raises:
        IndexError: As for a NumPy array, and names the first row that is not there.
    """
    index = np.asarray(rows)
    if index.dtype == bool and index.ndim:
        if index.shape != (num_rows,):
            raise IndexError(f"a mask of shape {index.shape} does not fit {num_rows} rows")
        return np.flatnonzero(index)
    if index.ndim > 1 or index.dtype == bool or not (index.dtype.kind in "iu" or index.size == 0):
        raise IndexError(
            f"rows are {index.dtype} of shape {index.shape}; expected a slice, an integer, "
            f"a list of integers or a mask"
        )
    index = index.astype(np.int64)
    outside = (index < -num_rows) | (index >= num_rows)
    if outside.any():
        raise IndexError(f"row {int(index[outside].flat[0])} is not in [0, {num_rows})")
    return np.where(index < 0, index + num_rows, index)


def expand_ellipsis(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key with ``...`` replaced by the slices that it stands for."""
    key = key or (...,)
    places = [place for place, part in enumerate(key) if part is Ellipsis]
    if len(places) > 1 or len(key) - len(places) > TokenArray.ndim:
        raise IndexError(f"too many indices: {key}, the array has {TokenArray.ndim} axes")
    for place in places:
        whole = (slice(None),) * (TokenArray.ndim - len(key) + 1)
        key = (*key[:place], *whole, *key[place + 1 :])
    return key
