"""MaxBoxAcc: does the box around what is attended to agree with the box around the object?

    map -> 224 x 224, 8 bits -> every threshold -> boxes of its contours -> IoU with ground truth

Version 2 takes the boxes of all contours, those of holes too, and averages over three overlaps;
version 1 takes the largest contour and an overlap of one half.

Source: Choe et al., "Evaluating Weakly Supervised Object Localization Methods Right" (2020),
section 4: MaxBoxAcc and MaxBoxAccV2.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epcache.errors import DataError

MAP_SIZE = 224
"""Side of the square in which boxes are drawn and compared."""
IOU_THRESHOLDS = (0.3, 0.5, 0.7)
V1_IOU = 0.5
THRESHOLDS: NDArray[np.float64] = np.arange(0, 1, 0.001)
ROUNDING = 1e-5
"""A map whose values differ by no larger share is even; what is left is noise of resizing."""
COLUMNS = ("path", "x0", "y0", "x1", "y1")
"""Header of a file of boxes."""


@dataclass(kw_only=True)
class BoxAccuracy:
    """Counts, image by image, how often a threshold finds the object."""

    thresholds: NDArray[np.float64] = field(default_factory=THRESHOLDS.copy)
    """(T,) shares of a map's maximum."""
    iou_thresholds: Sequence[float] = IOU_THRESHOLDS
    """(K,) overlaps that count as found."""
    num_images: int = 0

    def __post_init__(self) -> None:
        """Nothing is counted yet."""
        shape = len(self.iou_thresholds), len(self.thresholds)
        self._hits_v2: NDArray[np.int64] = np.zeros(shape, np.int64)
        self._hits_v1: NDArray[np.int64] = np.zeros(shape, np.int64)

    def add(self, score_map: NDArray[np.uint8], boxes: ArrayLike) -> None:
        """Score one image.

        Args:
            score_map: (H, W) on 8 bits (:func:`score_map` makes one).
            boxes: (k, 4) ground truth x0 y0 x1 y1 in the map's pixels, k >= 1; the last row and
                column belong to a box.
        """
        import cv2

        truth = np.asarray(boxes, np.float64).reshape(-1, 4)
        levels = (self.thresholds * int(score_map.max())).astype(np.int64)
        # Many thresholds, but an 8-bit map has no more than 255 of them that differ
        distinct, place = np.unique(levels, return_inverse=True)
        masks = (
            cv2.threshold(score_map, level, 1, cv2.THRESH_BINARY)[1] for level in distinct.tolist()
        )
        found, largest = zip(*map(contour_boxes, masks), strict=True)
        starts = np.cumsum([0, *map(len, found[:-1])])
        overlap = iou(np.concatenate(found), truth).max(axis=1)
        best = np.maximum.reduceat(overlap, starts), overlap[starts + largest]
        wanted = np.asarray(self.iou_thresholds)[:, None]
        self._hits_v2 += best[0][place] >= wanted
        self._hits_v1 += best[1][place] >= wanted
        self.num_images += 1

    @property
    def accuracy_v2(self) -> NDArray[np.float64]:
        """(K, T) share of images where any contour's box overlaps enough."""
        return self._hits_v2 / max(1, self.num_images)

    @property
    def accuracy_v1(self) -> NDArray[np.float64]:
        """(K, T) share of images where the largest contour's box overlaps enough."""
        return self._hits_v1 / max(1, self.num_images)

    @property
    def max_box_acc_v2(self) -> float:
        """Best threshold for each overlap, averaged over the overlaps."""
        return float(self.accuracy_v2.max(axis=1).mean())

    @property
    def max_box_acc_v1(self) -> float:
        """Best threshold at an overlap of one half.

        Raises:
            ValueError: One half is none of the overlaps.
        """
        return float(self.accuracy_v1[list(self.iou_thresholds).index(V1_IOU)].max())


def contour_boxes(mask_HW: NDArray[Any]) -> tuple[NDArray[np.float64], int]:
    """Boxes around all contours of a mask on 8 bits, outer ones and those of holes.

    Returns:
        (k, 4) x0 y0 x1 y1, and which of them has the largest area inside its contour. A box
        ends one pixel after its contour (but in the picture), as the published evaluation draws
        it; an empty mask has one box, the pixel 0, 0.
    """
    import cv2

    height, width = mask_HW.shape
    contours, _ = cv2.findContours(mask_HW, cv2.RETR_TREE, cv2.CHAIN_APPROX_SIMPLE)
    if not contours:
        return np.zeros((1, 4)), 0
    boxes = np.array([cv2.boundingRect(contour) for contour in contours], np.float64)
    boxes[:, 2:] += boxes[:, :2]
    boxes[:, 2:] = np.minimum(boxes[:, 2:], (width - 1, height - 1))
    if len(contours) == 1:
        return boxes, 0
    areas = [cv2.contourArea(contour) for contour in contours]
    return boxes, areas.index(max(areas))


