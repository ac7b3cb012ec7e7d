"""Everything that a report shows, read once from the results folder into one frozen object."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from epcache.errors import ConfigError, EpcacheError
from epcache.report.commands import command_of
from epcache.report.costs import macs_of
from epcache.results import ROWS, RUNS, Row, best_row, read_rows
from epcache.store.reader import Store, open_store

ATTENTION, SUBSETS = "attention", "subsets"
FLOATS = tuple(f.name for f in fields(Row) if "float" in str(f.type))


@dataclass(frozen=True, kw_only=True)
class Task:
    """What rows can be compared on: one backbone's tokens of one data set."""

    backbone: str
    dataset: str
    digest: str
    is_alone: bool = True
    """Whether no other store has this backbone and data set."""

    @property
    def name(self) -> str:
        """``digits_mae on digits``; with the store's digest where that says too little."""
        digest = "" if self.is_alone else f" ({self.digest[:8]})"
        return f"{self.backbone} on {self.dataset}{digest}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row with what else is known of it."""

    row: Row
    task: Task
    config: Mapping[str, Any] | None
    """``config.json`` of the run; None for k-NN, linear classifiers and runs that are gone."""
    command: str
    """Gives the same run again."""
    macs: int | None
    """Multiply-adds an image, the classifier's included; None where the run is gone."""

    @property
    def head(self) -> str:
        """What was put on the backbone, such as ``ep M=32`` or ``k-NN gap``."""
        return head_name(self.row, self.config)

    @property
    def is_whole(self) -> bool:
        """Whether it learnt from all of train."""
        return self.row.shots is None and self.row.share is None

    @property
    def score(self) -> float | None:
        """Top-1 on the evaluation split without a choice on it.

        At the epoch that held-out data chose; at the last epoch where nothing was held out.
        """
        row = self.row
        if row.test_top1 is not None:
            return row.test_top1
        return row.test_top1_last if row.val_top1 is None else None


@dataclass(frozen=True, kw_only=True)
class AttentionRun:
    """``attention/<run>/``: measures and pictures."""

    run: str
    folder: Path
    measures: Mapping[str, Any]
    entry: Entry | None
    """Of the row it analyses, where that is among the results."""

    @property
    def pictures(self) -> tuple[Path, ...]:
        """The figures that are there, in the order of the analysis."""
        names = self.measures.get("figures")
        if not isinstance(names, list):
            return ()
        plain = [str(name) for name in names if Path(str(name)).name == str(name)]
        paths = (self.folder / name for name in plain)
        return tuple(path for path in paths if path.suffix.lower() == ".png" and path.is_file())


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """A store that rows come from."""

    task: Task
    path: Path | None
    """None where it is not there any more; then the rows alone speak."""
    provenance: Mapping[str, Any]
    splits: Mapping[str, tuple[int, int]]
    """Images and views of each split."""
    layers: tuple[int, ...]
    tokens: Mapping[str, Any]
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All of a results folder."""

    folder: Path
    entries: tuple[Entry, ...]
    curves: Mapping[str, Mapping[str, Any]]
    """``curve.json`` of runs that were scored, by run."""
    attention: tuple[AttentionRun, ...]
    subsets: tuple[Path, ...]
    stores: tuple[StoreFacts, ...]
    problems: tuple[str, ...]
    """Files that could not be read; the report goes on without them."""

    @property
    def rows(self) -> list[Row]:
        """The rows, oldest first."""
        return [entry.row for entry in self.entries]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Those with the most rows first."""
        counts: dict[Task, int] = {}
        for entry in self.entries:
            counts[entry.task] = counts.get(entry.task, 0) + 1
        return tuple(sorted(counts, key=lambda task: (-counts[task], task.name)))

    @cached_property
    def scored(self) -> tuple[Entry, ...]:
        """Rows with a score on the evaluation split, best first."""
        found = [entry for entry in self.entries if entry.row.test_top1_best is not None]
        return tuple(
            sorted(found, key=lambda e: (e.score or 0.0, e.row.val_top1 or 0), reverse=True)
        )

    @cached_property
    def heads(self) -> tuple[str, ...]:
        """Every head once, the best first; its place here is its colour everywhere."""
        ordered = [*self.scored, *self.entries]
        whole = sorted(ordered, key=lambda entry: not entry.is_whole)
        return tuple(dict.fromkeys(entry.head for entry in whole))


