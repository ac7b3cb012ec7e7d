"""Which backbone is best, asked three ways: k-NN, linear and efficient probing.

The order of backbones depends on the protocol; this finds by how much.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from epcache.results import Row, best_row

PROTOCOLS = ("knn", "linear", "ep")
"""knn: best k and temperature; linear: probes of [CLS] or the mean patch token, or, where no
backbone has those, logistic regression and ridge; ep: efficient probing. What is best is chosen on
held-out images."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Two backbones that two protocols put in opposite orders."""

    protocols: tuple[str, str]
    backbones: tuple[str, str]
    """The first is better by the first protocol, the second by the second."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The backbones of one data set and one amount of training images."""

    dataset: str
    shots: int | None
    share: float | None
    """Both None: all of train."""
    accuracies: Mapping[str, Mapping[str, float]]
    """Protocol to backbone to accuracy on the evaluation split, a mean over seeds."""
    ranks: Mapping[str, Mapping[str, int]]
    """Protocol to backbone to rank, 1 the best; equal accuracies share the better rank."""
    flips: Sequence[Flip]
    trained: Mapping[str, str] = field(default_factory=dict)
    """How the probes of a protocol were trained: the same for every backbone."""

    @property
    def backbones(self) -> tuple[str, ...]:
        """All of them; best first, by the last protocol that has them."""
        places: dict[str, int] = {}
        for ranks in self.ranks.values():
            places |= ranks
        return tuple(sorted(places, key=lambda name: (places[name], name)))

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "backbones": list(self.backbones)}


def rank_backbones(rows: Sequence[Row]) -> list[Ranking]:
    """Rank the backbones of every data set, by each protocol that two of them have.

    Only the last layer that rows have of a backbone counts, without averages: that is where the
    protocols are usually compared.

    Args:
        rows: Of several stores.

    Returns:
        Rankings of data sets with at least two backbones, those of all of train first.
    """
    groups: dict[tuple[str, int, float], list[Row]] = {}
    for row in _of_last_layers(rows):
        key = (row.dataset, row.shots or 0, row.share or 0.0)
        groups.setdefault(key, []).append(row)
    found = []
    for (dataset, shots, share), group in sorted(groups.items()):
        alike = {protocol: comparable(_of_protocol(group, protocol)) for protocol in PROTOCOLS}
        accuracies = {
            protocol: scores
            for protocol, those in alike.items()
            if len(scores := _scores(those)) > 1
        }
        if accuracies:
            ranks = {protocol: ranked(scores) for protocol, scores in accuracies.items()}
            found.append(
                Ranking(
                    dataset=dataset,
                    shots=shots or None,
                    share=share or None,
                    accuracies=accuracies,
                    ranks=ranks,
                    flips=flips(accuracies),
                    trained={p: told for p in accuracies if (told := trained(alike[p]))},
                )
            )
    return found


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Rows trained alike, in the way that most backbones were; of equals the longer training.

    Otherwise a rank would say whose probe was trained more.
    """
    ways: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        ways.setdefault((row.num_queries, *row.training), []).append(row)
    return max(
        ways.values(),
        key=lambda those: (len({row.digest for row in those}), those[0].epochs or 0),
        default=[],
    )


def trained(rows: Sequence[Row]) -> str:
    """``M=32, recipe small, 30 epochs``; empty where nothing is trained by epochs."""
    first = rows[0]
    if first.epochs is None:
        return ""
    queries = "" if first.num_queries is None else f"M={first.num_queries}, "
    return f"{queries}recipe {first.recipe}, {first.epochs} epochs"


def ranked(scores: Mapping[str, float]) -> dict[str, int]:
    """Rank of each name by its score, 1 the highest; ties share the better rank."""
    return {
        name: 1 + sum(other > score for other in scores.values()) for name, score in scores.items()
    }


def flips(accuracies: Mapping[str, Mapping[str, float]]) -> list[Flip]:
    """Pairs of backbones whose order is opposite, for each pair of protocols; ties are no flip."""
    found = []
    for one, other in itertools.combinations(accuracies, 2):
        both = [name for name in accuracies[one] if name in accuracies[other]]
        for a, b in itertools.combinations(both, 2):
            by_one = accuracies[one][a] - accuracies[one][b]
            by_other = accuracies[other][a] - accuracies[other][b]
            if by_one * by_other < 0:
                pair = (a, b) if by_one > 0 else (b, a)
                found.append(Flip(protocols=(one, other), backbones=pair))
    return found


def _of_last_layers(rows: Sequence[Row]) -> list[Row]:
    last: dict[str, int] = {}
    for row in rows:
        last[row.digest] = max(row.layer, last.get(row.digest, 0))
    return [row for row in rows if row.layer == last[row.digest] and row.average_layers is None]


def _of_protocol(rows: Sequence[Row], protocol: str) -> list[Row]:
    if protocol == "knn":
        return [row for row in rows if row.k is not None]
    if protocol == "linear":
        linear = [row for row in rows if row.pooler in ("cls", "gap") and row.k is None]
        return [row for row in linear if row.method is None] or linear
    return [row for row in rows if row.pooler == protocol]


def _scores(rows: Sequence[Row]) -> dict[str, float]:
    """Accuracy of each backbone: of each seed's best row, then the mean."""
    stores: dict[tuple[str, str], dict[int | None, list[Row]]] = {}
    for row in rows:
        if row.score is not None:
            seeds = stores.setdefault((row.backbone, row.digest), {})
            # the seed of k-NN and of full data says nothing of the images trained on
            few = row.shots is not None or row.share is not None
            seeds.setdefault(row.seed if few else None, []).append(row)
    names = [backbone for backbone, _ in stores]
    found = {}
    for (backbone, digest), seeds in stores.items():
        best = [one for group in seeds.values() if (one := best_row(group)) is not None]
        name = backbone if names.count(backbone) == 1 else f"{backbone} ({digest[:8]})"
        found[name] = statistics.fmean(value for row in best if (value := row.score) is not None)
    return found
