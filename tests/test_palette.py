"""Colours stay apart for colour-blind readers, and no pair of colour and marker comes twice."""

import itertools
import re
from importlib import resources

import numpy as np
import pytest

from epcache.palette import CATEGORICAL, DIVERGING, MARKERS, SEQUENTIAL, colour, marker

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
BLINDNESS = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "none": np.eye(3).tolist(),
}


def linear(text):
    """Linear RGB of ``#rrggbb``."""
    value = np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE Lab under D65."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def page_colours(*, is_dark):
    """The categorical colours of the report's style sheet."""
    text = (resources.files("epcache.report") / "style.css").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
    return re.findall(r"--c\d: (#[0-9a-f]{6})", dark if is_dark else light)


def contrast(one, other):
    """Contrast by WCAG, 1 to 21."""
    lights = [np.array([0.2126, 0.7152, 0.0722]) @ linear(each) + 0.05 for each in (one, other)]
    return max(lights) / min(lights)


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_told_apart(kind, theme):
    """Any two differ by much more than is just seen, also without red or green cones."""
    colours = CATEGORICAL if theme == "light" else page_colours(is_dark=True)
    seen = [lab(np.array(BLINDNESS[kind]) @ linear(each)) for each in colours]
    for (a, one), (b, other) in itertools.combinations(zip(colours, seen, strict=True), 2):
        assert np.linalg.norm(one - other) > 15, (kind, a, b)


def test_the_page_has_the_same_colours():
    """The style sheet repeats the palette for the light theme and has as many for the dark one."""
    assert page_colours(is_dark=False) == [each.lower() for each in CATEGORICAL]
    assert len(page_colours(is_dark=True)) == len(CATEGORICAL)


def test_colours_are_seen_on_their_background():
    """Each has a contrast of 2 with white, or 3 with the dark page, so that a thin line is seen."""
    for each in CATEGORICAL:
        assert contrast(each, "#ffffff") > 2, each
    for each in page_colours(is_dark=True):
        assert contrast(each, "#14171b") > 3, each


def test_pairs_of_colour_and_marker_come_once():
    """64 things are told apart by colour and marker together."""
    pairs = [(colour(i), marker(i)) for i in range(len(CATEGORICAL) * len(MARKERS))]
    assert len(set(pairs)) == len(pairs) == 64
    assert colour(0) == CATEGORICAL[0]
    assert colour(len(CATEGORICAL)) == CATEGORICAL[0]


def test_maps_are_matplotlibs():
    """The named maps exist."""
    import matplotlib

    assert {SEQUENTIAL, DIVERGING} <= set(matplotlib.colormaps)
