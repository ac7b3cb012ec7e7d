"""Rows of a manifest as uint8 batches: decode, crop, and set aside what cannot be decoded.

Decoding and resizing happen in Pillow, which lets other threads run meanwhile, so threads feed the
backbone as well as processes would, without copies between them and without a fork.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from epcache.errors import DataError

if TYPE_CHECKING:
    from epcache.manifest import Split

CROP_SCALE = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
"""Random resized crop of the published recipe. Source: paper, training details."""

LARGE_PIXELS = 32_000_000
"""Above this an image is decoded while no other large one is, so memory stays bounded."""

RESIZED_PIXELS = 64_000_000
"""Above this only the crop is resized: an image of 1 x 10,000 would grow to gigabytes.

Pillow then does not look beyond the crop, so pixels at its border differ a little from the rule."""


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """From an image file to the square that the backbone sees, before mean and std."""

    image_size: int
    crop_pct: float = 224 / 256
    """The shorter side is resized to ``image_size / crop_pct``, then the centre is cut out."""
    interpolation: str = "bicubic"

    def eval_crop(self, image: Image.Image) -> Image.Image:
        """Resize the shorter side, cut out the centre; equals torchvision's Resize + CenterCrop."""
        size = self.image_size
        short = round(size / self.crop_pct)
        width, height = image.size
        # torchvision's integer arithmetic, to the pixel
        if width <= height:
            new_width, new_height = short, int(short * height / width)
        else:
            new_width, new_height = int(short * width / height), short
        left, top = round((new_width - size) / 2.0), round((new_height - size) / 2.0)
        if new_width * new_height <= RESIZED_PIXELS:
            if (new_width, new_height) != image.size:
                image = image.resize((new_width, new_height), self._filter)
            return image.crop((left, top, left + size, top + size))
        scale_x, scale_y = width / new_width, height / new_height
        box = (left * scale_x, top * scale_y, (left + size) * scale_x, (top + size) * scale_y)
        return image.resize((size, size), self._filter, box=box)

    def random_crop(self, image: Image.Image, rng: random.Random) -> Image.Image:
        """Random resized crop and flip, as torchvision draws them, from ``rng`` alone."""
        left, top, width, height = random_box(image.size, rng)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.image_size, self.image_size), self._filter)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image

    @property
    def _filter(self) -> Image.Resampling:
        return Image.Resampling[self.interpolation.upper()]


def random_box(size: tuple[int, int], rng: random.Random) -> tuple[int, int, int, int]:
    """A crop (left, top, width, height) of random area and aspect ratio, or the largest centre.

    Source: torchvision RandomResizedCrop (ten tries, then the fallback); only ``rng.random`` is
    used, whose stream Python promises not to change.
    """
    width, height = size
    low, high = np.log(CROP_RATIO)
    for _ in range(10):
        area = width * height * (CROP_SCALE[0] + (CROP_SCALE[1] - CROP_SCALE[0]) * rng.random())
        ratio = float(np.exp(low + (high - low) * rng.random()))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.random() * (width - w + 1)), int(rng.random() * (height - h + 1))
            return left, top, w, h
    w, h = width, height
    if width / height < CROP_RATIO[0]:
        h = max(1, round(w / CROP_RATIO[0]))
    elif width / height > CROP_RATIO[1]:
        w = max(1, round(h * CROP_RATIO[1]))
    return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive rows of one view, ready for the backbone."""

    images: NDArray[np.uint8]
    """(B, 3, S, S); zeros where the image could not be decoded."""
    sizes: list[tuple[int, int]]
    """Width and height of each image on disk; (0, 0) where it could not be decoded."""
    bad: dict[int, str]
    """Position in the batch -> why it could not be decoded."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which rows make a batch."""

    split: Split
    indices: Sequence[int]
    """Positions in the manifest's split."""
    view: int = 0


class ImageLoader:
    """Decodes planned batches in threads, a bounded number of images ahead of the consumer."""

    def __init__(
        self, preprocess: Preprocess, *, seed: int, num_workers: int, prefetch_batches: int = 2
    ) -> None:
        self.preprocess = preprocess
        self.seed = seed
        self.num_workers = num_workers
        self.prefetch_batches = prefetch_batches
        self._one_large_image = threading.Lock()

    def load(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """Batches in the order of the plans.

        Raises:
            DataError: A file cannot be read for a reason that lies with the machine, not with the
                image (permission, input/output error, the file is gone).
        """
        waiting: deque[list[Future[Decoded]]] = deque()
        plans = iter(plans)
        with (
            quiet_pillow(),
            ThreadPoolExecutor(self.num_workers, thread_name_prefix="decode") as pool,
        ):
            try:
                while True:
                    for plan in plans:
                        waiting.append(
                            [pool.submit(self._decode, plan, index) for index in plan.indices]
                        )
                        if len(waiting) > self.prefetch_batches:
                            break
                    if not waiting:
                        return
                    yield self._batch([future.result() for future in waiting.popleft()])
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _batch(self, decoded: list[Decoded]) -> Batch:
        size = self.preprocess.image_size
        images = np.zeros((len(decoded), 3, size, size), np.uint8)
        for position, image in enumerate(decoded):
            if image.pixels is not None:
                images[position] = image.pixels
        bad = {i: image.reason for i, image in enumerate(decoded) if image.reason is not None}
        return Batch(images=images, sizes=[image.size for image in decoded], bad=bad)

    def _decode(self, plan: BatchPlan, index: int) -> Decoded:
        path = plan.split.paths[index]
        try:
            with plan.split.open_image(index) as image:
                size = image.size
                large = size[0] * size[1] > LARGE_PIXELS
                with self._one_large_image if large else contextlib.nullcontext():
                    rgb = image.convert("RGB")  # as torchvision's loader does
                    if plan.view == 0:
                        crop = self.preprocess.eval_crop(rgb)
                    else:
                        rng = random.Random(f"{self.seed}/{plan.split.name}/{path}/{plan.view}")
                        crop = self.preprocess.random_crop(rgb, rng)
            return Decoded(pixels=np.asarray(crop).transpose(2, 0, 1), size=size)
        except Exception as error:  # Pillow's decoders raise almost anything on a broken file
            if trouble := machine_trouble(error):
                raise DataError(
                    f"cannot read {path} of split {plan.split.name!r}: {trouble}. The image may be "
                    f"fine, so it is not quarantined: mend that and run the same command again"
                ) from error
            return Decoded(reason=describe(error))


def machine_trouble(error: Exception) -> str | None:
    """What the machine, not the image, is to blame for; None where it is the image."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return None


def describe(error: Exception) -> str:
    """Why an image could not be decoded; the same words on every run and machine."""
    if isinstance(error, UnidentifiedImageError):  # its message holds an absolute path
        return "not an image that Pillow can read"
    text = str(error).splitlines()[0] if str(error) else "no reason given"
    return f"{type(error).__name__}: {text}"


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One image, or why there is none."""

    pixels: NDArray[np.uint8] | None = None
    size: tuple[int, int] = (0, 0)
    reason: str | None = None


@contextlib.contextmanager
def quiet_pillow() -> Iterator[None]:
    """Let large but legal images and odd palettes pass without a warning, as their users expect.

    Entered in the consumer's thread: ``catch_warnings`` in the workers would race.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        yield
