"""A specification means exactly the combinations that exist, on each store its own."""

import itertools

import pytest
from probekit import learnable_store

import epcache
from epcache.errors import ConfigError
from epcache.sweep import Sweep, stored_layers


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return epcache.open_store(learnable_store(tmp_path_factory.mktemp("sweep") / "store"))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    path = tmp_path_factory.mktemp("headless") / "store"
    return epcache.open_store(learnable_store(path, num_prefix=0, layers=(1, 2, 3)))


def jobs(text, store):
    return Sweep.parse(text).jobs(store)


def test_a_grid_is_every_combination(store):
    """Of all its lists; what stands above the grids counts for all."""
    text = """
        epochs = 3
        [[grid]]
        pooler = "ep"
        M = [2, 4]
        layers = "all"
        lr = [0.01, 0.1]
        seeds = [0, 1, 2]
        norms = ["none", "final"]
        [[grid]]
        pooler = "gap"
        epochs = 5
    """
    found = jobs(text, store).probes
    keys = [(c.pooler, c.num_queries, c.layer, c.lr, c.seed, c.norm, c.epochs) for c in found]
    expected = itertools.product(
        ["ep"], [2, 4], [0, 3], [0.01, 0.1], [0, 1, 2], ["none", "final"], [3]
    )
    assert sorted(keys[:-1]) == sorted(expected)
    assert keys[-1] == ("gap", None, 3, None, 0, "auto", 5)


def test_values_go_to_the_poolers_that_have_them(store, headless):
    """Queries to those with queries, no width for linear ones; nothing twice, no cls without."""
    text = """
        pooler = ["cls", "gap", "ep", "simpool", "cbam"]
        M = [2, 4]
        dim_out = [8, 16]
        tokens = ["patch", "all"]
    """
    found = jobs(text, store).probes
    count = {}
    for config in found:
        count.setdefault(config.pooler, []).append(
            (config.num_queries, config.dim_out, config.tokens)
        )
    assert count["cls"] == [(None, None, "patch")]
    assert count["gap"] == [(None, None, "patch"), (None, None, "all")]
    assert count["ep"] == list(itertools.product([2, 4], [8, 16], ["patch", "all"]))
    assert count["simpool"] == [(None, None, "patch"), (None, None, "all")]
    assert count["cbam"] == [(None, None, "patch")]
    assert "cls" not in {config.pooler for config in jobs(text, headless).probes}
    with pytest.raises(ConfigError, match="grid 1: no combination of its values exists in store"):
        jobs('pooler = "cls"', headless)


def test_amounts_of_images_stand_side_by_side(store):
    """Shots and shares are one axis: no probe has both."""
    found = jobs('shots = [1, 4]\nshares = ["10%", 0.5]\nM = 4', store).probes
    assert [(c.shots, c.share) for c in found] == [(1, None), (4, None), (None, 0.1), (None, 0.5)]


def test_classifiers_on_pooled_features(store):
    """k-NN, ridge and logistic regression take cls and gap, and of the values what they look at."""
    text = """
        method = ["knn", "ridge", "probe"]
        pooler = ["gap", "ep"]
        M = 4
        k = [1, 5]
        seed = [0, 1]
        epochs = [2, 3]
        shots = 2
    """
    found = jobs(text, store)
    assert [(job.method, job.pooler, job.fields["seed"], job.ks) for job in found.features] == [
        ("knn", "gap", 0, (1, 5)), ("knn", "gap", 1, (1, 5)),
        ("ridge", "gap", 0, ()), ("ridge", "gap", 1, ()),
    ]  # fmt: skip
    assert all(job.fields["shots"] == 2 for job in found.features)
    assert len(found.probes) == 2 * 2 * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[grid]]\npoler = 'ep'", r"grid 1: unknown key 'poler'; did you mean pooler"),
        ("learning_rat = 1", "unknown key 'learning_rat'; did you mean learning_rate"),
        ("zzz = 1", "unknown key 'zzz'; expected some of stores, method, pooler"),
        ("pooler = 'epp'", "did you mean ep"),
        ("M = 'many'", "M='many'; expected whole numbers, one or a list"),
        ("M = [4, 2.5]", "M=2.5; expected whole numbers"),
        ("lr = true", "lr=True; expected numbers"),
        ("lr = []", "lr is an empty list; leave it out or give a value"),
        ("method = 'svm'", "method='svm'; expected some of probe, knn, ridge, logistic"),
        ("layer = 0.5", 'expected block indices, "all" or "last"'),
        ("lr = 1\nlrs = 2", "lrs says again what another key says"),
        ("share = 'x%'", "share='x%' is no percentage"),
        ("[[grid]]\nstores = 'a'", "grid 1: stores stand at the top"),
        ("[grid]\nlr = 1", r"write \[\[grid\]\] above each"),
        ("lr = ", "is no TOML: "),
    ],
)
def test_mistakes_name_the_place_and_the_nearest_words(text, message):
    """Before any store is opened."""
    with pytest.raises(ConfigError, match=message):
        Sweep.parse(text)


def test_values_that_cannot_work_are_those_of_a_probe(store):
    """With the message that the probe itself has."""
    with pytest.raises(ConfigError, match=r"tokens='patches': expected one of"):
        jobs("tokens = 'patches'", store)
    with pytest.raises(ConfigError, match="layer 2 is not in store"):
        jobs("layer = 2", store)


def test_layers_by_word_and_number(headless):
    """Ascending and each once."""
    assert stored_layers(headless, "all") == [1, 2, 3]
    assert stored_layers(headless, "last") == [3]
    assert stored_layers(headless, "2,-1,3") == [2, 3]
    assert stored_layers(headless, [1, "last"]) == [1, 3]
    with pytest.raises(ConfigError, match="'first': expected all, last or block indices"):
        stored_layers(headless, "first")
