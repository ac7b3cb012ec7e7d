"""ImageNet-1k: a class is a WordNet id, its label is the id's place in sorted order.

The validation images come as one flat folder without labels; two files that people have beside it
say what they are, and nothing is guessed without one of them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from epcache.errors import DataError
from epcache.layouts.folders import (
    SplitRows,
    are_numbers,
    class_folders,
    loose_images,
    read_class_tree,
    read_lines,
)
from epcache.layouts.info import DatasetInfo

_WNID = re.compile(r"n\d{8}")
_VAL_STEM = "ILSVRC2012_val_{:08d}"
_SOLUTION = "LOC_val_solution.csv"
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def read_imagenet(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of ImageNet-1k: class folders named by WordNet id, or the flat validation folder."""
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{info.name}: {folder} does not exist; {info.expected}")
    classes = class_folders(folder)
    if not classes:
        return _read_flat(info, root, split)
    _check_wnids(info, folder, classes)
    rows = read_class_tree(info.name, root, split, classes)
    return _with_first_missing(info, split, rows)


def _check_wnids(info: DatasetInfo, folder: Path, classes: Sequence[str]) -> None:
    odd = [name for name in classes if not _WNID.fullmatch(name)]
    if not odd:
        return
    if are_numbers(classes):
        raise DataError(
            f"{info.name}: class folders of {folder} are numbers ({classes[0]}..{classes[-1]}), "
            "and which WordNet ids they stand for cannot be known: some tools number the sorted "
            "ids, the devkit has an order of its own. Rename them to WordNet ids (n01440764), or "
            f"use --dataset imagefolder --data-dir {folder.parent}, which orders by number"
        )
    raise DataError(
        f"{info.name}: {folder / odd[0]} is not a WordNet id like n01440764; remove it, or use "
        f"--dataset imagefolder --data-dir {folder.parent}"
    )


def _read_flat(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """The validation images straight in their folder, as the archive unpacks them."""
    images = loose_images(root / split)
    if not images:
        raise DataError(f"{info.name}: {root / split} has no class folders; {info.expected}")
    wnids = _validation_wnids(info, root, split) if split == "val" else None
    if wnids is None:
        raise DataError(
            f"{info.name}: {len(images):,} images lie straight in {root / split}, so their classes "
            f"are unknown. Sort them into {split}/<wnid>/"
            + (
                f", or put {_SOLUTION} (Kaggle) or the unpacked ILSVRC2012_devkit_t12 "
                f"(data/{_TRUTH} and data/meta.mat) into {root}"
                if split == "val"
                else ""
            )
        )
    unknown = [name for name, _ in images if Path(name).stem not in wnids]
    if unknown:
        raise DataError(
            f"{info.name}: {root / split / unknown[0]} has no label in the list beside it; "
            "remove the image or complete the list"
        )
    classes = sorted(set(wnids.values()))
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    rows = SplitRows(
        classes=tuple(classes),
        paths=tuple(f"{split}/{name}" for name, _ in images),
        labels=np.array([label_of[wnids[Path(name).stem]] for name, _ in images], np.int64),
        sizes=np.array([size for _, size in images], np.int64),
    )
    return _with_first_missing(info, split, rows)


def _validation_wnids(info: DatasetInfo, root: Path, split: str) -> dict[str, str] | None:
    """Image stem to WordNet id, from Kaggle's csv or the devkit, whichever lies near."""
    # Kaggle's tree is ILSVRC/Data/CLS-LOC/val with the csv beside ILSVRC.
    near = [root / split, root, *root.absolute().parents[:3]]
    for folder in near:
        if (folder / _SOLUTION).is_file():
            return _read_solution(folder / _SOLUTION)
    near = near[:3]
    for folder in [*near, *(f / "data" for f in near), *_devkits(near)]:
        if (folder / _TRUTH).is_file():
            wnid_of = _devkit_wnids(info, folder)
            truth = read_lines(folder / _TRUTH)
            try:
                return {_VAL_STEM.format(i): wnid_of[int(id_)] for i, id_ in enumerate(truth, 1)}
            except (KeyError, ValueError) as exc:
                raise DataError(
                    f"{folder / _TRUTH} has a class that meta.mat does not ({exc}); "
                    "unpack the devkit again"
                ) from exc
    return None


def _devkits(near: Sequence[Path]) -> list[Path]:
    return [folder / "ILSVRC2012_devkit_t12" / "data" for folder in near]


def _read_solution(path: Path) -> dict[str, str]:
    """Kaggle's csv: `ImageId,PredictionString`, the latter `<wnid> x0 y0 x1 y1 ...`."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    wnids = {row.get("ImageId") or "": (row.get("PredictionString") or "")[:9] for row in rows}
    odd = [stem for stem, wnid in wnids.items() if not stem or not _WNID.fullmatch(wnid)]
    if odd or not wnids:
        raise DataError(
            f"{path} is not Kaggle's file at {odd[:1] or 'all'}: expected lines "
            "'ILSVRC2012_val_00000001,n01751748 111 108 441 193'; fetch it again"
        )
    return wnids


def _devkit_wnids(info: DatasetInfo, folder: Path) -> dict[int, str]:
    """The devkit's own class number to WordNet id. Its order is not the sorted one."""
    import scipy.io  # type: ignore[import-untyped, unused-ignore]

    path = folder / "meta.mat"
    try:
        synsets: Any = scipy.io.loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in np.atleast_1d(synsets)}
    except Exception as exc:  # scipy has its own errors for damaged files
        raise DataError(
            f"{info.name}: {folder / _TRUTH} has the devkit's class numbers, which need its "
            f"meta.mat beside it ({type(exc).__name__}: {exc}); unpack ILSVRC2012_devkit_t12.tar.gz"
        ) from exc


def _with_first_missing(info: DatasetInfo, split: str, rows: SplitRows) -> SplitRows:
    """Name the first validation image that is not there: their names are numbered."""
    if split != "val" or len(rows.paths) >= info.splits[split]:
        return rows
    there = {Path(path).stem for path in rows.paths}
    if not all(stem.startswith("ILSVRC2012_val_") for stem in there):
        return rows
    expected = (_VAL_STEM.format(i) for i in range(1, info.splits[split] + 1))
    return replace(rows, first_missing=next(stem for stem in expected if stem not in there))
