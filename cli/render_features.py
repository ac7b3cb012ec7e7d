"""How results on pooled features and the list of poolers look; built from ``render.py``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epcache.cli.render import facts, next_step, note, percent, table

if TYPE_CHECKING:
    from epcache.pipelines.readout import Study
    from epcache.results import Row


def knn(study: Study) -> None:
    """Every k and temperature, best first."""
    feature_rows(
        study, {"k": lambda row: str(row.k), "T": lambda row: f"{row.temperature:g}"}, "linear"
    )


def linear(study: Study) -> None:
    """Every method with its penalty, best first."""
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: str(row.method),
        "l2": lambda row: f"{'C' if row.method == 'logistic' else 'alpha'} {row.l2:.3g}",
    }
    feature_rows(study, columns, "layerwise")


def feature_rows(study: Study, columns: Mapping[str, Callable[[Row], str]], command: str) -> None:
    """Rows of one store, layer and norm that differ in pooler and some columns."""
    first, store = study.rows[0], str(study.store)
    data = f"{first.dataset}, {first.train_images:,} training images"
    facts(
        [
            ("store", store),
            ("features", f"{first.backbone}, layer {first.layer}, norm {first.norm}; {data}"),
        ]
    )
    judged = first.val_top1 is not None
    rows = sorted(
        study.rows, key=lambda row: (row.val_top1 or 0, row.test_top1_best or 0), reverse=True
    )
    table(
        ["pooler", *columns, *(["held-out top-1"] if judged else []), "test top-1", "test top-5"],
        [
            (
                row.pooler,
                *(text(row) for text in columns.values()),
                *([percent(row.val_top1)] if judged else []),
                percent(row.test_top1_best),
                percent(row.test_top5),
            )
            for row in rows
        ],
        right="k,T,held-out top-1,test top-1,test top-5",
    )
    if not judged:
        note("nothing was held out: the order is that of the evaluation split, no fair choice")
    next_step(
        f"wrote {len(rows)} row{'s' * (len(rows) > 1)} to {study.rows_path}",
        f"epcache {command} {shlex.quote(store)}",
    )


def poolers(
    found: Sequence[Mapping[str, Any]], *, dim: int, classes: int, grid: tuple[int, int]
) -> None:
    """Sizes and work, in millions."""
    table(
        ["pooler", "params M", "published M", "here M", "ratio"],
        [
            (
                each["name"],
                millions(each["num_params"]),
                millions(each["macs_published"]),
                millions(each["macs"]),
                "-" if each["macs"] is None else f"{each['macs_published'] / each['macs']:.1f}",
            )
            for each in found
        ],
        right="params M,published M,here M,ratio",
    )
    for each in found:
        if "problem" in each:
            note(each["problem"])
    note(
        f"parameters with a head of {classes:,} classes; multiply-adds of an image of {grid[0]} x "
        f"{grid[1]} tokens of width {dim}, as published and as computed here"
    )


def millions(number: int | None) -> str:
    """``1.383`` for 1,383,400."""
    return "-" if number is None else f"{number / 1e6:,.3f}"
