"""What is learnt, what chooses and what is scored never share an image."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probekit import BAD_ROW, learnable_store

import epcache
from epcache.errors import ConfigError
from epcache.subset import choose_rows


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = learnable_store(tmp_path_factory.mktemp("subset") / "store")
    return epcache.open_store(path)["train"]


AMOUNTS = st.one_of(
    st.builds(lambda n: {"shots": n}, st.integers(1, 30)),
    st.builds(lambda s: {"share": s}, st.floats(0.001, 1)),
    st.just({}),
)


@settings(deadline=None, max_examples=60)
@given(amount=AMOUNTS, seed=st.integers(0, 20), holdout=st.sampled_from([0.0, 0.1, 0.3]))
def test_what_chooses_is_never_learnt_from(split, amount, seed, holdout):
    """For every amount and seed: disjoint, valid, ascending; a subset is refitted on alone."""
    found = choose_rows(split, **amount, seed=seed, holdout=holdout)
    valid = set(range(61)) - {BAD_ROW}
    assert not set(found.learn) & set(found.held)
    assert set(found.learn) | set(found.held) | set(found.rows) <= valid
    for rows in (found.rows, found.learn, found.held):
        assert (np.diff(rows) > 0).all()
    assert (len(found.held) == 0) == (holdout == 0)
    assert found.all_rows.tolist() == sorted({*found.rows, *found.held})
    if found.is_outside:
        assert found.learn.tolist() == found.rows.tolist()
        assert not set(found.rows) & set(found.held)
    else:
        assert sorted([*found.learn, *found.held]) == found.rows.tolist()


def test_one_shot_is_chosen_by_one_image_a_class(split):
    """A subset is judged by no more images than it has, and by at most four a class."""
    for shots, held in ((1, [1, 1, 1]), (3, [3, 3, 3]), (8, [4, 4, 4]), (17, [4, 3, 2])):
        found = choose_rows(split, shots=shots, holdout=0.1)
        assert np.bincount(split.labels[found.held]).tolist() == held, shots
        assert found.notes == ()


def test_nothing_left_outside_is_told_and_held_out_as_usual(split):
    """All of train as a subset: a tenth of it chooses, and a line says so."""
    found = choose_rows(split, share=1.0, holdout=0.1)
    assert not found.is_outside
    assert found.notes == (
        "the subset is all of train and leaves no image to choose by: 10% of it is held out, as "
        "without a subset",
    )
    assert np.bincount(split.labels[found.held]).tolist() == [2, 2, 2]
    assert len(found.rows) == 60


def test_shots_above_the_smallest_class_are_told(tmp_path):
    """Which is 19 images here: all of them are taken, and the others choose."""
    store = epcache.open_store(learnable_store(tmp_path / "store", num_train=62))
    split = store["train"]
    labels = split.labels[split.valid]
    assert np.bincount(labels).tolist() == [21, 21, 19]
    found = choose_rows(split, shots=20, holdout=0.1)
    assert found.short_classes == (2,)
    assert found.notes == (
        "1 of 3 classes have fewer than 20 training images: all of theirs are taken",
        "1 of 3 classes have no training image outside the subset of 59: the others choose "
        "learning rate and epoch",
    )
    assert np.bincount(split.labels[found.rows]).tolist() == [20, 20, 19]
    assert np.bincount(split.labels[found.held]).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shots": 1, "share": 0.1}, "shots=1 and share=0.1: give one of the two"),
        ({"shots": 0}, "shots=0: expected a whole number of 1 or more"),
        ({"share": 0.0}, "above 0 and at most 1"),
        ({"share": 1.5}, "share=1.5: expected a share"),
        ({"holdout": 0.01}, "holds out none"),
    ],
)
def test_amounts_that_cannot_be_are_refused(split, wrong, message):
    with pytest.raises(ConfigError, match=message):
        choose_rows(split, **wrong)
