"""Small trees of tiny images with the file layouts of the real data sets.

Every builder writes into an empty folder and returns nothing; `small` makes the `DatasetInfo` that
goes with a tree, by putting other counts into the real manifest.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from epcache.layouts.info import DatasetInfo, dataset_info

CUB_CSV = Path(__file__).parent / "data" / "cub200.csv.gz"


def small(name: str, *, num_classes: int | None = None, **counts: int) -> DatasetInfo:
    """The real manifest of a data set with other counts (split=images)."""
    info = dataset_info(name)
    return replace(info, num_classes=num_classes or info.num_classes, splits=counts)


@cache
def jpeg(width: int = 8, height: int = 6, grey: int = 90) -> bytes:
    """A tiny JPEG file."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (grey, 40, 200)).save(buffer, "JPEG")
    return buffer.getvalue()


def write(path: Path, content: str | bytes = b"") -> None:
    """Write a file with the folders above it; an image where no content is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content or jpeg())


def write_lines(path: Path, lines: Iterable[str]) -> None:
    write(path, "".join(f"{line}\n" for line in lines))


def image_tree(root: Path, splits: Mapping[str, Mapping[str, int]], suffix: str = ".jpg") -> None:
    """`<split>/<class>/<class>_<i><suffix>`; an empty class is an empty folder."""
    for split, classes in splits.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                write(root / split / name / f"{name}_{i}{suffix}")


def cub_rows() -> list[dict[str, str]]:
    """All 11,788 images of CUB-200-2011 by path: split, label from 0, size, box."""
    with gzip.open(CUB_CSV, "rt", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: row["path"])


def cub200(root: Path, rows: Sequence[Mapping[str, str]], *, sizes: bool = False) -> None:
    """CUB_200_2011 with its five text files; `sizes` gives images the size of the real ones."""
    classes = {int(row["label"]): row["path"].split("/")[0] for row in rows}
    write_lines(root / "classes.txt", (f"{k + 1} {classes[k]}" for k in sorted(classes)))
    for name, line in {
        "images": lambda row: row["path"],
        "image_class_labels": lambda row: int(row["label"]) + 1,
        "train_test_split": lambda row: int(row["split"] == "train"),
        "bounding_boxes": lambda row: "{}.0 {}.0 {}.0 {}.0".format(
            row["x0"],
            row["y0"],
            int(row["x1"]) - int(row["x0"]),
            int(row["y1"]) - int(row["y0"]),
        ),
    }.items():
        write_lines(root / f"{name}.txt", (f"{i} {line(row)}" for i, row in enumerate(rows, 1)))
    for folder in {row["path"].split("/")[0] for row in rows}:
        (root / "images" / folder).mkdir(parents=True)
    for row in rows:
        size = (int(row["width"]), int(row["height"])) if sizes else (8, 6)
        (root / "images" / row["path"]).write_bytes(jpeg(*size))


def food101(root: Path) -> None:
    """food-101 of 2 classes, 3 train and 2 test images."""
    lists = {
        "train": {"waffles": ["waffles/7", "waffles/3"], "apple_pie": ["apple_pie/1"]},
        "test": {"waffles": ["waffles/9"], "apple_pie": ["apple_pie/4"]},
    }
    for split, metadata in lists.items():
        write(root / "meta" / f"{split}.json", json.dumps(metadata))
        for image in itertools.chain(*metadata.values()):
            write(root / "images" / f"{image}.jpg")


def dtd(root: Path) -> None:
    """A dtd folder of 2 classes, 2 train, 2 val and 2 test images."""
    for i, split in enumerate(["train", "val", "test"]):
        names = [f"{name}/{name}_{i:04d}.jpg" for name in ("woven", "banded")]
        write_lines(root / "labels" / f"{split}1.txt", names)
        for name in names:
            write(root / "images" / name)


def fgvc_aircraft(root: Path) -> None:
    """fgvc-aircraft-2013b of 2 variants with spaces, 3 trainval and 2 test images."""
    write_lines(root / "data" / "variants.txt", ["Boeing 737-700", "A310"])
    lists = {
        "trainval": ["0001 A310", "0002 Boeing 737-700", "0003 A310"],
        "test": ["0004 Boeing 737-700", "0005 A310"],
    }
    for split, lines in lists.items():
        write_lines(root / "data" / f"images_variant_{split}.txt", lines)
        for line in lines:
            write(root / "data" / "images" / f"{line[:4]}.jpg")


def oxford_pets(root: Path) -> None:
    """oxford-iiit-pet of 2 breeds, 3 trainval and 2 test images."""
    lists = {
        "trainval": ["Abyssinian_1 1 1 1", "american_bulldog_2 2 2 1", "Abyssinian_3 1 1 1"],
        "test": ["Abyssinian_4 1 1 1", "american_bulldog_5 2 2 1"],
    }
    for split, lines in lists.items():
        write_lines(root / "annotations" / f"{split}.txt", lines)
        for line in lines:
            write(root / "images" / f"{line.split()[0]}.jpg")


def cars_devkit(root: Path) -> None:
    """Stanford Cars as torchvision has it: 2 classes, 3 train and 2 test images."""
    names = np.array(["Acura RL Sedan 2012", "smart fortwo Convertible 2012"], object)
    (root / "devkit").mkdir(parents=True)
    scipy.io.savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    annos = {
        ("devkit/cars_train_annos.mat", "cars_train"): [2, 1, 2],
        ("cars_test_annos_withlabels.mat", "cars_test"): [1, 2],
    }
    for (mat, folder), classes in annos.items():
        table = np.array(
            [(f"{i:05d}.jpg", label, 1) for i, label in enumerate(classes, 1)],
            [("fname", object), ("class", object), ("bbox_x1", object)],
        )
        scipy.io.savemat(root / mat, {"annotations": table})
        for i in range(len(classes)):
            write(root / folder / f"{i + 1:05d}.jpg")


def cars_annos(root: Path) -> None:
    """Stanford Cars as one table over car_ims: 2 classes, 3 train and 2 test images."""
    rows = [(2, 0), (1, 0), (2, 0), (1, 1), (2, 1)]
    table = np.array(
        [(f"car_ims/{i:06d}.jpg", label, test) for i, (label, test) in enumerate(rows, 1)],
        [("relative_im_path", object), ("class", object), ("test", object)],
    )
    names = np.array(["Acura RL Sedan 2012", "smart fortwo Convertible 2012"], object)
    root.mkdir(parents=True)
    scipy.io.savemat(root / "cars_annos.mat", {"annotations": table, "class_names": names})
    for row in table:
        write(root / row["relative_im_path"])


def sun397(root: Path, lists: str = ".") -> None:
    """SUN397 of 2 classes, one nested, 3 train and 2 test images and one in no list."""
    write_lines(root / "ClassName.txt", ["/a/abbey", "/a/apartment_building/outdoor"])
    abbey, outdoor = "/a/abbey/sun_a{}.jpg", "/a/apartment_building/outdoor/sun_b{}.jpg"
    splits = {
        "Training_01": [abbey.format(1), outdoor.format(1), abbey.format(2)],
        "Testing_01": [outdoor.format(3), abbey.format(3)],
    }
    for split, lines in splits.items():
        write_lines(root / lists / f"{split}.txt", lines)
        for line in lines:
            write(root / line[1:])
    write(root / "a" / "abbey" / "sun_unlisted.jpg")


def places365(root: Path, folder: str = "data_256_standard") -> dict[str, object]:
    """Places365 of 2 classes, 3 train and 2 val images.

    Returns:
        Attributes of torchvision's reader that let it accept these lists.
    """
    lists = {
        "categories_places365.txt": ["/f/field/wild 1", "/f/field_road 0"],
        "places365_train_standard.txt": [
            "/f/field_road/1.jpg 0",
            "/f/field/wild/2.jpg 1",
            "/f/field_road/3.jpg 0",
        ],
        "places365_val.txt": ["Places365_val_1.jpg 1", "Places365_val_2.jpg 0"],
    }
    for name, lines in lists.items():
        write_lines(root / name, lines)
    for line in lists["places365_train_standard.txt"]:
        write(root / folder / line.split()[0][1:])
    for line in lists["places365_val.txt"]:
        write(root / "val_256" / line.split()[0])
    md5 = {name: hashlib.md5((root / name).read_bytes()).hexdigest() for name in lists}
    categories, train, val = lists
    return {
        "_CATEGORIES_META": (categories, md5[categories]),
        "_FILE_LIST_META": {"train-standard": (train, md5[train]), "val": (val, md5[val])},
    }


def cifar100(root: Path) -> dict[str, object]:
    """CIFAR-100 of 2 classes, 3 train and 2 test images; see `places365`."""
    generator = np.random.default_rng(0)
    parts = {"train": [1, 0, 1], "test": [0, 1]}
    contents = {
        name: {
            "data": generator.integers(0, 256, (len(labels), 3072), np.uint8),
            "fine_labels": labels,
        }
        for name, labels in parts.items()
    }
    contents["meta"] = {"fine_label_names": ["apple", "whale"]}
    md5 = {}
    for name, content in contents.items():
        write(root / name, pickle.dumps(content))
        md5[name] = hashlib.md5((root / name).read_bytes()).hexdigest()
    return {
        "train_list": [["train", md5["train"]]],
        "test_list": [["test", md5["test"]]],
        "meta": {"filename": "meta", "key": "fine_label_names", "md5": md5["meta"]},
    }


def stl10(root: Path) -> dict[str, object]:
    """STL-10 of 2 classes, 3 train and 2 test images, without the unlabelled; see `places365`."""
    generator = np.random.default_rng(0)
    files = {}
    for split, labels in {"train": [2, 1, 2], "test": [1, 2]}.items():
        files[f"{split}_X.bin"] = generator.integers(
            0, 256, (len(labels), 3, 96, 96), np.uint8
        ).tobytes()
        files[f"{split}_y.bin"] = bytes(labels)
    write_lines(root / "class_names.txt", ["airplane", "truck"])
    for name, content in files.items():
        write(root / name, content)
    entries = [[name, hashlib.md5(content).hexdigest()] for name, content in files.items()]
    return {
        "train_list": [*entries[:2], ["unlabeled_X.bin", "0" * 32]],
        "test_list": entries[2:],
    }


def flat_val(root: Path, wnids: Sequence[str], *, solution: bool = False) -> None:
    """The flat validation folder of ImageNet, image i of class wnids[i]; Kaggle's csv beside it."""
    stems = [f"ILSVRC2012_val_{i:08d}" for i in range(1, len(wnids) + 1)]
    for stem in stems:
        write(root / "val" / f"{stem}.JPEG")
    if solution:
        lines = [f"{stem},{wnid} 1 2 3 4 " for stem, wnid in zip(stems, wnids, strict=True)]
        write_lines(root / "LOC_val_solution.csv", ["ImageId,PredictionString", *reversed(lines)])


def devkit(folder: Path, wnids: Sequence[str], wnid_of: Mapping[int, str]) -> None:
    """The devkit's ground truth and meta.mat, with one inner node of the hierarchy."""
    id_of = {wnid: number for number, wnid in wnid_of.items()}
    write_lines(
        folder / "ILSVRC2012_validation_ground_truth.txt", (str(id_of[wnid]) for wnid in wnids)
    )
    rows = [(number, wnid, "words", "gloss", 0) for number, wnid in wnid_of.items()]
    rows.append((1001, "n99999999", "words", "gloss", 3))
    kinds = [(k, object) for k in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    scipy.io.savemat(folder / "meta.mat", {"synsets": np.array(rows, kinds)})
