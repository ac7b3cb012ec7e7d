"""Manifests: what can be named, where it is looked for, how it is checked and hashed."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trees
from torchvision import datasets

from epcache.errors import ConfigError, DataError
from epcache.layouts.folders import SplitRows
from epcache.layouts.info import parse_info
from epcache.layouts.locate import find_root
from epcache.layouts.readers import read_layout
from epcache.manifest import (
    check_counts,
    dataset_info,
    list_datasets,
    load_manifest,
    read_manifest,
)

# Published sizes: train split, evaluation split, images of each, classes.
TABLE = {
    "imagenet1k": ("train", "val", 1_281_167, 50_000, 1000),
    "cifar100": ("train", "test", 50_000, 10_000, 100),
    "places365": ("train", "val", 1_803_460, 36_500, 365),
    "cub200": ("train", "test", 5_994, 5_794, 200),
    "fgvc_aircraft": ("trainval", "test", 6_667, 3_333, 100),
    "stanford_cars": ("train", "test", 8_144, 8_041, 196),
    "food101": ("train", "test", 75_750, 25_250, 101),
    "sun397": ("train", "test", 19_850, 19_850, 397),
    "dtd": ("trainval", "test", 3_760, 1_880, 47),
    "oxford_pets": ("trainval", "test", 3_680, 3_669, 37),
    "stl10": ("train", "test", 5_000, 8_000, 10),
    "digits": ("train", "test", 1_297, 500, 10),
}


@pytest.fixture(autouse=True)
def _no_shared_data(monkeypatch):
    monkeypatch.delenv("EPCACHE_DATA", raising=False)


@pytest.fixture
def birds(tmp_path) -> Path:
    """A small CUB tree below a folder of its own, and its parent."""
    trees.cub200(tmp_path / "birds" / "CUB_200_2011", trees.cub_rows()[:40])
    return tmp_path / "birds"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small folder of images."""
    trees.image_tree(tmp_path / "pets", {s: {"cat": 2, "dog": 2} for s in ("train", "val")})
    return tmp_path / "pets"


def digest(folder: Path) -> str:
    return load_manifest("imagefolder", data_dir=folder).digest


@pytest.mark.parametrize("name", TABLE)
def test_manifests_hold_the_published_numbers(name):
    """Every TOML parses and has the published splits, counts and classes."""
    info = dataset_info(name)
    train, evaluation, num_train, num_eval, num_classes = TABLE[name]
    assert (info.train_split, info.eval_split) == (train, evaluation)
    assert info.splits == {train: num_train, evaluation: num_eval}
    assert info.num_classes == num_classes
    assert info.title
    assert info.layout
    assert info.source
    assert info.licence
    assert info.obtain


def test_list_datasets_has_all_of_them():
    """The list is the table's data sets and imagefolder, sorted."""
    assert [info.name for info in list_datasets()] == sorted([*TABLE, "imagefolder"])
    assert dataset_info("imagefolder").num_classes is None


def test_downloads_carry_torchvisions_checksums():
    """Where torchvision knows url and md5, the manifest has the same."""
    known = {
        "cifar100": {datasets.CIFAR100.url: datasets.CIFAR100.tgz_md5},
        "stl10": {datasets.STL10.url: datasets.STL10.tgz_md5},
        "food101": {datasets.Food101._URL: datasets.Food101._MD5},
        "dtd": {datasets.DTD._URL: datasets.DTD._MD5},
        "oxford_pets": dict(datasets.OxfordIIITPet._RESOURCES),
        "sun397": {datasets.SUN397._DATASET_URL: datasets.SUN397._DATASET_MD5},
        "places365": {
            datasets.Places365._BASE_URL + file: md5
            for file, md5 in [
                datasets.Places365._DEVKIT_META["standard"],
                datasets.Places365._IMAGES_META["train-standard", True],
                datasets.Places365._IMAGES_META["val", True],
            ]
        },
    }
    for name, expected in known.items():
        got = {entry.url: entry.checksum for entry in dataset_info(name).downloads}
        assert got | expected == got


def test_what_has_no_checksum_has_no_download():
    """Sets without a public source say where to obtain the data instead."""
    without = {info.name for info in list_datasets() if not info.download}
    assert without == {"imagenet1k", "stanford_cars", "imagefolder", "digits"}