def iou(boxes_k4: NDArray[np.float64], others_m4: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of every pair, (k, m); the last row and column of a box count."""
    one, other = boxes_k4[:, None], others_m4[None]
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    shared = np.clip(high - low + 1, 0, None).prod(axis=-1)
    areas = [(box[..., 2:] - box[..., :2] + 1).prod(axis=-1) for box in (one, other)]
    overlap: NDArray[np.float64] = shared / (areas[0] + areas[1] - shared)
    return overlap


def score_map(attention_HW: NDArray[np.floating], size: int = MAP_SIZE) -> NDArray[np.uint8]:
    """An attention map over the token grid as localisation sees it: (size, size) on 8 bits.

    Resized by bicubic interpolation, then scaled so that its smallest value is 0 and its largest
    255; a map without contrast is 0 everywhere.
    """
    import cv2

    large = cv2.resize(
        attention_HW.astype(np.float32), (size, size), interpolation=cv2.INTER_CUBIC
    ).astype(np.float64)
    low, high = large.min(), large.max()
    if high - low <= ROUNDING * abs(high):
        return np.zeros((size, size), np.uint8)
    scaled: NDArray[np.uint8] = (255 * ((large - low) / (high - low))).astype(np.uint8)
    return scaled


@dataclass(frozen=True, kw_only=True)
class EvalCrop:
    """Where a pixel of an image goes when its shorter side is resized and the centre cut out.

    The same arithmetic, to the pixel, as ``epcache.dataset.Preprocess.eval_crop``.
    """

    image_size: int
    crop_pct: float

    def carry_boxes(self, boxes_k4: ArrayLike, size: tuple[int, int]) -> NDArray[np.float64]:
        """Boxes of the image on disk in shares of the crop that the backbone sees.

        Args:
            boxes_k4: x0 y0 x1 y1 in pixels.
            size: Width and height of the image.

        Returns:
            (v, 4) in [0, 1]: clipped to the crop; a box that lies outside of it altogether is left
            out, so v may be less than k, and 0.
        """
        (new_width, new_height), (left, top) = self.geometry(size)
        scale = np.array([new_width / size[0], new_height / size[1]] * 2)
        moved = np.asarray(boxes_k4, np.float64).reshape(-1, 4) * scale - [left, top, left, top]
        carried = np.clip(moved / self.image_size, 0, 1)
        seen = (carried[:, 2:] > carried[:, :2]).all(axis=1)
        shown: NDArray[np.float64] = carried[seen]
        return shown

    def geometry(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height after resizing, and the left and top of the crop in them."""
        width, height = size
        short = round(self.image_size / self.crop_pct)
        if width <= height:
            resized = short, int(short * height / width)
        else:
            resized = int(short * width / height), short
        left, top = (round((side - self.image_size) / 2.0) for side in resized)
        return resized, (left, top)


def map_pixels(shares_k4: NDArray[np.float64], size: int = MAP_SIZE) -> NDArray[np.float64]:
    """Boxes in shares of the crop, in whole pixels of a score map."""
    pixels: NDArray[np.float64] = np.clip(np.rint(shares_k4 * size), 0, size - 1)
    return pixels


def read_boxes(path: Path) -> dict[str, NDArray[np.float64]]:
    """A file of boxes: ``path,x0,y0,x1,y1``, one box a line, any number of lines an image.

    Returns:
        Path of the image, as the store's samples have it, to its boxes (k, 4).

    Raises:
        DataError: The file is not of this form, or a box has no area.
    """
    found: dict[str, list[list[float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            if header != list(COLUMNS):
                raise DataError(
                    f"boxes {path}: its first line is {','.join(header)!r}; expected "
                    f"{','.join(COLUMNS)!r}"
                )
            for line in filter(None, lines):
                found.setdefault(line[0], []).append(_box(line, f"{path}, line {lines.line_num}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"boxes {path} cannot be read ({reason}); give a CSV file with {','.join(COLUMNS)}"
        ) from None
    return {name: np.array(boxes) for name, boxes in found.items()}


def _box(line: Sequence[str], place: str) -> list[float]:
    """The numbers of one line."""
    try:
        x0, y0, x1, y1 = box = [float(number) for number in line[1:]]
    except ValueError:
        raise DataError(
            f"boxes {place}: {','.join(line)!r}; expected a path and four numbers"
        ) from None
    if not (np.isfinite(box).all() and x1 > x0 and y1 > y0):
        raise DataError(
            f"boxes {place}: {x0:g},{y0:g},{x1:g},{y1:g} has no area; expected x0 < x1 and y0 < y1 "
            f"in pixels of the image"
        )
    return box


def boxes_of_rows(
    boxes: Mapping[str, NDArray[np.float64]], paths: Sequence[str], place: str
) -> list[NDArray[np.float64]]:
    """The boxes of each row, (k, 4); (0, 4) where there are none.

    Raises:
        DataError: No path of the file is one of the rows'.
    """
    none = np.empty((0, 4))
    if not any(path in boxes for path in paths):
        raise DataError(
            f"boxes {place}: none of its {len(boxes):,} images is in the split that is looked at; "
            f"expected paths as in samples.csv, such as {paths[0]}"
        )
    return [boxes.get(path, none) for path in paths]
