"""Boxes around maps are scored as published, and ground truth follows the image into its crop."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epcache.dataset import Preprocess
from epcache.errors import DataError
from epcache.localization import (
    BoxAccuracy,
    EvalCrop,
    boxes_of_rows,
    contour_boxes,
    iou,
    map_pixels,
    read_boxes,
    score_map,
)

GOLDEN = Path(__file__).parent / "golden" / "localization.npz"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as data:
        return dict(data)


def score(golden, images=slice(None)):
    """Our counts of the golden images."""
    accuracy = BoxAccuracy(
        thresholds=golden["thresholds"], iou_thresholds=golden["iou_thresholds"].tolist()
    )
    boxes = np.split(golden["boxes"], np.cumsum(golden["boxes_per_image"])[:-1])
    for one_map, its_boxes in list(zip(golden["score_maps"], boxes, strict=True))[images]:
        accuracy.add(one_map, its_boxes)
    return accuracy


def test_reference_is_reproduced_exactly(golden):
    """Every accuracy at every threshold and overlap, of both versions, and both maxima."""
    ours = score(golden)
    np.testing.assert_array_equal(ours.accuracy_v2, golden["accuracy_v2"])
    np.testing.assert_array_equal(ours.accuracy_v1, golden["accuracy_v1"])
    assert ours.max_box_acc_v2 == pytest.approx(float(golden["max_box_acc_v2"]), abs=1e-15)
    assert ours.max_box_acc_v1 == pytest.approx(float(golden["max_box_acc_v1"]), abs=1e-15)


def test_versions_differ_in_the_reference(golden):
    """The reference tells the two versions apart, so agreeing with it means something."""
    assert (golden["accuracy_v2"] != golden["accuracy_v1"]).any()
    assert score(golden, slice(3)).num_images == 3


def ring(side=40, outer=(5, 34), inner=(12, 20)):
    """A filled square with a square hole."""
    mask = np.zeros((side, side), np.uint8)
    mask[outer[0] : outer[1] + 1, outer[0] : outer[1] + 1] = 1
    mask[inner[0] : inner[1] + 1, inner[0] : inner[1] + 1] = 0
    return mask


def test_holes_have_boxes_too():
    """A ring gives its outer box and that of its hole, which runs along the pixels around it."""
    boxes, largest = contour_boxes(ring())
    assert sorted(boxes.tolist()) == [[5, 5, 35, 35], [11, 11, 22, 22]]
    assert boxes[largest].tolist() == [5, 5, 35, 35]


def test_object_in_a_hole_counts_for_version_2_alone():
    """Version 1 looks at the largest contour, which here is the frame around the object."""
    accuracy = BoxAccuracy()
    accuracy.add(255 * ring(), [[11, 11, 22, 22]])
    assert accuracy.max_box_acc_v2 == 1
    assert accuracy.max_box_acc_v1 == 0


def test_empty_mask_and_border():
    """Nothing above the threshold is the pixel 0, 0; a box never leaves the picture."""
    assert contour_boxes(np.zeros((8, 8), np.uint8))[0].tolist() == [[0, 0, 0, 0]]
    assert contour_boxes(np.ones((8, 9), np.uint8))[0].tolist() == [[0, 0, 8, 7]]


def test_thresholds_that_fall_together_are_scored_alike():
    """A thousand thresholds of a dark map give what each of them gives alone."""
    rng = np.random.default_rng(0)
    smooth = np.asarray(Image.fromarray(rng.random((6, 6)).astype(np.float32)).resize((48, 48)))
    dark = (23 * smooth / smooth.max()).astype(np.uint8)
    truth = [[4, 4, 20, 30], [25, 10, 40, 40]]
    many = BoxAccuracy()
    many.add(dark, truth)
    for place in (0, 1, 43, 44, 517, 999):
        one = BoxAccuracy(thresholds=many.thresholds[place : place + 1])
        one.add(dark, truth)
        np.testing.assert_array_equal(one.accuracy_v2[:, 0], many.accuracy_v2[:, place])
        np.testing.assert_array_equal(one.accuracy_v1[:, 0], many.accuracy_v1[:, place])
    assert len(np.unique(many.accuracy_v2[0])) == 2


SIDES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)
BOXES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3).map(
    lambda found: np.array([[x[0], y[0], x[1], y[1]] for x, y in found], float)
)


@given(ours=BOXES, truth=BOXES)
def test_overlap_is_that_of_pixel_sets(ours, truth):
    """Intersection over union of the pixels that two boxes cover, ends included."""

    def pixels(box):
        x0, y0, x1, y1 = box.astype(int)
        return {(x, y) for x in range(x0, x1 + 1) for y in range(y0, y1 + 1)}

    expected = [
        [len(pixels(a) & pixels(b)) / len(pixels(a) | pixels(b)) for b in truth] for a in ours
    ]
    np.testing.assert_allclose(iou(ours, truth), expected, atol=1e-15)


def test_score_map_spans_all_of_8_bits():
    """The peak is 255 in its cell's place, the lowest 0; no contrast is 0 everywhere."""
    attention = np.full((4, 4), 0.05, np.float32)
    attention[1, 2] = 0.25
    large = score_map(attention)
    assert large.shape == (224, 224)
    assert large.dtype == np.uint8
    assert (large.min(), large.max()) == (0, 255)
    y, x = np.unravel_index(large.argmax(), large.shape)
    assert (y // 56, x // 56) == (1, 2)
    assert not score_map(np.full((3, 3), 0.1)).any()


class Recorded:
    """Stands for an image and remembers what was done to it."""

    def __init__(self, size):
        self.size = size

    def resize(self, size, resample=None, box=None):
        self.size = size
        return self

    def crop(self, box):
        self.cropped = box
        return self


@settings(max_examples=300)
@given(
    width=st.integers(1, 4000), height=st.integers(1, 4000),
    side=st.sampled_from([32, 224, 336, 518]), crop_pct=st.sampled_from([0.875, 1.0, 0.9, 0.95]),
)  # fmt: skip
def test_geometry_is_that_of_the_images(width, height, side, crop_pct):
    """Boxes are resized and cropped by exactly the numbers that the image is."""
    crop = EvalCrop(image_size=side, crop_pct=crop_pct)
    resized, (left, top) = crop.geometry((width, height))
    image = Recorded((width, height))
    Preprocess(image_size=side, crop_pct=crop_pct).eval_crop(image)
    if hasattr(image, "cropped"):  # else too large to resize as a whole
        assert image.size == resized
        assert image.cropped == (left, top, left + side, top + side)


@pytest.mark.parametrize("size", [(400, 300), (230, 610), (500, 500)])
def test_box_of_a_rectangle_is_where_the_rectangle_went(size):
    """A white rectangle, resized and cropped as an image, fills its carried box to a pixel."""
    box = (0.3 * size[0], 0.35 * size[1], 0.65 * size[0], 0.8 * size[1])
    box = tuple(map(round, box))
    image = Image.new("L", size)
    image.paste(255, box)
    seen = np.asarray(Preprocess(image_size=224).eval_crop(image)) > 127
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    (carried,) = EvalCrop(image_size=224, crop_pct=0.875).carry_boxes([box], size)
    expected = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    np.testing.assert_allclose(224 * carried, expected, atol=1)


def test_boxes_beyond_the_crop_are_clipped_or_left_out():
    """Of a wide image the sides are not seen: a box there is none, one that reaches in is cut."""
    crop = EvalCrop(image_size=100, crop_pct=1.0)
    carried = crop.carry_boxes([[0, 0, 90, 100], [50, 20, 150, 70], [301, 0, 400, 9]], (400, 100))
    assert carried.tolist() == []
    carried = crop.carry_boxes([[0, 0, 90, 100], [50, 20, 200, 70], [251, 0, 400, 9]], (400, 100))
    np.testing.assert_allclose(carried, [[0, 0.2, 0.5, 0.7]])
    assert map_pixels(carried).tolist() == [[0, 45, 112, 157]]
    assert map_pixels(np.array([[0, 0, 1.0, 1.0]])).tolist() == [[0, 0, 223, 223]]


def test_file_of_boxes(tmp_path):
    """Several lines of one image are several boxes; names may hold commas; other rows have none."""
    path = tmp_path / "boxes.csv"
    path.write_text('path,x0,y0,x1,y1\n"a,b.png",1,2,3.5,4\nc.png,0,0,9,9\n"a,b.png",5,5,6,6\n')
    boxes = read_boxes(path)
    found = boxes_of_rows(boxes, ["c.png", "d.png", "a,b.png"], str(path))
    assert [each.tolist() for each in found] == [
        [[0, 0, 9, 9]], [], [[1, 2, 3.5, 4], [5, 5, 6, 6]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,x,y\n", "first line is 'name,x,y'; expected 'path,x0,y0,x1,y1'"),
        ("", "first line is ''"),
        ("path,x0,y0,x1,y1\na.png,1,2,3\n", "line 2: 'a.png,1,2,3'; expected a path and four"),
        ("path,x0,y0,x1,y1\na.png,1,2,x,4\n", "line 2: 'a.png,1,2,x,4'"),
        ("path,x0,y0,x1,y1\na.png,1,2,3,4\nb.png,5,2,3,4\n", "line 3: 5,2,3,4 has no area"),
        ("path,x0,y0,x1,y1\na.png,1,2,nan,4\n", "has no area"),
    ],
)
def test_damaged_files_of_boxes_are_refused(tmp_path, text, message):
    """The error names file, line and what was expected."""
    path = tmp_path / "boxes.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=r"boxes .*boxes\.csv") as error:
        read_boxes(path)
    assert message in str(error.value)


def test_boxes_of_other_images_are_refused(tmp_path):
    """A file that fits no image is a mistake, and a missing one says so."""
    with pytest.raises(DataError, match=r"none of its 1 images .* such as val/a.png"):
        boxes_of_rows({"a.png": np.zeros((1, 4))}, ["val/a.png"], "boxes.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_boxes(tmp_path / "nothing.csv")
