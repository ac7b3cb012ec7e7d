"""Every data set's layout on disk becomes the right rows, or an error that says what is wrong."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import datasets

from epcache.errors import ConfigError, DataError
from epcache.layouts.folders import IMAGE_SUFFIXES
from epcache.layouts.info import list_datasets
from epcache.layouts.readers import READERS, eval_split, read_layout, split_names
from epcache.manifest import read_manifest

FILE_SETS = {
    # name: torchvision's folder, its class, its splits by ours
    "food101": ("food-101", datasets.Food101, {"train": ["train"], "test": ["test"]}),
    "dtd": ("dtd/dtd", datasets.DTD, {"trainval": ["train", "val"], "test": ["test"]}),
    "fgvc_aircraft": (
        "fgvc-aircraft-2013b",
        datasets.FGVCAircraft,
        {"trainval": ["trainval"], "test": ["test"]},
    ),
    "oxford_pets": (
        "oxford-iiit-pet",
        datasets.OxfordIIITPet,
        {"trainval": ["trainval"], "test": ["test"]},
    ),
}
WNIDS = ["n01440764", "n02119789", "n03000684"]


def counts(splits: dict[str, list[str]], num_train: int = 3) -> dict[str, int]:
    return dict(zip(splits, (num_train, 2), strict=True))


def refuse(info, root: Path, *words: str, splits=None) -> str:
    """Reading must fail with one line that has all the words."""
    with pytest.raises(DataError) as caught:
        read_manifest(info, root, splits)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_every_manifest_has_a_reader():
    """The reader that a TOML names exists, and no reader is without a TOML."""
    assert {info.reader for info in list_datasets()} == set(READERS)


@pytest.mark.parametrize("name", FILE_SETS)
def test_file_sets_are_what_torchvision_reads(name, tmp_path):
    """Paths, labels and classes are torchvision's, list after list."""
    folder, reader, splits = FILE_SETS[name]
    getattr(trees, name)(tmp_path / folder)
    info = trees.small(name, num_classes=2, **counts(splits, 4 if name == "dtd" else 3))
    manifest = read_manifest(info, tmp_path / folder)
    for split, parts in splits.items():
        theirs = [reader(tmp_path, split=part) for part in parts]
        attribute = "_images" if name == "oxford_pets" else "_image_files"
        files = [file for their in theirs for file in getattr(their, attribute)]
        got = manifest.splits[split]
        assert [tmp_path / folder / path for path in got.paths] == [Path(file) for file in files]
        assert got.labels.tolist() == [label for their in theirs for label in their._labels]
        assert manifest.classes == tuple(theirs[0].classes)
        assert got.open_image(0).size == (8, 6)


@pytest.mark.parametrize("name", FILE_SETS)
def test_a_renamed_folder_reads_the_same(name, tmp_path):
    """The folder's own name, which torchvision insists on, does not matter."""
    folder, _, splits = FILE_SETS[name]
    info = trees.small(name, num_classes=2, **counts(splits, 4 if name == "dtd" else 3))
    getattr(trees, name)(tmp_path / folder)
    getattr(trees, name)(tmp_path / "elsewhere")
    usual, renamed = (read_manifest(info, tmp_path / f) for f in (folder, "elsewhere"))
    assert usual.digest == renamed.digest
    assert renamed.splits["test"].open_image(1).size == (8, 6)


@pytest.mark.parametrize("name", FILE_SETS)
def test_a_listed_file_that_is_missing_is_named(name, tmp_path):
    """A listed image that is not on disk is an error with both counts and the first missing."""
    folder, _, splits = FILE_SETS[name]
    getattr(trees, name)(tmp_path / folder)
    info = trees.small(name, num_classes=2, **counts(splits))
    paths = read_layout(info, tmp_path / folder, ["test"])["test"].paths
    for path in paths:
        (tmp_path / folder / path).unlink()
    refuse(
        info, tmp_path / folder, "test has 0 of 2", f"first missing is {paths[0]}", splits=["test"]
    )


def test_torchvision_trouble_is_a_data_error(tmp_path):
    """What torchvision's reader raises becomes one line with the expected layout."""
    trees.fgvc_aircraft(tmp_path)
    trees.write_lines(tmp_path / "data" / "images_variant_test.txt", ["0004 Concorde"])
    refuse(trees.small("fgvc_aircraft", trainval=3, test=2), tmp_path, "Concorde", "expected:")


