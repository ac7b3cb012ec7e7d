"""How each data set lies on disk: reader name -> rows of one split.

A reader takes what is known of the data set (`DatasetInfo`), its root and a split, and returns
`SplitRows`. It checks what only it can know; counts, labels and leaks are checked in `manifest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from epcache.errors import ConfigError, DataError
from epcache.layouts.folders import (
    SplitRows,
    class_folders,
    has_image,
    loose_images,
    name_some,
    read_class_tree,
    read_lines,
    read_listed,
)
from epcache.layouts.imagenet import read_imagenet
from epcache.layouts.info import DatasetInfo
from epcache.layouts.torchvision_sets import (
    read_cars_devkit,
    read_cifar100,
    read_file_set,
    read_places365,
    read_stl10,
)

EVAL_FOLDERS = ("val", "test", "valid", "validation")
"""Names of the evaluation split of a folder of images, best first."""

_NUM_DIGITS, _NUM_TEST = 1797, 500


def read_layout(
    info: DatasetInfo, root: Path | None, splits: Sequence[str] | None = None
) -> dict[str, SplitRows]:
    """Read splits of a data set from its root.

    Args:
        info: The data set.
        root: Folder with its content, as `locate.find_root` finds it; None for `digits`.
        splits: Which splits; None for all.

    Returns:
        Split name to rows, in the order of the manifest.

    Raises:
        ConfigError: If a split is asked for that the data set does not have.
        DataError: If the files are not in the layout of the data set.
    """
    eval_split(info, root)  # a folder of images may lack it
    has = split_names(info, root)
    unknown = [split for split in splits or () if split not in has]
    if unknown or (splits is not None and not splits):
        raise ConfigError(
            f"split {unknown[0] if unknown else '(none)'} is not in {info.name}; "
            f"choose from {', '.join(has)}"
        )
    read = READERS[info.reader]
    return {
        split: read(info, root or Path(), split)
        for split in has
        if splits is None or split in splits
    }


def split_names(info: DatasetInfo, root: Path | None) -> tuple[str, ...]:
    """The splits of a data set: the manifest's, or for `imagefolder` the folders found."""
    if info.splits or root is None:
        return tuple(info.splits)
    found = [f for f in class_folders(root) if _has_classes(root / f)]
    first = [f for f in (info.train_split, *EVAL_FOLDERS) if f in found]
    return (*first, *sorted(set(found) - set(first)))


def eval_split(info: DatasetInfo, root: Path | None) -> str:
    """The evaluation split: the manifest's, or for `imagefolder` the first of `EVAL_FOLDERS`.

    Raises:
        DataError: If a folder of images has no training or no evaluation split.
    """
    if info.splits or root is None:
        return info.eval_split
    has = split_names(info, root)
    found = [split for split in EVAL_FOLDERS if split in has]
    if info.train_split not in has or not found:
        lacks = info.train_split if info.train_split not in has else " or ".join(EVAL_FOLDERS)
        raise DataError(
            f"{info.name}: {root} has no split folder {lacks} with <class>/<image> in it; "
            f"found {', '.join(has) or 'none'}; {info.expected}"
        )
    return found[0]