def test_an_unknown_name_gets_the_nearest_ones():
    """A slip of the pen is met with the likely name and all of them."""
    with pytest.raises(ConfigError, match=r"did you mean cub200\?.*stl10"):
        load_manifest("cub-200")
    with pytest.raises(ConfigError, match=r"'\.\./x' is not known: Known are"):
        load_manifest("../x")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title =", "titel =", ["'title' is missing"]),
        ("images = 5994", "", ["'splits.train.images' is missing"]),
        ("images = 5994", "images = '5994'", ["'splits.train.images'", "not of type int"]),
        ("images = 5994", "images = 0", ["'splits.train.images' is 0, not positive"]),
        ("images = 5994", "images = true", ["'splits.train.images'", "not of type int"]),
        ("num_classes =", "classes =", ["'num_classes' is missing"]),
        ("num_classes =", "extra = 1\nnum_classes =", ["'extra' is not a known key"]),
        ('eval_split = "test"', 'eval_split = "val"', ["'eval_split' is 'val'"]),
        ('md5 = "97', 'md5 = "X7', ["'downloads[0].md5'", "not a lower-case md5"]),
        ('md5 = "97', 'sha256 = "97', ["'downloads[0].sha256'", "not a lower-case sha256"]),
        ('md5 = "97', 'crc = "97', ["'downloads[0].sha256' is missing"]),
        ('members = ["CUB_200_2011"]', "members = []", ["'downloads[0].members' is empty"]),
        ('members = ["CUB_200_2011"]', 'members = ["../x"]', ["leaves the download folder"]),
        ('members = ["CUB_200_2011"]', "members = [1]", ["not a list of strings"]),
        ("[splits.train]", "[splits.train", ["is not TOML"]),
        ("[[downloads]]", "[downloads]", ["'downloads'", "not of type list"]),
    ],
)
def test_a_malformed_toml_names_file_and_key(old, new, words, tmp_path):
    """Whatever is wrong in a TOML, the message has its file name and the key."""
    text = (Path(__file__).parent.parent / "data_manifests" / "cub200.toml").read_text()
    assert old in text
    (tmp_path / "birds.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        parse_info(tmp_path / "birds.toml")
    for word in ["birds.toml", *words]:
        assert word in str(caught.value)


def test_importing_manifests_is_fast():
    """Neither torch nor scipy is imported before a data set is read."""
    code = "import sys, epcache.manifest as m; m.list_datasets(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "torchvision", "scipy", "sklearn", "timm"} & set(done.stdout.split())


@pytest.mark.parametrize("place", ["CUB_200_2011", ".", "CUB_200_2011/images"])
def test_one_folder_deeper_or_shallower_will_do(place, birds):
    """The data folder, its parent, or a folder inside it all lead to the same root."""
    root = find_root(dataset_info("cub200"), birds / place)
    assert root.resolve() == birds / "CUB_200_2011"


@pytest.mark.parametrize("name", ["cub200", "CUB_200_2011", "cub200/CUB_200_2011", "cub200/old"])
def test_data_are_found_below_the_shared_folder(name, tmp_path, monkeypatch):
    """Without data_dir, $EPCACHE_DATA/<name> counts, or the usual folder straight in it."""
    trees.cub200(tmp_path / name, trees.cub_rows()[:3])
    monkeypatch.setenv("EPCACHE_DATA", str(tmp_path))
    assert find_root(dataset_info("cub200"), None) == tmp_path / name


def test_data_dir_goes_before_the_shared_folder(birds, tmp_path, monkeypatch):
    """An explicit folder that is wrong is an error, never replaced by another one."""
    monkeypatch.setenv("EPCACHE_DATA", str(tmp_path))
    trees.cub200(tmp_path / "cub200", trees.cub_rows()[:3])
    assert find_root(dataset_info("cub200"), birds) == birds / "CUB_200_2011"
    with pytest.raises(DataError, match="no such folder"):
        find_root(dataset_info("cub200"), tmp_path / "typo")


def test_several_folders_that_would_do_are_ambiguous(tmp_path):
    """Two matching folders below are not chosen between."""
    for name in ("a", "b"):
        trees.image_tree(tmp_path / name, {"train": {"x": 1}, "val": {"x": 1}})
    with pytest.raises(ConfigError, match=r"several folders that would do \(a, b\)"):
        load_manifest("imagefolder", data_dir=tmp_path)


def test_a_missing_folder_says_where_layout_and_source(tmp_path):
    """The message has the place, the expected tree, and where the data come from."""
    with pytest.raises(DataError) as caught:
        load_manifest("cub200", data_dir=tmp_path / "nowhere")
    for word in [
        str(tmp_path / "nowhere"),
        "no such folder",
        "CUB_200_2011/images/<class>/<image>.jpg",
        "https://data.caltech.edu",
        "epcache datasets",
    ]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_incomplete_folder_says_what_it_lacks(birds):
    """Data that are partly there are told from data that are not."""
    (birds / "CUB_200_2011" / "images.txt").unlink()
    with pytest.raises(DataError, match=r"CUB_200_2011 lacks images\.txt"):
        load_manifest("cub200", data_dir=birds)


def test_a_file_is_no_data_folder(tmp_path):
    """A path to a file is refused as such."""
    trees.write(tmp_path / "x.tgz")
    with pytest.raises(DataError, match="not a folder"):
        load_manifest("cub200", data_dir=tmp_path / "x.tgz")


@pytest.mark.parametrize(("name", "word"), [("imagefolder", "--data-dir"), ("dtd", "EPCACHE_DATA")])
def test_without_any_folder_the_options_are_named(name, word):
    """No data_dir and no EPCACHE_DATA is a configuration error."""
    with pytest.raises(ConfigError, match=word):
        load_manifest(name)


def test_imagefolder_ignores_the_shared_folder(folder, monkeypatch):
    """A folder of images is always named."""
    monkeypatch.setenv("EPCACHE_DATA", str(folder))
    with pytest.raises(ConfigError, match="needs the folder"):
        load_manifest("imagefolder")


def test_splits_come_in_manifest_order(folder):
    """Only the splits asked for are there, in the data set's order, whatever the request's."""
    both = load_manifest("imagefolder", data_dir=folder, splits=["val", "train", "val"])
    assert list(both.splits) == ["train", "val"]
    one = load_manifest("imagefolder", data_dir=folder, splits=["val"])
    assert list(one.splits) == ["val"]
    assert (one.train_split, one.eval_split) == ("train", "val")


@pytest.mark.parametrize("splits", [["test", "dev"], []])
def test_an_unknown_split_is_refused(splits, birds):
    """A split that the data set does not have, or none at all, lists those it has."""
    with pytest.raises(ConfigError, match="choose from train, test"):
        load_manifest("cub200", data_dir=birds, splits=splits)


def test_counts_are_checked(birds):
    """A split with other than the expected number of images has both numbers in the message."""
    with pytest.raises(DataError, match=r"split train has \d+ images, expected 5,994|classes"):
        load_manifest("cub200", data_dir=birds)
    info = trees.small("cub200", num_classes=1, train=1, test=1)
    rows = read_layout(info, birds / "CUB_200_2011")
    info = replace(info, splits={name: len(split.paths) for name, split in rows.items()})
    check_counts(info, rows)
    with pytest.raises(DataError, match="expected 99"):
        check_counts(replace(info, splits={**info.splits, "test": 99}), rows)


def rows(paths=("a", "b"), labels=(0, 1), classes=("x", "y")) -> SplitRows:
    sizes = np.ones(len(paths), np.int64)
    return SplitRows(classes=classes, paths=paths, labels=np.array(labels, np.int64), sizes=sizes)


def test_number_of_classes_is_checked():
    """Classes more or fewer than expected are an error with both numbers."""
    info = trees.small("cub200", num_classes=3, train=2)
    with pytest.raises(DataError, match="has 2 classes, expected 3"):
        check_counts(info, {"train": rows()})


@pytest.mark.parametrize("label", [-1, 2])
def test_label_range_is_checked(label):
    """A label that is no class is named with its image."""
    info = trees.small("cub200", num_classes=2, train=2)
    with pytest.raises(DataError, match=rf"b has label {label}, expected 0\.\.1"):
        check_counts(info, {"train": rows(labels=(0, label))})


def two_splits(monkeypatch, **splits: SplitRows):
    """A manifest of made-up rows."""
    monkeypatch.setattr("epcache.manifest.read_layout", lambda *_: splits)
    counts = {name: len(split.paths) for name, split in splits.items()}
    return read_manifest(trees.small("cub200", num_classes=2, **counts), None)


@pytest.mark.parametrize("paths", [("c", "a"), ("c", "c")])
def test_a_path_that_comes_twice_is_refused(paths, monkeypatch):
    """A leaky split, or a list with a line twice, is an error that names the image."""
    with pytest.raises(DataError, match=rf"{paths[1]} is in (train and test|test and test)"):
        two_splits(monkeypatch, train=rows(), test=rows(paths))


def test_splits_must_have_the_same_classes(monkeypatch):
    """Classes of one split only are named."""
    with pytest.raises(DataError, match="only in train: y; only in test: z"):
        two_splits(monkeypatch, train=rows(), test=rows(("c", "d"), classes=("x", "z")))


@pytest.mark.skipif(sys.platform == "darwin", reason="the file system refuses such names")
def test_a_file_name_that_is_not_utf8_is_refused(folder):
    """What cannot be written to samples.csv is refused at once."""
    (folder / "train" / "cat" / os.fsdecode(b"\xff.jpg")).write_bytes(trees.jpeg())
    with pytest.raises(DataError, match="not UTF-8"):
        digest(folder)


def test_digest_is_the_promised_json(folder):
    """sha256 over canonical JSON of name, classes and every (path, label, size)."""
    manifest = load_manifest("imagefolder", data_dir=folder)
    size = len(trees.jpeg())
    value = {
        "name": "imagefolder",
        "classes": ["cat", "dog"],
        "splits": {
            split: {
                "checksums": [],
                "rows": [
                    [f"{split}/{name}/{name}_{i}.jpg", label, size]
                    for label, name in enumerate(["cat", "dog"])
                    for i in range(2)
                ],
            }
            for split in ("train", "val")
        },
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    assert manifest.digest == hashlib.sha256(text.encode()).hexdigest()


def test_digest_does_not_depend_on_its_pieces(folder, monkeypatch):
    """Hashing piece by piece gives the hash of the whole."""
    whole = digest(folder)
    monkeypatch.setattr("epcache.manifest._ROWS_AT_ONCE", 3)
    assert digest(folder) == whole


def test_digest_does_not_depend_on_place_or_order(folder, tmp_path, monkeypatch):
    """The same files elsewhere, made in another order and listed backwards, have one digest."""
    elsewhere = tmp_path / "far" / "away"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in reversed(files):
        trees.write(elsewhere / path.relative_to(folder), path.read_bytes())
    scandir = os.scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            return None

    before = digest(folder)
    monkeypatch.setattr("os.scandir", Backwards)
    assert digest(elsewhere) == before


@pytest.mark.parametrize("change", ["rename", "relabel", "add", "remove", "resize", "class"])
def test_digest_changes_with_the_data(change, folder):
    """A renamed, relabelled, added, removed or resized file, or a renamed class, is another set."""
    before = digest(folder)
    image = folder / "train" / "cat" / "cat_0.jpg"
    if change == "rename":
        image.rename(image.with_name("cat_00.jpg"))
    elif change == "relabel":
        image.rename(folder / "train" / "dog" / "cat_0.jpg")
    elif change == "add":
        trees.write(image.with_name("new.jpg"))
    elif change == "remove":
        image.unlink()
    elif change == "resize":
        image.write_bytes(image.read_bytes() + b"\0")
    else:
        for split in ("train", "val"):
            (folder / split / "cat").rename(folder / split / "lion")
    assert digest(folder) != before


def test_digest_of_a_packed_set_covers_its_checksums(monkeypatch):
    """Packed rows have no sizes, so the checksum of their file stands in."""
    one, two = (
        replace(rows(), sizes=None, checksums=(text,), open_image=lambda row: None)
        for text in ("1", "2")
    )
    assert two_splits(monkeypatch, train=one).digest != two_splits(monkeypatch, train=two).digest


def test_images_open_undecoded_and_hold_no_file(folder):
    """An opened image is as on disk, and none of many keeps a file open."""
    trees.write(folder / "train" / "cat" / "broken.png", "not an image")
    split = load_manifest("imagefolder", data_dir=folder).splits["train"]
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir())) if fds.exists() else 0
    images = [split.open_image(split.paths.index("train/cat/cat_0.jpg")) for _ in range(20)]
    assert images[0].format == "JPEG"
    assert (len(list(fds.iterdir())) if fds.exists() else 0) == before
    with pytest.raises(OSError, match="cannot identify"):
        split.open_image(split.paths.index("train/cat/broken.png"))
    del images
    gc.collect()


def test_what_cannot_be_read_is_one_line(folder, monkeypatch):
    """A folder without permission is a data error that names it."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match=r"imagefolder: .*Permission denied.*pets"):
        load_manifest("imagefolder", data_dir=folder)
