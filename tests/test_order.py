"""Orders are pure functions of sizes and seeds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epcache.order import shuffled, store_order


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


def test_classes_mix():
    """Rows that were sorted by class are spread: every tenth of the order sees most classes."""
    labels = np.repeat(np.arange(10), 100)
    mixed = labels[store_order(1000, seed=0, split="train")]
    assert all(len(set(part)) >= 9 for part in np.split(mixed, 10))
