"""Sealed stores: open one, name a split and a layer, get arrays. No Zarr library is needed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcache.errors import ConfigError, StoreError
from epcache.store.array import ShardCache, TokenArray, runs_of_equal
from epcache.store.documents import FINAL_NORM, read_root
from epcache.store.journal import committed_bytes
from epcache.store.spec import LayerShape, StoreSpec


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of ``samples.csv``."""

    row: int
    path: str
    label: int
    class_name: str


class Store:
    """A sealed store. ``store["train"].layer(-1).patch`` is an array (n, N, D) of float16."""

    def __init__(self, path: Path, root: Mapping[str, Any]) -> None:
        self.path = path
        self.spec = StoreSpec.from_json(root["spec"])
        self.digest: str = root["digest"]
        self.provenance: Mapping[str, Any] = root["provenance"]
        self.tokens: Mapping[str, Any] = root["tokens"]
        self._shards = ShardCache()
        if self.spec.digest != self.digest:
            raise StoreError(
                f"store {path}: its spec has digest {self.spec.digest[:8]}, its document says "
                f"{self.digest[:8]}; it was edited. Extract it again"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """Block indices that are stored."""
        return tuple(self.spec.layers)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self.spec.splits)

    @property
    def num_bytes(self) -> int:
        """Bytes of all token shards, as they lie on disk."""
        return committed_bytes(self.path)

    @property
    def final_norm_path(self) -> Path | None:
        """The backbone's last norm, or None where it has none."""
        path = self.path / FINAL_NORM
        return path if path.exists() else None

    def release(self) -> None:
        """Drop the pages of shards that were read from this process's memory.

        Arrays stay valid: a page that is looked at again is read again.
        """
        self._shards.release()

    def resolve_layer(self, layer: int) -> int:
        """A stored block index; negative ones count from the backbone's end.

        Raises:
            ConfigError: The backbone has no such layer, or the store does not hold it.
        """
        resolved = layer + self.spec.num_layers if layer < 0 else layer
        if resolved not in self.spec.layers:
            has = format_ranges(self.layers)
            raise ConfigError(
                f"layer {layer} is not in store {self.path} (has {has} of 0-"
                f"{self.spec.num_layers - 1}). Run: epcache extract --layers {layer} ..."
            )
        return resolved

    def has_cls(self, layer: int) -> bool:
        """Whether a layer holds a [CLS] token; registers alone are none."""
        has_prefix = self.spec.layers[self.resolve_layer(layer)].num_prefix > 0
        # Stores that do not say are of backbones with [CLS]
        return has_prefix and bool(self.provenance.get("backbone", {}).get("has_cls", True))

    def __getitem__(self, split: str) -> SplitReader:
        """A split by name.

        Raises:
            ConfigError: The store has no such split.
        """
        if split not in self.spec.splits:
            raise ConfigError(
                f"split {split!r} is not in store {self.path} (has {', '.join(self.splits)})"
            )
        return SplitReader(self, split)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, layers={list(self.layers)}, splits={list(self.splits)})"


class SplitReader:
    """One split: labels, which rows are valid, samples and layers."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.num_rows = store.spec.splits[name].num_rows
        self.num_views = store.spec.splits[name].num_views
        self.labels: NDArray[np.int64] = self._column("labels", "<i8", ())
        """(n,) int64, from 0."""
        self.valid: NDArray[np.bool_] = self._column("valid", "?", ())
        """(n,) bool; False where the image could not be decoded and the tokens are zeros."""

    def __len__(self) -> int:
        """How many rows, the invalid ones included."""
        return self.num_rows

    @property
    def sizes(self) -> NDArray[np.int32]:
        """(n, 2) width and height of the images on disk, in pixels; zeros where invalid."""
        return self._column("sizes", "<i4", (2,))

    @property
    def boxes(self) -> NDArray[np.float64] | None:
        """(n, 4) x0 y0 x1 y1 in pixels of the images on disk, or None where there are none."""
        if not (self.store.path / self.name / "boxes").exists():
            return None
        return self._column("boxes", "<f8", (4,))

    def samples(self) -> list[Sample]:
        """What each row is."""
        path = self.store.path / self.name / "samples.csv"
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = csv.reader(file)
            next(rows)  # the header
            return [
                Sample(row=int(row), path=path, label=int(label), class_name=class_name)
                for row, path, label, class_name in rows
            ]

    def layer(self, layer: int, *, view: int = 0) -> LayerReader:
        """The tokens of one layer, as the backbone's block gave them (no final norm)."""
        if not 0 <= view < self.num_views:
            raise ConfigError(
                f"view {view} of split {self.name!r} is not in store {self.store.path} "
                f"(has {self.num_views}). Run: epcache extract --views {view + 1} ..."
            )
        return LayerReader(self.store, self.name, self.store.resolve_layer(layer), view)

    def _column(self, name: str, dtype: str, width: tuple[int, ...]) -> NDArray[Any]:
        path = self.store.path / self.name / name / "c" / "/".join("0" * (1 + len(width)))
        try:
            values = np.fromfile(path, dtype)
        except OSError as error:
            raise StoreError(
                f"store file {path} cannot be read ({error.strerror}); run: epcache verify"
            ) from None
        if values.size != self.num_rows * int(np.prod(width)):
            raise StoreError(f"store file {path} has the wrong size; run: epcache verify")
        return values.reshape(self.num_rows, *width)


class LayerReader:
    """One layer of a view of a split."""

    def __init__(self, store: Store, split: str, layer: int, view: int) -> None:
        self.layer = layer
        self.shape: LayerShape = store.spec.layers[layer]
        arrays = {a.path.rsplit("/", 1)[1]: a for a in store.spec.layer_arrays(split, layer, view)}
        self.patch = TokenArray(store.path, arrays["patch"], store._shards)
        """Patch tokens (n, N, D), row-major over the grid."""
        self.prefix = (
            TokenArray(store.path, arrays["prefix"], store._shards) if "prefix" in arrays else None
        )
        """[CLS] and registers (n, R, D); None for a backbone without any."""


def format_ranges(numbers: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    ordered = np.array(sorted(numbers))
    parts = []
    for start, stop in runs_of_equal(ordered - np.arange(len(ordered))):
        first, last = ordered[start], ordered[stop - 1]
        parts.append(f"{first}" if first == last else f"{first}-{last}")
    return ",".join(parts)


def open_store(path: str | Path) -> Store:
    """Open a sealed store.

    Raises:
        StoreError: There is none, it is not sealed, or another version wrote it.
    """
    path = Path(path)
    root = read_root(path)
    if root is None:
        raise StoreError(f"no store at {path}. Make one: epcache extract --backbone B --dataset D")
    if root["sealed"] is None:
        raise StoreError(
            f"store {path} is not sealed: its extraction has not finished. Run the command again "
            f"to go on: {root['provenance'].get('command', 'epcache extract ...')}"
        )
    return Store(path, root)
