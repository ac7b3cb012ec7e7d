"""Which images a data set has: name and folder -> rows, classes, splits and a digest.

The digest stands for the data in a store's identity: a renamed, relabelled, added or resized file
changes it; where the data lie, and the order in which a file system lists them, does not.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from epcache.download import download_dataset
from epcache.errors import DataError, EpcacheError
from epcache.layouts.folders import SplitRows, name_some
from epcache.layouts.info import DatasetInfo, Download, dataset_info, list_datasets
from epcache.layouts.locate import data_folder, find_root
from epcache.layouts.readers import eval_split, read_layout

__all__ = [
    "DatasetInfo",
    "Download",
    "Manifest",
    "Split",
    "check_counts",
    "dataset_info",
    "list_datasets",
    "load_manifest",
    "read_manifest",
]

_ROWS_AT_ONCE = 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """The rows of one split, in a fixed order."""

    name: str
    paths: tuple[str, ...]
    """Posix path relative to the root, or `<archive member>/<index>` for packed sets."""
    labels: NDArray[np.int64]
    """Shape (n,), values in [0, number of classes)."""
    boxes: NDArray[np.float64] | None
    """Shape (n, 4): x0 y0 x1 y1 in pixels of the original image; None where there are none."""
    open_image: Callable[[int], Image.Image]
    """Row to image as opened, neither converted nor, for files, decoded yet."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """The rows of a data set, checked."""

    name: str
    root: Path | None
    """Folder that the paths start from; None for bundled data."""
    classes: tuple[str, ...]
    splits: dict[str, Split]
    """Those asked for, in the order of the data set."""
    train_split: str
    eval_split: str
    digest: str
    """sha256 of canonical JSON of name, classes and, per split, every (path, label, file size)."""


def load_manifest(
    dataset: str,
    *,
    data_dir: Path | None = None,
    splits: Sequence[str] | None = None,
    download: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Manifest:
    """Find, read and check a data set.

    Args:
        dataset: One of `list_datasets()`; `imagefolder` for any `<split>/<class>/<image>` tree.
        data_dir: Where the data are; by default `$EPCACHE_DATA/<dataset>`. One folder above or
            below the data will do.
        splits: Which splits to read; by default all.
        download: Fetch the data first where they are not there and a checksum is known.
        progress: Receives a line now and then while downloading.

    Raises:
        ConfigError: If the data set or a split is unknown, or there is no folder to look in.
        DataError: If the data are missing, incomplete or not in the expected layout.
    """
    info = dataset_info(dataset)
    if not info.markers:
        return read_manifest(info, None, splits)
    with _readable(info):
        try:
            root = find_root(info, data_dir)
        except DataError:
            if not download:
                raise
            download_dataset(info, data_folder(info, data_dir), progress=progress)
            root = find_root(info, data_dir)
    return read_manifest(info, root, splits)


def read_manifest(
    info: DatasetInfo, root: Path | None, splits: Sequence[str] | None = None
) -> Manifest:
    """Read and check a data set whose root is known; see `load_manifest`."""
    with _readable(info):
        rows = read_layout(info, root, splits)
        evaluation = eval_split(info, root)
    check_counts(info, rows)
    _check_rows(info, rows)
    first = next(iter(rows.values()))
    return Manifest(
        name=info.name,
        root=root,
        classes=first.classes,
        splits={name: _split(name, root, split) for name, split in rows.items()},
        train_split=info.train_split,
        eval_split=evaluation,
        digest=_digest(info.name, rows),
    )


@contextmanager
def _readable(info: DatasetInfo) -> Iterator[None]:
    """Turn what the system says about files that cannot be read into an error for the user."""
    try:
        yield
    except EpcacheError:  # some of them are an OSError too
        raise
    except OSError as exc:
        raise DataError(f"{info.name}: {exc}; make the data readable and try again") from exc


def check_counts(info: DatasetInfo, rows: Mapping[str, SplitRows]) -> None:
    """Hold what was read against the numbers of the manifest.

    Raises:
        DataError: If images or classes are more or fewer than expected, or a label is out of
            range.
    """
    for name, split in rows.items():
        num_classes = len(split.classes) if info.num_classes is None else info.num_classes
        if len(split.classes) != num_classes:
            raise DataError(
                f"{info.name}: split {name} has {len(split.classes):,} classes, expected "
                f"{num_classes:,} ({name_some(split.classes, 3)}); complete the data"
            )
        found, expected = len(split.paths), info.splits.get(name, len(split.paths))
        if found != expected or not found:
            missing = f", the first missing is {split.first_missing}" if split.first_missing else ""
            what = f"expected {expected:,}" if expected else "needs at least one"
            raise DataError(
                f"{info.name}: split {name} has {found:,} images, {what}{missing}; "
                "complete the data or remove what does not belong to them"
            )
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= num_classes))
        if len(wrong):
            raise DataError(
                f"{info.name}: {split.paths[wrong[0]]} has label {split.labels[wrong[0]]}, "
                f"expected 0..{num_classes - 1}; unpack the data again"
            )


def _check_rows(info: DatasetInfo, rows: Mapping[str, SplitRows]) -> None:
    """Classes agree between splits, no path comes twice, and every path can be written down."""
    names = list(rows)
    for one, other in itertools.pairwise(names):
        if rows[one].classes != rows[other].classes:
            a, b = set(rows[one].classes), set(rows[other].classes)
            raise DataError(
                f"{info.name}: {one} and {other} have other classes: only in {one}: "
                f"{name_some(sorted(a - b)) or 'none'}; only in {other}: "
                f"{name_some(sorted(b - a)) or 'none'}; both need all of them"
            )
    seen = Counter[str]()
    for split in rows.values():
        seen.update(split.paths)
    twice = next((path for path, count in seen.items() if count > 1), None)
    if twice is not None:
        where = [name for name in names for path in rows[name].paths if path == twice]
        raise DataError(
            f"{info.name}: {twice} is in {' and '.join(where)}: splits must not share images; "
            "mend the lists"
        )
    try:
        "\n".join(seen).encode()
    except UnicodeEncodeError:
        odd = next(path for path in seen if not _is_utf8(path))
        raise DataError(f"{info.name}: file name {odd!r} is not UTF-8; rename the file") from None


def _is_utf8(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode()


def _split(name: str, root: Path | None, rows: SplitRows) -> Split:
    def open_file(row: int) -> Image.Image:
        # From memory: an image is decoded later, and must not hold a file open until then.
        return Image.open(io.BytesIO((root / rows.paths[row]).read_bytes()))  # type: ignore[operator]

    return Split(
        name=name,
        paths=rows.paths,
        labels=rows.labels,
        boxes=rows.boxes,
        open_image=rows.open_image or open_file,
    )


def _digest(name: str, splits: Mapping[str, SplitRows]) -> str:
    """sha256 of canonical JSON, written piece by piece: ImageNet's would be 100 MB."""
    sha = hashlib.sha256()

    def write(value: object) -> None:
        sha.update(_canonical(value))

    classes = next(iter(splits.values())).classes
    sha.update(b'{"classes":')
    write(classes)
    sha.update(b',"name":')
    write(name)
    sha.update(b',"splits":{')
    for i, (split, rows) in enumerate(sorted(splits.items())):
        sha.update(b"," * (i > 0))
        write(split)
        sha.update(b':{"checksums":')
        write(rows.checksums)
        sha.update(b',"rows":[')
        labels = rows.labels.tolist()
        sizes = rows.sizes.tolist() if rows.sizes is not None else [None] * len(labels)
        for a in range(0, len(labels), _ROWS_AT_ONCE):
            b = a + _ROWS_AT_ONCE
            piece = list(zip(rows.paths[a:b], labels[a:b], sizes[a:b], strict=True))
            sha.update(b"," * (a > 0) + _canonical(piece)[1:-1])
        sha.update(b"]}")
    sha.update(b"}}")
    return sha.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
