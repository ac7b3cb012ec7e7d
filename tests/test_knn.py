"""Weighted cosine k-nearest neighbours."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from epcache.errors import ConfigError, DataError
from epcache.knn import knn_classify, knn_predict, select_knn


def digits():
    """Features and labels of train and test, 1,200 and 597 rows."""
    data = load_digits()
    features, labels = data.data.astype(np.float32), data.target.astype(np.int64)
    return features[:1200], labels[:1200], features[1200:], labels[1200:]


def by_hand(train, labels, test, k, temperature, num_classes):
    """Shares of the vote, one test row at a time, in plain float64."""
    train, test = np.float64(train), np.float64(test)
    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test)]
    train, test = (x / np.where(n > 0, n, 1) for x, n in zip((train, test), norms, strict=True))
    shares = np.zeros((len(test), num_classes))
    for row, vector in enumerate(test):
        similarity = train @ vector
        nearest = np.argsort(-similarity, kind="stable")[:k]
        np.add.at(shares[row], labels[nearest], np.exp(similarity[nearest] / temperature))
    return shares / shares.sum(1, keepdims=True)


@st.composite
def cases(draw):
    """Small sets whose rows repeat often, among them zero rows."""
    num_classes, dim = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 5, 70, 300]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    pool = generator.standard_normal((draw(st.integers(1, 6)), dim)).astype(np.float32)
    pool[0] *= draw(st.sampled_from([0, 1]))
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    train, test = (pool[generator.integers(len(pool), size=size)] for size in sizes)
    train = train * 2.0 ** generator.integers(-3, 3, size=(len(train), 1))
    labels = [generator.integers(num_classes, size=size) for size in sizes]
    return train.astype(np.float32), labels[0], test, labels[1], num_classes


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (10, 0.07), (20, 0.2), (200, 0.1)])
def test_digits_agree_with_scikit_learn(k, temperature):
    """Shares of the vote, and so accuracy, are scikit-learn's."""
    train, labels, test, test_labels = digits()
    model = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(np.float64(train), labels)
    expected = model.predict_proba(np.float64(test))
    options = {"num_classes": 10, "chunk_rows": 256}
    shares = knn_predict(train, labels, test, k=k, temperature=temperature, **options)
    np.testing.assert_allclose(shares.numpy(), expected, atol=2e-6)
    (result,) = knn_classify(
        train, labels, test, test_labels, ks=[k], temperatures=[temperature], **options
    )
    assert result.top1 == np.mean(expected.argmax(1) == test_labels)
    assert result.top1 > 0.9
    assert result.num_neighbours == k


@settings(deadline=None, max_examples=60)
@given(case=cases(), k=st.integers(1, 45), chunk_rows=st.integers(1, 45))
def test_answers_do_not_depend_on_the_chunk(case, k, chunk_rows):
    """With repeated rows, zero rows and k beyond the rows, every chunk gives the same bits."""
    train, labels, test, _, num_classes = case
    options = {"k": k, "temperature": 0.1, "num_classes": num_classes}
    whole = knn_predict(train, labels, test, chunk_rows=10_000, **options)
    parts = knn_predict(train, labels, test, chunk_rows=chunk_rows, **options)
    assert torch.equal(whole, parts)
    assert bool(whole.isfinite().all())
    np.testing.assert_allclose(whole.sum(1), 1, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(case=cases(), chunk_rows=st.integers(1, 45))
def test_ties_go_to_the_lower_row(case, chunk_rows):
    """One neighbour of a repeated vector is the first row that holds it, at any scale."""
    train, _, test, _, _ = case
    own = np.arange(len(train))
    shares = knn_predict(train, own, test, k=1, num_classes=len(train), chunk_rows=chunk_rows)
    units = train.astype(np.float64)
    norms = np.linalg.norm(units, axis=1, keepdims=True)
    units = np.round(units / np.where(norms > 0, norms, 1), 6)
    for winner in shares.argmax(1).tolist():
        same = np.flatnonzero((units == units[winner]).all(1))
        assert winner == same[0]


def test_a_large_sorted_run_of_ties_is_cut_at_the_lowest_rows():
    """Of 3,000 equal rows, the first k vote, wherever the chunks end."""
    train = np.ones((3000, 5), np.float32)
    labels = np.repeat(np.arange(30), 100)
    for chunk_rows in (64, 999, 4096):
        shares = knn_predict(
            train, labels, train[:2], k=150, num_classes=30, chunk_rows=chunk_rows
        ).numpy()
        np.testing.assert_allclose(shares[:, :2], [[2 / 3, 1 / 3]] * 2, rtol=1e-6)
        assert not shares[:, 2:].any()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 30), temperature=st.floats(0.02, 5))
