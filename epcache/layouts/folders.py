"""Images as files: class trees and official lists become rows. No image is opened here.

A listing follows `torchvision.datasets.ImageFolder`: a class is a folder, an image is a file with
an image suffix at any depth below it, other files are passed over, an empty class is an error.
Three things differ, on purpose: folders whose name starts with a dot are left by tools and are
never classes, folders named by numbers are ordered by number, and a dangling link is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from epcache.errors import DataError

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),  # torchvision's
    *(".gif", ".avif", ".jp2"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitRows:
    """One split as a reader finds it, before it is checked against the manifest."""

    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64] | None = None
    """Bytes of each file; None for packed sets."""
    checksums: tuple[str, ...] = ()
    """Of a packed set's files: they stand in for the sizes in the manifest's digest."""
    boxes: NDArray[np.float64] | None = None
    open_image: Callable[[int], Image.Image] | None = None
    """Row to image; None where the paths are files below the root."""
    first_missing: str | None = None
    """The first image that should be there and is not, where the reader can know it."""


def read_class_tree(name: str, root: Path, split: str, classes: Sequence[str]) -> SplitRows:
    """Rows of `<root>/<split>/<class>/**/<image>`, sorted by (label, path).

    Args:
        name: Data set, for messages.
        root: Folder of the splits.
        split: Folder of one split.
        classes: Class folders in label order; those without a folder here are left out.

    Raises:
        DataError: If a class folder holds no image.
    """
    paths: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    present = set(class_folders(root / split))
    empty = []
    for label, folder in enumerate(classes):
        if folder not in present:
            continue
        images = image_files(root / split / folder)
        if not images:
            empty.append(folder)
        paths += [f"{split}/{folder}/{path}" for path, _ in images]
        sizes += [size for _, size in images]
        labels += [label] * len(images)
    if empty:
        raise DataError(
            f"{name}: no image in class folder {name_some(empty)} of {root / split}; "
            f"fill or remove it (images end in {' '.join(IMAGE_SUFFIXES)})"
        )
    return SplitRows(
        classes=tuple(classes),
        paths=tuple(paths),
        labels=np.array(labels, np.int64),
        sizes=np.array(sizes, np.int64),
    )


def read_listed(
    name: str,
    root: Path,
    split: str,
    *,
    paths: Sequence[str],
    labels: ArrayLike,
    classes: Sequence[str],
    boxes: NDArray[np.float64] | None = None,
) -> SplitRows:
    """Rows of an official list, in its order; every listed file must be there.

    Raises:
        DataError: If files are missing; the message has how many and the first.
    """
    sizes = _sizes(root, paths)
    missing = [path for path in paths if path not in sizes]
    if missing:
        raise DataError(
            f"{name}: split {split} has {len(paths) - len(missing):,} of {len(paths):,} listed "
            f"images, the first missing is {missing[0]} in {root}; unpack the archive again"
        )
    return SplitRows(
        classes=tuple(classes),
        paths=tuple(paths),
        labels=np.asarray(labels, np.int64).reshape(-1),
        sizes=np.fromiter((sizes[path] for path in paths), np.int64, len(paths)),
        boxes=boxes,
    )


def class_folders(folder: Path) -> list[str]:
    """Names of the class folders in label order: by number if all are numbers, else as text.

    Sorted as text, 1..1000 would put 10 before 2, so labels would mean other classes than the
    numbers say.
    """
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and _alive(entry).is_dir()
        ]
    if are_numbers(names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def are_numbers(names: Sequence[str]) -> bool:
    """Whether there are names and all of them are plain numbers."""
    return bool(names) and all(name.isascii() and name.isdigit() for name in names)


def is_image(name: str) -> bool:
    """Whether the name has an image suffix. What is inside is found out when it is decoded."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def image_files(folder: Path) -> list[tuple[str, int]]:
    """Every image at any depth below a folder: (path relative to it, bytes), sorted."""
    return sorted(_walk(os.fspath(folder), ""))


def has_image(folder: Path) -> bool:
    """Whether there is an image at any depth below a folder."""
    return next(_walk(os.fspath(folder), ""), None) is not None


def loose_images(folder: Path) -> list[tuple[str, int]]:
    """Images that lie directly in a folder: (name, bytes), sorted."""
    with os.scandir(folder) as entries:
        return sorted(
            (entry.name, entry.stat().st_size)
            for entry in entries
            if is_image(entry.name) and _alive(entry).is_file()
        )


def read_lines(path: Path) -> list[str]:
    """Lines of a list file that are not blank.

    Raises:
        DataError: If the file is missing or not text.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{path} cannot be read ({exc}); unpack the archive again") from exc
    return [line for line in lines if line.strip()]


def name_some(names: Sequence[str], most: int = 5) -> str:
    """The first few of many names, for a message."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if _alive(entry).is_dir():
                if not name.startswith("."):
                    _refuse_loop(entry, folder)
                    yield from _walk(entry.path, f"{prefix}{name}/")
            elif is_image(name) and entry.is_file():
                yield prefix + name, entry.stat().st_size


def _alive(entry: os.DirEntry[str]) -> os.DirEntry[str]:
    """The entry, unless it is a link to nothing."""
    # Only links pay for a look at their target: kind and name come with the directory.
    if entry.is_symlink() and not Path(entry.path).exists():
        target = Path(entry.path).readlink()
        raise DataError(f"{entry.path} is a dangling link to {target}; restore it or remove it")
    return entry


def _refuse_loop(entry: os.DirEntry[str], folder: str) -> None:
    if entry.is_symlink() and Path(folder).resolve().is_relative_to(Path(entry.path).resolve()):
        raise DataError(f"{entry.path} links to a folder that contains it; remove the link")


def _sizes(root: Path, paths: Sequence[str]) -> dict[str, int]:
    """Bytes of those of the paths that are there: one scan a folder, one stat a file."""
    wanted: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        wanted.setdefault(folder, set()).add(name)
    sizes = {}
    for folder, names in wanted.items():
        prefix = f"{folder}/" if folder else ""
        try:
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.name in names and _alive(entry).is_file():
                        sizes[prefix + entry.name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            continue  # all its files are reported as missing
    return sizes
