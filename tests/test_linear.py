"""Logistic regression and ridge on pooled features."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier

import epcache.features
import epcache.softmax
from epcache.errors import ConfigError, DataError
from epcache.linear import CS, RELATIVE_ALPHAS, fit_logistic, fit_ridge


def digits():
    """Features and labels of train and test, 900 and 897 rows, values 0 to 1."""
    data = load_digits()
    features, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    return features[:900], labels[:900], features[900:], labels[900:]


def random_case(seed, *, num_rows=40, dim=6, num_classes=3, shift=0.0):
    """Overlapping classes with a bias; features far from the origin if asked."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(num_classes, size=2 * num_rows)
    labels[:num_classes] = np.arange(num_classes)
    centres = generator.standard_normal((num_classes, dim))
    noise = generator.standard_normal((2 * num_rows, dim))
    features = (centres[labels] + 1.5 * noise + shift).astype(np.float32)
    return features[:num_rows], labels[:num_rows], features[num_rows:], labels[num_rows:]


def one_hot(labels, num_classes):
    return np.eye(num_classes)[labels]


def same_decisions(features, result, reference):
    """Predictions agree, except where the reference itself is undecided."""
    expected = reference.decision_function(np.float64(features))
    ordered = np.sort(expected, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 1e-3 * np.abs(expected).max()
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(result.predictions.numpy()[clear], expected.argmax(1)[clear])


@pytest.mark.parametrize("c", [CS[0], 1e-3, 0.1, 10.0, 1e3])
def test_logistic_agrees_with_scikit_learn_on_digits(c):
    """Weights, biases and predictions are scikit-learn's lbfgs at a tight tolerance."""
    train, labels, test, test_labels = digits()
    reference = LogisticRegression(C=c, tol=1e-9, max_iter=20_000).fit(np.float64(train), labels)
    result = fit_logistic(
        train, labels, test, test_labels, num_classes=10, holdout_rows=None, cs=[c], tolerance=1e-6
    )
    assert result.converged
    size = np.abs(reference.coef_).max()
    np.testing.assert_allclose(result.weight.numpy(), reference.coef_, atol=2e-3 * size)
    biases = reference.intercept_ - reference.intercept_.mean()
    np.testing.assert_allclose(
        result.bias.numpy(), biases, atol=2e-3 * max(1, np.abs(biases).max())
    )
    same_decisions(test, result, reference)
    scores = torch.from_numpy(test).double() @ result.weight.T + result.bias
    assert torch.equal(scores.argmax(1), result.predictions)
    assert result.test_top1 == np.mean(result.predictions.numpy() == test_labels)
    top5 = scores.topk(5).indices.numpy()
    assert result.test_top5 == np.mean((top5 == test_labels[:, None]).any(1))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), power=st.floats(-4, 2), dim=st.sampled_from([2, 6, 60]))
def test_logistic_agrees_with_scikit_learn_on_random_data(seed, power, dim):
    """Also with more features than rows, where only the rows' span is searched."""
    train, labels, test, test_labels = random_case(seed, dim=dim, shift=3.0)
    c = 10**power
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = LogisticRegression(C=c, tol=1e-10, max_iter=50_000)
        reference.fit(np.float64(train) - 3.0, labels)
    result = fit_logistic(
        train, labels, test, test_labels, num_classes=3, holdout_rows=None, cs=[c]
    )
    assert result.converged
    size = np.linalg.norm(reference.coef_)
    assert np.linalg.norm(result.weight.numpy() - reference.coef_) < 1e-3 * size
    same_decisions(test - np.float32(3.0), result, reference)


