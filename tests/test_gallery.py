"""Pictures of attention show the images that were cached, and colour what is attended to."""

import dataclasses
import io
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from epcache import gallery, overlay
from epcache.attention import Analysis, QueryMeasures
from epcache.dataset import Preprocess
from epcache.palette import CATEGORICAL


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=30), count=st.integers(0, 12),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_choice_is_of_as_many_classes_as_can_be(labels, count, seed):
    """Different images, the same on every call; no class a second time before all had a turn."""
    labels = np.array(labels)
    chosen = gallery.choose_images(labels, count, seed=seed)
    assert len(set(chosen.tolist())) == len(chosen) == min(count, len(labels))
    assert chosen.tolist() == gallery.choose_images(labels, count, seed=seed).tolist()
    counts = np.bincount(labels[chosen], minlength=5)
    for label in range(5):
        left = (labels == label).sum() - counts[label]
        assert not left or counts[label] >= counts.max() - 1


def test_choice_depends_on_the_seed_and_prefers():
    """Another seed shows others; images with a box come first."""
    labels = np.arange(100) % 7
    assert len({tuple(gallery.choose_images(labels, 4, seed=seed)) for seed in range(5)}) == 5
    first = np.zeros(100, bool)
    first[[10, 40, 55]] = True
    chosen = gallery.choose_images(labels, 5, seed=0, first=first)
    assert set(chosen[:3]) == {10, 40, 55}


def test_few_queries_have_a_colour_each():
    """Up to eight are not grouped, however alike."""
    assert gallery.group_queries(np.zeros((8, 8))) == [[m] for m in range(8)]


def test_many_queries_are_grouped_by_what_they_look_at():
    """Twelve queries, of which some look alike, fall into eight groups of those."""
    alike = [[0, 7], [1], [2, 5, 11], [3], [4], [6], [8, 10], [9]]
    distances = np.full((12, 12), 0.9)
    for group in alike:
        distances[np.ix_(group, group)] = 0.1
    np.fill_diagonal(distances, 0)
    assert gallery.group_queries(distances) == alike


def test_colours_are_the_palettes_and_seen_on_grey():
    """Each differs from every grey that an image is drawn in."""
    assert overlay.COLOURS == CATEGORICAL
    grounds = overlay.ground(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))

    def contrast(colour):
        return np.abs(grounds.reshape(-1, 3) - overlay.rgb(colour)).max(1).min()

    assert contrast("#B0B0B0") < 0.01
    assert min(map(contrast, overlay.COLOURS)) > 0.15


def test_tint_leaves_the_image_where_nobody_looks():
    """No attention, no colour; the more of it, the nearer the colour."""
    base = np.full((4, 4, 3), 0.8)
    colour = overlay.rgb("#0072B2")
    density = np.linspace(0, 1, 16).reshape(4, 4)
    tinted = overlay.tint(base, colour, density)
    assert np.array_equal(tinted[0, 0], base[0, 0])
    assert (np.diff(np.abs(tinted - base).sum(-1).ravel()) > 0).all()
    assert tinted[3, 3].argmax() == 2


def test_strength_spans_a_map_and_ignores_noise():
    """From 0 to 1 however small the values; an even map is 0 everywhere, rounding or not."""
    rng = np.random.default_rng(0)
    scaled = overlay.strength(1e-4 * rng.random((20, 20)))
    assert (scaled.min(), scaled.max()) == (0, 1)
    even = overlay.enlarge(np.full((3, 3), 0.1))
    assert even.std() > 0
    assert not overlay.strength(even).any()


def test_combined_picture_has_the_colour_of_who_looks_most():
    """Left and right halves belong to two queries."""
    maps = np.zeros((2, 8, 8))
    maps[0, :, :4], maps[1, :, 4:] = 0.03, 0.02
    colours = np.array([[1.0, 0, 0], [0, 0, 1.0]])
    picture = overlay.combine(np.full((8, 8, 3), 0.9), maps, colours)
    assert (picture[:, :4].argmax(-1) == 0).all()
    noisy = maps + 1e-3 * np.random.default_rng(0).random(maps.shape)
    picture = overlay.combine(np.full((8, 8, 3), 0.9), noisy, colours)
    assert (picture[:, 5:, 2] >= picture[:, 5:, 0]).all()


