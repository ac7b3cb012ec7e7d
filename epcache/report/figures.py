"""The figures: which there are, what each draws, and what its caption says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from epcache.palette import CATEGORICAL, colour, marker
from epcache.report import drawings, series
from epcache.report.canvas import Canvas, Draw, Picture, make_picture
from epcache.report.collect import Entry, Results, Task
from epcache.report.drawings import Style
from epcache.report.formats import short
from epcache.report.series import LayerCurves, Point, ShotCurves, TrainingCurve

if TYPE_CHECKING:
    from epcache.ranks import Ranking

FIGURES = ("params", "macs", "layers", "shots", "rates", "training", "ranks")
"""Every name that a figure can have."""
MOST_TASKS, MOST_LINES = 6, 8
"""Panels of a figure and lines of a panel; tables have everything."""
SEEDS = " Means over seeds where there are several."
K = TypeVar("K")
V = TypeVar("V")
Say = Callable[[str], None]


def make_figures(
    results: Results, ranks: Sequence[Ranking], folder: Path, *, say: Say = lambda _: None
) -> dict[str, Picture]:
    """Draw every figure that has data, by name, and write its files.

    Args:
        results: What to draw.
        ranks: Of backbones, as ``epcache.ranks.rank_backbones`` has them.
        folder: For PNG and SVG.
        say: Told which figure is being drawn.
    """
    plans = [
        _cost(results, "params", "trainable parameters", lambda entry: entry.row.num_params),
        _cost(results, "macs", "multiply-adds an image", lambda entry: entry.macs),
        _layers(results),
        _shots(results),
        _rates(results),
        _training(results),
        _ranks(ranks),
    ]
    pictures = {}
    for plan in plans:
        if plan is not None:
            name, title, caption, draw = plan
            say(f"drawing {name}")
            pictures[name] = make_picture(name, title, caption, draw, folder)
    return pictures


Plan = tuple[str, str, str, Draw]


def _cost(
    results: Results, name: str, what: str, cost: Callable[[Entry], int | None]
) -> Plan | None:
    """Accuracy against a cost, with the Pareto front."""
    found = _of_tasks(results, lambda task: series.cost_points(results, task, cost) or None)
    if not found:
        return None
    panels, left_out = _first(found, MOST_TASKS)
    families = _families(results, panels.values())

    def draw(canvas: Canvas) -> None:
        axes = canvas.panels(len(panels))
        for ax, (task, points) in zip(axes, panels.items(), strict=True):
            drawings.draw_costs(canvas, ax, points, families)
            drawings.label(ax, _task_title(panels, task), f"{what} (log)")
        canvas.legend([drawings.handle(style, family) for family, style in families.items()])

    caption = (
        f"Accuracy on the evaluation split against {what}. One point a head, the classifier "
        "included: its best layer on held-out data, all of train. Dashed: the Pareto front; what "
        f"it passes through is named.{_note(left_out)}"
    )
    return name, f"Accuracy against {what}", caption, draw


def _layers(results: Results) -> Plan | None:
    def of(task: Task) -> LayerCurves | None:
        curves = series.layer_curves(results, task)
        return curves if curves.single or curves.averages else None

    found = _of_tasks(results, of)
    if not found:
        return None
    panels, left_out = _first(found, MOST_TASKS)
    merged = [[*c.single.items(), *c.averages.items()] for c in panels.values()]
    styles, hidden = _styles(results, merged)

    def draw(canvas: Canvas) -> None:
        for ax, (task, curves) in zip(canvas.panels(len(panels)), panels.items(), strict=True):
            drawings.draw_layers(canvas, ax, curves, styles)
            drawings.label(ax, _task_title(panels, task), "layer")
        canvas.legend([drawings.handle(style, head, line=True) for head, style in styles.items()])

    averages = (
        " Right of the line, hollow: tokens averaged over the last so many layers."
        if any(curves.averages for curves in panels.values())
        else ""
    )
    caption = (
        "Accuracy on the evaluation split over the layer whose tokens are probed (0 is the first "
        f"block). Ringed: the layer that held-out data chose.{averages}{SEEDS}"
        f"{_note(left_out, hidden)}"
    )
    return "layers", "Accuracy by layer", caption, draw


def _shots(results: Results) -> Plan | None:
    def of(task: Task) -> ShotCurves | None:
        curves = series.shot_curves(results, task)
        return curves if curves.shots or curves.shares else None

    found = _of_tasks(results, of)
    if not found:
        return None
    panels, left_out = _first(found, MOST_TASKS)
    merged = [[*c.shots.items(), *c.shares.items()] for c in panels.values()]
    styles, hidden = _styles(results, merged)

    def draw(canvas: Canvas) -> None:
        axes = canvas.panels(len(panels), height=360)
        for ax, (task, curves) in zip(axes, panels.items(), strict=True):
            drawings.draw_shots(canvas, ax, curves, styles)
            drawings.label(ax, _task_title(panels, task), "training images of each class (log)")
        canvas.legend([drawings.handle(style, head, line=True) for head, style in styles.items()])

    caption = (
        "Accuracy on the evaluation split over the training images of each class; means over "
        "seeds, bands of one sample standard deviation. Hollow: a share of each class, or all of "
        f"train (top axis).{_note(left_out, hidden)}"
    )
    return "shots", "Accuracy by training images", caption, draw


def _rates(results: Results) -> Plan | None:
    found = _of_tasks(results, lambda task: series.rate_curves(results, task) or None)
    if not found:
        return None
    panels, left_out = _first(found, MOST_TASKS)
    merged = [[(h, c.points) for h, c in curves.items()] for curves in panels.values()]
    styles, hidden = _styles(results, merged)

    def draw(canvas: Canvas) -> None:
        for ax, (task, curves) in zip(canvas.panels(len(panels)), panels.items(), strict=True):
            drawings.draw_rates(canvas, ax, curves, styles)
            drawings.label(
                ax, _task_title(panels, task), "learning rate (log)", "held-out top-1, %"
            )
        canvas.legend([drawings.handle(style, head, line=True) for head, style in styles.items()])

    caption = (
        "Held-out accuracy over the learning rate, at the layer where most rates were tried. "
        f"Ringed: the rate that was chosen. A flat top means that the rate matters little.{SEEDS}"
        f"{_note(left_out, hidden)}"
    )
    return "rates", "Learning-rate sensitivity", caption, draw


def _training(results: Results) -> Plan | None:
    found = _of_tasks(results, lambda task: series.training_curves(results, task) or None)
    if not found:
        return None
    panels, left_out = _first(found, MOST_TASKS // 2)
    merged = [
        [(head, [_score_point(curve)]) for head, curve in curves.items()]
        for curves in panels.values()
    ]
    styles, hidden = _styles(results, merged)

    def draw(canvas: Canvas) -> None:
        axes = canvas.panels(2 * len(panels), most=2, share=False, height=300)
        for number, (task, curves) in enumerate(panels.items()):
            loss, top1 = axes[2 * number : 2 * number + 2]
            drawings.draw_training(canvas, loss, top1, curves, styles)
            drawings.label(loss, _task_title(panels, task), "epoch", "training loss")
            drawings.label(top1, "" if canvas.is_narrow or len(panels) == 1 else " ", "epoch")
        canvas.legend([drawings.handle(style, head, line=True) for head, style in styles.items()])

    caption = (
        "Training loss, and accuracy on the evaluation split after each epoch, of the run of each "
        "head that held-out data chose, trained on all of train. Ringed: the epoch that held-out "
        f"data chose for it.{_note(left_out, hidden)}"
    )
    return "training", "Training curves", caption, draw


def _ranks(ranks: Sequence[Ranking]) -> Plan | None:
    usable = {_ranking_title(each): each for each in ranks if len(each.ranks) > 1}
    whole = {t: each for t, each in usable.items() if each.shots is None and each.share is None}
    usable = whole or usable
    if not usable:
        return None
    panels, left_out = _first(usable, MOST_TASKS)
    backbones = list(dict.fromkeys(name for each in panels.values() for name in each.backbones))
    styles = {name: (colour(place), marker(place)) for place, name in enumerate(backbones)}

    def draw(canvas: Canvas) -> None:
        most = max(len(each.backbones) for each in panels.values())
        axes = canvas.panels(len(panels), share=False, height=min(520, 130 + 44 * most))
        for ax, (title, each) in zip(axes, panels.items(), strict=True):
            drawings.draw_ranks(canvas, ax, each, styles)
            drawings.label(ax, short(title, 40), "", "rank")

    caption = (
        "Rank of each backbone under each protocol, 1 is the best. Lines that cross are pairs that "
        f"change places; a backbone that never does is drawn thin.{_note(left_out)}"
    )
    return "ranks", "Ranks of backbones by protocol", caption, draw


def _ranking_title(each: Ranking) -> str:
    """The data set, and the subset of train where it is one."""
    if each.shots is not None:
        return f"{each.dataset}, {each.shots} shot{'s' * (each.shots > 1)}"
    return each.dataset if each.share is None else f"{each.dataset}, {100 * each.share:g}%"


def _families(results: Results, panels: Iterable[Sequence[Point]]) -> dict[str, Style]:
    """A style for each family, that of its best head, so that figures agree."""
    heads: dict[str, str] = {}
    points = [point for points in panels for point in points]
    for point in sorted(points, key=lambda p: results.heads.index(p.entry.head)):
        heads.setdefault(drawings.family(point.entry), point.entry.head)
    styles = _distinct(results, list(heads.values()))
    return {name: styles[head] for name, head in heads.items()}


def _styles(
    results: Results, panels: Iterable[Sequence[tuple[str, Sequence[Point]]]]
) -> tuple[dict[str, Style], int]:
    """Styles of the heads that are drawn, the best first, and how many are left out."""
    best: dict[str, float] = {}
    for panel in panels:
        for head, points in panel:
            top = max((point.y for point in points), default=0.0)
            best[head] = max(best.get(head, 0.0), top)
    shown = sorted(best, key=lambda head: -best[head])[:MOST_LINES]
    return _distinct(results, shown), len(best) - len(shown)


def _distinct(results: Results, heads: Sequence[str]) -> dict[str, Style]:
    """Each head's own colour, unless one drawn before it has the same: then a free one."""
    free = list(range(len(CATEGORICAL)))
    styles = {}
    for number, head in enumerate(heads):
        wanted = results.heads.index(head)
        if wanted in free:
            free.remove(wanted)
        elif free:
            wanted = free.pop(0)
        else:
            wanted = number
        styles[head] = (colour(wanted), marker(wanted))
    return styles


def _of_tasks(results: Results, make: Callable[[Task], V | None]) -> dict[Task, V]:
    found = {task: make(task) for task in results.tasks}
    return {task: value for task, value in found.items() if value is not None}


def _first(found: Mapping[K, V], most: int) -> tuple[dict[K, V], int]:
    """The first so many, and how many are left out."""
    return dict(list(found.items())[:most]), max(0, len(found) - most)


def _task_title(panels: Mapping[Task, Any], task: Task) -> str:
    return short(task.name, 44)


def _note(panels: int = 0, lines: int = 0) -> str:
    """What is not drawn."""
    parts = []
    if panels:
        parts.append(f"{panels} more {'panel' if panels == 1 else 'panels'}")
    if lines:
        heads = "head, whose" if lines == 1 else "heads, whose"
        parts.append(f"{lines} more {heads} best accuracy is lower")
    return f" Not drawn: {' and '.join(parts)}; the tables have them." if parts else ""


def _score_point(curve: TrainingCurve) -> Point:
    return Point(x=0, y=curve.entry.score or 0.0, std=0, num_seeds=1, entry=curve.entry)