@pytest.mark.parametrize("folder", ["data_256_standard", "data_256"])
def test_places365_with_either_folder_name(folder, tmp_path, monkeypatch):
    """Small images read from the folder as unpacked or as torchvision renames it."""
    for key, value in trees.places365(tmp_path, folder).items():
        monkeypatch.setattr(datasets.Places365, key, value)
    manifest = read_manifest(trees.small("places365", num_classes=2, train=3, val=2), tmp_path)
    assert manifest.classes == ("field_road", "field/wild")  # by number, not by name
    assert manifest.splits["train"].paths[1] == f"{folder}/f/field/wild/2.jpg"
    assert manifest.splits["train"].labels.tolist() == [0, 1, 0]
    assert manifest.splits["val"].paths == (
        "val_256/Places365_val_1.jpg",
        "val_256/Places365_val_2.jpg",
    )


def test_places365_lists_must_be_the_official_ones(tmp_path):
    """A list with another md5 is a DataError that names it."""
    trees.places365(tmp_path)
    refuse(trees.small("places365", train=3, val=2), tmp_path, "categories_places365.txt")


@pytest.mark.parametrize("layout", ["cars_devkit", "cars_annos"])
def test_stanford_cars_from_its_tables(layout, tmp_path):
    """Both official layouts give labels from 0 and the official class names."""
    getattr(trees, layout)(tmp_path / "cars")
    info = trees.small("stanford_cars", num_classes=2, train=3, test=2)
    manifest = read_manifest(info, tmp_path / "cars")
    assert manifest.classes == ("Acura RL Sedan 2012", "smart fortwo Convertible 2012")
    assert manifest.splits["train"].labels.tolist() == [1, 0, 1]
    assert manifest.splits["test"].labels.tolist() == [0, 1]
    assert manifest.splits["test"].open_image(1).size == (8, 6)


def test_stanford_cars_as_class_folders(tmp_path):
    """The tree that copies of the data have reads as folders, the classes sorted."""
    trees.image_tree(tmp_path, {"train": {"b": 2, "a": 1}, "test": {"a": 1, "b": 1}})
    info = trees.small("stanford_cars", num_classes=2, train=3, test=2)
    assert read_manifest(info, tmp_path).splits["train"].labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("damage", ["devkit/cars_train_annos.mat", "cars_annos.mat"])
def test_stanford_cars_with_a_damaged_table(damage, tmp_path):
    """A table that is no table is a DataError with the expected layouts."""
    trees.write(tmp_path / damage, "no table")
    refuse(trees.small("stanford_cars", train=3, test=2), tmp_path, "expected:")


@pytest.mark.parametrize(("name", "size"), [("cifar100", (32, 32)), ("stl10", (96, 96))])
def test_packed_sets(name, size, tmp_path, monkeypatch):
    """Rows of packed files are <member>/<index>, labels from 0, pixels torchvision's."""
    reader = {"cifar100": datasets.CIFAR100, "stl10": datasets.STL10}[name]
    folder = {"cifar100": "cifar-100-python", "stl10": "stl10_binary"}[name]
    member = {"cifar100": "test", "stl10": "test_X.bin"}[name]
    for key, value in getattr(trees, name)(tmp_path / folder).items():
        monkeypatch.setattr(reader, key, value)
    manifest = read_manifest(trees.small(name, num_classes=2, train=3, test=2), tmp_path / folder)
    assert manifest.splits["train"].labels.tolist() == [1, 0, 1]
    assert manifest.splits["test"].labels.tolist() == [0, 1]
    assert manifest.splits["test"].paths == (f"{member}/0", f"{member}/1")
    image = manifest.splits["train"].open_image(2)
    assert (image.mode, image.size) == ("RGB", size)
    if name == "cifar100":
        theirs = reader(tmp_path, train=True)[2][0]
    else:  # torchvision wants the unlabelled images too
        monkeypatch.setattr(reader, "_check_integrity", lambda self: True)
        theirs = reader(tmp_path, split="train")[2][0]
    np.testing.assert_array_equal(np.asarray(image), np.asarray(theirs))


@pytest.mark.parametrize("name", ["cifar100", "stl10"])
def test_a_damaged_packed_set_is_refused(name, tmp_path):
    """Packed files whose md5 is not the official one are never opened."""
    getattr(trees, name)(tmp_path)
    refuse(trees.small(name, train=3, test=2), tmp_path, "corrupted", "--download")


