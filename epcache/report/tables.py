"""The tables: which there are, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from epcache.report import series
from epcache.report.collect import Entry, Results, averaged, best_entry
from epcache.report.formats import Column, Table
from epcache.report.published import Beside
from epcache.report.series import Point
from epcache.results import Row

if TYPE_CHECKING:
    from epcache.convergence import Convergence
    from epcache.ranks import Ranking

TABLES = (
    "leaderboard", "rows", "costs", "layers", "layer_winners", "shots", "rates", "ranks", "flips",
    "convergence", "attention", "queries", "published", "stores",
)  # fmt: skip
"""Every name that a table can have."""
TASK = (Column(name="backbone", label="backbone"), Column(name="dataset", label="data set"))
HEAD = Column(name="head", label="head")
LAYER = Column(name="layer", label="layer")
SEEDS = Column(name="seeds", label="seeds", kind="count")


def percent(name: str, label: str) -> Column:
    """A column of accuracies."""
    return Column(name=name, label=f"{label}, %", kind="percent")


def make_tables(
    results: Results,
    beside: Sequence[Beside],
    ranks: Sequence[Ranking],
    convergence: Sequence[Convergence],
) -> dict[str, Table]:
    """Every table that has rows, by name."""
    tables = [
        leaderboard(results), all_rows(results), costs(results), layers(results),
        layer_winners(results), shots(results), rates(results), rank_table(ranks), flips(ranks),
        convergence_table(results, convergence), attention(results), queries(results),
        published(beside), stores(results),
    ]  # fmt: skip
    return {table.name: table for table in tables if table.rows}


def leaderboard(results: Results) -> Table:
    """Scored rows, best first."""
    columns = [
        HEAD, *TASK, LAYER, Column(name="train", label="train"),
        percent("test_top1", "test"), percent("test_top1_best", "best epoch"),
        percent("val_top1", "held-out"), percent("test_top5", "top-5"),
        Column(name="num_params", label="params", kind="count"),
        Column(name="macs", label="multiply-adds", kind="count"),
        Column(name="epochs", label="epochs", kind="count"),
        Column(name="lr", label="lr", kind="number"), Column(name="seed", label="seed"),
        Column(name="run", label="run"),
    ]  # fmt: skip
    rows = [
        [
            head_text(e), e.row.backbone, e.row.dataset, layer_text(e.row), train_text(e.row),
            e.row.test_top1, e.row.test_top1_best, e.row.val_top1, e.row.test_top5,
            e.row.num_params, e.macs, e.row.epochs, e.row.lr, e.row.seed, e.row.run,
        ]
        for e in results.scored
    ]  # fmt: skip
    caption = (
        "test: top-1 on the evaluation split at the epoch and rate that held-out training images "
        "chose; best epoch: the best epoch on the evaluation split, which published tables print."
    )
    return Table(name="leaderboard", title="Results", caption=caption, columns=columns, rows=rows)


def all_rows(results: Results) -> Table:
    """Every row with every field, and its command."""
    names = [field.name for field in fields(Row)]
    rows = [
        [*(getattr(entry.row, name) for name in names), entry.head, entry.macs, entry.command]
        for entry in results.entries
    ]
    columns = [Column(name=name, label=name) for name in (*names, "head", "macs", "command")]
    return Table(
        name="rows", title="All rows", caption="Accuracies are fractions.", columns=columns,
        rows=rows, is_data=True,
    )  # fmt: skip


def costs(results: Results) -> Table:
    """The points of both Pareto figures."""
    rows = []
    for task in results.tasks:
        params = series.cost_points(results, task, lambda entry: entry.row.num_params)
        macs = series.cost_points(results, task, lambda entry: entry.macs)
        fronts = [
            {points[i].entry.head for i in series.pareto_front([(p.x, p.y) for p in points])}
            for points in (params, macs)
        ]
        for point in sorted(params, key=lambda p: -p.y):
            entry = point.entry
            on = [what for what, front in zip(("params", "macs"), fronts, strict=True)
                  if entry.head in front]  # fmt: skip
            rows.append(
                [entry.head, point.y, entry.row.num_params, entry.macs, " and ".join(on) or None,
                 layer_text(entry.row), task.backbone, task.dataset]
            )  # fmt: skip
    columns = [
        HEAD, percent("test_top1", "test"), Column(name="num_params", label="params", kind="count"),
        Column(name="macs", label="multiply-adds", kind="count"),
        Column(name="pareto", label="Pareto front of"), LAYER, *TASK,
    ]  # fmt: skip
    caption = "The best layer of each head on held-out data, all of train; means over seeds."
    return Table(
        name="costs", title="Accuracy and cost", caption=caption, columns=columns, rows=rows
    )


def layers(results: Results) -> Table:
    """The points of the layer curves."""
    rows = []
    for task in results.tasks:
        curves = series.layer_curves(results, task)
        for several in (curves.single, curves.averages):
            for head, points in several.items():
                rows += [
                    [head, layer_text(p.entry.row), *_mean(p), task.backbone, task.dataset]
                    for p in points
                ]
    columns = [
        HEAD, LAYER, percent("test_top1", "test"), percent("std", "std"), SEEDS, *TASK,
    ]  # fmt: skip
    return Table(
        name="layers", title="Accuracy by layer", caption="All of train; std over seeds.",
        columns=columns, rows=rows,
    )  # fmt: skip


def layer_winners(results: Results) -> Table:
    """Which layer each head should look at, and what that is worth."""
    rows = []
    for task in results.tasks:
        curves = series.layer_curves(results, task)
        for head, points in curves.single.items():
            last = points[-1]
            everything = [*points, *curves.averages.get(head, ())]
            best = best_entry([point.entry for point in everything])
            winner = next((p for p in everything if p.entry is best), last)
            rows.append(
                [head, layer_text(winner.entry.row), winner.y, layer_text(last.entry.row), last.y,
                 winner.y - last.y, task.backbone, task.dataset]
            )  # fmt: skip
    columns = [
        HEAD, Column(name="best_layer", label="chosen layer"),
        percent("best_top1", "its test"), Column(name="last_layer", label="last layer"),
        percent("last_top1", "its test"), Column(name="gain", label="gain", kind="points"),
        *TASK,
    ]  # fmt: skip
    caption = "Chosen on held-out data among single layers and averages; gain in percentage points."
    return Table(
        name="layer_winners", title="Which layer wins", caption=caption, columns=columns, rows=rows
    )


def shots(results: Results) -> Table:
    """The points of the shot curves."""
    rows = []
    for task in results.tasks:
        curves = series.shot_curves(results, task)
        heads = dict.fromkeys([*curves.shots, *curves.shares])
        for head in heads:
            points = [*curves.shots.get(head, ()), *curves.shares.get(head, ())]
            for p in sorted(points, key=lambda point: point.x):
                row = p.entry.row
                where = (task.backbone, task.dataset)
                rows.append([head, train_text(row), row.train_images, *_mean(p), *where])
    columns = [
        HEAD, Column(name="subset", label="of train"),
        Column(name="train_images", label="images", kind="count"), percent("test_top1", "test"),
        percent("std", "std"), SEEDS, *TASK,
    ]  # fmt: skip
    caption = "Means and sample standard deviations over seeds, which choose the subset too."
    return Table(
        name="shots",
        title="Accuracy by training images",
        caption=caption,
        columns=columns,
        rows=rows,
    )


def rates(results: Results) -> Table:
    """The points of the learning-rate figure."""
    rows = [
        [head, p.x, p.y, p.num_seeds, "chosen" if p.x == curve.chosen else None,
         layer_text(p.entry.row), task.backbone, task.dataset]
        for task in results.tasks
        for head, curve in series.rate_curves(results, task).items()
        for p in curve.points
    ]  # fmt: skip
    columns = [
        HEAD, Column(name="lr", label="learning rate", kind="number"),
        percent("val_top1", "held-out"), SEEDS, Column(name="chosen", label=""), LAYER, *TASK,
    ]  # fmt: skip
    return Table(
        name="rates", title="Held-out accuracy by learning rate", caption="All of train.",
        columns=columns, rows=rows,
    )  # fmt: skip


def rank_table(ranks: Sequence[Ranking]) -> Table:
    """Rank and accuracy of each backbone under each protocol."""
    rows = [
        [each.dataset, _subset_text(each), backbone, protocol, by_backbone[backbone],
         each.accuracies[protocol][backbone], each.trained.get(protocol)]
        for each in ranks
        for protocol, by_backbone in each.ranks.items()
        for backbone in sorted(by_backbone, key=by_backbone.__getitem__)
    ]  # fmt: skip
    columns = [
        Column(name="dataset", label="data set"), Column(name="subset", label="train"),
        Column(name="backbone", label="backbone"), Column(name="protocol", label="protocol"),
        Column(name="rank", label="rank", kind="count"), percent("test_top1", "test"),
        Column(name="trained", label="probes trained with"),
    ]  # fmt: skip
    caption = (
        "1 is the best of the backbones that have a number. Last layer; linear is the better probe "
        "of [CLS] and the mean patch token; the probes of a protocol are trained alike."
    )
    return Table(
        name="ranks", title="Ranks of backbones", caption=caption, columns=columns, rows=rows
    )


def flips(ranks: Sequence[Ranking]) -> Table:
    """Pairs of backbones that change places between two protocols."""
    rows = [
        [each.dataset, _subset_text(each), *flip.backbones, *flip.protocols]
        for each in ranks
        for flip in each.flips
    ]
    columns = [
        Column(name="dataset", label="data set"), Column(name="subset", label="train"),
        Column(name="backbone_a", label="backbone"),
        Column(name="backbone_b", label="and backbone"),
        Column(name="protocol_a", label="first is better under"),
        Column(name="protocol_b", label="second under"),
    ]  # fmt: skip
    return Table(name="flips", title="Ranks that flip", caption="", columns=columns, rows=rows)


def _subset_text(each: Ranking) -> str:
    return subset_text(each.shots, each.share)


def convergence_table(results: Results, found: Sequence[Convergence]) -> Table:
    """How soon each run is as good as it gets."""
    by_run = {entry.row.run: entry for entry in results.entries}
    rows = [
        [by_run[each.run].head, each.epochs_to_share, each.epochs, layer_text(by_run[each.run].row),
         each.backbone, each.dataset, each.run]
        for each in found
        if each.run in by_run
    ]  # fmt: skip
    columns = [
        HEAD, Column(name="epochs_to_97_percent", label="epochs to 97%", kind="count"),
        Column(name="epochs", label="of", kind="count"), LAYER, *TASK,
        Column(name="run", label="run"),
    ]  # fmt: skip
    caption = "Epochs until 97% of the accuracy after the last epoch is reached for the first time."
    return Table(
        name="convergence", title="Convergence", caption=caption, columns=columns, rows=rows
    )


def attention(results: Results) -> Table:
    """One line an analysed run."""
    names = ("accuracy", "complementarity", "max_box_acc_v2", "max_box_acc_v1", "num_maps",
             "num_images")  # fmt: skip
    rows = []
    for each in results.attention:
        entry = each.entry
        where = [entry.row.backbone, entry.row.dataset] if entry else [None, None]
        head = entry.head if entry else each.measures.get("pooler")
        rows.append([head, *(finite(each.measures.get(name)) for name in names), *where, each.run])
    columns = [
        HEAD, percent("accuracy", "top-1"),
        Column(name="complementarity", label="complementarity", kind="number"),
        percent("max_box_acc_v2", "MaxBoxAccV2"), percent("max_box_acc_v1", "V1"),
        Column(name="num_maps", label="maps", kind="count"),
        Column(name="num_images", label="images", kind="count"), *TASK,
        Column(name="run", label="run"),
    ]  # fmt: skip
    return Table(
        name="attention", title="Attention", caption="Boxes where the data set has them.",
        columns=columns, rows=rows,
    )  # fmt: skip


def queries(results: Results) -> Table:
    """One line a query of the analysed runs."""
    rows = [
        [each.run, query.get("query"), *(finite(query.get(name)) for name in
         ("accuracy_drop", "entropy", "centroid_in_box"))]
        for each in results.attention
        for query in listed(each.measures.get("queries"))
        if isinstance(query, dict)
    ]  # fmt: skip
    columns = [
        Column(name="run", label="run"), Column(name="query", label="query"),
        Column(name="accuracy_drop", label="accuracy drop", kind="points"),
        Column(name="entropy", label="entropy", kind="number"),
        percent("centroid_in_box", "centroid in box"),
    ]  # fmt: skip
    caption = (
        "Accuracy drop in percentage points when a query's map is replaced by uniform attention."
    )
    return Table(name="queries", title="Queries", caption=caption, columns=columns, rows=rows)


def listed(value: object) -> Sequence[Any]:
    """A list of a file that may be damaged."""
    return value if isinstance(value, list) else ()


def published(found: Sequence[Beside]) -> Table:
    """Published numbers and ours of the same kind."""
    rows = []
    for each in sorted(found, key=lambda each: each.ours is None):
        theirs, row = each.published, each.ours.row if each.ours else None
        best = row.test_top1_best if row else None
        rows.append(
            [theirs.head, theirs.top1, best, None if best is None else best - theirs.top1,
             row.test_top1 if row else None, each.ours.head if each.ours else None,
             theirs.backbone, theirs.dataset, theirs.protocol, theirs.note or None,
             row.run if row else None]
        )  # fmt: skip
    columns = [
        Column(name="head", label="published head"), percent("published", "published"),
        percent("our_test_top1_best", "ours, best epoch"),
        Column(name="difference", label="difference", kind="points"),
        percent("our_test_top1", "ours, held-out choice"),
        Column(name="our_head", label="our head"), *TASK,
        Column(name="protocol", label="published protocol"),
        Column(name="note", label="note"), Column(name="run", label="run"),
    ]  # fmt: skip
    source = f"Published: {found[0].published.source}." if found else ""
    return Table(
        name="published", title="Published numbers", columns=columns, rows=rows,
        caption=f"{source} The difference compares best epoch with best epoch.",
    )  # fmt: skip


def stores(results: Results) -> Table:
    """Where the tokens come from."""
    names = ("backbone", "dataset", "digest", "weights_digest", "precision", "image_size",
             "splits", "path")  # fmt: skip
    rows = []
    for each in results.stores:
        told = each.provenance
        sizes = ", ".join(f"{name} {rows:,}" for name, (rows, _) in each.splits.items())
        rows.append(
            [each.task.backbone, each.task.dataset, each.task.digest,
             mapping(told, "backbone").get("weights_digest"), told.get("precision"),
             mapping(told, "transform").get("image_size"), sizes or None,
             None if each.path is None else str(each.path)]
        )  # fmt: skip
    return Table(
        name="stores", title="Stores", caption="",
        columns=[Column(name=name, label=name.replace("_", " ")) for name in names], rows=rows,
    )  # fmt: skip


def head_text(entry: Entry) -> str:
    """The head, with what tells k-NN and linear rows of one pooler apart."""
    row = entry.row
    if row.k is not None:
        temperature = "" if row.temperature is None else f" T={row.temperature:g}"
        return f"{entry.head} k={row.k}{temperature}"
    return entry.head


def layer_text(row: Row) -> str:
    """``11``, or ``8-11`` for an average."""
    several = averaged(row)
    return str(row.layer) if several == 1 else f"{row.layer - several + 1}-{row.layer}"


def train_text(row: Row) -> str:
    """``all``, ``4 shots`` or ``10%``."""
    return subset_text(row.shots, row.share)


def subset_text(shots: int | None, share: float | None) -> str:
    """Which part of train; ``all`` where neither is given."""
    if shots is not None:
        return "1 shot" if shots == 1 else f"{shots} shots"
    return "all" if share is None else f"{100 * share:g}%"


def mapping(data: Any, name: str) -> dict[str, Any]:
    """A part of a document, empty where it is not there."""
    part = data.get(name) if hasattr(data, "get") else None
    return dict(part) if isinstance(part, dict) else {}


def finite(value: Any) -> float | int | None:
    """A number, or None where it is none."""
    if isinstance(value, bool):
        return float(value)
    is_finite = isinstance(value, int | float) and abs(value) < float("inf")
    return value if is_finite else None


def _mean(point: Point) -> Iterable[Any]:
    return point.y, point.std if point.num_seeds > 1 else None, point.num_seeds
