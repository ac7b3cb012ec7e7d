"""The marks of each figure, on axes that are ready; what is drawn is decided in ``figures.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epcache.report import series
from epcache.report.canvas import INK, MUTED, Canvas, log_axis
from epcache.report.collect import Entry, best_entry
from epcache.report.formats import short
from epcache.report.series import LayerCurves, Point, RateCurve, ShotCurves, TrainingCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from epcache.ranks import Ranking

Style = tuple[str, str]
"""Colour and marker."""
PROTOCOL_LABELS = {"knn": "k-NN", "ep": "EP"}


def draw_costs(
    canvas: Canvas, ax: Axes, points: Sequence[Point], families: Mapping[str, Style]
) -> None:
    """Points, the front through the best of them, and their names."""
    front = series.pareto_front([(point.x, point.y) for point in points])
    for place, point in enumerate(points):
        face, shape = families[family(point.entry)]
        is_front = place in front
        ax.plot(
            [point.x], [100 * point.y], shape, color=face, markersize=8 if is_front else 6.5,
            alpha=1 if is_front else 0.65, gid=canvas.tip(_tip(point)), zorder=3,
        )  # fmt: skip
    xs, ys = zip(*((points[i].x, 100 * points[i].y) for i in front), strict=True)
    last = max(point.x for point in points)
    ax.plot(
        [*xs, last], [*ys, ys[-1]], drawstyle="steps-post", color=MUTED, linestyle=(0, (4, 3)),
        linewidth=1.2, zorder=1,
    )  # fmt: skip
    ax.set_xscale("log")
    least = min(point.x for point in points)
    span = max(last / least, 10.0)
    # room on the left for the name of the first, which no point of the front can stand in
    room = 0.6 if canvas.is_narrow else 0.45
    ax.set_xlim(least / span**room, max(last, least * 1.5) * span**0.08)
    ax.margins(y=0.14)
    log_axis(ax.xaxis, *ax.get_xlim())
    canvas.later.append(lambda: _name_points(ax, points, front))


def _name_points(ax: Axes, points: Sequence[Point], front: Sequence[int]) -> None:
    """Name the points of a front, the best first, where a name touches no other and no point.

    Nothing lies above and left of such a point, so its name goes there; or right below it.
    """
    from matplotlib.transforms import Bbox

    places = ax.transData.transform([(point.x, 100 * point.y) for point in points])
    taken: list[Bbox] = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    for position in reversed(front):
        point = points[position]
        for offset, across, up in (((-6, 4), "right", "bottom"), ((7, -5), "left", "top")):
            text = ax.annotate(
                short(point.entry.head, 18), (point.x, 100 * point.y), xytext=offset,
                textcoords="offset points", ha=across, va=up, color=INK, in_layout=False,
                fontsize="small",
            )  # fmt: skip
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def draw_layers(canvas: Canvas, ax: Axes, curves: LayerCurves, styles: Mapping[str, Style]) -> None:
    """A line a head; averages of layers to the right of the last."""
    depths = sorted({point.x for points in curves.single.values() for point in points})
    counts = sorted({point.x for points in curves.averages.values() for point in points})
    last = depths[-1] if depths else -1.0
    step = max(1.0, (last - (depths[0] if depths else 0)) / 12)
    places = {count: last + step * (1.5 + i) for i, count in enumerate(counts)}
    for head, points in curves.single.items():
        if head in styles:
            _line(canvas, ax, points, styles[head])
            best = best_entry([point.entry for point in points])
            _ring(ax, next((p for p in points if p.entry is best), None), styles[head])
    for head, points in curves.averages.items():
        if head in styles:
            face, shape = styles[head]
            xs, ys = [places[p.x] for p in points], [100 * p.y for p in points]
            ax.plot(xs, ys, linestyle=":", color=face, linewidth=1.4)
            for x, y, point in zip(xs, ys, points, strict=True):
                tip = canvas.tip(f"{_tip(point)}, average of the last {point.x:g} layers")
                ax.plot([x], [y], shape, color=face, markerfacecolor="none", gid=tip)
    if counts and depths:
        ax.axvline(last + step * 0.75, color=MUTED, linewidth=0.8)
    keep = depths[:: max(1, -(-len(depths) // (7 if canvas.is_narrow else 12)))]
    ticks = [*keep, *places.values()]
    ax.set_xticks(ticks, [*(f"{d:g}" for d in keep), *(f"avg {c:g}" for c in counts)])
    if len(counts) > 1 and (canvas.is_narrow or len(ax.figure.axes) > 1):
        for text in ax.get_xticklabels()[len(keep) :]:
            text.set_rotation(60)


def draw_shots(canvas: Canvas, ax: Axes, curves: ShotCurves, styles: Mapping[str, Style]) -> None:
    """A line and a band a head; shares hollow, on an axis at the top."""
    for head, points in curves.shots.items():
        if head not in styles:
            continue
        _line(canvas, ax, points, styles[head])
        ax.fill_between(
            [p.x for p in points], [100 * (p.y - p.std) for p in points],
            [100 * (p.y + p.std) for p in points], color=styles[head][0], alpha=0.17, linewidth=0,
        )  # fmt: skip
    shown = [head for head in curves.shares if head in styles]
    for place, head in enumerate(shown):
        face, shape = styles[head]
        aside = 1.025 ** (place - (len(shown) - 1) / 2)  # beside each other, not over each other
        for p in curves.shares[head]:
            if p.std:
                ends = [100 * (p.y - p.std), 100 * (p.y + p.std)]
                ax.plot([p.x * aside] * 2, ends, color=face, linewidth=1)
            tip = canvas.tip(_tip(p))
            ax.plot([p.x * aside], [100 * p.y], shape, color=face, markerfacecolor="none", gid=tip)
    ax.set_xscale("log")
    ax.minorticks_off()
    shots = {p.x: p.entry.row.shots for points in curves.shots.values() for p in points}
    ax.set_xticks(_apart(sorted(shots)), [f"{shots[x]}" for x in _apart(sorted(shots))])
    shares = {p.x: p.entry.row.share for points in curves.shares.values() for p in points}
    if shares:
        places = _apart(sorted(shares))
        top = ax.secondary_xaxis("top")
        top.set_xticks(places, [_share_label(shares[x]) for x in places])
        top.minorticks_off()
        top.tick_params(colors=MUTED, length=3)
        top.spines["top"].set_visible(False)


def _apart(places: Sequence[float]) -> list[float]:
    """Of sorted places those that stand 15% apart, so that their labels do not touch."""
    kept: list[float] = []
    for place in places:
        if not kept or place > 1.15 * kept[-1]:
            kept.append(place)
    return kept


def _share_label(share: float | None) -> str:
    return "all" if share in (None, 1) else f"{100 * share:.3g}%"


def draw_rates(
    canvas: Canvas, ax: Axes, curves: Mapping[str, RateCurve], styles: Mapping[str, Style]
) -> None:
    """A line a head, the chosen rate ringed."""
    for head, curve in curves.items():
        if head in styles:
            _line(canvas, ax, curve.points, styles[head])
            chosen = next((p for p in curve.points if p.x == curve.chosen), None)
            _ring(ax, chosen, styles[head])
    rates = sorted({p.x for curve in curves.values() for p in curve.points})
    ax.set_xscale("log")
    ax.minorticks_off()
    spread = [rate for i, rate in enumerate(rates) if not i or rate > 1.9 * rates[i - 1]]
    keep = spread[:: 2 if canvas.is_narrow and len(spread) > 6 else 1]
    ax.set_xticks(keep, [f"{rate:g}" for rate in keep])


def draw_training(
    canvas: Canvas, loss: Axes, top1: Axes, curves: Mapping[str, TrainingCurve],
    styles: Mapping[str, Style],
) -> None:  # fmt: skip
    """Loss on one axes, accuracy on the other."""
    from matplotlib.ticker import MaxNLocator

    for head, curve in curves.items():
        if head not in styles:
            continue
        face, shape = styles[head]
        dash: Any = "-" if curve.is_final else (0, (4, 2))
        tip = f"{head}, run {curve.entry.row.run}"
        loss.plot(curve.loss, color=face, linestyle=dash, linewidth=1.8, gid=canvas.tip(tip))
        values = [100 * value for value in curve.top1]
        top1.plot(values, color=face, linestyle=dash, linewidth=1.8, gid=canvas.tip(tip))
        epoch = curve.entry.row.best_epoch
        if epoch is not None and 0 <= epoch < len(values):
            top1.plot(
                [epoch], [values[epoch]], shape, color=face, markersize=9, markerfacecolor="none",
                markeredgewidth=1.6,
            )  # fmt: skip
    losses = [v for c in curves.values() for v in c.loss if v > 0]
    if losses and max(losses) > 30 * min(losses):
        loss.set_yscale("log")
        log_axis(loss.yaxis, min(losses), max(losses))
    for ax in (loss, top1):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_ranks(canvas: Canvas, ax: Axes, each: Ranking, styles: Mapping[str, Style]) -> None:
    """A line a backbone from protocol to protocol, named at its end."""
    protocols = list(each.ranks)
    flipped = {name for flip in each.flips for name in flip.backbones}
    ends: dict[int, list[str]] = {}
    for backbone in each.backbones:
        face, shape = styles[backbone]
        here = [(x, each.ranks[p][backbone]) for x, p in enumerate(protocols)
                if backbone in each.ranks[p]]  # fmt: skip
        ax.plot(*zip(*here, strict=True), color=face, linewidth=2.6 if backbone in flipped else 1.2)
        for x, rank in here:
            top1 = 100 * each.accuracies[protocols[x]][backbone]
            tip = canvas.tip(f"{backbone}: rank {rank} under {protocols[x]}, {top1:.2f}%")
            ax.plot([x], [rank], shape, color=face, markersize=8, gid=tip)
        x, rank = here[-1]
        if x == len(protocols) - 1:
            ends.setdefault(rank, []).append(short(backbone, 20))
        else:
            ax.annotate(
                short(backbone, 20), (x, rank), xytext=(6, 6), textcoords="offset points", color=INK
            )
    for rank, names in ends.items():
        ax.annotate(
            ", ".join(names), (len(protocols) - 1, rank), xytext=(9, 0), va="center",
            textcoords="offset points", color=INK, annotation_clip=False,
        )  # fmt: skip
    lowest = max(rank for ranks in each.ranks.values() for rank in ranks.values())
    ax.set_yticks(range(1, lowest + 1))
    ax.set_ylim(lowest + 0.5, 0.5)
    ax.set_xticks(range(len(protocols)), [PROTOCOL_LABELS.get(p, p) for p in protocols])
    ax.set_xlim(-0.15, len(protocols) - 0.85)


def _line(canvas: Canvas, ax: Axes, points: Sequence[Point], style: Style) -> None:
    face, shape = style
    ax.plot([p.x for p in points], [100 * p.y for p in points], color=face, linewidth=1.8)
    for p in points:
        tip = canvas.tip(_tip(p))
        ax.plot([p.x], [100 * p.y], shape, color=face, markersize=5.5, gid=tip)


def _ring(ax: Axes, point: Point | None, style: Style) -> None:
    if point is not None:
        ax.plot(
            [point.x], [100 * point.y], "o", color=style[0], markersize=12, markerfacecolor="none",
            markeredgewidth=1.4,
        )  # fmt: skip


def _tip(point: Point) -> str:
    row = point.entry.row
    parts = [f"{point.entry.head}: {100 * point.y:.2f}%"]
    if point.num_seeds > 1:
        parts[0] += f" ± {100 * point.std:.2f} ({point.num_seeds} seeds)"
    parts.append(f"layer {row.layer}")
    if row.lr is not None:
        parts.append(f"lr {row.lr:g}")
    if row.num_params is not None:
        parts.append(f"{row.num_params:,} parameters")
    return ", ".join(parts)


def label(ax: Axes, title: str, x: str, y: str = "top-1, %") -> None:
    """Title and axes' labels."""
    ax.set_title(title, pad=10)
    ax.set_xlabel(x)
    place = ax.get_subplotspec()
    if place is None or place.is_first_col() or len(ax.get_shared_y_axes().get_siblings(ax)) == 1:
        ax.set_ylabel(y)


def handle(style: Style, label: str, *, line: bool = False) -> Any:
    """An entry of the legend."""
    from matplotlib.lines import Line2D

    face, shape = style
    return Line2D(
        [], [], color=face, marker=shape, linestyle="-" if line else "", label=short(label, 34),
        markersize=6.5,
    )  # fmt: skip


def family(entry: Entry) -> str:
    """Heads that are drawn alike where size is an axis: all M and O of a pooler."""
    row = entry.row
    return f"{row.method} {row.pooler}" if row.method is not None else row.pooler
