"""The numbers behind the figures are those that the rows say, chosen on held-out data alone."""

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reportkit import make_row, scored, write_results

from epcache.report import series
from epcache.report.collect import collect

POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12)


def results_of(tmp_path, rows, **options):
    results = collect(write_results(tmp_path / "results", rows, **options))
    return results, results.tasks[0]


@given(POINTS)
def test_front_is_what_no_point_beats(points):
    """A point is on the front if and only if none is cheaper and better; compared with a search."""
    front = {points[i] for i in series.pareto_front(points)}
    expected = {
        (x, y)
        for x, y in points
        if not any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
    }
    assert front == expected
    xs = [points[i][0] for i in series.pareto_front(points)]
    assert xs == sorted(xs)


def test_seeds_become_mean_and_deviation(tmp_path):
    """A point is the mean over seeds, each seed's rate chosen on held-out data."""
    tests = (0.5, 0.6, 0.9)
    rows = [scored(top1, shots=4, seed=seed, train_images=400) for seed, top1 in enumerate(tests)]
    # better on the evaluation split, worse on held-out data: must not count
    lucky = scored(0.99, shots=4, seed=0, lr=0.5, train_images=400)
    rows.append(dataclasses.replace(lucky, val_top1=0.1))
    results, task = results_of(tmp_path, rows)
    (point,) = series.shot_curves(results, task).shots["ep M=32"]
    assert point.y == pytest.approx(statistics.fmean(tests))
    assert point.std == pytest.approx(statistics.stdev(tests))
    assert (point.x, point.num_seeds) == (400, 3)


def test_layers_and_averages_are_apart(tmp_path):
    """Averages of layers are curves of their own; subsets of train are in neither."""
    rows = [scored(0.5 + layer / 100, layer=layer) for layer in (3, 7, 11)]
    rows += [scored(0.7, average_layers=2), scored(0.2, shots=1, layer=5)]
    results, task = results_of(tmp_path, rows)
    curves = series.layer_curves(results, task)
    assert [(p.x, p.y) for p in curves.single["ep M=32"]] == [(3, 0.53), (7, 0.57), (11, 0.61)]
    assert [(p.x, p.y) for p in curves.averages["ep M=32"]] == [(2, 0.7)]


def test_shares_are_apart_from_shots(tmp_path):
    """Percentages and all of train come as shares, at their number of images."""
    rows = [scored(0.3, shots=1, train_images=100), scored(0.4, share=0.1, train_images=500)]
    results, task = results_of(tmp_path, [*rows, scored(0.8, train_images=5000)])
    curves = series.shot_curves(results, task)
    assert [(p.x, p.y) for p in curves.shots["ep M=32"]] == [(100, 0.3)]
    assert [(p.x, p.y) for p in curves.shares["ep M=32"]] == [(500, 0.4), (5000, 0.8)]


def test_rates_show_held_out_accuracy(tmp_path):
    """All rates count, the unscored too; the chosen one is best on held-out data."""
    rows = [
        make_row(lr=lr, val_top1=val, test_top1=None, test_top1_best=None, test_top1_last=None)
        for lr, val in ((0.001, 0.4), (0.1, 0.5))
    ]
    rows.append(make_row(lr=0.01, val_top1=0.6))
    results, task = results_of(tmp_path, rows)
    curve = series.rate_curves(results, task)["ep M=32"]
    assert [(p.x, p.y) for p in curve.points] == [(0.001, 0.4), (0.01, 0.6), (0.1, 0.5)]
    assert curve.chosen == 0.01


def test_costs_take_the_layer_that_held_out_data_chose(tmp_path):
    """The layer that is best on the evaluation split is not the one that is drawn."""
    chosen = dataclasses.replace(scored(0.6, layer=8), val_top1=0.9)
    lucky = dataclasses.replace(scored(0.8, layer=11), val_top1=0.5)
    results, task = results_of(tmp_path, [lucky, chosen])
    (point,) = series.cost_points(results, task, lambda entry: entry.row.num_params)
    assert (point.x, point.y) == (1_383_400, 0.6)
    (point,) = series.cost_points(results, task, lambda entry: entry.macs)
    # D = O = 768, M = 32, N = 196, C = 1000, pooled first: scores, pooling, projection, classifier
    assert point.x == 2 * 196 * 768 * 32 + 768 * 768 + 768 * 1000


def test_where_nothing_was_held_out_the_last_epoch_counts(tmp_path):
    """Without held-out data the score is the last epoch's, which nothing chose."""
    row = make_row(val_top1=None, test_top1=None, test_top1_best=0.9, test_top1_last=0.8)
    results, _ = results_of(tmp_path, [row])
    assert results.entries[0].score == 0.8


def test_training_curve_is_the_final_one(tmp_path):
    """The curve is that of the training on all of train; the other one only where there is none."""
    results, task = results_of(tmp_path, [make_row()])
    curve = series.training_curves(results, task)["ep M=32"]
    assert curve.is_final
    assert len(curve.top1) == len(curve.loss) == 50
    entry = results.entries[0]
    select = {"train_loss": [2.0, None], "val_top1": [0.1, 0.2]}
    other = series.training_curve(entry, {"select": select, "final": None})
    assert other is not None
    assert not other.is_final
    assert other.top1 == [0.1, 0.2]
    for damaged in ({}, {"final": 3}, {"final": {"test_top1": "no"}}, {"select": {"val_top1": []}}):
        assert series.training_curve(entry, damaged) is None
