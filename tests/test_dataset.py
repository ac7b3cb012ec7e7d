"""Decoding, cropping and quarantine."""

import errno
import io
import random
import struct
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epcache.dataset import BatchPlan, ImageLoader, Preprocess, random_box
from epcache.errors import DataError
from epcache.manifest import Split


def noise(width, height, seed=0, mode="RGB"):
    channels = {"RGB": (3,), "L": (), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)
    return Image.fromarray(pixels)


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def split_of(files):
    """A split over encoded images; an exception in the list is raised when its row is opened."""

    def open_image(row):
        if isinstance(files[row], Exception):
            raise files[row]
        return Image.open(io.BytesIO(files[row]))

    return Split(
        name="train",
        paths=tuple(f"{row}.png" for row in range(len(files))),
        labels=np.zeros(len(files), np.int64),
        boxes=None,
        open_image=open_image,
    )


def load(files, *, size=32, rows=None, view=0, seed=0, workers=2, batch=4):
    split = split_of(files)
    rows = list(range(len(files))) if rows is None else rows
    loader = ImageLoader(Preprocess(image_size=size), seed=seed, num_workers=workers)
    plans = [
        BatchPlan(split=split, indices=rows[start : start + batch], view=view)
        for start in range(0, len(rows), batch)
    ]
    return list(loader.load(plans))


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    size=st.sampled_from([14, 32, 56]),
    crop_pct=st.sampled_from([224 / 256, 1.0, 0.9]),
)
def test_eval_crop_equals_torchvision(width, height, size, crop_pct):
    """Resize and centre crop give torchvision's pixels, all of them, for any shape."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    image = noise(width, height)
    reference = Compose(
        [Resize(round(size / crop_pct), InterpolationMode.BICUBIC), CenterCrop(size)]
    )(image)
    ours = Preprocess(image_size=size, crop_pct=crop_pct).eval_crop(image)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(reference))


def test_extreme_shape_is_cropped_while_resizing(monkeypatch):
    """An image that would grow to gigabytes gives the same crop, but for a soft edge."""
    image = noise(3, 400)
    preprocess = Preprocess(image_size=32)
    plain = np.asarray(preprocess.eval_crop(image), np.int16)
    monkeypatch.setattr("epcache.dataset.RESIZED_PIXELS", 1)
    difference = np.abs(np.asarray(preprocess.eval_crop(image), np.int16) - plain)
    assert difference.shape == (32, 32, 3)
    assert difference.mean() < 1  # grey levels of 255, on noise
    assert difference[12:20, 4:].max() <= 5


def test_a_line_of_pixels_is_cropped_in_little_memory():
    """One pixel by sixty thousand: four gigabytes if it were resized whole."""
    crop = Preprocess(image_size=224).eval_crop(noise(1, 60_000))
    assert crop.size == (224, 224)


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 10_000))
def test_random_box_lies_inside(width, height, seed):
    """A random crop never leaves the image and is never empty."""
    left, top, w, h = random_box((width, height), random.Random(seed))
    assert left >= 0
    assert top >= 0
    assert w >= 1
    assert h >= 1
    assert left + w <= width
    assert top + h <= height


@pytest.mark.parametrize("size", [(1000, 1000), (600, 200), (50, 900)])
def test_random_boxes_follow_the_recipe(size):
    """Areas and shapes are spread as torchvision's RandomResizedCrop spreads them."""
    import torch
    from torchvision.transforms import RandomResizedCrop

    image = Image.new("L", size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        crop = RandomResizedCrop.get_params
        drawn = [crop(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)]
    theirs = np.array([(left, top, w, h) for top, left, h, w in drawn])
    ours = np.array([random_box(size, random.Random(seed)) for seed in range(3000)])
    scale = np.array([*size, *size])
    for quantity in (
        lambda boxes: boxes / scale,
        lambda boxes: np.log(boxes[:, 2:] / boxes[:, 3:]),
    ):
        np.testing.assert_allclose(quantity(ours).mean(0), quantity(theirs).mean(0), atol=0.02)
        np.testing.assert_allclose(quantity(ours).std(0), quantity(theirs).std(0), atol=0.02)


def test_views_depend_on_seed_view_and_path_alone():
    """A row's augmented view is the same in any batch and any company, and differs by view."""
    files = [encoded(noise(60, 50, seed)) for seed in range(6)]
    alone = load(files, rows=[3], view=1)[0].images[0]
    among = np.concatenate([b.images for b in load(files, view=1, workers=3)])[3]
    np.testing.assert_array_equal(alone, among)
    assert (alone != load(files, rows=[3], view=2)[0].images[0]).any()
    assert (alone != load(files, rows=[3], view=1, seed=1)[0].images[0]).any()
    assert (alone != load(files, rows=[3], view=0)[0].images[0]).any()


def test_batches_come_in_order_with_sizes():
    """Rows arrive in the order planned, whatever thread decoded them, with their sizes on disk."""
    files = [encoded(noise(20 + row, 40, row)) for row in range(11)]
    batches = load(files, workers=4)
    assert [len(b.images) for b in batches] == [4, 4, 3]
    assert [size for b in batches for size in b.sizes] == [(20 + row, 40) for row in range(11)]
    reference = Preprocess(image_size=32)
    for row, pixels in enumerate(np.concatenate([b.images for b in batches])):
        expected = np.asarray(reference.eval_crop(Image.open(io.BytesIO(files[row]))))
        np.testing.assert_array_equal(pixels, expected.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "I;16", "LA"])
