"""Tokens of a store as batches for training: read ahead, gather, finish, copy to the device.

    map -> gather rows (float16) -> cast, final norm -> compute type -> device -> step

Everything left of the step happens in a thread ahead of it. What fits the memory budget is read and
finished once and then gathered from memory; the order and the values are the same either way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epcache.averaging import averaged_layers
from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.order import epoch_order
from epcache.store.array import TokenArray
from epcache.store.reader import SplitReader

TokenKind = Literal["patch", "all", "cls"]
TOKEN_KINDS: tuple[TokenKind, ...] = ("patch", "all", "cls")

BLOCK_ROWS = 32
WINDOW_BLOCKS = 32
"""A streamed window is 1,024 rows: mixed well, and 200 MB of ViT-S/14 or 540 MB of ViT-L/14."""

READ_AHEAD = 2
CHUNK_ROWS = 256
"""Rows that are finished at a time while a source is read from end to end."""
POOL_BYTES = 2**26
"""Finished tokens that are in memory at a time while a source is pooled."""


class Source(Protocol):
    """Finished tokens by position: of a store, or pooled once and kept."""

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""

    @property
    def dim(self) -> int:
        """Token width D."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of finished tokens."""

    @property
    def num_bytes(self) -> int:
        """Memory of all finished tokens of a view."""

    @property
    def labels(self) -> Tensor:
        """(n,) int64."""

    def read(self, positions: NDArray[np.int64], *, view: int = 0) -> Tensor:
        """Finished tokens (B, N, D) of the rows at these positions."""

    def subset(self, positions: NDArray[np.int64]) -> Source:
        """The same tokens of fewer rows."""

    def release(self) -> None:
        """Give back what reading has put into memory; the next read fetches it again."""


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """Which tokens of a split a pass looks at, and how they are finished."""

    split: SplitReader
    layer: int
    tokens: TokenKind = "patch"
    """``patch``; ``all``: [CLS] in front of them; ``cls``: [CLS] alone."""
    average_layers: int = 1
    """Tokens are averaged over so many layers, the last of them ``layer``."""
    norm: FinalNorm | None = None
    """Applied to all tokens of each layer, as the backbone would; None leaves raw block output."""
    rows: NDArray[np.int64]
    """Rows of the split, ascending: valid ones, of the subset asked for."""
    dtype: torch.dtype = torch.float32
    """In which the matrix products are done."""

    def __post_init__(self) -> None:
        """Refuse tokens that the store does not have."""
        if self.tokens not in TOKEN_KINDS:
            raise ConfigError(f"tokens {self.tokens!r}: expected one of {', '.join(TOKEN_KINDS)}")
        if self.tokens != "patch" and not self.split.store.has_cls(self.layer):
            raise ConfigError(
                f"tokens {self.tokens!r}: store {self.split.store.path} has no [CLS] token; "
                f"use patch tokens"
            )
        averaged_layers(self.split.store, self.layer, self.average_layers)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of one image."""
        shape = self.split.layer(self.layer).shape
        return {"patch": shape.num_patches, "all": shape.num_patches + 1, "cls": 1}[self.tokens]

    @property
    def dim(self) -> int:
        """Token width D."""
        return self.split.layer(self.layer).shape.dim

    @property
    def num_bytes(self) -> int:
        """Memory of all finished tokens of a view."""
        return len(self) * self.num_tokens * self.dim * self.dtype.itemsize

    @property
    def labels(self) -> Tensor:
        """(n,) int64, by position in ``rows``."""
        return torch.from_numpy(self.split.labels[self.rows])

    def read(self, positions: NDArray[np.int64], *, view: int = 0) -> Tensor:
        """Finished tokens (B, N, D) of the rows at these positions."""
        layers = averaged_layers(self.split.store, self.layer, self.average_layers)
        tokens = self._read_layer(layers[-1], positions, view)
        if len(layers) > 1:
            tokens = tokens.float()
            for layer in layers[:-1]:
                tokens += self._read_layer(layer, positions, view)
            tokens /= len(layers)
        return tokens.to(self.dtype)

    def _read_layer(self, number: int, positions: NDArray[np.int64], view: int) -> Tensor:
        layer = self.split.layer(number, view=view)
        rows = self.rows[positions]
        parts = []
        if self.tokens != "patch":
            assert layer.prefix is not None
            parts.append(take(layer.prefix, rows)[:, :1])
        if self.tokens != "cls":
            parts.append(take(layer.patch, rows))
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return tokens if self.norm is None else self.norm(tokens)

    def subset(self, positions: NDArray[np.int64]) -> TokenSource:
        """The same tokens of fewer rows."""
        return replace(self, rows=self.rows[positions])

    def release(self) -> None:
        """Let go of the pages of the store that were read, so that they do not pile up."""
        self.split.store.release()


@dataclass(frozen=True, kw_only=True)
class PooledSource:
    """One vector an image, pooled once by a pooler without parameters and kept."""

    features: tuple[Tensor, ...]
    """For each view (n, 1, D) float32: images of one token, which such poolers leave as it is."""
    labels: Tensor
    """(n,) int64."""

    @classmethod
    def of(cls, source: TokenSource, *, num_views: int) -> PooledSource:
        """Mean over the tokens of every row; of a single token, the token."""
        features = tuple(pool(source, view=view)[:, None] for view in range(num_views))
        return cls(features=features, labels=source.labels)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    @property
    def num_tokens(self) -> int:
        """One."""
        return 1

    @property
    def dim(self) -> int:
        """Token width D."""
        return self.features[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return self.features[0].dtype

    @property
    def num_bytes(self) -> int:
        """Memory of the vectors of a view."""
        return self.features[0].nbytes

    def read(self, positions: NDArray[np.int64], *, view: int = 0) -> Tensor:
        """Pooled vectors (B, 1, D)."""
        return self.features[view][torch.from_numpy(positions)]

    def subset(self, positions: NDArray[np.int64]) -> PooledSource:
        """The same vectors of fewer rows."""
        index = torch.from_numpy(positions)
        return PooledSource(
            features=tuple(values[index] for values in self.features), labels=self.labels[index]
        )

    def release(self) -> None:
        """Nothing: it lies in memory on purpose."""


def pool(
    source: TokenSource,
    *,
    view: int = 0,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Mean over the tokens of every row; of a single token, the token.

    Args:
        source: What to read, from end to end.
        view: Which cached view.
        chunk_rows: Rows at a time; None is as many as fit `POOL_BYTES`. It changes no vector.
        progress: Told how many bytes of tokens are through, and of how many.

    Returns:
        (n, D) float32.
    """
    source = replace(source, dtype=torch.float32)
    row_bytes = 4 * source.num_tokens * source.dim
    pooled_ND = torch.empty(len(source), source.dim)
    for part in chunks(source, chunk_rows or max(1, POOL_BYTES // row_bytes)):
        stop = int(part[-1]) + 1
        pooled_ND[part[0] : stop] = source.read(part, view=view).mean(1)
        if progress is not None:
            progress(stop * row_bytes, len(source) * row_bytes)
    return pooled_ND


def chunks(source: Source, chunk_rows: int = CHUNK_ROWS) -> Iterator[NDArray[np.int64]]:
    """All positions of a source, some at a time; pages are let go of on the way."""
    for start in range(0, len(source), chunk_rows):
        yield np.arange(start, min(start + chunk_rows, len(source)))
        source.release()


def take(array: TokenArray, rows: NDArray[np.int64]) -> Tensor:
    """Rows of a store's array as a tensor of their own."""
    return torch.from_numpy(array.take(rows))


class TokenStream:
    """Batches of a source, epoch after epoch.

    Args:
        source: What to read; epoch e reads its view e mod ``num_views``.
        batch_size: Rows a batch.
        device: Where batches are wanted.
        budget_bytes: Keep all finished tokens in memory when they fit; 0 always streams.
        order_seed: Of the training order.
        num_views: Cached views to alternate between.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        device: torch.device | str = "cpu",
        budget_bytes: int = 0,
        order_seed: int = 0,
        num_views: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"--batch-size {batch_size}: expected 1 or more")
        self.source = source
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.order_seed = order_seed
        self.num_views = num_views
        self.resident = self.num_bytes <= budget_bytes
        batch_bytes = source.num_bytes // max(1, len(source)) * batch_size
        self.read_ahead = READ_AHEAD if 4 * batch_bytes <= budget_bytes else 1
        """Batches that wait; one where batches are large beside the budget."""
        self._kept: dict[int, Tensor] = {}
        self._labels = source.labels

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.source)

    @property
    def num_bytes(self) -> int:
        """Memory of all that the stream reads."""
        return self.source.num_bytes * self.num_views

    def num_steps(self, *, drop_last: bool) -> int:
        """Training batches an epoch."""
        whole, rest = divmod(len(self), self.batch_size)
        return whole if (drop_last and whole) or not rest else whole + 1

    def epoch(self, epoch: int, *, drop_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches (tokens, labels) in the order of an epoch."""
        order = epoch_order(
            len(self),
            seed=self.order_seed,
            epoch=epoch,
            block_rows=BLOCK_ROWS,
            window_blocks=WINDOW_BLOCKS,
        )
        batches = self.cut(order)
        batches = batches[: self.num_steps(drop_last=drop_last)]
        return self._read(batches, view=epoch % self.num_views)

    def in_order(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every row of view 0 once, in stored order; for evaluation."""
        return self._read(self.cut(np.arange(len(self))), view=0)

    def cut(self, order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Batches of an order."""
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    def _read(
        self, batches: list[NDArray[np.int64]], *, view: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.resident:
            kept = self._resident(view)
            for positions in batches:
                index = torch.from_numpy(positions)
                labels = self._labels[index].to(self.device, non_blocking=True)
                yield kept[index.to(kept.device)], labels
            return
        with ReadAhead(self, batches, view) as ahead:
            yield from ahead

    def _resident(self, view: int) -> Tensor:
        """All finished tokens of a view, on the device, read once."""
        if view not in self._kept:
            source = self.source
            kept = torch.empty(
                (len(source), source.num_tokens, source.dim), dtype=source.dtype, device=self.device
            )
            for part in chunks(source):
                kept[part[0] : part[-1] + 1] = source.read(part, view=view)
            self._kept[view] = kept
        return self._kept[view]


class ReadAhead:
    """A thread that keeps a few batches ready."""

    def __init__(self, stream: TokenStream, batches: list[NDArray[np.int64]], view: int) -> None:
        self._stream, self._batches, self._view = stream, batches, view
        self._ready: queue.Queue[tuple[Tensor, Tensor] | BaseException | None]
        self._ready = queue.Queue(stream.read_ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="token-stream", daemon=True)

    def __enter__(self) -> ReadAhead:
        """Start reading."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, also in the middle of an epoch."""
        self._stopped.set()
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in order; what the thread met is raised here."""
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            unreleased = 0
            for positions in self._batches:
                unreleased += len(positions)
                if unreleased > BLOCK_ROWS * WINDOW_BLOCKS:  # a window is behind
                    self._stream.source.release()
                    unreleased = len(positions)
                tokens = self._stream.source.read(positions, view=self._view)
                labels = self._stream._labels[torch.from_numpy(positions)]
                if not self._put((self._to_device(tokens), self._to_device(labels))):
                    return
            self._stream.source.release()
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: tuple[Tensor, Tensor] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._stream.device.type != "cuda":
            return tensor.to(self._stream.device)
        return tensor.pin_memory().to(self._stream.device, non_blocking=True)
