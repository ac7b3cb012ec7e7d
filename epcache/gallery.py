"""Pictures of attention: where each query looks, image by image, and how the measures relate.

Every query has a colour. More queries than colours are put into as many groups, of queries that
look at the same places. How a map lies over an image is in ``overlay.py``.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from epcache.dataset import Preprocess, quiet_pillow
from epcache.dataset import describe as describe_fault
from epcache.errors import EpcacheError
from epcache.manifest import load_manifest
from epcache.overlay import (
    COLOURS,
    PICTURE,
    Pixels,
    combine,
    enlarge,
    ground,
    rgb,
    strength,
    tint,
)
from epcache.palette import MARKERS
from epcache.store.reader import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from epcache.attention import Analysis

COLUMNS = 8
"""Maps side by side, at most."""
INK, MUTED, RULE = "#1c2128", "#59626e", "#dde2e8"
PANEL, GAP, HEAD, SIDE = 1.12, 0.06, 0.56, 0.26
"""Inches: side of a picture, space between two, above for headings, on the left for classes."""
LETTER = 0.1
"""Inches, at most nearly, of a letter of the title."""
DPI = PICTURE / PANEL
"""A picture is drawn with as many pixels as it has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exhibit:
    """One image with the maps of all queries."""

    label: str
    """Its class."""
    crop: NDArray[np.uint8] | None
    """(S, S, 3) as the backbone saw it; None where the image is not at hand."""
    maps_MHW: NDArray[np.float32]
    boxes_k4: NDArray[np.float64]
    """Ground truth in shares of the crop."""


# ---------------------------------------------------------------------------------- which images


