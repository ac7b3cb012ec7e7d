"""Orders are pure functions of sizes and seeds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epcache.order import nested_share, nested_shots, outside, shuffled, store_order


@given(num_rows=st.integers(0, 500), seed=st.integers(0, 2**32))
def test_an_order_is_a_permutation(num_rows, seed):
    """Every row once, for any size and seed."""
    order = store_order(num_rows, seed=seed, split="train")
    np.testing.assert_array_equal(np.sort(order), np.arange(num_rows))


def test_an_order_never_changes():
    """The first rows as they were when stores were first written; stores depend on them."""
    assert store_order(10, seed=0, split="train").tolist() == [9, 0, 2, 3, 8, 6, 5, 4, 7, 1]
    assert store_order(10, seed=0, split="train").dtype == np.int64


def test_seed_and_salt_change_the_order():
    """Two seeds, or two uses of one seed, share no order."""
    orders = {
        tuple(shuffled(50, seed=seed, salt=salt)) for seed in (0, 1, 2) for salt in ("a", "b")
    }
    assert len(orders) == 6


LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)


@given(labels=LABELS, few=st.integers(1, 20), more=st.integers(0, 20), seed=st.integers(0, 99))
def test_fewer_shots_lie_within_more(labels, few, more, seed):
    """Of each class min(shots, all) rows, each once, and none is given up for more shots."""
    small, short = nested_shots(labels, shots=few, seed=seed)
    large, _ = nested_shots(labels, shots=few + more, seed=seed)
    counts = np.bincount(labels)
    assert np.bincount(labels[small], minlength=6).tolist() == [
        min(few, count) for count in np.bincount(labels, minlength=6)
    ]
    assert short == [label for label in range(len(counts)) if 0 < counts[label] < few]
    assert set(small) <= set(large)
    assert sorted(set(small)) == small.tolist()


@given(labels=LABELS, shares=st.tuples(*[st.floats(0.001, 1)] * 2), seed=st.integers(0, 99))
def test_shares_are_nested_and_leave_no_class_out(labels, shares, seed):
    """At least one row of each class; the smaller share lies in the larger, one shot in both."""
    small, large = (nested_share(labels, share=share, seed=seed) for share in sorted(shares))
    for label in np.unique(labels):
        expected = max(1, round((labels == label).sum() * min(shares)))
        assert (labels[small] == label).sum() == expected
    assert set(nested_shots(labels, shots=1, seed=seed)[0]) <= set(small) <= set(large)


@given(labels=LABELS, shots=st.integers(1, 20), most=st.integers(0, 6), seed=st.integers(0, 99))
def test_rows_outside_a_subset(labels, shots, most, seed):
    """None of the subset; of a class no more than asked, than the subset has, than there are."""
    chosen, _ = nested_shots(labels, shots=shots, seed=seed)
    found = outside(labels, chosen, most=most, seed=seed)
    assert sorted(set(found) - set(chosen)) == found.tolist()
    for label in np.unique(labels):
        has = (labels == label).sum()
        inside = min(shots, has)
        assert (labels[found] == label).sum() == min(most, inside, has - inside)


def test_larger_subsets_are_judged_by_the_same_rows_and_more():
    """While there are enough rows: what judges one shot judges two and four as well."""
    labels = np.repeat(np.arange(3), 20)
    judged = [
        set(outside(labels, nested_shots(labels, shots=n, seed=1)[0], most=4, seed=1).tolist())
        for n in (1, 2, 4, 8)
    ]
    assert [len(rows) for rows in judged] == [3, 6, 12, 12]
    assert judged[0] < judged[1] < judged[2] == judged[3]


def test_classes_mix():
    """Rows that were sorted by class are spread: every tenth of the order sees most classes."""
    labels = np.repeat(np.arange(10), 100)
    mixed = labels[store_order(1000, seed=0, split="train")]
    assert all(len(set(part)) >= 9 for part in np.split(mixed, 10))
