"""Numbers that others have published for the same backbone and data set, beside ours."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from epcache.poolers import pooler_options
from epcache.report.collect import Entry, Results, averaged

LINEAR = "linear"
"""A linear probe, of [CLS] or of the mean patch token: the source does not say which."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published accuracy."""

    backbone: str
    dataset: str
    pooler: str
    """A pooler's name, or `LINEAR`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: str = "patch"
    top1: float
    """A fraction."""
    protocol: str
    """How the epoch was chosen."""
    source: str
    note: str = ""

    @property
    def head(self) -> str:
        """As ours are named."""
        names = {"num_queries": "M", "dim_out": "O"}
        parts = [f"{names.get(key, key)}={value}" for key, value in self.options.items()]
        extra = ["(all)"] if self.tokens == "all" else []
        return " ".join([self.pooler, *parts, *extra])


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A published number and our best row of the same kind, if there is one."""

    published: Published
    ours: Entry | None


@cache
def published_results() -> tuple[Published, ...]:
    """All of ``published_results.toml``."""
    text = (resources.files("epcache") / "published_results.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    shared = {name: data[name] for name in ("dataset", "protocol", "source")}
    found = []
    for each in data["backbones"]:
        about = {"backbone": each["backbone"], "note": each.get("note", ""), **shared}
        found.append(Published(pooler=LINEAR, top1=each["lp"] / 100, **about))
        options = {"num_queries": each.get("M", 32)}
        tokens = each.get("tokens", "patch")
        found.append(
            Published(pooler="ep", options=options, tokens=tokens, top1=each["ep"] / 100, **about)
        )
    found += [
        Published(
            backbone=each["backbone"], pooler=each["pooler"], top1=each["top1"] / 100,
            options=each.get("options", {}), note="ablation", **shared,
        )
        for each in data["ablations"]
    ]  # fmt: skip
    return tuple(found)


def beside(results: Results) -> list[Beside]:
    """Published numbers of the backbones and data sets that were measured here."""
    measured = {(task.backbone, task.dataset) for task in results.tasks}
    found = []
    for each in published_results():
        if (each.backbone, each.dataset) in measured:
            alike = [entry for entry in results.scored if is_alike(each, entry)]
            best = max(alike, key=lambda e: e.row.test_top1_best or 0.0, default=None)
            found.append(Beside(published=each, ours=best))
    return found


def is_alike(published: Published, entry: Entry) -> bool:
    """Whether a row measures the same: backbone, data set, head and tokens, on all of train.

    The published layer is the last; so is ours where the run's store says which that is, and
    averages of layers never count.
    """
    row = entry.row
    if (row.backbone, row.dataset) != (published.backbone, published.dataset):
        return False
    if not entry.is_whole or averaged(row) > 1 or row.k is not None or row.method is not None:
        return False
    asked = entry.config["probe"] if entry.config and "probe" in entry.config else {}
    options = dict(asked.get("options") or {})
    if published.pooler == LINEAR:
        return row.pooler in ("cls", "gap") and not options.get("value", False)
    if (row.pooler, row.tokens) != (published.pooler, published.tokens):
        return False
    sizes = {"num_queries": row.num_queries, "dim_out": asked.get("dim_out")}
    ours = {**options, **{name: value for name, value in sizes.items() if value is not None}}
    defaults = pooler_options(row.pooler)
    return {**defaults, **ours} == {**defaults, **published.options}