def choose_images(
    labels: NDArray[np.int64], count: int, *, seed: int, first: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Positions of images to show, a pure function of its arguments: of as many classes as can be.

    Args:
        labels: Class of each image.
        count: How many to show; fewer where there are fewer.
        seed: Of the choice.
        first: Images to prefer, such as those with a box.
    """
    order = np.random.default_rng([seed, len(labels)]).permutation(len(labels))
    turn, seen = np.empty(len(labels), np.int64), dict[int, int]()
    for position in order:  # an image's turn: how many of its class came before
        label = int(labels[position])
        turn[position] = seen.get(label, 0)
        seen[label] = seen.get(label, 0) + 1
    later = np.zeros(len(labels), bool) if first is None else ~first
    ranked = order[np.lexsort((turn[order], later[order]))]
    return ranked[:count].astype(np.int64)


def load_crops(
    store: Store, split: str, paths: Sequence[str], *, say: Callable[[str], None]
) -> list[NDArray[np.uint8] | None]:
    """Images as the backbone saw them, from the folder that the store was made from.

    Args:
        store: Its provenance says where the images lay and how they were cropped.
        split: Name of the split.
        paths: Of the images, as ``samples.csv`` has them.
        say: Told where images are missing.
    """
    dataset, transform = store.provenance["dataset"], store.provenance["transform"]
    root = dataset.get("root")
    try:
        manifest = load_manifest(
            dataset["name"], data_dir=None if root is None else Path(root), splits=[split]
        )
    except EpcacheError as error:
        say(f"the images are not at hand, maps are drawn over grey: {error}")
        return [None] * len(paths)
    rows = {path: row for row, path in enumerate(manifest.splits[split].paths)}
    preprocess = Preprocess(
        image_size=transform["image_size"],
        crop_pct=transform["crop_pct"],
        interpolation=transform["interpolation"],
    )
    crops: list[NDArray[np.uint8] | None] = []
    with quiet_pillow():
        for path in paths:
            try:
                with manifest.splits[split].open_image(rows[path]) as image:
                    crops.append(np.asarray(preprocess.eval_crop(image.convert("RGB"))))
            except Exception as error:  # Pillow's decoders raise almost anything on a broken file
                reason = (
                    "not in the folder" if isinstance(error, KeyError) else describe_fault(error)
                )
                say(f"image {path} is not at hand ({reason}); its maps are drawn over grey")
                crops.append(None)
    return crops


# ------------------------------------------------------------------------------------ which colour


def group_queries(distances_MM: NDArray[np.float64], most: int = len(COLOURS)) -> list[list[int]]:
    """Queries by colour: each its own where there are enough, else those alike together.

    Args:
        distances_MM: Between the maps of each pair of queries.
        most: How many groups there may be.

    Returns:
        Groups in order of their first query, queries in ascending order.
    """
    num_maps = len(distances_MM)
    if num_maps <= most:
        return [[query] for query in range(num_maps)]
    from sklearn.cluster import AgglomerativeClustering

    # Complete linkage: no two queries of a group differ much, and groups are of like size
    model = AgglomerativeClustering(n_clusters=most, metric="precomputed", linkage="complete")
    found = model.fit_predict((distances_MM + distances_MM.T) / 2)
    groups = [np.flatnonzero(found == group).tolist() for group in range(most)]
    return sorted(groups)


# ---------------------------------------------------------------------------------------- pictures


class Wall:
    """Square pictures in rows and columns, with a title on top; one set of axes in inches.

    Args:
        num_rows: Of pictures.
        num_columns: Of pictures in a block.
        num_blocks: Side by side, with room for a label on the left of each.
        title: Above all.
        head: Inches for the headings of columns.
    """

    def __init__(
        self, num_rows: int, num_columns: int, *, title: str, num_blocks: int = 1, head: float = 0.0
    ) -> None:
        from matplotlib.figure import Figure

        self.num_columns = num_columns
        width = self.left_of(num_blocks * num_columns) - SIDE + 0.1
        lines = textwrap.wrap(title, int((width - SIDE) / LETTER))
        self.top = head + 0.21 + 0.17 * len(lines)
        height = self.above(num_rows) + 0.1
        self.figure = Figure(figsize=(width, height), dpi=DPI)
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()
        self.axes.set_autoscale_on(False)
        self.text(SIDE, 0.14, "\n".join(lines), size=9.5, weight="bold", va="top")

    def left_of(self, column: int) -> float:
        """Inches from the left to a column, counted through all blocks."""
        return SIDE * (1 + column // self.num_columns) + column * (PANEL + GAP)

    def above(self, row: int) -> float:
        """Inches from the top to a row."""
        return self.top + row * (PANEL + GAP)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Text at inches from the top left."""
        self.axes.text(x, y, text, **{"color": INK, "size": 8, "parse_math": False, **style})

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """A rectangle in inches from the top left."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, **style))

    def picture(self, row: int, column: int, pixels: Pixels, *, edge: str = RULE) -> None:
        """Hang a picture."""
        x, y = self.left_of(column), self.above(row)
        extent = (x, x + PANEL, y + PANEL, y)
        self.axes.imshow(pixels, extent=extent, aspect="auto")
        self.box(x, y, PANEL, PANEL, fill=False, edgecolor=edge, linewidth=0.8)

    def heading(self, column: int, lines: Sequence[str], colour: str | None = None) -> None:
        """Name a column; its colour is a bar beneath the text."""
        x, y = self.left_of(column), self.top - 0.4
        for line, text in enumerate(lines):
            style = {"size": 6.3, "color": MUTED} if line else {"size": 7.5, "color": INK}
            self.text(x, y + 0.13 * line, text, va="baseline", **style)
        if colour is not None:
            self.box(x, self.top - 0.08, PANEL, 0.05, color=colour, linewidth=0)

    def label(self, row: int, column: int, text: str) -> None:
        """Name a row on the left of a column, from bottom to top."""
        x, y = self.left_of(column) - 0.07, self.above(row) + PANEL / 2
        style = {"rotation": 90, "ha": "right", "va": "center", "size": 6.3, "color": MUTED}
        self.text(x, y, shorten(text, 20), **style)


def gallery(
    exhibits: Sequence[Exhibit], groups: Sequence[Sequence[int]], analysis: Analysis, title: str
) -> Figure:
    """Images down, queries (or groups of them) across, behind the image and all of them in one.

    Where there are few queries, images hang side by side too.
    """
    colours_G3 = np.stack([rgb(colour) for colour in COLOURS[: len(groups)]])
    before = 1 if len(groups) == 1 else 2
    columns = before + len(groups)
    num_rows = -(-len(exhibits) // max(1, (COLUMNS + 2) // columns))
    num_blocks = -(-len(exhibits) // num_rows)
    wall = Wall(num_rows, columns, title=title, num_blocks=num_blocks, head=HEAD)
    for block in range(num_blocks):
        _headings(wall, block * columns, before, groups, analysis)
    for number, exhibit in enumerate(exhibits):
        block, row = divmod(number, num_rows)
        first = block * columns
        base = ground(exhibit.crop)
        large_GSS = enlarge(np.stack([exhibit.maps_MHW[list(g)].mean(0) for g in groups]))
        wall.label(row, first, exhibit.label)
        _original(wall, row, first, exhibit)
        if before == 2:
            wall.picture(row, first + 1, combine(base, large_GSS, colours_G3))
        for column, large in enumerate(large_GSS, start=first + before):
            colour = colours_G3[column - first - before]
            wall.picture(row, column, tint(base, colour, strength(large)))
    return wall.figure


def _headings(
    wall: Wall, first: int, before: int, groups: Sequence[Sequence[int]], analysis: Analysis
) -> None:
    """Name the columns of a block."""
    wall.heading(first, ["image", "as cropped for", "evaluation"])
    if before == 2:
        what = "query" if len(groups) == len(analysis.queries) else "group"
        wall.heading(first + 1, ["combined", f"colour: {what} with", "most attention"])
    for column, group in enumerate(groups):
        wall.heading(first + before + column, describe(group, analysis), COLOURS[column])


def small_multiples(
    exhibit: Exhibit, groups: Sequence[Sequence[int]], analysis: Analysis, title: str
) -> Figure:
    """All queries over one image, group by group, each in its group's colour."""
    queries = [(query, place) for place, group in enumerate(groups) for query in group]
    num_rows = -(-(2 + len(queries)) // COLUMNS)
    wall = Wall(num_rows, COLUMNS, title=title)
    base = ground(exhibit.crop)
    _original(wall, 0, 0, exhibit)
    colours_G3 = np.stack([rgb(colour) for colour in COLOURS[: len(groups)]])
    means = enlarge(np.stack([exhibit.maps_MHW[list(g)].mean(0) for g in groups]))
    wall.picture(0, 1, combine(base, means, colours_G3))
    large_MSS = enlarge(exhibit.maps_MHW)
    for place, (query, group) in enumerate(queries, start=2):
        pixels = tint(base, colours_G3[group], strength(large_MSS[query]))
        row, column = divmod(place, COLUMNS)
        wall.picture(row, column, pixels, edge=COLOURS[group])
        tag = {"facecolor": "white", "edgecolor": COLOURS[group], "pad": 1.5, "linewidth": 0.8}
        x, y = wall.left_of(column) + 0.055, wall.above(row) + 0.06
        wall.text(x, y, str(query), size=6.5, va="top", bbox=tag)
    return wall.figure


def _original(wall: Wall, row: int, column: int, exhibit: Exhibit) -> None:
    """The image itself, with ground-truth boxes."""
    x, y = wall.left_of(column), wall.above(row)
    if exhibit.crop is None:
        wall.picture(row, column, ground(None))
        style = {"ha": "center", "va": "center", "size": 6.5, "color": MUTED}
        wall.text(x + PANEL / 2, y + PANEL / 2, "image not\nat hand", **style)
    else:
        wall.picture(row, column, exhibit.crop / 255)
    for x0, y0, x1, y1 in PANEL * exhibit.boxes_k4:
        for colour, width in (("white", 2.4), (INK, 1.0)):  # seen on any ground
            style = {"fill": False, "edgecolor": colour, "linewidth": width}
            wall.box(x + x0, y + y0, x1 - x0, y1 - y0, **style)


def describe(group: Sequence[int], analysis: Analysis) -> list[str]:
    """A column's title, and what its queries have in common."""
    members = [analysis.queries[query] for query in group]
    drop = 100 * float(np.mean([query.accuracy_drop for query in members]))
    entropy = float(np.mean([query.entropy for query in members]))
    if len(group) == 1:
        name = f"query {group[0]}"
    else:
        name = f"{len(group)} queries: " + ",".join(map(str, group))
    return [shorten(name, 19), f"drop {drop:.2f} points", f"entropy {entropy:.2f}"]


def shorten(text: str, most: int) -> str:
    """The beginning, where a text is too long."""
    return text if len(text) <= most else text[: most - 1].rstrip(" ,") + "…"


# ------------------------------------------------------------------------------------------- plots


def scatter(analysis: Analysis, groups: Sequence[Sequence[int]], title: str) -> Figure:
    """What a query is worth against each of its other measures, a panel each."""
    from matplotlib.figure import Figure

    found = analysis.correlations
    names, matrix = found["measures"], found["matrix"]
    labels = {
        "entropy": "normalised entropy",
        "off_centre": "centroid's distance from the centre",
        "complementarity": "distance to the other queries",
        "centroid_in_box": "share of centroids inside a box",
    }
    others = [name for name in names if name != "accuracy_drop"]
    figure = Figure(figsize=(0.5 + 2.5 * len(others), 3.0), dpi=DPI, layout="constrained")
    style: dict[str, Any] = {"size": 10, "weight": "bold", "color": INK, "parse_math": False}
    figure.suptitle(title, x=0.01, ha="left", **style)
    place = {query: number for number, group in enumerate(groups) for query in group}
    for column, name in enumerate(others):
        axes = figure.add_subplot(1, len(others), column + 1)
        _points(axes, analysis, name, place)
        r = matrix[0][names.index(name)]
        axes.set_title(
            "" if r is None else f"r = {r:.2f}".replace("-", "\N{MINUS SIGN}"),
            size=8,
            color=MUTED,
            loc="right",
        )
        axes.set_xlabel(labels[name], size=8, color=INK)
        if column == 0:
            axes.set_ylabel("accuracy drop (points)", size=8, color=INK)
        else:
            axes.tick_params(labelleft=False)
    return figure


def _points(axes: Axes, analysis: Analysis, name: str, place: Mapping[int, int]) -> None:
    """A point a query, in its colour and marker; numbered, of many only those worth most."""
    axes.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
    axes.grid(color=RULE, linewidth=0.6, zorder=0)
    by_drop = sorted(analysis.queries, key=lambda query: -query.accuracy_drop)
    named = {query.query for query in by_drop[: 16 if len(by_drop) <= 16 else 3]}
    for query in analysis.queries:
        x, y, group = getattr(query, name), 100 * query.accuracy_drop, place[query.query]
        axes.plot(
            x, y, marker=MARKERS[group], color=COLOURS[group], zorder=2,
            markersize=8 if MARKERS[group] == "*" else 5.5,
            markeredgecolor="white", markeredgewidth=0.6, linestyle="none",
        )  # fmt: skip
        if query.query in named:
            axes.annotate(
                str(query.query), (x, y), xytext=(4, 3), textcoords="offset points",
                size=6.5, color=MUTED, zorder=3,
            )  # fmt: skip
    axes.margins(0.12)
    axes.tick_params(labelsize=7, colors=MUTED, length=2)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=RULE)


def to_bytes(figure: Figure, kind: str) -> bytes:
    """A picture as the bytes of a file, the same on every run.

    Args:
        figure: What to draw.
        kind: ``png`` or ``svg``.
    """
    import matplotlib

    buffer = io.BytesIO()
    with (
        matplotlib.rc_context({"svg.hashsalt": "epcache", "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        # Names of classes may be in a script that the font lacks
        warnings.filterwarnings("ignore", message="Glyph ", category=UserWarning)
        if kind == "svg":
            figure.savefig(buffer, format=kind, metadata={"Date": None})
        else:
            figure.savefig(buffer, format=kind, pil_kwargs={"compress_level": 4})
    return buffer.getvalue()
