"""Ranks and flips are those that counting by hand gives."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from test_results import BASE

from epcache.ranks import flips, rank_backbones, ranked
from epcache.results import Row

SCORES = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 4).map(float), min_size=1)


def row(backbone, pooler, test, **more):
    """A scored row of a backbone's last layer."""
    number = next(COUNTER)
    values = {"val_top1": test, "test_top1": test, "test_top1_best": test, "epochs": 5, **more}
    base = {**BASE, "backbone": backbone, "digest": backbone * 8, "pooler": pooler}
    return Row(**{"run": str(number), **base, **values})


COUNTER = itertools.count()


@given(SCORES)
def test_ranks_count_the_better_ones(scores):
    """Rank one has nobody above; equal scores share a rank."""
    found = ranked(scores)
    order = sorted(scores.values(), reverse=True)
    assert all(found[name] == 1 + order.index(score) for name, score in scores.items())


@given(st.dictionaries(st.sampled_from(["knn", "linear", "ep"]), SCORES, min_size=2))
def test_a_flip_is_an_opposite_order(accuracies):
    """Each is one, the first backbone better by the first protocol, and none is missing."""
    found = flips(accuracies)
    for flip in found:
        (one, other), (a, b) = flip.protocols, flip.backbones
        assert accuracies[one][a] > accuracies[one][b]
        assert accuracies[other][a] < accuracies[other][b]
    expected = {
        (one, other, a, b)
        for one, other in itertools.combinations(accuracies, 2)
        for a, b in itertools.permutations("abcde", 2)
        if {a, b} <= set(accuracies[one]) & set(accuracies[other])
        and accuracies[one][a] > accuracies[one][b]
        and accuracies[other][a] < accuracies[other][b]
    }
    assert {(*flip.protocols, *flip.backbones) for flip in found} == expected
    assert len(found) == len(expected)


def test_each_protocol_takes_its_best_row():
    """k-NN its best k, linear the better of cls and gap, EP its best rate; by held-out accuracy."""
    rows = [
        row("mae", "gap", 0.2, k=10, temperature=0.07, epochs=None),
        row("mae", "gap", 0.3, k=20, temperature=0.07, epochs=None),
        row("mae", "cls", 0.5), row("mae", "gap", 0.6), row("mae", "ep", 0.9),
        row("mae", "ep", 0.99, val_top1=0.1),
        row("mae", "ep", 0.95, layer=2), row("mae", "ep", 0.95, average_layers=2),
        row("dino", "cls", 0.7, k=10, temperature=0.07, epochs=None),
        row("dino", "cls", 0.7), row("dino", "gap", 0.5), row("dino", "ep", 0.8),
        row("dino", "gap", 0.99, method="ridge", l2=1.0),
    ]  # fmt: skip
    (found,) = rank_backbones(rows)
    assert found.accuracies == {
        "knn": {"mae": 0.3, "dino": 0.7},
        "linear": {"mae": 0.6, "dino": 0.7},
        "ep": {"mae": 0.9, "dino": 0.8},
    }
    assert found.ranks["knn"] == found.ranks["linear"] == {"mae": 2, "dino": 1}
    assert found.ranks["ep"] == {"mae": 1, "dino": 2}
    assert found.backbones == ("mae", "dino")
    assert {(flip.protocols, flip.backbones) for flip in found.flips} == {
        (("knn", "ep"), ("dino", "mae")),
        (("linear", "ep"), ("dino", "mae")),
    }
    assert found.to_json()["flips"][0]["backbones"] == ("dino", "mae")


def test_few_images_are_ranked_apart_and_averaged_over_seeds():
    """A ranking for each amount; a single backbone has none."""
    few = [
        row(backbone, "ep", test, shots=4, seed=seed, train_images=12)
        for backbone, tests in (("a", (0.2, 0.4)), ("b", (0.5, 0.3)))
        for seed, test in enumerate(tests)
    ]
    alone = [row("a", "ep", 0.9)]
    (found,) = rank_backbones(few + alone)
    assert (found.shots, found.share) == (4, None)
    assert found.accuracies == {"ep": {"a": 0.30000000000000004, "b": 0.4}}
    assert rank_backbones(alone) == []


def test_two_stores_of_one_backbone_are_told_apart():
    """By the store's digest; another data set is another ranking."""
    rows = [row("a", "ep", 0.5), row("a", "ep", 0.6, digest="other678digest"), row("b", "ep", 0.1)]
    (found,) = rank_backbones(rows)
    assert set(found.ranks["ep"]) == {"a (aaaaaaaa)", "a (other678)", "b"}
    assert rank_backbones([rows[0], row("b", "ep", 0.3, dataset="farm")]) == []
