"""Measures of attention are what a plain computation on all maps at once gives."""

import numpy as np
import pooler_references
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pooler_cases import ATTENTIVE, GRID, ids, relative, small
from probekit import learnable_store

import epcache
from epcache import attention
from epcache.attention import MapReader, ablated_logits, analyse
from epcache.errors import ConfigError
from epcache.localization import BoxAccuracy, map_pixels, score_map
from epcache.poolers import POOLERS
from epcache.probe import Probe

NUM_TOKENS = GRID[0] * GRID[1]


def references_without(name, index):
    """Patches under which a plain reference computes with one of its maps spread evenly."""
    softmax, softplus, sigmoid = (
        torch.Tensor.softmax, torch.nn.functional.softplus, torch.sigmoid
    )  # fmt: skip

    def even_softmax(scores, dim):
        maps = softmax(scores, dim)
        if name == "abmilp":  # the score of its one map; self-attention before it stays
            return torch.full_like(maps, 1 / NUM_TOKENS) if dim == 1 else maps
        first = maps.shape[-1] - NUM_TOKENS  # a token in front keeps its share
        rest = maps[:, index, ..., first:]
        maps[:, index, ..., first:] = rest.mean(-1, keepdim=True)
        return maps

    def even_softplus(scores):
        return softplus(scores).mean(1, keepdim=True).expand_as(scores)

    def even_sigmoid(scores):
        gate = sigmoid(scores)
        return gate.mean((1, 2, 3), keepdim=True).expand_as(gate) if gate.dim() > 2 else gate

    return [
        (torch.Tensor, "softmax", even_softmax),
        (pooler_references.F, "softplus", even_softplus),
        (torch, "sigmoid", even_sigmoid),
    ]


@pytest.mark.parametrize("case", ATTENTIVE, ids=ids)
def test_one_map_is_spread_evenly_and_the_rest_kept(case, monkeypatch):
    """Each output is that of the textbook pooler whose own map is levelled inside of it."""
    pooler, tokens = small(case)
    params = {name: value.detach() for name, value in pooler.state_dict().items()}
    with torch.no_grad():
        outputs = pooler.eval().ablate(tokens)
        own = pooler(tokens)
    assert outputs.shape == (len(tokens), pooler.num_maps, pooler.dim_out)
    assert relative(outputs[:, 0], own) > 1e-4
    for index in range(pooler.num_maps):
        with monkeypatch.context() as patch:
            for target, name, value in references_without(case[0], index):
                patch.setattr(target, name, value)
            expected, _ = pooler_references.run(*case, params, tokens, grid=GRID)
        assert relative(outputs[:, index], expected) < 1e-9


def test_every_attentive_pooler_is_covered():
    """What has maps can be ablated: the cases above leave none out."""
    assert {case[0] for case in ATTENTIVE} == set(POOLERS) - {"cls", "gap"}


@pytest.mark.parametrize("case", ATTENTIVE, ids=ids)
def test_logits_of_slices_are_those_of_whole_outputs(case):
    """The fast way through the classifier gives the logits of pooling anew for each map."""
    pooler, tokens = small(case)
    probe = Probe(pooler, 5, torch.Generator().manual_seed(1)).double()
    probe.norm.running_mean = torch.randn(pooler.dim_out).double()
    probe.norm.running_var = torch.rand(pooler.dim_out).double() + 0.3
    probe.eval()
    with torch.no_grad():
        logits, ablated = ablated_logits(probe, tokens)
        plain = [probe.head(probe.norm(y)) for y in pooler.ablate(tokens).unbind(1)]
        assert relative(logits, probe(tokens)) < 1e-12
    assert relative(ablated, torch.stack(plain, 1)) < 1e-12


@pytest.mark.parametrize("case", ATTENTIVE, ids=ids)
def test_looking_changes_nothing(case):
    """Running statistics stay as they are, in training mode too."""
    pooler, tokens = small(case)
    before = {name: value.clone() for name, value in pooler.state_dict().items()}
    pooler.train().ablate(tokens)
    assert all(torch.equal(value, before[name]) for name, value in pooler.state_dict().items())


MAPS = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))


def random_maps(shape, seed=0):
    """(B, M, H * W) distributions, some of them concentrated."""
    generator = torch.Generator().manual_seed(seed)
    images, maps, height, width = shape
    scores = torch.randn(images, maps, height * width, generator=generator, dtype=torch.float64)
    return (5 * scores).softmax(-1)