@pytest.mark.parametrize("lists", [".", "Partitions", ".."])
def test_sun397_wherever_its_lists_lie(lists, tmp_path):
    """Only listed images are rows, classes come from ClassName.txt, nested ones too."""
    trees.sun397(tmp_path / "SUN397", lists)
    manifest = read_manifest(
        trees.small("sun397", num_classes=2, train=3, test=2), tmp_path / "SUN397"
    )
    assert manifest.classes == ("abbey", "apartment_building/outdoor")
    assert manifest.splits["train"].labels.tolist() == [0, 1, 0]
    assert manifest.splits["test"].paths[0] == "a/apartment_building/outdoor/sun_b3.jpg"


def test_sun397_with_an_unknown_class(tmp_path):
    """A listed class that ClassName.txt does not have is named."""
    trees.sun397(tmp_path)
    trees.write_lines(tmp_path / "ClassName.txt", ["/a/abbey"])
    refuse(trees.small("sun397", train=3, test=2), tmp_path, "apartment_building/outdoor")


def test_cub200_labels_boxes_and_order(tmp_path):
    """Labels start at 0, boxes are x0 y0 x1 y1, rows are in the order of image ids."""
    rows = [row for row in trees.cub_rows() if int(row["label"]) < 2]
    trees.cub200(tmp_path, rows, sizes=True)
    train, test = (sum(row["split"] == split for row in rows) for split in ("train", "test"))
    info = trees.small("cub200", num_classes=2, train=train, test=test)
    split = read_manifest(info, tmp_path).splits["test"]
    expected = [row for row in rows if row["split"] == "test"]
    assert split.paths == tuple(f"images/{row['path']}" for row in expected)
    assert split.labels.tolist() == [int(row["label"]) for row in expected]
    boxes = [[float(row[key]) for key in ("x0", "y0", "x1", "y1")] for row in expected]
    np.testing.assert_array_equal(split.boxes, boxes)
    assert split.open_image(4).size == (int(expected[4]["width"]), int(expected[4]["height"]))


def test_cub200_at_full_size(tmp_path):
    """All 11,788 names give 5,994 and 5,794 rows of 200 classes in well under a second each."""
    rows = trees.cub_rows()
    trees.cub200(tmp_path, rows)
    began = time.perf_counter()
    manifest = read_manifest(trees.dataset_info("cub200"), tmp_path)
    assert time.perf_counter() - began < 5
    assert [len(split.paths) for split in manifest.splits.values()] == [5994, 5794]
    assert manifest.classes[0] == "001.Black_footed_Albatross"
    assert len(manifest.classes) == 200
    for split in manifest.splits.values():
        assert set(split.labels.tolist()) == set(range(200))
        expected = {r["path"]: int(r["label"]) for r in rows if r["split"] == split.name}
        got = dict(zip(split.paths, split.labels.tolist(), strict=True))
        assert got == {f"images/{path}": label for path, label in expected.items()}
        assert split.boxes.shape == (len(split.paths), 4)


@pytest.mark.parametrize(
    "name", ["images", "image_class_labels", "train_test_split", "bounding_boxes", "classes"]
)
def test_cub200_with_a_short_text_file(name, tmp_path):
    """Text files that do not agree are an error, whichever is short."""
    rows = trees.cub_rows()[:20]
    trees.cub200(tmp_path, rows)
    lines = (tmp_path / f"{name}.txt").read_text().splitlines()
    trees.write_lines(tmp_path / f"{name}.txt", lines[:-1])
    num_train = sum(row["split"] == "train" for row in rows)
    info = trees.small("cub200", num_classes=1, train=num_train, test=20 - num_train)
    refuse(info, tmp_path, "cub200")


def imagenet(**counts: int):
    return trees.small("imagenet1k", num_classes=3, **(counts or {"train": 6, "val": 3}))


def test_imagenet_labels_are_places_in_sorted_wnid_order(tmp_path):
    """The class list is the sorted WordNet ids."""
    trees.image_tree(
        tmp_path,
        {"train": dict.fromkeys(WNIDS[::-1], 2), "val": dict.fromkeys(WNIDS, 1)},
        ".JPEG",
    )
    manifest = read_manifest(imagenet(), tmp_path)
    assert manifest.classes == tuple(WNIDS)
    assert manifest.splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_imagenet_with_numbered_folders_is_refused(tmp_path):
    """Numbers cannot be mapped to WordNet ids silently: the message says what to do."""
    trees.image_tree(tmp_path, {"train": {"1": 2, "2": 2, "10": 2}, "val": {"1": 1}})
    refuse(imagenet(), tmp_path, "numbers (1..10)", "--dataset imagefolder")