def collect(folder: Path) -> Results:
    """Read a results folder.

    Raises:
        ConfigError: It holds no rows.
        DataError: ``rows.jsonl`` is damaged.
    """
    rows = [clean(row) for row in read_rows(folder)]
    if not rows:
        raise ConfigError(
            f"no results in {folder}: {ROWS} is missing or empty. Run: epcache probe (or epcache "
            f"demo), or name another results folder"
        )
    problems: list[str] = []
    configs = {
        row.run: config
        for row in rows
        if (config := _read(folder / RUNS / row.run / "config.json", problems)) is not None
    }
    scored = {row.run for row in rows if row.test_top1_best is not None}
    curves = {
        run: curve
        for run in configs
        if run in scored
        and (curve := _read(folder / RUNS / run / "curve.json", problems)) is not None
    }
    tasks, stores = _tasks(rows), _open_stores(folder, rows, configs)
    entries = tuple(
        Entry(
            row=row, task=tasks[row.digest, row.backbone, row.dataset],
            config=configs.get(row.run),
            command=command_of(row, configs.get(row.run), stores.get(row.digest)),
            macs=macs_of(row, configs.get(row.run)),
        )
        for row in rows
    )  # fmt: skip
    subsets = folder / SUBSETS
    return Results(
        folder=folder, entries=entries, curves=curves,
        attention=_attention(folder, entries, problems),
        subsets=tuple(sorted(subsets.glob("*.json"))) if subsets.is_dir() else (),
        stores=tuple(_facts(task, stores.get(task.digest)) for task in tasks.values()),
        problems=tuple(problems),
    )  # fmt: skip


def clean(row: Row) -> Row:
    """With None in place of what is no finite number, and text where text belongs."""
    changed: dict[str, Any] = {}
    for name in FLOATS:
        value = getattr(row, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            changed[name] = 0.0 if name == "seconds" else None
    for name in ("run", "backbone", "dataset", "digest", "pooler", "norm", "tokens"):
        if not isinstance(getattr(row, name), str):
            changed[name] = str(getattr(row, name))
    return replace(row, **changed) if changed else row


def head_name(row: Row, config: Mapping[str, Any] | None = None) -> str:
    """What was put on the backbone, with what tells it from others of its kind."""
    if row.k is not None:
        return f"k-NN {row.pooler}"
    if row.method is not None:
        return f"{row.method} {row.pooler}"
    parts = [row.pooler]
    if row.num_queries is not None:
        parts.append(f"M={row.num_queries}")
    about = config if isinstance(config, Mapping) else {}
    asked = about.get("probe")
    asked = asked if isinstance(asked, Mapping) else {}
    if asked.get("dim_out") not in (None, about.get("dim")):
        parts.append(f"O={asked['dim_out']}")
    options = asked.get("options") or {}
    parts += [f"{name}={value}" for name, value in sorted(options.items())]
    if row.tokens == "all":
        parts.append("(all)")
    return " ".join(parts)


def averaged(row: Row) -> int:
    """Over how many layers tokens were averaged, the last of them ``row.layer``."""
    return row.average_layers or 1


def best_entry(entries: Sequence[Entry]) -> Entry | None:
    """The one that held-out data chooses."""
    best = best_row([entry.row for entry in entries])
    return next((entry for entry in entries if entry.row is best), None)


def _read(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    """A JSON object; None, and a problem noted, where the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read ({error})")
        return None
    if not isinstance(data, dict):
        problems.append(f"{path} holds no JSON object")
        return None
    return data


def _tasks(rows: Sequence[Row]) -> dict[tuple[str, str, str], Task]:
    """Tasks by digest, backbone and data set, in the order of the rows."""
    keys = list(dict.fromkeys((row.digest, row.backbone, row.dataset) for row in rows))
    pairs = [key[1:] for key in keys]
    return {
        (digest, backbone, dataset): Task(
            backbone=backbone, dataset=dataset, digest=digest,
            is_alone=pairs.count((backbone, dataset)) == 1,
        )
        for digest, backbone, dataset in keys
    }  # fmt: skip


def _open_stores(
    folder: Path, rows: Iterable[Row], configs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Store]:
    """The stores of the rows that are still there, by digest."""
    wanted = {row.digest for row in rows}
    named = dict.fromkeys(str(config.get("store")) for config in configs.values())
    beside = sorted((folder.parent / "stores").glob("*/*/zarr.json"))
    found: dict[str, Store] = {}
    for path in [*map(Path, named), *(document.parent for document in beside)]:
        if wanted <= found.keys():
            break
        try:
            store = open_store(path)
        except (EpcacheError, OSError, ValueError, KeyError):
            continue  # gone, unfinished or of another version: the rows speak for it
        if store.digest in wanted:
            found.setdefault(store.digest, store)
    return found


def _facts(task: Task, store: Store | None) -> StoreFacts:
    if store is None:
        return StoreFacts(
            task=task, path=None, provenance={}, splits={}, layers=(), tokens={}, num_bytes=None
        )
    splits = {name: (s.num_rows, s.num_views) for name, s in store.spec.splits.items()}
    return StoreFacts(
        task=task, path=store.path, provenance=store.provenance, splits=splits,
        layers=store.layers, tokens=store.tokens, num_bytes=store.num_bytes,
    )  # fmt: skip


def _attention(
    folder: Path, entries: Sequence[Entry], problems: list[str]
) -> tuple[AttentionRun, ...]:
    by_run = {entry.row.run: entry for entry in entries}
    found = []
    for path in sorted((folder / ATTENTION).glob("*/attention.json")):
        measures = _read(path, problems)
        if measures is not None:
            run = str(measures.get("run", path.parent.name))
            found.append(
                AttentionRun(run=run, folder=path.parent, measures=measures, entry=by_run.get(run))
            )
    return tuple(found)
