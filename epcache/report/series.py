"""The numbers behind each figure, as plain points; nothing here draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from epcache.report.collect import Entry, Results, Task, averaged, best_entry

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A place in a figure: the mean over seeds of what held-out data chose for each."""

    x: float
    y: float
    std: float
    """Sample standard deviation over seeds; 0 for one seed."""
    num_seeds: int
    entry: Entry
    """One of the rows behind it, the best on held-out data."""


Curves = Mapping[str, Sequence[Point]]
"""Points from left to right by head."""


@dataclass(frozen=True, kw_only=True)
class LayerCurves:
    """Accuracy over depth; averages of the last layers apart, x being how many."""

    single: Curves
    averages: Curves


@dataclass(frozen=True, kw_only=True)
class ShotCurves:
    """Accuracy over training images a class; x is the number of training images."""

    shots: Curves
    shares: Curves
    """Percentages; all of train is the share of 1."""


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Held-out accuracy over learning rates."""

    points: Sequence[Point]
    chosen: float
    """The rate that held-out data chose."""


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """One run, epoch by epoch."""

    entry: Entry
    loss: Sequence[float]
    top1: Sequence[float]
    is_final: bool
    """Trained on all of train and scored on the evaluation split; else both on held-out terms."""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the points that no other beats, from left to right; of equal ones the first.

    A point beats another that has no less x and no more y, unless they are equal.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i))
    front, best = [], -math.inf
    for position in order:
        if points[position][1] > best:
            front.append(position)
            best = points[position][1]
    return front


def cost_points(results: Results, task: Task, cost: Callable[[Entry], int | None]) -> list[Point]:
    """One point a head: its cost and the accuracy of the layer that held-out data chose."""
    points = []
    for entries in _by(whole_rows(results, task), lambda entry: entry.head).values():
        priced = [entry for entry in entries if cost(entry)]
        layers = _by(priced, lambda entry: (entry.row.layer, averaged(entry.row))).values()
        found = [p for layer in layers if (p := summarise(layer, x=0.0)) is not None]
        if found:
            best = best_entry([point.entry for point in found])
            point = next(point for point in found if point.entry is best)
            points.append(_at(point, float(cost(point.entry) or 0)))
    return sorted(points, key=lambda point: point.x)


def layer_curves(results: Results, task: Task) -> LayerCurves:
    """Heads that were probed at two layers or more, or on averages."""
    entries = trained_alike(
        whole_rows(results, task), lambda entry: entry.row.layer + 1000 * averaged(entry.row)
    )
    single = [entry for entry in entries if averaged(entry.row) == 1]
    several = [entry for entry in entries if averaged(entry.row) > 1]
    curves = _curves(single, lambda entry: float(entry.row.layer))
    return LayerCurves(
        single={head: points for head, points in curves.items() if len(points) > 1},
        averages=_curves(several, lambda entry: float(averaged(entry.row))),
    )


def shot_curves(results: Results, task: Task) -> ShotCurves:
    """Heads that learnt from subsets of train, all at the layer most of these rows look at."""
    entries = [entry for entry in results.scored if entry.task == task]
    parts = [entry for entry in entries if not entry.is_whole]
    if not parts:
        return ShotCurves(shots={}, shares={})
    place = most_common((entry.row.layer, averaged(entry.row)) for entry in parts)

    def images(entry: Entry) -> float:
        return float(entry.row.train_images)

    here = [entry for entry in entries if (entry.row.layer, averaged(entry.row)) == place]
    here = trained_alike(here, images)
    heads = {entry.head for entry in here if not entry.is_whole}
    return ShotCurves(
        shots=_curves([e for e in here if e.row.shots is not None], images),
        shares=_curves([e for e in here if e.row.shots is None and e.head in heads], images),
    )


def rate_curves(results: Results, task: Task) -> dict[str, RateCurve]:
    """Heads with two rates or more at the layer where most were tried, all of train."""
    entries = [
        entry
        for entry in results.entries
        if entry.task == task and entry.is_whole and entry.row.lr and entry.row.val_top1 is not None
    ]
    if not entries:
        return {}
    # what was tried there, not how often: five seeds at one rate say nothing of rates
    rates = _by(entries, lambda e: (e.row.layer, averaged(e.row)))
    place = max(rates, key=lambda key: (len({(e.head, e.row.lr) for e in rates[key]}), key))
    curves = {}
    for head, found in _by(rates[place], lambda entry: entry.head).items():
        alike = trained_alike(found, lambda entry: entry.row.lr or 0.0)
        points = [
            point
            for lr, those in sorted(_by(alike, lambda entry: entry.row.lr).items())
            if (point := summarise(those, x=lr or 0.0, y=lambda entry: entry.row.val_top1))
        ]
        best = best_entry(alike)
        if len(points) > 1 and best is not None:
            curves[head] = RateCurve(points=points, chosen=best.row.lr or 0.0)
    return curves


def training_curves(results: Results, task: Task) -> dict[str, TrainingCurve]:
    """Of each head the run that held-out data chose among those with a curve."""
    entries = [e for e in whole_rows(results, task) if e.row.run in results.curves]
    found = {}
    for head, those in _by(entries, lambda entry: entry.head).items():
        readable = [e for e in those if training_curve(e, results.curves[e.row.run]) is not None]
        best = best_entry(readable)
        if best is not None:
            curve = training_curve(best, results.curves[best.row.run])
            assert curve is not None
            found[head] = curve
    return found


def training_curve(entry: Entry, curve: Mapping[str, Any]) -> TrainingCurve | None:
    """What ``curve.json`` tells; None where it holds no numbers."""
    for name, judged in (("final", "test_top1"), ("select", "val_top1")):
        part = curve.get(name)
        if not isinstance(part, dict):
            continue
        loss, top1 = _finite(part.get("train_loss")), _finite(part.get(judged))
        if top1:
            return TrainingCurve(
                entry=entry, loss=loss, top1=top1, is_final=name == "final"
            )  # fmt: skip
    return None


def whole_rows(results: Results, task: Task) -> list[Entry]:
    """Scored rows of a task that learnt from all of train."""
    return [e for e in results.scored if e.task == task and e.is_whole]


def summarise(
    entries: Iterable[Entry],
    *,
    x: float,
    y: Callable[[Entry], float | None] = lambda entry: entry.score,
) -> Point | None:
    """One point of rows that differ in what was selected, and in seeds."""
    chosen = []
    for those in _by(entries, lambda entry: entry.row.seed).values():
        usable = [entry for entry in those if y(entry) is not None]
        best = best_entry(usable) or (usable[0] if usable else None)
        if best is not None:
            chosen.append(best)
    if not chosen:
        return None
    values = [value for entry in chosen if (value := y(entry)) is not None]
    return Point(
        x=x,
        y=statistics.fmean(values),
        std=statistics.stdev(values) if len(values) > 1 else 0.0,
        num_seeds=len(values),
        entry=best_entry(chosen) or chosen[0],
    )


def most_common(values: Iterable[K]) -> K:
    """The value that comes most often, the first of those that tie."""
    counts: dict[K, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return max(counts, key=lambda value: counts[value])


def trained_alike(entries: Sequence[Entry], x: Callable[[Entry], float]) -> list[Entry]:
    """Of each head the rows of the training that reaches most places; of equals the longer.

    Points of one curve must differ in nothing but their place.
    """
    kept = []
    for found in _by(entries, lambda entry: entry.head).values():
        ways = _by(found, lambda entry: entry.row.training)
        reach = {how: len({x(entry) for entry in way}) for how, way in ways.items()}
        kept += ways[max(ways, key=lambda how: (reach[how], how[2] or 0))]
    return kept


def _curves(entries: Sequence[Entry], x: Callable[[Entry], float]) -> dict[str, list[Point]]:
    return {
        head: [
            point
            for place, those in sorted(_by(found, x).items())
            if (point := summarise(those, x=place)) is not None
        ]
        for head, found in _by(entries, lambda entry: entry.head).items()
    }


def _by(entries: Iterable[Entry], key: Callable[[Entry], K]) -> dict[K, list[Entry]]:
    groups: dict[K, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _at(point: Point, x: float) -> Point:
    return Point(x=x, y=point.y, std=point.std, num_seeds=point.num_seeds, entry=point.entry)


def _finite(values: object) -> list[float]:
    """Numbers of an epoch list; damaged ones become gaps, nothing where it is no list."""
    if not isinstance(values, list):
        return []
    return [
        float(v) if isinstance(v, int | float) and math.isfinite(v) else math.nan for v in values
    ]