def test_imagenet_with_an_odd_folder_is_refused(tmp_path):
    """A folder that is no WordNet id is named."""
    trees.image_tree(tmp_path, {"train": dict.fromkeys([*WNIDS, "extra"], 2)})
    refuse(imagenet(), tmp_path, "extra is not a WordNet id")


@pytest.mark.parametrize("place", [".", "val", ".."])
def test_imagenet_flat_val_with_kaggles_csv(place, tmp_path):
    """LOC_val_solution.csv near the flat folder labels it, in any order of its lines."""
    root = tmp_path / "imagenet"
    wnids = [WNIDS[2], WNIDS[0], WNIDS[1]]
    trees.flat_val(root, wnids, solution=True)
    (root / "LOC_val_solution.csv").rename(root / place / "LOC_val_solution.csv")
    split = read_manifest(imagenet(), root, ["val"]).splits["val"]
    assert split.paths[0] == "val/ILSVRC2012_val_00000001.JPEG"
    assert split.labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize("place", ["ILSVRC2012_devkit_t12/data", "data", ".", "val"])
def test_imagenet_flat_val_with_the_devkit(place, tmp_path):
    """The devkit's numbers go through its meta.mat: their order is not the sorted one."""
    wnids = [WNIDS[2], WNIDS[0], WNIDS[1]]
    trees.flat_val(tmp_path, wnids)
    trees.devkit(tmp_path / place, wnids, {1: WNIDS[1], 2: WNIDS[0], 3: WNIDS[2]})
    split = read_manifest(imagenet(), tmp_path, ["val"]).splits["val"]
    assert split.labels.tolist() == [2, 0, 1]


def test_imagenet_flat_val_with_train_folders(tmp_path):
    """A labelled flat val folder shares the classes of train."""
    trees.image_tree(tmp_path, {"train": dict.fromkeys(WNIDS, 2)})
    trees.flat_val(tmp_path, WNIDS, solution=True)
    assert read_manifest(imagenet(), tmp_path).splits["val"].labels.tolist() == [0, 1, 2]


def test_imagenet_flat_val_alone_is_refused(tmp_path):
    """Without labels the error says how to come by them."""
    trees.flat_val(tmp_path, WNIDS)
    refuse(imagenet(), tmp_path, "val/<wnid>/", "LOC_val_solution.csv", "devkit", splits=["val"])


def test_imagenet_ground_truth_without_its_mapping_is_refused(tmp_path):
    """The devkit's numbers alone mean nothing."""
    trees.flat_val(tmp_path, WNIDS)
    trees.devkit(tmp_path, WNIDS, dict(enumerate(WNIDS, 1)))
    (tmp_path / "meta.mat").unlink()
    refuse(imagenet(), tmp_path, "meta.mat", splits=["val"])


def test_imagenet_first_missing_validation_image_is_named(tmp_path):
    """The validation images are numbered, so the first missing one is known."""
    trees.flat_val(tmp_path, WNIDS, solution=True)
    (tmp_path / "val" / "ILSVRC2012_val_00000002.JPEG").unlink()
    (tmp_path / "LOC_val_solution.csv").rename(tmp_path / "val" / "LOC_val_solution.csv")
    message = refuse(imagenet(), tmp_path, "has 2 images, expected 3", splits=["val"])
    assert "first missing is ILSVRC2012_val_00000002" in message


def folder_info():
    return trees.dataset_info("imagefolder")


def test_imagefolder_follows_image_folder(tmp_path):
    """Nested, hidden, foreign and broken files are treated as torchvision's ImageFolder does."""
    trees.image_tree(tmp_path, {"train": {"a": 2, "b": 1}, "val": {"a": 1, "b": 1}})
    for name in ["deep/er/x.JPG", "._x.jpg", ".DS_Store", "Thumbs.db", "notes.txt", "y.webp"]:
        trees.write(tmp_path / "train" / "a" / name, "not an image")
    theirs = datasets.ImageFolder(tmp_path / "train")
    split = read_manifest(folder_info(), tmp_path).splits["train"]
    got = sorted(zip(split.paths, split.labels.tolist(), strict=True))
    assert got == sorted((str(Path(p).relative_to(tmp_path)), k) for p, k in theirs.samples)
    assert "train/a/._x.jpg" in split.paths


