"""Attention over an image: pixels only.

A map is drawn as its query's colour over the image in pale grey, the denser the more attention. In
the combined picture every place has the colour of the query that gives it most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from epcache.localization import ROUNDING
from epcache.palette import CATEGORICAL

Pixels = NDArray[np.floating]
"""(H, W, 3) in [0, 1]."""

COLOURS = CATEGORICAL
"""Of queries, in order."""
PICTURE = 168
"""Side in pixels of a picture with a map over it."""
GREY = 0.82
"""Of the ground that stands for an image that is not at hand."""


def enlarge(maps_HW: NDArray[np.floating], size: int = PICTURE) -> NDArray[np.float32]:
    """Maps (..., H, W) as smooth pictures (..., size, size), none below zero."""
    import cv2

    flat = maps_HW.reshape(-1, *maps_HW.shape[-2:]).astype(np.float32)
    large = [cv2.resize(one, (size, size), interpolation=cv2.INTER_CUBIC) for one in flat]
    stacked: NDArray[np.float32] = np.clip(np.stack(large), 0, None)
    return stacked.reshape(*maps_HW.shape[:-2], size, size)


def ground(crop: NDArray[np.uint8] | None) -> Pixels:
    """The image in pale grey, so that any colour stands out on it."""
    if crop is None:
        return np.full((PICTURE, PICTURE, 3), GREY)
    image = Image.fromarray(crop).convert("L").resize((PICTURE, PICTURE), Image.Resampling.BICUBIC)
    grey = np.asarray(image, np.float64) / 255
    return np.repeat((0.6 + 0.4 * grey)[..., None], 3, axis=-1)


def rgb(colour: str) -> NDArray[np.float64]:
    """``#0072B2`` as three shares."""
    return np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])


def strength(map_SS: NDArray[np.floating]) -> NDArray[np.floating]:
    """How densely a map is drawn, in [0, 1]: from its lowest to (nearly) its highest value.

    A single token may hold most of the attention; the rest would vanish beside it.
    """
    low, high = map_SS.min(), np.quantile(map_SS, 0.99)
    if high - low <= ROUNDING * high:
        return np.zeros_like(map_SS)
    scaled: NDArray[np.floating] = np.clip((map_SS - low) / (high - low), 0, 1)
    return scaled


def tint(base: Pixels, colours: NDArray[np.floating], density: NDArray[np.floating]) -> Pixels:
    """A colour over a picture; where it is densest the picture still shines through."""
    alpha = 0.9 * density[..., None]
    tinted: Pixels = np.clip(base * (1 - alpha) + alpha * colours * (0.4 + 0.6 * base), 0, 1)
    return tinted


def combine(base: Pixels, maps_GSS: NDArray[np.floating], colours_G3: NDArray[Any]) -> Pixels:
    """Every place in the colour of the map that gives it most, denser where that is more."""
    winner = maps_GSS.argmax(axis=0)
    # The root lifts what would pale beside the one map that is most concentrated
    return tint(base, colours_G3[winner], strength(maps_GSS.max(axis=0)) ** 0.5)
