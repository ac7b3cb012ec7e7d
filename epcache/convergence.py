"""How soon a probe is as good as it gets: epochs to a share of its final accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epcache.results import RUNS, Row, best_row
from epcache.runs import read_curve

SHARE = 0.97
"""Of the final accuracy; what is left is noise of a few images on small evaluation splits."""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """How soon one run got there."""

    run: str
    backbone: str
    dataset: str
    pooler: str
    num_queries: int | None
    layer: int
    lr: float | None
    epochs: int
    """Of the schedule."""
    epochs_to_share: int
    """Epochs until the accuracy first was at least ``share`` of the last; 1 is the first epoch."""
    share: float
    final_top1: float
    """On the evaluation split, after the last epoch of the training on all of train."""

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


def convergence(
    rows: Sequence[Row], results_dir: Path, *, share: float = SHARE
) -> list[Convergence]:
    """Epochs to a share of the final accuracy, for every row that was scored and has its curve.

    Args:
        rows: Of probes; others have no curve and are left out.
        results_dir: Where their runs lie.
        share: Of the accuracy after the last epoch.
    """
    found = []
    for row in rows:
        curve = scored_curve(row, results_dir)
        if curve and row.epochs is not None:  # an imported head has one score and no epochs
            found.append(
                Convergence(
                    run=row.run,
                    backbone=row.backbone,
                    dataset=row.dataset,
                    pooler=row.pooler,
                    num_queries=row.num_queries,
                    layer=row.layer,
                    lr=row.lr,
                    epochs=len(curve),
                    epochs_to_share=epochs_to_share(curve, share),
                    share=share,
                    final_top1=curve[-1],
                )
            )
    return found


def best_convergence(rows: Sequence[Row], results_dir: Path) -> list[Convergence]:
    """That of the best row of each pooler and number of queries."""
    groups: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        if row.epochs is not None and row.test_top1_best is not None:
            groups.setdefault((row.pooler, row.num_queries), []).append(row)
    best = [one for group in groups.values() if (one := best_row(group)) is not None]
    return convergence(best, results_dir)


def epochs_to_share(curve: Sequence[float], share: float = SHARE) -> int:
    """Epochs, from 1, until a curve first reached a share of its last value."""
    return next(n for n, top1 in enumerate(curve, start=1) if top1 >= share * curve[-1])


def scored_curve(row: Row, results_dir: Path) -> list[float]:
    """Accuracy on the evaluation split after each epoch; empty where the row was not scored."""
    if row.test_top1_best is None:
        return []
    top1 = read_curve(results_dir / RUNS / row.run).get("final", {}).get("test_top1")
    values = top1 if isinstance(top1, list) else []
    return values if all(isinstance(value, int | float) for value in values) else []