NAMES = st.text("aB1.-_ ", min_size=1, max_size=6).filter(lambda n: n.strip(".") and n[0] != ".")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tree=st.dictionaries(
        st.sampled_from(["cat", "Dog", "a-b", "a b", "é"]),
        st.sets(st.tuples(NAMES, st.sampled_from([".jpg", ".PNG", ".txt", ""])), min_size=1),
        min_size=1,
    )
)
def test_imagefolder_equals_torchvision(tree, tmp_path_factory):
    """Any tree without numbers for names gives ImageFolder's samples and classes."""
    root = tmp_path_factory.mktemp("tree")
    for name, files in tree.items():
        for split in ("train", "val"):
            trees.write(root / split / name / "always.jpg")
        for stem, suffix in files:
            trees.write(root / "train" / name / (stem + suffix))
    theirs = datasets.ImageFolder(root / "train")
    manifest = read_manifest(folder_info(), root)
    split = manifest.splits["train"]
    assert list(manifest.classes) == theirs.classes
    got = zip(split.paths, split.labels.tolist(), strict=True)
    assert sorted(got) == sorted((str(Path(p).relative_to(root)), k) for p, k in theirs.samples)


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_image_suffixes_are_what_pillow_reads(suffix):
    """Every suffix that counts as an image is one that Pillow knows."""
    Image.init()
    assert suffix in Image.registered_extensions()


def test_numbered_class_folders_are_ordered_by_number(tmp_path):
    """1..12 as text would put 10 before 2."""
    classes = {str(i): 1 for i in range(1, 13)}
    trees.image_tree(tmp_path, {"train": classes, "test": classes})
    manifest = read_manifest(folder_info(), tmp_path)
    assert manifest.classes == tuple(str(i) for i in range(1, 13))
    assert manifest.splits["train"].paths[9] == "train/10/10_0.jpg"
    assert manifest.splits["train"].labels.tolist() == list(range(12))


@pytest.mark.parametrize(
    ("folders", "evaluation"),
    [
        (["train", "val", "test"], "val"),
        (["train", "validation", "test"], "test"),
        (["train", "valid", "validation"], "valid"),
        (["train", "validation"], "validation"),
    ],
)
def test_imagefolder_splits_are_the_folders_found(folders, evaluation, tmp_path):
    """All split folders are splits, train first; the first of the known names evaluates."""
    trees.image_tree(tmp_path, {name: {"a": 1, "b": 1} for name in [*folders, "extra"]})
    (tmp_path / "docs").mkdir()
    (tmp_path / ".cache" / "a").mkdir(parents=True)
    manifest = read_manifest(folder_info(), tmp_path)
    assert set(manifest.splits) == {*folders, "extra"}
    assert next(iter(manifest.splits)) == "train"
    assert manifest.eval_split == evaluation
    assert split_names(folder_info(), tmp_path) == tuple(manifest.splits)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"train": {"a": 1}}, ["no split folder val or test or valid or validation"]),
        ({"val": {"a": 1}}, ["no split folder train"]),
        ({"train": {"a": 1, "b": 0}, "val": {"a": 1, "b": 1}}, ["no image in class folder b"]),
        ({"train": {"a": 1}, "val": {"a": 0}}, ["no split folder val"]),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "c": 1}}, ["c only in val", "b only in tr"]),
        ({"train": {"a": 1}, "val": {"a": 1}, "more": {"x": 1}}, ["x only in more"]),
    ],
)
def test_imagefolder_trees_that_cannot_work(tree, words, tmp_path):
    """Missing splits, empty classes and classes of one split only are errors that name them."""
    trees.image_tree(tmp_path, tree)
    refuse(folder_info(), tmp_path, *words)


def test_imagefolder_split_that_is_not_there(tmp_path):
    """Asking for a split that was not found lists those that were."""
    trees.image_tree(tmp_path, {"train": {"a": 1}, "val": {"a": 1}})
    with pytest.raises(
        ConfigError, match="split test is not in imagefolder; choose from train, val"
    ):
        read_manifest(folder_info(), tmp_path, ["test"])