def test_modes_convert_as_torchvision_does(mode, tmp_path):
    """Grey, palette, transparent, CMYK and 16-bit images become RGB as by ``pil_loader``."""
    from torchvision.datasets.folder import pil_loader

    if mode == "I;16":
        image = Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16)
    else:
        image = noise(64, 64).convert("RGB").convert(mode)
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    image.save(path)
    (batch,) = load([path.read_bytes()])
    assert not batch.bad
    expected = Preprocess(image_size=32).eval_crop(pil_loader(path))
    np.testing.assert_array_equal(batch.images[0], np.asarray(expected).transpose(2, 0, 1))


def bomb():
    """A PNG header of 20,000 x 20,000 pixels with no pixels behind it."""

    def part(kind, data):
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", b"") + part(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (encoded(noise(300, 300), "JPEG")[:4000], "truncated"),
        (encoded(noise(300, 300))[:4000], "OSError"),
        (b"", "not an image"),
        (b"<html>not found</html>", "not an image"),
        (bomb(), "bomb"),
        (encoded(noise(30, 30))[:50], ""),
    ],
    ids=["truncated jpeg", "truncated png", "empty", "html", "bomb", "header only"],
)
def test_what_cannot_be_decoded_is_set_aside(data, word):
    """A broken file leaves zeros, a reason and no size; its neighbours are untouched."""
    good = encoded(noise(40, 40))
    (batch,) = load([good, data, good])
    assert list(batch.bad) == [1]
    assert word in batch.bad[1]
    assert "0x" not in batch.bad[1], "a reason must read the same on every run"
    assert not batch.images[1].any()
    assert batch.sizes == [(40, 40), (0, 0), (40, 40)]
    np.testing.assert_array_equal(batch.images[0], batch.images[2])


def test_large_but_legal_images_pass_without_a_warning():
    """Between Pillow's warning and its error an image is decoded, silently."""
    image = Image.new("1", (10_000, 9_500))  # 95 megapixels: above the warning, below the error
    (batch,) = load([encoded(image)])
    assert not batch.bad
    assert batch.sizes == [(10_000, 9_500)]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOENT])
def test_trouble_of_the_machine_is_not_the_images_fault(number):
    """An unreadable disk stops the run with the file's name instead of emptying the data set."""
    good = encoded(noise(40, 40))
    with pytest.raises(DataError, match=r"1\.png"):
        load([good, OSError(number, "trouble"), good])


def test_out_of_memory_is_not_the_images_fault():
    """So does a machine without memory."""
    with pytest.raises(DataError, match="memory"):
        load([MemoryError()])


def test_the_loader_reads_a_bounded_number_of_images_ahead():
    """A consumer that stops after one batch has not had the whole data set decoded."""
    opened = []
    data = encoded(noise(40, 40))

    def open_image(row):
        opened.append(row)
        return Image.open(io.BytesIO(data))

    split = Split(
        name="train",
        paths=tuple(map(str, range(1000))),
        labels=np.zeros(1000, np.int64),
        boxes=None,
        open_image=open_image,
    )
    loader = ImageLoader(Preprocess(image_size=16), seed=0, num_workers=2, prefetch_batches=2)
    batches = loader.load(
        BatchPlan(split=split, indices=range(s, s + 10)) for s in range(0, 1000, 10)
    )
    next(batches)
    assert len(opened) <= 40
    batches.close()
    assert threading.active_count() < 10


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    """However many threads there are, only one holds a large image's pixels."""
    monkeypatch.setattr("epcache.dataset.LARGE_PIXELS", 100)
    running, most = 0, 0
    lock = threading.Lock()
    convert = Image.Image.convert

    def watched(self, *arguments, **options):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        result = convert(self, *arguments, **options)
        with lock:
            running -= 1
        return result

    monkeypatch.setattr(Image.Image, "convert", watched)
    load([encoded(noise(200, 200, seed)) for seed in range(12)], workers=4)
    assert most == 1