@settings(max_examples=60)
@given(shape=MAPS, seed=st.integers(0, 99))
def test_measures_of_maps_are_the_plain_sums(shape, seed):
    """Entropy, centroid and distance, each written with loops."""
    maps, grid = random_maps(shape, seed), shape[2:]
    values = maps.numpy()
    entropy = attention.entropy(maps).numpy()
    centroid = attention.centroids(maps, grid).numpy()
    apart = attention.total_variation(maps).numpy()
    for image, of_image in enumerate(values):
        for query, flat in enumerate(of_image):
            total = -sum(a * np.log(a) for a in flat if a > 0)
            most = np.log(len(flat))
            assert entropy[image, query] == pytest.approx(total / most if most else 0, abs=1e-9)
            x = y = 0.0
            for cell, a in enumerate(flat):
                row, column = divmod(cell, grid[1])
                x, y = x + a * (column + 0.5) / grid[1], y + a * (row + 0.5) / grid[0]
            np.testing.assert_allclose(centroid[image, query], [x, y], atol=1e-6)
            for other, its in enumerate(of_image):
                expected = 0.5 * np.abs(flat - its).sum()
                assert apart[image, query, other] == pytest.approx(expected, abs=1e-9)


def test_measures_at_their_ends():
    """Uniform: entropy 1, in the centre. One token: entropy 0, in its cell. Disjoint: 1 apart."""
    maps = torch.zeros(1, 3, 6)
    maps[0, 0] = 1 / 6
    maps[0, 1, 5] = maps[0, 2, 0] = 1
    assert attention.entropy(maps)[0].tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    np.testing.assert_allclose(
        attention.centroids(maps, (2, 3))[0], [[0.5, 0.5], [5 / 6, 0.75], [1 / 6, 0.25]], atol=1e-6
    )
    apart = attention.total_variation(maps)[0].numpy()
    np.testing.assert_allclose(apart, [[0, 5 / 6, 5 / 6], [5 / 6, 0, 1], [5 / 6, 1, 0]], atol=1e-6)


def test_places_inside_boxes():
    """Inside any of the boxes, edges included; of no box, outside."""
    places = np.array([[0.5, 0.5], [0.2, 0.9], [0.1, 0.1]])
    boxes = np.array([[0.4, 0.4, 0.5, 0.5], [0.15, 0.8, 1, 1]])
    assert attention.inside_any(places, boxes).tolist() == [True, True, False]
    assert attention.inside_any(places, boxes[:0]).tolist() == [False] * 3


def test_correlations_are_numpys():
    """Pearson's, on the diagonal 1; a constant measure or two queries have none."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((3, 7))
    np.testing.assert_allclose(attention.correlate(columns.tolist()), np.corrcoef(columns))
    flat = attention.correlate([[1, 2, 4], [0.1 + 0.2, 0.3, 0.3]])
    assert flat == [[pytest.approx(1), None], [None, None]]
    assert attention.correlate([[1, 2], [2, 5]]) == [[None, None], [None, None]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store and one run on it of each of some poolers."""
    root = tmp_path_factory.mktemp("attention")
    store = epcache.open_store(learnable_store(root / "store"))
    kinds = [
        {"pooler": "ep", "num_queries": 4}, {"pooler": "vjepa", "options": {"num_heads": 4}},
        {"pooler": "clip"}, {"pooler": "simpool"}, {"pooler": "gap"},
        {"pooler": "ep", "num_queries": 8, "tokens": "all"},
    ]  # fmt: skip
    configs = [
        epcache.ProbeConfig(**kind, lr=0.01, epochs=3, holdout=0, batch_size=16) for kind in kinds
    ]
    rows = epcache.fit_probes(store, configs, device="cpu", results_dir=root / "results")
    probes = [epcache.load_probe(row.run, results_dir=root / "results") for row in rows]
    return store, {f"{probe.row.pooler}-{probe.row.tokens}": probe for probe in probes}


def all_at_once(store, probe):
    """Tokens of the evaluation split as the probe sees them, its maps and its labels."""
    layer = store["val"].layer(probe.row.layer)
    rows = np.arange(len(store["val"]))
    tokens = probe.prepare(
        torch.from_numpy(layer.patch.take(rows)), torch.from_numpy(layer.prefix.take(rows))
    )
    with torch.no_grad():
        maps = probe.probe.pooler.attention(tokens)
    if probe.row.tokens == "all":
        maps = maps[..., 1:] / maps[..., 1:].sum(-1, keepdim=True)
    return tokens, maps, store["val"].labels


