"""The colours of every picture: distinct to colour-blind readers, on white and on black.

The first six are those of Okabe and Ito (2008). Their yellow is not seen on white and their black
not on black, so a brown and a grey stand in. Pictures that matter repeat the distinction in marker,
dash or label.
"""

from __future__ import annotations

CATEGORICAL: tuple[str, ...] = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # bluish green
    "#CC79A7",  # reddish purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#703010",  # brown
    "#4D4D4D",  # dark grey
)
"""In drawing order."""

MARKERS: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "X", "*")
"""One for each colour, by matplotlib's names."""

SEQUENTIAL = "cividis"
"""Matplotlib's name of the map for amounts: even in lightness, the same to colour-blind readers."""

DIVERGING = "PuOr"
"""For amounts with a sign, such as correlations."""


def colour(index: int) -> str:
    """The colour of the ``index``-th thing that is drawn; they begin again after the last."""
    return CATEGORICAL[index % len(CATEGORICAL)]


def marker(index: int) -> str:
    """The marker of the ``index``-th thing.

    The second round of colours gets other markers, so that no pair comes twice in 64 things.
    """
    rounds, place = divmod(index, len(CATEGORICAL))
    return MARKERS[(place + rounds) % len(MARKERS)]
