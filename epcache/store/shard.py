"""One shard file: tokens in C order, then the index that makes it a Zarr v3 shard.

The bytes of a shard are written front to back as batches arrive, so memory does not depend on the
size of a shard. Uncompressed, chunk i lies at i * chunk_bytes and the file's front is plain C-order
memory, which is what the reader maps.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from epcache.errors import StoreError
from epcache.store.files import disk_full_is_clear, write_all
from epcache.store.journal import ShardFile
from epcache.store.spec import (
    BLOSC,
    INDEX_CHECKSUM_BYTES,
    INDEX_ENTRY_BYTES,
    MISSING_CHUNK,
    TokenArraySpec,
)

COMPRESS_THREADS = 8

_BLOSC_SHUFFLE = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE}


class ShardWriter:
    """Writes the rows of one shard to a temporary file, in order."""

    def __init__(self, array: TokenArraySpec, shard: int, partial: Path) -> None:
        self.array = array
        self.shard = shard
        self.partial = partial
        self._expected_rows = array.shard_num_rows(shard)
        self._num_rows = 0
        self._crc = 0
        self._num_bytes = 0
        self._chunks: list[tuple[int, int]] = []
        self._waiting: list[NDArray[np.float16]] = []
        self._num_waiting = 0
        self._file = partial.open("wb", buffering=0)

    def append(self, tokens: NDArray[np.float16]) -> None:
        """Add rows (B, num_tokens, dim)."""
        assert tokens.dtype == np.float16
        assert tokens.shape[1:] == (self.array.num_tokens, self.array.dim), tokens.shape
        self._num_rows += len(tokens)
        assert self._num_rows <= self._expected_rows
        if self.array.geometry.compress:
            self._compress(tokens)
        else:
            self._write(np.ascontiguousarray(tokens))

    def finish(self) -> ShardFile:
        """Pad the last chunk, write the index and flush to the disk; the file is then whole."""
        assert self._num_rows == self._expected_rows
        padding = self.array.shard_num_chunks(self.shard) * self.array.chunk_rows - self._num_rows
        if padding:
            zeros = np.zeros((padding, self.array.num_tokens, self.array.dim), np.float16)
            (self._compress if self.array.geometry.compress else self._write)(zeros)
        if not self.array.geometry.compress:
            size = self.array.chunk_bytes
            self._chunks = [
                (i * size, size) for i in range(self.array.shard_num_chunks(self.shard))
            ]
        self._write(
            np.frombuffer(encode_index(self._chunks, self.array.chunks_per_shard), np.uint8)
        )
        with disk_full_is_clear(self.partial):
            os.fsync(self._file.fileno())
        self._file.close()
        return ShardFile(num_bytes=self._num_bytes, crc32c=f"{self._crc:08x}")

    def abandon(self) -> None:
        """Close and remove the temporary file, so that it takes no room."""
        self._file.close()
        self.partial.unlink(missing_ok=True)

    def _write(self, data: NDArray[Any]) -> None:
        self._crc = google_crc32c.extend(self._crc, data)
        view = data.reshape(-1).view(np.uint8).data
        self._num_bytes += len(view)
        with disk_full_is_clear(self.partial):
            write_all(self._file, view)

    def _compress(self, tokens: NDArray[np.float16]) -> None:
        """Hand on whole chunks; rows that do not fill one wait for the next batch.

        Blosc runs in threads of ours: in the main thread numcodecs lets Blosc start its own, which
        put the blocks of a chunk in the order in which they happen to finish.
        """
        self._waiting.append(tokens.copy())  # the caller may fill its buffer again
        self._num_waiting += len(tokens)
        rows = self.array.chunk_rows
        if self._num_waiting < rows:
            return
        joined = np.concatenate(self._waiting)
        whole = len(joined) // rows * rows
        chunks = [joined[start : start + rows] for start in range(0, whole, rows)]
        with ThreadPoolExecutor(COMPRESS_THREADS) as pool:
            for data in pool.map(compress_chunk, chunks):
                self._chunks.append((self._num_bytes, len(data)))
                self._write(np.frombuffer(data, np.uint8))
        self._waiting = [joined[whole:].copy()]
        self._num_waiting = len(joined) - whole


def compress_chunk(tokens: NDArray[np.float16]) -> bytes:
    """What Zarr's ``blosc`` codec with the store's settings makes of a chunk.

    The same bytes each time only outside the main thread.
    """
    compressed: bytes = blosc.compress(
        np.ascontiguousarray(tokens),
        str(BLOSC["cname"]).encode(),
        BLOSC["clevel"],
        _BLOSC_SHUFFLE[str(BLOSC["shuffle"])],
        BLOSC["blocksize"],
    )
    return compressed


def decompress_chunk(data: bytes | memoryview, out: NDArray[np.float16]) -> None:
    """Fill ``out`` (chunk_rows, num_tokens, dim) from a compressed chunk.

    Raises:
        StoreError: The chunk does not hold what it should.
    """
    try:
        sizes = struct.unpack_from("<4xI4xI", data)  # Blosc's header: bytes decoded, then encoded
        if sizes != (out.nbytes, len(data)):
            raise ValueError(f"sizes {sizes}, expected {(out.nbytes, len(data))}")
        blosc.decompress(data, out)
    except (RuntimeError, ValueError, struct.error) as error:
        raise StoreError(f"a compressed chunk is damaged ({error}); run: epcache verify") from None


def encode_index(chunks: list[tuple[int, int]], chunks_per_shard: int) -> bytes:
    """The index of a shard: (offset, length) per chunk as little-endian uint64, then crc32c.

    Source: Zarr v3 sharding codec, binary shard format.
    """
    absent = [(MISSING_CHUNK, MISSING_CHUNK)] * (chunks_per_shard - len(chunks))
    data = np.array(chunks + absent, dtype="<u8").tobytes()
    return data + struct.pack("<I", google_crc32c.value(data))


def decode_index(data: bytes, path: Path) -> NDArray[np.uint64]:
    """Offsets and lengths (chunks_per_shard, 2) from the end of a shard file.

    Raises:
        StoreError: The checksum does not match.
    """
    body, checksum = data[:-INDEX_CHECKSUM_BYTES], data[-INDEX_CHECKSUM_BYTES:]
    if len(body) % INDEX_ENTRY_BYTES or struct.pack("<I", google_crc32c.value(body)) != checksum:
        raise StoreError(f"the index of shard {path} is damaged; run: epcache verify")
    return np.frombuffer(body, "<u8").reshape(-1, 2)