def test_links_are_followed(tmp_path):
    """Linked images and class folders are rows like others."""
    trees.image_tree(tmp_path, {"train": {"a": 1}, "val": {"a": 1, "b": 1}, ".store": {"b": 2}})
    (tmp_path / "train" / "b").symlink_to(tmp_path / ".store" / "b")
    (tmp_path / "train" / "a" / "z.jpg").symlink_to(tmp_path / ".store" / "b" / "b_0.jpg")
    split = read_manifest(folder_info(), tmp_path).splits["train"]
    assert split.paths == tuple(
        f"train/{path}" for path in ("a/a_0.jpg", "a/z.jpg", "b/b_0.jpg", "b/b_1.jpg")
    )
    assert split.open_image(1).size == (8, 6)


@pytest.mark.parametrize("link", ["train/b", "train/a/z.jpg", "train/a/folder"])
def test_a_dangling_link_is_named(link, tmp_path):
    """A link to nothing is an error with link and target, image or folder."""
    trees.image_tree(tmp_path, {"train": {"a": 1}, "val": {"a": 1}})
    (tmp_path / link).symlink_to(tmp_path / "gone")
    refuse(folder_info(), tmp_path, f"{tmp_path / link} is a dangling link", "gone")


def test_a_dangling_link_in_a_list_is_named(tmp_path):
    """Listed data sets name a dangling link too."""
    trees.food101(tmp_path)
    image = tmp_path / "images" / "waffles" / "9.jpg"
    image.unlink()
    image.symlink_to(tmp_path / "gone")
    refuse(trees.small("food101", num_classes=2, train=3, test=2), tmp_path, "9.jpg is a dangling")


def test_a_link_loop_is_refused(tmp_path):
    """A folder that links to one above it would never end."""
    trees.image_tree(tmp_path, {"train": {"a": 1}, "val": {"a": 1}})
    (tmp_path / "train" / "a" / "again").symlink_to(tmp_path / "train")
    refuse(folder_info(), tmp_path, "again links to a folder that contains it")


def test_one_folder_under_two_names_is_refused(tmp_path):
    """A val that links to train would leak every image."""
    trees.image_tree(tmp_path, {"train": {"a": 1}})
    (tmp_path / "val").symlink_to("train")
    refuse(folder_info(), tmp_path, "are one folder")


def test_flat_train_folder_is_refused(tmp_path):
    """Images straight in train/ have no class."""
    trees.image_tree(tmp_path, {"val": {"a": 1}})
    trees.write(tmp_path / "train" / "x.jpg")
    refuse(folder_info(), tmp_path, "no split folder train", "train/<class>/<image>")


def test_digits_are_bundled_grey_and_split_by_a_rule():
    """1,297 and 500 images, every class within one of its share, values over the whole range."""
    manifest = read_manifest(trees.dataset_info("digits"), None)
    train, test = manifest.splits.values()
    assert (len(train.paths), len(test.paths)) == (1297, 500)
    assert not set(train.paths) & set(test.paths)
    in_test = np.bincount(test.labels)
    share = (np.bincount(train.labels) + in_test) * 500 / 1797
    assert np.abs(in_test - share).max() <= 1
    pixels = np.stack([np.asarray(test.open_image(i)) for i in range(500)])
    assert pixels.shape == (500, 8, 8)
    assert (pixels.min(), pixels.max(), test.open_image(0).mode) == (0, 255, "L")


def test_digits_pixels_are_scikit_learns():
    """A row's image and label are those of its index in scikit-learn's table."""
    from sklearn.datasets import load_digits

    data = load_digits()
    for split in read_manifest(trees.dataset_info("digits"), None).splits.values():
        for row in (0, 7, len(split.paths) - 1):
            index = int(split.paths[row].removeprefix("digits/"))
            assert split.labels[row] == data.target[index]
            back = np.asarray(split.open_image(row)) * (16 / 255)
            np.testing.assert_allclose(back, data.images[index], atol=0.04)


def test_listing_opens_no_image(tmp_path, monkeypatch):
    """A listing looks at names and sizes only."""
    trees.image_tree(tmp_path, {"train": {"a": 1}, "val": {"a": 1}})

    def fail(*_args, **_kwargs):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", fail)
    assert eval_split(folder_info(), tmp_path) == "val"
    assert len(read_manifest(folder_info(), tmp_path).splits["train"].paths) == 1