def test_random_data_agrees_with_a_plain_loop(seed, k, temperature):
    """Shares of the vote are those of one test row at a time in float64."""
    generator = np.random.default_rng(seed)
    train = generator.standard_normal((30, 6)).astype(np.float32)
    test = generator.standard_normal((9, 6)).astype(np.float32)
    labels = generator.integers(4, size=30)
    shares = knn_predict(
        train, labels, test, k=k, temperature=temperature, num_classes=4, chunk_rows=7
    )
    expected = by_hand(train, labels, test, k, temperature, 4)
    np.testing.assert_allclose(shares.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_one_search_serves_every_k_and_temperature():
    """The list holds k by k and T by T what each gives alone, in the order asked for."""
    train, labels, test, test_labels = digits()
    ks, temperatures = (50, 3, 50), (0.2, 0.05)
    together = knn_classify(
        train, labels, test, test_labels, ks=ks, temperatures=temperatures, num_classes=10
    )
    alone = [
        knn_classify(train, labels, test, test_labels, ks=[k], temperatures=[t], num_classes=10)[0]
        for k in ks
        for t in temperatures
    ]
    assert together == alone


def test_more_neighbours_than_rows_lets_all_vote():
    """The k asked for is kept, and the number that voted is told."""
    train, labels, test, test_labels = digits()
    few, all_rows = knn_classify(
        train[:15], labels[:15], test, test_labels, ks=[15, 200], num_classes=10
    )
    assert (few.k, few.num_neighbours) == (15, 15)
    assert (all_rows.k, all_rows.num_neighbours) == (200, 15)
    assert (all_rows.top1, all_rows.top5) == (few.top1, few.top5)


def test_a_class_without_votes_is_never_right():
    """Ten classes, one training row: top-5 counts only the class that has a vote."""
    (result,) = knn_classify(
        np.ones((1, 2)), [7], np.ones((10, 2)), range(10), ks=[1], num_classes=10
    )
    assert (result.top1, result.top5) == (0.1, 0.1)


def test_extreme_temperatures_stay_finite():
    """exp(1 / T) overflows below T = 0.0014; the shares do not."""
    train, labels, test, _ = digits()
    for temperature in (1e-300, 1e-4, 1e300):
        shares = knn_predict(
            train, labels, test[:20], k=20, temperature=temperature, num_classes=10
        )
        assert bool(shares.isfinite().all())


def test_held_out_rows_choose_k():
    """The choice is the best of classifying the held-out rows by the rest, the smallest k first."""
    train, labels, _, _ = digits()
    holdout = np.arange(0, 1200, 10)[::-1].copy()
    rest = np.setdiff1d(np.arange(1200), holdout)
    options = {"ks": (300, 40, 5, 1), "temperatures": (0.2, 0.07), "num_classes": 10}
    chosen = select_knn(train, labels, holdout_rows=holdout, **options)
    expected = knn_classify(train[rest], labels[rest], train[holdout], labels[holdout], **options)
    assert list(chosen.grid) == expected
    best = max(result.top1 for result in expected)
    winners = [(r.k, r.temperature) for r in expected if r.top1 == best]
    assert (chosen.k, chosen.temperature, chosen.val_top1) == (*min(winners), best)


def test_leaving_one_out_never_asks_the_row_itself():
    """Every row is classified as if the set did not hold it, whatever the chunk."""
    train, labels, _, _ = digits()
    train, labels = np.concatenate([train[:30], train[:3]]), np.append(labels[:30], [9, 9, 9])
    right = []
    for row in range(33):
        rest = np.delete(np.arange(33), row)
        shares = knn_predict(train[rest], labels[rest], train[row : row + 1], k=5, num_classes=10)
        right.append(int(shares.argmax(1)) == labels[row])
    for chunk_rows in (1, 17, 33, 100):
        chosen = select_knn(train, labels, ks=(5,), num_classes=10, chunk_rows=chunk_rows)
        assert chosen.val_top1 == np.mean(right)
    everyone = select_knn(train, labels, ks=(33,), num_classes=10)
    assert everyone.grid[0].num_neighbours == 32


def test_tensors_arrays_and_memory_maps_are_alike(tmp_path):
    """Half precision, views, read-only maps and tensors give what a float32 array gives."""
    train, labels, test, test_labels = digits()
    expected = knn_classify(train, labels, test, test_labels, num_classes=10)
    np.save(tmp_path / "train.npy", train.astype(np.float16))
    mapped = np.load(tmp_path / "train.npy", mmap_mode="r")
    backwards = test[::-1].copy()[::-1]
    for one, two in [
        (mapped, backwards),
        (torch.from_numpy(train).bfloat16(), torch.from_numpy(test)),
        (train.astype(np.int64), test.astype(np.float64)),
    ]:
        got = knn_classify(one, torch.from_numpy(labels), two, test_labels.tolist(), num_classes=10)
        assert got == expected


def test_memory_is_bounded_by_the_chunk():
    """A search from 2,000 rows among 20,000, with 320 MB of similarities, needs under 60 MB."""
    script = """
import resource, numpy as np, torch
torch.set_num_threads(1)
from epcache.knn import knn_classify
features = np.random.default_rng(0).standard_normal((22000, 8)).astype("f4")
labels = np.arange(22000) % 100
args = (features[:20000], labels[:20000], features[20000:], labels[20000:])
knn_classify(*(part[:600] for part in args), num_classes=100, chunk_rows=512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
knn_classify(*args, ks=(10,), num_classes=100, chunk_rows=512)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 60e6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ks": []}, ConfigError, "ks is empty"),
        ({"ks": [0]}, ConfigError, "ks must be positive finite numbers, got 0"),
        ({"ks": [2.5]}, ConfigError, "k must be a positive integer, got 2.5"),
        ({"temperatures": []}, ConfigError, "temperatures is empty"),
        ({"temperatures": [0.0]}, ConfigError, "temperatures must be positive finite"),
        ({"temperatures": [float("nan")]}, ConfigError, "got nan"),
        ({"num_classes": 0}, ConfigError, "num_classes must be a positive integer, got 0"),
        ({"chunk_rows": 0}, ConfigError, "chunk_rows must be a positive integer, got 0"),
        ({"train_labels": [0, 1]}, DataError, "train has 3 features but 2 labels"),
        ({"train_labels": [0, 1, 2]}, DataError, "train row 2 has label 2; expected 0 to 1"),
        ({"test_labels": [-1]}, DataError, "test row 0 has label -1"),
        ({"test_labels": [0.5]}, DataError, "test labels have type float64"),
        ({"test_features": np.ones((1, 3))}, DataError, "width 3, train features 2"),
        ({"test_features": np.ones((0, 2))}, DataError, "test features have shape \\(0, 2\\)"),
        ({"train_features": np.ones(3)}, DataError, "shape \\(3,\\); expected \\(n, D\\)"),
        ({"train_features": np.array([["a"]] * 3)}, DataError, "expected numbers"),
        ({"train_features": [[0, 1], [np.nan, 1], [1, np.inf]]}, DataError, "train row 1 is not"),
        ({"train_features": [[0, 1], [0, 1], [1e39, 1]]}, DataError, "train row 2 is not finite"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(change, error, message):
    """Each names what is wrong, the value and what was expected."""
    arguments = {
        "train_features": np.ones((3, 2)),
        "train_labels": [0, 1, 1],
        "test_features": np.ones((1, 2)),
        "test_labels": [0],
        "num_classes": 2,
        "chunk_rows": 2,
    } | change
    arguments["train_features"] = np.asarray(arguments["train_features"])
    with pytest.raises(error, match=message) as caught:
        knn_classify(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("holdout", "message"),
    [
        ([3], "held-out row 3 is not one of the 3 training rows"),
        ([-1], "held-out row -1"),
        ([1, 1], "1 held-out rows repeat"),
        ([], "0 of 3 training rows are held out"),
        ([2, 0, 1], "3 of 3 training rows are held out"),
    ],
)
def test_wrong_held_out_rows_are_told(holdout, message):
    """Rows must exist, once each, and leave something on either side."""
    with pytest.raises(ConfigError, match=message):
        select_knn(np.ones((3, 2)), [0, 1, 1], holdout_rows=holdout, num_classes=2)