def test_two_classes_are_a_softmax_too():
    """With two classes scikit-learn has one weight vector; at 2 C its answer is ours at C."""
    train, labels, test, test_labels = random_case(0, num_classes=2)
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(train, labels)
    result = fit_logistic(
        train, labels, test, test_labels, num_classes=2, holdout_rows=None, cs=[0.5]
    )
    weight = (result.weight[1] - result.weight[0]).numpy()
    np.testing.assert_allclose(weight, reference.coef_[0], atol=1e-4)
    np.testing.assert_allclose(
        float(result.bias[1] - result.bias[0]), reference.intercept_[0], 1e-3
    )


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    power=st.floats(-6, 5),
    scaling=st.sampled_from(["none", "l2", "standard"]),
)
def test_the_solution_is_a_newton_step_from_nowhere(seed, power, scaling):
    """By autograd on the objective as written, at any C of the grid and any scaling.

    The step that the dense Hessian asks for is at most a ten thousandth of W.
    """
    train, labels, test, test_labels = random_case(seed, dim=4, num_rows=20)
    result = fit_logistic(
        train, labels, test, test_labels,
        num_classes=3, holdout_rows=None, cs=[10**power], scaling=scaling,
    )  # fmt: skip
    assert result.converged
    raw = torch.from_numpy(train).double()
    if scaling == "l2":
        raw = raw / raw.norm(dim=1, keepdim=True)
    deviation = raw.std(0, unbiased=False) if scaling == "standard" else torch.ones(4).double()
    features, targets = (raw - raw.mean(0)) / deviation, torch.from_numpy(labels)

    def objective(params):
        logits = features @ params[:, :4].T + params[:, 4]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        return 10**power * loss + params[:, :4].square().sum() / 2

    bias = result.bias + result.weight @ raw.mean(0)
    params = torch.cat([result.weight * deviation, bias[:, None]], 1)
    gradient = torch.autograd.functional.jacobian(objective, params).flatten()
    hessian = torch.autograd.functional.hessian(objective, params).reshape(15, 15)
    step = torch.linalg.pinv(hessian, rtol=1e-12, hermitian=True) @ gradient
    step = step.reshape(3, 5)[:, :4]
    assert float(step.norm()) < 1e-4 * float((result.weight * deviation).norm())


def test_the_path_gives_what_each_c_gives_alone():
    """Warm starts change the way, not the end; the best held-out C wins, the smallest of equals."""
    train, labels, test, test_labels = digits()
    holdout, rest = np.arange(0, 900, 9), np.setdiff1d(np.arange(900), np.arange(0, 900, 9))
    cs = CS[::5]
    result = fit_logistic(
        train, labels, test, test_labels, num_classes=10, holdout_rows=holdout, cs=cs[::-1]
    )
    assert [point.value for point in result.grid] == list(cs)
    assert all(point.converged for point in result.grid)
    for point in result.grid:
        alone = fit_logistic(
            train[rest], labels[rest], train[holdout], labels[holdout],
            num_classes=10, holdout_rows=None, cs=[point.value],
        )  # fmt: skip
        assert point.val_top1 == alone.test_top1
    best = max(point.val_top1 for point in result.grid)
    assert result.val_top1 == best
    assert result.l2 == min(point.value for point in result.grid if point.val_top1 == best)
    refit = fit_logistic(
        train, labels, test, test_labels, num_classes=10, holdout_rows=None, cs=[result.l2]
    )
    assert torch.equal(refit.weight, result.weight)
    assert refit.val_top1 is None
    assert refit.grid == ()


@pytest.mark.parametrize(
    ("method", "grid"), [(fit_logistic, {"cs": CS[::9]}), (fit_ridge, {"alphas": CS[18:]})]
)
@pytest.mark.parametrize("dim", [6, 60])
def test_chunks_and_kept_copies_change_nothing_but_rounding(monkeypatch, method, grid, dim):
    """Read anew on every pass in chunks of 7 or kept whole: the same weights, half or single."""
    train, labels, test, test_labels = random_case(3, dim=dim)
    train = np.float32(np.float16(train))
    arguments = (labels, test, test_labels)
    options = {"num_classes": 3, "holdout_rows": range(0, 40, 5), **grid}
    kept = method(train, *arguments, **options)
    monkeypatch.setattr(epcache.features, "KEPT_BYTES", 0)
    monkeypatch.setattr(epcache.softmax, "KEPT_BYTES", 0)
    for features in (torch.from_numpy(train), np.float16(train)):
        streamed = method(features, *arguments, chunk_rows=7, **options)
        assert [p.val_top1 for p in streamed.grid] == [p.val_top1 for p in kept.grid]
        size = float(kept.weight.norm())
        assert float((streamed.weight - kept.weight).norm()) < 1e-4 * size


def test_a_class_without_rows_is_never_predicted():
    """Its bias is -inf, the others are what they would be without it."""
    train, labels, test, test_labels = random_case(5)
    options = {"holdout_rows": None, "cs": [1.0]}
    without = fit_logistic(train, labels, test, test_labels, num_classes=3, **options)
    wider = fit_logistic(train, 2 * labels, test, 2 * test_labels - 0, num_classes=6, **options)
    torch.testing.assert_close(wider.weight[::2], without.weight)
    assert wider.bias[1::2].tolist() == [-np.inf] * 3
    assert torch.equal(wider.predictions, 2 * without.predictions)
    unseen = fit_logistic(train, labels, test, test_labels * 0 + 4, num_classes=6, **options)
    assert (unseen.test_top1, unseen.test_top5) == (0, 0)