@pytest.mark.parametrize("kind", ["ep-patch", "vjepa-patch", "clip-patch", "ep-all"])
@pytest.mark.parametrize("batch", [5, 64])
def test_a_streamed_analysis_is_the_analysis_at_once(trained, kind, batch, monkeypatch):
    """Every number, whatever the batch, as computed from all maps of the split together."""
    store, probes = trained
    monkeypatch.setattr(attention, "MAX_BATCH", batch)
    probe, seen = probes[kind], []
    found = analyse(MapReader(probe, store, "val"), progress=lambda *done: seen.append(done))
    tokens, maps, labels = all_at_once(store, probe)
    with torch.no_grad():
        accuracy = (probe.probe(tokens).argmax(1).numpy() == labels).mean()
        ablated = probe.probe.pooler.ablate(tokens)
        guesses = probe.probe.head(probe.probe.norm(ablated)).argmax(-1).numpy()
    assert seen[-1] == (24, 24)
    assert found.num_images == 24
    assert found.accuracy == pytest.approx(accuracy)
    assert found.accuracy == pytest.approx(probe.row.test_top1_best, abs=1e-6)
    centroids = attention.centroids(maps, (2, 3)).numpy()
    apart = attention.total_variation(maps).mean(0).numpy()
    num_maps = maps.shape[1]
    for m, query in enumerate(found.queries):
        assert query.query == m
        assert query.accuracy_drop == pytest.approx(accuracy - (guesses[:, m] == labels).mean())
        assert query.entropy == pytest.approx(float(attention.entropy(maps)[:, m].mean()), abs=1e-5)
        np.testing.assert_allclose(query.centroid, centroids[:, m].mean(0), atol=1e-5)
        distance = np.sqrt(((centroids[:, m] - 0.5) ** 2).sum(-1)).mean()
        assert query.off_centre == pytest.approx(distance, abs=1e-5)
        others = [apart[m, k] for k in range(num_maps) if k != m]
        assert query.complementarity == pytest.approx(np.mean(others), abs=1e-5)
        assert query.centroid_in_box is None
    upper = apart[np.triu_indices(num_maps, 1)]
    assert found.complementarity == pytest.approx(upper.mean(), abs=1e-5)
    assert found.max_box_acc_v2 is None
    names = ["accuracy_drop", "entropy", "off_centre", "complementarity"]
    assert found.correlations["measures"] == names


def test_boxes_are_scored_on_the_images_that_have_them(trained):
    """Centroids against boxes and MaxBoxAcc of the mean map, as computed image by image."""
    store, probes = trained
    rng = np.random.default_rng(3)
    boxes = [np.sort(rng.random((row % 3, 2, 2)), axis=1).reshape(-1, 4) for row in range(24)]
    found = analyse(MapReader(probes["ep-patch"], store, "val"), boxes=boxes)
    _, maps, _ = all_at_once(store, probes["ep-patch"])
    centroids, mean = attention.centroids(maps, (2, 3)).numpy(), maps.mean(1).numpy()
    localised = BoxAccuracy()
    inside = np.zeros(4)
    for image, its in enumerate(boxes):
        if len(its):
            localised.add(score_map(mean[image].reshape(2, 3)), map_pixels(its))
            for m, (x, y) in enumerate(centroids[image]):
                inside[m] += any(a <= x <= c and b <= y <= d for a, b, c, d in its)
    assert found.num_boxed == localised.num_images == 16
    assert found.max_box_acc_v2 == pytest.approx(localised.max_box_acc_v2)
    assert found.max_box_acc_v1 == pytest.approx(localised.max_box_acc_v1)
    np.testing.assert_allclose([q.centroid_in_box for q in found.queries], inside / 16)
    assert found.correlations["measures"][-1] == "centroid_in_box"
    whole = analyse(
        MapReader(probes["ep-patch"], store, "val"), boxes=[np.array([[0, 0, 1.0, 1.0]])] * 24
    )
    assert {query.centroid_in_box for query in whole.queries} == {1.0}


def test_one_map_has_no_company(trained):
    """Complementarity and correlations of a single map are null, and all of it is JSON."""
    store, probes = trained
    found = analyse(MapReader(probes["simpool-patch"], store, "val")).to_json()
    assert found["complementarity"] is None
    assert found["queries"][0]["complementarity"] is None
    assert found["correlations"]["matrix"] == [[None] * 3] * 3
    assert set(found["definitions"]) >= set(attention.MEASURES)


def test_maps_leave_cls_out(trained):
    """Maps of a probe that sees [CLS] are over the grid, and sum to 1."""
    store, probes = trained
    maps = MapReader(probes["ep-all"], store, "val").maps(np.array([3, 0, 7]))
    _, expected, _ = all_at_once(store, probes["ep-all"])
    assert maps.shape == (3, 8, 2, 3)
    np.testing.assert_allclose(maps.sum((2, 3)), 1, atol=1e-5)
    np.testing.assert_allclose(maps.reshape(3, 8, 6), expected[[3, 0, 7]], atol=1e-6)


def test_all_attention_on_cls_is_an_even_map(trained):
    """Where nothing is left over for the patches, no map is not a number."""
    store, probes = trained
    reader = MapReader(probes["ep-all"], store, "val")
    maps = torch.zeros(1, 8, 7)
    maps[..., 0] = 1
    assert torch.equal(reader.patch_maps(maps), torch.full((1, 8, 6), 1 / 6))


def test_poolers_without_maps_are_refused(trained):
    """What has nothing to look at is refused, and the error says what to take."""
    store, probes = trained
    with pytest.raises(ConfigError, match="pooler gap has no attention maps; take a run of"):
        MapReader(probes["gap-patch"], store, "val")