@pytest.fixture
def folder(tmp_path):
    """``val/<class>/<n>.png`` of noise, and a store that was made from it."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for row in range(4):
            path = tmp_path / "images" / split / "ab"[row % 2] / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40 + row, 50, 3), np.uint8)).save(path)
    provenance = {
        "dataset": {"name": "imagefolder", "root": str(tmp_path / "images")},
        "transform": {"image_size": 32, "crop_pct": 0.875, "interpolation": "bicubic"},
    }
    return tmp_path / "images", SimpleNamespace(provenance=provenance)


def test_images_are_shown_as_the_backbone_saw_them(folder):
    """The evaluation crop, to the pixel, in the order asked for."""
    root, store = folder
    paths = ["val/b/3.png", "val/a/0.png"]
    crops = gallery.load_crops(store, "val", paths, say=pytest.fail)
    for path, crop in zip(paths, crops, strict=True):
        with Image.open(root / path) as image:
            expected = Preprocess(image_size=32).eval_crop(image.convert("RGB"))
        assert np.array_equal(crop, np.asarray(expected))


def test_missing_images_are_grey_and_told(folder):
    """A file that is gone or damaged costs its picture alone; a folder that is gone, all."""
    root, store = folder
    (root / "val" / "a" / "0.png").write_bytes(b"no image")
    told = []
    crops = gallery.load_crops(
        store, "val", ["val/a/0.png", "val/a/9.png", "val/a/2.png"], say=told.append
    )
    assert [crop is None for crop in crops] == [True, True, False]
    assert ["image val/a/0.png is not at hand" in told[0], "not in the folder" in told[1]] == [
        True, True,
    ]  # fmt: skip
    root.rename(root.with_name("moved"))
    assert gallery.load_crops(store, "val", ["val/a/2.png"], say=told.append) == [None]
    assert "maps are drawn over grey: imagefolder is not at" in told[2]


def analysis_of(num_maps):
    """Some measures of so many queries."""
    rng = np.random.default_rng(0)
    queries = [
        QueryMeasures(
            query=m, accuracy_drop=rng.normal() / 10, entropy=rng.random(), centroid=(0.4, 0.6),
            off_centre=rng.random() / 2, complementarity=rng.random() if num_maps > 1 else None,
            centroid_in_box=None,
        )
        for m in range(num_maps)
    ]  # fmt: skip
    return Analysis(
        queries=queries, accuracy=0.5, num_images=9, num_boxed=0,
        distances_MM=rng.random((num_maps, num_maps)), max_box_acc_v1=None, max_box_acc_v2=None,
    )  # fmt: skip


def exhibits_of(num_maps, number):
    """Images of noise, every second one not at hand."""
    rng = np.random.default_rng(0)
    return [
        gallery.Exhibit(
            label="a class of a rather long name",
            crop=None if row % 2 else rng.integers(0, 256, (32, 32, 3), np.uint8),
            maps_MHW=rng.dirichlet(np.ones(6), num_maps).reshape(num_maps, 2, 3).astype("f4"),
            boxes_k4=np.array([[0.1, 0.2, 0.5, 0.9]])[: row % 3],
        )
        for row in range(number)
    ]


TITLE = "vjepa on a_backbone_of_some_length_224, dataset: attention over images of validation"


def texts_of(figure):
    """Everything written on a figure."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def outside(figure):
    """Texts that are cut off at the figure's edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = figure.get_size_inches() * figure.dpi
    found = []
    labels = [part for ax in figure.axes for part in (ax.xaxis.label, ax.yaxis.label, *ax.texts)]
    for text in [*figure.texts, *labels]:
        box = text.get_window_extent(canvas.get_renderer())
        inside = box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1
        if text.get_text() and not inside:
            found.append(text.get_text())
    return found


@pytest.mark.parametrize(
    ("num_maps", "number", "panels"),
    [(1, 1, 2), (1, 5, 10), (2, 3, 12), (4, 1, 6), (8, 2, 20), (20, 2, 20)],
)
def test_gallery_has_every_image_with_every_query(num_maps, number, panels):
    """An image, its combined picture where there is more than one map, and each query or group."""
    analysis = analysis_of(num_maps)
    groups = gallery.group_queries(analysis.distances_MM)
    figure = gallery.gallery(exhibits_of(num_maps, number), groups, analysis, TITLE)
    assert len(figure.axes[0].images) == panels
    texts = texts_of(figure)
    assert texts.count("a class of a rather…") == number
    assert sum("entropy" in text for text in texts) % len(groups) == 0
    assert outside(figure) == []


def test_small_multiples_have_all_queries():
    """Every query's number once, after the image and the combined picture."""
    analysis = analysis_of(20)
    groups = gallery.group_queries(analysis.distances_MM)
    figure = gallery.small_multiples(exhibits_of(20, 1)[0], groups, analysis, "all queries")
    assert len(figure.axes[0].images) == 22
    assert {int(text) for text in texts_of(figure) if text.isdecimal()} == set(range(20))
    assert outside(figure) == []


def test_scatter_has_a_panel_for_each_measure_and_a_point_for_each_query():
    """Points are the numbers, with their correlation above; a measure without any is left out."""
    analysis = analysis_of(5)
    figure = gallery.scatter(analysis, [[m] for m in range(5)], "measures")
    assert len(figure.axes) == 3
    for axes, name in zip(figure.axes, ("entropy", "off_centre", "complementarity"), strict=True):
        points = {(x, y) for line in axes.lines[1:] for x, y in zip(*line.get_data(), strict=True)}
        expected = {(getattr(q, name), 100 * q.accuracy_drop) for q in analysis.queries}
        assert points == expected
        r = np.corrcoef(*zip(*expected, strict=True))[0, 1]
        assert f"r = {r:.2f}".replace("-", "\N{MINUS SIGN}") in axes.get_title(loc="right")
    boxed = dataclasses.replace(
        analysis, queries=[dataclasses.replace(q, centroid_in_box=0.5) for q in analysis.queries]
    )
    figure = gallery.scatter(boxed, [[m] for m in range(5)], "measures")
    assert len(figure.axes) == 4
    assert figure.axes[3].get_title(loc="right") == ""
    assert outside(figure) == []


def test_files_are_the_same_on_every_run():
    """No date and no random ids, and no complaint of a font; the PNG is of the figure's size."""
    groups = [[m] for m in range(3)]
    for kind in ("png", "svg"):
        one, two = (
            gallery.to_bytes(gallery.scatter(analysis_of(3), groups, "measures"), kind)
            for _ in range(2)
        )
        assert one == two
    figure = gallery.gallery(exhibits_of(3, 1), groups, analysis_of(3), "猫 of $1$")
    with Image.open(io.BytesIO(gallery.to_bytes(figure, "png"))) as image:
        np.testing.assert_allclose(image.size, figure.get_size_inches() * figure.dpi, atol=1)