@pytest.mark.parametrize("method", [fit_logistic, fit_ridge])
@pytest.mark.parametrize("scaling", ["none", "l2", "standard"])
def test_constant_features_and_single_classes_are_no_trouble(method, scaling):
    """With nothing to tell rows apart, the most frequent class is predicted."""
    options = {"num_classes": 3, "holdout_rows": [0], "scaling": scaling}
    for labels in ([0, 2, 2, 2], [2, 2, 2, 2]):
        result = method(np.full((4, 2), 0.1), labels, np.zeros((2, 2)), [2, 1], **options)
        assert result.converged
        assert result.predictions.tolist() == [2, 2]
        assert result.test_top1 == 0.5
        assert bool(result.weight.isfinite().all())


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    power=st.floats(-3, 4),
    dim=st.sampled_from([1, 6, 39, 40, 90]),
    shift=st.sampled_from([0.0, 10.0]),
)
def test_ridge_agrees_with_scikit_learn(seed, power, dim, shift):
    """Weights and biases are Ridge's on one-hot targets, predictions RidgeClassifier's."""
    train, labels, test, test_labels = random_case(seed, dim=dim, shift=shift)
    alpha = 10**power
    reference = Ridge(alpha=alpha, solver="svd").fit(np.float64(train), one_hot(labels, 3))
    result = fit_ridge(train, labels, test, test_labels, num_classes=3, alphas=[alpha])
    assert (result.l2, result.val_top1) == (alpha, None)
    np.testing.assert_allclose(result.weight.numpy(), reference.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(result.bias.numpy(), reference.intercept_, rtol=1e-6, atol=1e-7)
    classifier = RidgeClassifier(alpha=alpha, solver="svd").fit(np.float64(train), labels)
    assert np.mean(result.predictions.numpy() == classifier.predict(np.float64(test))) == 1.0


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), dim=st.sampled_from([3, 30]), num_rows=st.integers(4, 12))
def test_leaving_one_out_is_what_refitting_without_each_row_gives(seed, dim, num_rows):
    """The closed form counts the same rows as one fit for each row left out."""
    train, labels, test, test_labels = random_case(seed, dim=dim, num_rows=num_rows)
    alphas = [0.01, 1.0, 100.0]
    result = fit_ridge(train, labels, test, test_labels, num_classes=3, alphas=alphas)
    for point in result.grid:
        right = 0
        for row in range(num_rows):
            rest = np.delete(np.arange(num_rows), row)
            model = Ridge(alpha=point.value, solver="svd")
            model.fit(np.float64(train[rest]), one_hot(labels[rest], 3))
            scores = model.predict(np.float64(train[row : row + 1]))[0]
            right += scores.argmax() == labels[row]
        assert point.val_top1 == right / num_rows
    best = max(point.val_top1 for point in result.grid)
    assert result.l2 == max(point.value for point in result.grid if point.val_top1 == best)


def test_ridge_chooses_alpha_on_held_out_rows():
    """Each alpha is scored by a fit to the other rows; the default grid follows their scale."""
    train, labels, test, test_labels = digits()
    holdout, rest = np.arange(0, 900, 9), np.setdiff1d(np.arange(900), np.arange(0, 900, 9))
    result = fit_ridge(train, labels, test, test_labels, num_classes=10, holdout_rows=holdout)
    assert len(result.grid) == len(RELATIVE_ALPHAS)
    for point in result.grid[::6]:
        reference = RidgeClassifier(alpha=point.value).fit(np.float64(train[rest]), labels[rest])
        top1 = np.mean(reference.predict(np.float64(train[holdout])) == labels[holdout])
        assert point.val_top1 == top1
    assert result.test_top1 > 0.85
    louder = fit_ridge(
        8 * train, labels, 8 * test, test_labels, num_classes=10, holdout_rows=holdout
    )
    assert louder.l2 == pytest.approx(64 * result.l2)
    assert torch.equal(louder.predictions, result.predictions)


