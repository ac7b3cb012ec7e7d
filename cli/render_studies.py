"""What a person sees of ``epcache layerwise``, ``lowshot`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from epcache.cli.render import duration, facts, next_step, note, percent, screen, table
from epcache.cli.render_probe import converged, result_table
from epcache.results import count
from epcache.store.files import format_bytes

if TYPE_CHECKING:
    from epcache.pipelines.layerwise import Curve
    from epcache.pipelines.lowshot import Cell
    from epcache.pipelines.study import StoreStudy, StudyResult
    from epcache.pipelines.sweep import StorePlan, SweepPlan
    from epcache.probing import Failure
    from epcache.ranks import Ranking

BARS = "▁▂▃▄▅▆▇█"
SIZES = 5
"""Columns of a table of subsets: mean and deviation of five fit 80 characters."""


def layerwise(study: StudyResult, curves: Callable[[StoreStudy], Sequence[Curve]]) -> None:
    """A table of layers for each store, and who wins by how much."""
    for each in study.stores:
        about(each)
        if found := curves(each):
            layer_table(found)
            winners(found, each)
    finish(study, "epcache report")


def layer_table(curves: Sequence[Curve]) -> None:
    """Accuracy on the evaluation split: a row for each layer, a column for each pooler."""
    places = {(row.average_layers or 1, row.layer): "" for curve in curves for row in curve.points}
    cells = {
        (curve.pooler, curve.num_queries, row.average_layers or 1, row.layer): (
            percent(row.score) + ("*" if row is curve.best else " ")
        )
        for curve in curves
        for row in curve.points
    }
    names = [title(curve) for curve in curves]
    table(
        ["layer", *(f"{name} " for name in names)],
        [
            [
                layers(layer, number),
                *(cells.get((c.pooler, c.num_queries, number, layer), "- ") for c in curves),
            ]
            for number, layer in sorted(places)
        ],
        right=",".join(f"{name} " for name in names),
    )


def winners(curves: Sequence[Curve], study: StoreStudy) -> None:
    """For each pooler the layer that held-out images choose, and by how much it is better."""
    found = [curve.winner() for curve in curves]
    table(
        ["pooler", "by layer", "wins", "val", "test", "over the last", "over the next"],
        [
            [
                title(curve),
                spark([row.score for row in curve.points if row.average_layers is None]),
                layers(winner["layer"], winner["average_layers"]),
                percent(winner["val_top1"]),
                percent(winner["test_top1"]),
                gain(winner["over_last_layer"]),
                gain(winner["over_second"], named=True),
            ]
            for curve, winner in zip(curves, found, strict=True)
        ],
        right="val,test,over the last,over the next",
    )
    note(
        "accuracies on the evaluation split in %; * and wins: chosen on held-out training images "
        "(val); over: what it gains on the evaluation split"
    )
    for text in converged(study.convergence):
        note(text)
    if winner := study.extra.get("winner"):
        queries = "" if winner["num_queries"] is None else f" M={winner['num_queries']}"
        last = winner["over_last_layer"]
        more = "" if last is None else f", {100 * last['test']:+.2f} over the last layer"
        screen().print(
            f"winner: {winner['pooler']}{queries} on "
            f"{'layer' if winner['average_layers'] == 1 else 'the average of layers'} "
            f"{layers(winner['layer'], winner['average_layers'])}: "
            f"{percent(winner['test_top1'])} on the evaluation split{more}"
        )


def lowshot(study: StudyResult, cells: Callable[[StoreStudy], Sequence[Cell]]) -> None:
    """Mean and standard deviation: a row for each classifier, a column for each subset."""
    for each in study.stores:
        about(each)
        found = cells(each)
        sizes = list(dict.fromkeys(cell.size for cell in found))
        sizes.sort(key=lambda size: (size.share is not None, size.shots or size.share))
        names = list(dict.fromkeys(cell.classifier for cell in found))
        texts = {(cell.classifier, cell.size): cell.text for cell in found}
        images = {cell.size: cell.train_images for cell in found}
        for start in range(0, len(sizes), SIZES):
            part = sizes[start : start + SIZES]
            heads = [size.name for size in part]
            rows = [[name, *(texts.get((name, size), "-") for size in part)] for name in names]
            rows.append(["images", *(f"{images[size]:,}" for size in part)])
            table(["", *heads], rows, right=",".join(heads))
        seeds = max((len(cell.top1) for cell in found), default=1)
        note(
            f"accuracies on the evaluation split in %, mean"
            f"{' ± standard deviation' * (seeds > 1)} over {seeds} subset"
            f"{'s' * (seeds > 1)}; training images outside the subset chose rate, epoch, k and "
            f"penalty"
        )
        for text in converged(each.convergence):
            note(text)
    folder = study.rows_path.parent / "subsets"
    finish(study, "epcache report", f"; images of the subsets in {folder}")


def sweep(study: StudyResult) -> None:
    """The best rows of each store."""
    for each in study.stores:
        about(each)
        result_table(each.rows, study.rows_path)
        for text in converged(each.convergence):
            note(text)
    finish(study, "epcache report")


def planned(plan: SweepPlan) -> None:
    """What a sweep would do: a line for each pass."""
    for each in plan.stores:
        facts([("store", str(each.store))])
        passes(each)
        for failure in each.failures:
            note(f"cannot run: {failure.what}: {failure.reason}")
    found = plan.to_json()
    note(
        f"{found['probes']:,} probes, {found['done']:,} of them done, share {found['passes']:,} "
        f"passes; {found['features']:,} classifiers on pooled features; about "
        f"{duration(found['estimated_seconds'])} (an estimate from timed steps, classifiers on "
        f"pooled features not counted)"
    )


def passes(plan: StorePlan) -> None:
    """Probes that train together, their memory and their time."""
    table(
        ["pass", "probes", "done", "images", "epochs", "tokens", "time"],
        [
            [
                each.title,
                ", ".join(each.probes),
                str(each.num_done),
                f"{each.train_images:,}",
                str(each.epochs),
                format_bytes(each.token_bytes) + ("" if each.in_memory else " streamed"),
                duration(each.seconds),
            ]
            for each in plan.passes
        ],
        right="done,images,epochs,tokens,time",
    )


def ranking(found: Ranking) -> None:
    """Accuracy and rank of every backbone by each protocol, and which pairs change places."""
    size = "all of train"
    if found.shots is not None:
        size = f"{found.shots} shot{'s' * (found.shots > 1)}"
    elif found.share is not None:
        size = f"{100 * found.share:g}% of train"
    protocols = list(found.ranks)
    screen().print(f"backbones on {found.dataset}, {size}: accuracy and rank", highlight=False)
    table(
        ["backbone", *protocols],
        [
            [
                name,
                *(
                    f"{percent(found.accuracies[p][name])} ({found.ranks[p][name]})"
                    if name in found.ranks[p]
                    else "-"
                    for p in protocols
                ),
            ]
            for name in found.backbones
        ],
        right=",".join(protocols),
    )
    for protocol, how in found.trained.items():
        note(f"{protocol}: {how}, last layer")
    for flip in found.flips:
        first, second = flip.backbones
        note(f"flip: {first} is better by {flip.protocols[0]}, {second} by {flip.protocols[1]}")
    if len(protocols) > 1 and not found.flips:
        note(f"no pair changes places between {', '.join(protocols)}")


def finish(study: StudyResult, command: str, more: str = "") -> None:
    """Ranks, what failed, where the rows are, and what to do next."""
    for each in study.rankings:
        ranking(each)
    failed(study.failures)
    number = count(sum(len(each.rows) for each in study.stores), "row")
    next_step(f"{number} of this command in {study.rows_path}{more}", command)


def failed(failures: Sequence[Failure]) -> None:
    """On stderr, as it is no result."""
    if not failures:
        return
    grid = Table(box=None, header_style="bold", pad_edge=False)
    grid.add_column("failed")
    grid.add_column("why", overflow="fold")
    for failure in failures:
        grid.add_row(escape(failure.what), escape(failure.reason))
    screen(stderr=True).print(grid)


def about(study: StoreStudy) -> None:
    """Which store."""
    first = study.rows[0] if study.rows else None
    norm = "" if first is None else f", norm {first.norm}"
    facts([("store", str(study.store)), ("data", f"{study.backbone} on {study.dataset}{norm}")])


def title(curve: Curve) -> str:
    """``ep M=32``."""
    return curve.pooler + ("" if curve.num_queries is None else f" M={curve.num_queries}")


def layers(layer: int, number: int) -> str:
    """``11``, or ``8-11`` for the average of those layers."""
    return str(layer) if number == 1 else f"{layer - number + 1}-{layer}"


def gain(found: Mapping[str, Any] | None, *, named: bool = False) -> str:
    """``+0.42``, or ``+0.42 (layer 10)``."""
    if found is None:
        return "-"
    where = f" ({layers(found['layer'], found['average_layers'])})" if named else ""
    return f"{100 * found['test']:+.2f}{where}"


def spark(values: Sequence[float | None]) -> str:
    """A bar for each value, from the lowest to the highest."""
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    steps = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round(steps * (value - low) / ((high - low) or 1))]
        for value in values
    )