def read_folder_splits(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of any `<split>/<class>/<image>` tree; all splits share the classes of train."""
    train, evaluation = info.train_split, eval_split(info, root)
    folders = {name: root / name for name in dict.fromkeys([train, evaluation, split])}
    for name, folder in folders.items():
        if not folder.is_dir():
            raise DataError(f"{info.name}: {folder} does not exist; {info.expected}")
        if name != train and folder.resolve() == folders[train].resolve():
            raise DataError(f"{folder} and {folders[train]} are one folder: the splits would leak")
    classes = {name: class_folders(folder) for name, folder in folders.items()}
    if not classes[train]:
        loose = len(loose_images(folders[train]))
        raise DataError(
            f"{info.name}: no class folders in {folders[train]}, {loose:,} images straight in it; "
            f"{info.expected}"
        )
    for name in (evaluation, split):
        only = sorted(set(classes[name]) - set(classes[train]))
        lacks = sorted(set(classes[train]) - set(classes[name])) if name == evaluation else []
        if only or lacks:
            parts = [f"{name_some(only)} only in {name}"] if only else []
            parts += [f"{name_some(lacks)} only in {train}"] if lacks else []
            raise DataError(
                f"{info.name}: {train} and {name} of {root} have other classes: "
                f"{'; '.join(parts)}; give every class a folder with images in both"
            )
    return read_class_tree(info.name, root, split, classes[train])


def read_cub200(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of CUB-200-2011 from its own text files, in the order of image ids, with boxes."""
    names = _by_id(root / "images.txt")
    labels = _by_id(root / "image_class_labels.txt")
    in_train = _by_id(root / "train_test_split.txt")
    boxes = _by_id(root / "bounding_boxes.txt")
    classes = _by_id(root / "classes.txt")
    wanted = "1" if split == info.train_split else "0"
    try:
        ids = sorted((id_ for id_ in names if in_train[id_] == wanted), key=int)
        box_x_y_w_h = np.array([boxes[id_].split() for id_ in ids], np.float64).reshape(-1, 4)
        label_of = {number: label for label, number in enumerate(sorted(classes, key=int))}
        rows = [label_of[labels[id_]] for id_ in ids]  # the files count classes from 1
    except (KeyError, ValueError) as exc:
        raise DataError(
            f"{info.name}: the text files of {root} do not agree "
            f"({type(exc).__name__}: {exc}); unpack the archive again"
        ) from exc
    box_x_y_w_h[:, 2:] += box_x_y_w_h[:, :2]
    return read_listed(
        info.name,
        root,
        split,
        paths=[f"images/{names[id_]}" for id_ in ids],
        labels=rows,
        classes=[classes[number] for number in label_of],
        boxes=box_x_y_w_h,
    )


def read_sun397(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of SUN397: one of its 50-a-class lists. torchvision reads no lists."""
    classes = [line.strip() for line in read_lines(root / "ClassName.txt")]
    paths: list[str] = []
    for name in info.lists[split]:
        near = [folder / name for folder in (root, root / "Partitions", root.parent)]
        found = next((path for path in near if path.is_file()), near[0])
        paths += [line.strip() for line in read_lines(found)]
    label_of = {name: label for label, name in enumerate(classes)}
    try:
        labels = [label_of[path.rpartition("/")[0]] for path in paths]
    except KeyError as exc:
        raise DataError(
            f"{info.name}: {exc.args[0]!r} is listed and not in {root / 'ClassName.txt'}; "
            "unpack the archives again"
        ) from exc
    return read_listed(
        info.name,
        root,
        split,
        paths=[path.removeprefix("/") for path in paths],
        labels=labels,
        classes=[name[3:] for name in classes],  # "/a/abbey" -> "abbey"
    )


def read_stanford_cars(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of Stanford Cars, in whichever of its layouts lies there."""
    if (root / "devkit" / "cars_train_annos.mat").is_file():
        return read_cars_devkit(info, root, split)
    if (root / "cars_annos.mat").is_file():
        return _read_cars_annos(info, root, split)
    return read_folder_splits(info, root, split)


def read_digits(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of scikit-learn's 1,797 handwritten digits, as grey 8 x 8 images.

    scikit-learn has no split, so this rule makes one: order the images by (label, index) and send
    position p to test where `(p + 1) * 500 // 1797 > p * 500 // 1797`. That spreads exactly 500
    test images evenly over every class, with no random number.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    # Values are 0..16; spread them over 0..255.
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    labels = np.asarray(data.target, np.int64)
    place = np.arange(len(labels))
    to_test = (place + 1) * _NUM_TEST // _NUM_DIGITS > place * _NUM_TEST // _NUM_DIGITS
    in_test = np.empty(len(labels), bool)
    in_test[np.argsort(labels, kind="stable")] = to_test
    index = np.flatnonzero(in_test == (split == info.eval_split))

    def open_image(row: int) -> Image.Image:
        return Image.fromarray(pixels[index[row]])

    return SplitRows(
        classes=tuple(str(digit) for digit in data.target_names),
        paths=tuple(f"digits/{i}" for i in index),
        labels=labels[index],
        checksums=(hashlib.sha256(pixels.tobytes()).hexdigest(),),
        open_image=open_image,
    )


def _read_cars_annos(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """Stanford Cars as one `cars_annos.mat` over `car_ims/`, the layout of its full archive."""
    import scipy.io  # type: ignore[import-untyped, unused-ignore]

    try:
        table: Any = scipy.io.loadmat(root / "cars_annos.mat", squeeze_me=True)
        is_test = split == info.eval_split
        rows = [row for row in np.atleast_1d(table["annotations"]) if bool(row["test"]) == is_test]
        paths = [str(row["relative_im_path"]) for row in rows]
        labels = [int(row["class"]) - 1 for row in rows]  # the file counts classes from 1
        classes = [str(name) for name in np.atleast_1d(table["class_names"])]
    except Exception as exc:  # scipy has its own errors for damaged files
        raise DataError(
            f"{info.name}: {root / 'cars_annos.mat'} cannot be read "
            f"({type(exc).__name__}: {exc}); {info.expected}"
        ) from exc
    return read_listed(info.name, root, split, paths=paths, labels=labels, classes=classes)


def _by_id(path: Path) -> dict[str, str]:
    """Lines `<id> <rest>` of one of CUB's files."""
    pairs = (line.strip().partition(" ") for line in read_lines(path))
    return {id_: rest for id_, _, rest in pairs}


def _has_classes(folder: Path) -> bool:
    return any(has_image(folder / name) for name in class_folders(folder))


READERS: dict[str, Callable[[DatasetInfo, Path, str], SplitRows]] = {
    "cifar100": read_cifar100,
    "cub200": read_cub200,
    "digits": read_digits,
    "dtd": read_file_set,
    "fgvc_aircraft": read_file_set,
    "food101": read_file_set,
    "imagefolder": read_folder_splits,
    "imagenet1k": read_imagenet,
    "oxford_pets": read_file_set,
    "places365": read_places365,
    "stanford_cars": read_stanford_cars,
    "stl10": read_stl10,
    "sun397": read_sun397,
}