@pytest.mark.parametrize("scaling", ["l2", "standard"])
@pytest.mark.parametrize(("method", "grid"), [(fit_logistic, "cs"), (fit_ridge, "alphas")])
def test_scaling_is_what_scaled_features_give(method, grid, scaling):
    """Scaling inside equals scaling before; `standard` ends in weights for features as they are."""
    train, labels, test, test_labels = random_case(7, shift=2.0)
    options = {"num_classes": 3, "holdout_rows": None, grid: [1.0]}
    result = method(train, labels, test, test_labels, scaling=scaling, **options)
    if scaling == "l2":
        scaled = [np.float64(x) / np.linalg.norm(x, axis=1, keepdims=True) for x in (train, test)]
    else:
        mean, deviation = train.mean(0), train.std(0)
        scaled = [(np.float64(x) - mean) / deviation for x in (train, test)]
        raw = torch.from_numpy(test).double() @ result.weight.T + result.bias
        assert torch.equal(raw.argmax(1), result.predictions)
    expected = method(scaled[0], labels, scaled[1], test_labels, **options)
    assert torch.equal(result.predictions, expected.predictions)
    assert result.scaling == scaling
    weight = result.weight.numpy() * (deviation if scaling == "standard" else 1.0)
    np.testing.assert_allclose(weight, expected.weight.numpy(), atol=1e-4)


def test_memory_is_bounded():
    """Fits to 50 MB of features need less than half of that, where nothing is kept."""
    script = """
import resource, numpy as np, torch
torch.set_num_threads(1)
import epcache.features, epcache.softmax
from epcache.linear import fit_logistic, fit_ridge
epcache.features.KEPT_BYTES = epcache.softmax.KEPT_BYTES = 0
features = np.random.default_rng(0).standard_normal((100_000, 125), np.float32)
labels = np.arange(100_000) % 10
def fit(n):
    options = dict(num_classes=10, chunk_rows=1000)
    args = (features[:n], labels[:n], features[:9], labels[:9])
    fit_ridge(*args, alphas=[1.0, 2.0], **options)
    fit_logistic(*args, holdout_rows=None, cs=[1e-6], **options)
fit(2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fit(100_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < 25e6


@pytest.mark.parametrize("method", [fit_logistic, fit_ridge])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scaling": "minmax"}, ConfigError, "scaling 'minmax' is unknown; expected one of none"),
        ({"num_classes": 0}, ConfigError, "num_classes must be a positive integer"),
        ({"holdout_rows": [9]}, ConfigError, "held-out row 9 is not one of the 4 training rows"),
        ({"holdout_rows": [0, 1, 2, 3]}, ConfigError, "4 of 4 training rows are held out"),
        ({"train_labels": [0, 1]}, DataError, "train has 4 features but 2 labels"),
        ({"eval_labels": [5]}, DataError, "eval row 0 has label 5; expected 0 to 1"),
        ({"eval_features": np.ones((1, 3))}, DataError, "eval features have width 3"),
        ({"train_features": np.array([[1, 2]] * 3 + [[np.nan, 1]])}, DataError, "train row 3 is"),
        ({"eval_features": np.full((1, 2), np.inf)}, DataError, "eval row 0 is not finite"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(method, change, error, message):
    """Each names what is wrong, the value and what was expected."""
    arguments = {
        "train_features": np.ones((4, 2)),
        "train_labels": [0, 1, 0, 1],
        "eval_features": np.ones((1, 2)),
        "eval_labels": [0],
        "num_classes": 2,
        "holdout_rows": [0],
    }
    with pytest.raises(error, match=message) as caught:
        method(**arguments | change)
    assert "\n" not in str(caught.value)


def test_grids_that_cannot_work_are_told():
    """Empty, negative or without rows to choose on."""
    data, options = (np.ones((4, 2)), [0, 1, 0, 1], np.ones((1, 2)), [0]), {"num_classes": 2}
    for cs, message in [([], "cs is empty"), ([1.0, -1.0], "got -1.0")]:
        with pytest.raises(ConfigError, match=message):
            fit_logistic(*data, cs=cs, holdout_rows=[0], **options)
    with pytest.raises(ConfigError, match="2 values of C and no held-out rows"):
        fit_logistic(*data, cs=[1.0, 2.0], holdout_rows=None, **options)
    for alphas, message in [([], "alphas is empty"), ([0.0], "got 0.0")]:
        with pytest.raises(ConfigError, match=message):
            fit_ridge(*data, alphas=alphas, **options)
    with pytest.raises(ConfigError, match="leaving one out needs at least 2"):
        fit_ridge(np.ones((1, 2)), [0], np.ones((1, 2)), [0], alphas=[1.0, 2.0], **options)
