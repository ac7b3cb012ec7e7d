"""Data sets that torchvision knows how to read: its lists, labels and checksums, as rows.

torchvision hard-codes the folder names (`food-101/`, `dtd/dtd/`); here `root` is the folder with
the content, whatever its name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from epcache.errors import DataError, EpcacheError
from epcache.layouts.folders import SplitRows, read_listed
from epcache.layouts.info import DatasetInfo

# Reader: torchvision's class, the folder it insists on, the attribute with its image files.
_FILE_SETS = {
    "food101": ("Food101", "food-101", "_image_files"),
    "dtd": ("DTD", "dtd/dtd", "_image_files"),
    "fgvc_aircraft": ("FGVCAircraft", "fgvc-aircraft-2013b", "_image_files"),
    "oxford_pets": ("OxfordIIITPet", "oxford-iiit-pet", "_images"),
}


def read_file_set(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of Food-101, DTD, FGVC-Aircraft or Oxford-IIIT Pet: its lists, one after another."""
    from torchvision import datasets

    class_name, folder, files_attribute = _FILE_SETS[info.reader]
    files: list[str] = []
    labels: list[int] = []
    classes: list[str] = []
    with _torchvision_root(info, root, folder) as parent:
        for part in info.lists[split]:
            data = getattr(datasets, class_name)(parent, split=part)
            if classes not in ([], data.classes):
                raise DataError(f"{info.name}: list {part} has other classes in {root}")
            files += [os.fspath(file) for file in getattr(data, files_attribute)]
            labels += data._labels
            classes = data.classes
    paths = _relative(files, parent / folder)
    return read_listed(info.name, root, split, paths=paths, labels=labels, classes=classes)


def read_places365(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of Places365-Standard with small (256 x 256) images."""
    from torchvision.datasets import Places365

    with _torchvision_root(info, root, "") as parent:
        data = Places365(parent, split=info.lists[split][0], small=True)
        files = [file for file, _ in data.imgs]
        order = sorted(data.class_to_idx, key=lambda name: data.class_to_idx[name])
        folder = Path(data.images_dir)
    paths = _relative(files, folder)
    # The archive unpacks to data_256; torchvision then calls it data_256_standard.
    here = folder.name if (root / folder.name).is_dir() else folder.name.removesuffix("_standard")
    return read_listed(
        info.name,
        root,
        split,
        paths=[f"{here}/{path}" for path in paths],
        labels=data.targets,
        classes=[name[3:] for name in order],  # "/a/airfield" -> "airfield"
    )


def read_cars_devkit(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of Stanford Cars in the layout of its devkit, which torchvision reads."""
    from torchvision.datasets import StanfordCars

    with _torchvision_root(info, root, "stanford_cars") as parent:
        data = StanfordCars(parent, split=split)
        files = [file for file, _ in data._samples]
        labels = [int(label) for _, label in data._samples]
    paths = _relative(files, parent / "stanford_cars")
    return read_listed(info.name, root, split, paths=paths, labels=labels, classes=data.classes)


def read_cifar100(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A split of CIFAR-100; its files are pickles, which torchvision opens only if md5s match."""
    from torchvision.datasets import CIFAR100

    with _torchvision_root(info, root, "cifar-100-python") as parent:
        data = CIFAR100(parent, train=split == "train")
        [[member, md5]] = CIFAR100.train_list if split == "train" else CIFAR100.test_list
    pixels = data.data

    def open_image(row: int) -> Image.Image:
        return Image.fromarray(pixels[row])

    return SplitRows(
        classes=tuple(data.classes),
        paths=tuple(f"{member}/{row}" for row in range(len(pixels))),
        labels=np.array(data.targets, np.int64),
        checksums=(md5,),
        open_image=open_image,
    )


def read_stl10(info: DatasetInfo, root: Path, split: str) -> SplitRows:
    """A labelled split of STL-10; the 2.7 GB of unlabelled images need not be there."""
    from torchvision.datasets import STL10

    class Labelled(STL10):  # type: ignore[misc, unused-ignore]
        train_list = STL10.train_list[:2]

    files = Labelled.train_list if split == "train" else Labelled.test_list
    with _torchvision_root(info, root, "stl10_binary") as parent:
        data: Any = Labelled(parent, split=split)
        classes = tuple(data.classes)
    pixels = data.data

    def open_image(row: int) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(pixels[row].transpose(1, 2, 0)))

    return SplitRows(
        classes=classes,
        paths=tuple(f"{files[0][0]}/{row}" for row in range(len(pixels))),
        # Labels in the file are 1-10 and torchvision subtracts 1 in uint8: 255 was no label.
        labels=data.labels.astype(np.int64),
        checksums=tuple(md5 for _, md5 in files),
        open_image=open_image,
    )


@contextmanager
def _torchvision_root(info: DatasetInfo, root: Path, folder: str) -> Iterator[Path]:
    """The path that torchvision calls root, so that `<path>/<folder>` is our root.

    A folder of another name is lent the right one by a link in a temporary folder.
    """
    parts = Path(folder).parts
    root = root.absolute()
    try:
        if root.parts[len(root.parts) - len(parts) :] == parts:
            yield Path(*root.parts[: len(root.parts) - len(parts)])
            return
        with tempfile.TemporaryDirectory(prefix="epcache-") as lent:
            link = Path(lent, *parts)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root, target_is_directory=True)
            yield Path(lent)
    except EpcacheError:
        raise
    except Exception as exc:  # whatever a third party's reader raises on damaged files
        raise DataError(
            f"{info.name}: {root} cannot be read as this data set "
            f"({type(exc).__name__}: {' '.join(str(exc).split())}); {info.expected}"
        ) from exc


def _relative(files: Sequence[str], folder: Path) -> list[str]:
    """Posix paths of files relative to the folder that all of them lie in."""
    start = len(os.fspath(folder)) + 1
    return [file[start:].replace(os.sep, "/") for file in files]
