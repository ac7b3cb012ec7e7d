"""Results as they are kept: one row per probe in JSON lines, and a folder per run beside them.

``<home>/results/rows.jsonl`` gets one object a line, appended and fsynced: finished rows survive a
crash. ``<home>/results/runs/<run>/`` holds ``config.json``, ``curve.json``, ``best.safetensors``
and ``last.safetensors``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from epcache.errors import DataError
from epcache.home import home_dir
from epcache.store.files import disk_full_is_clear
from epcache.store.spec import canonical_json

ROWS = "rows.jsonl"
RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One probe's result; null (None) where a field does not apply. Accuracies are fractions."""

    run: str
    """Name of the run's folder: a hash of everything that decides the result."""
    backbone: str
    dataset: str
    digest: str
    """Of the store."""
    layer: int
    norm: str
    tokens: str
    views: int
    pooler: str
    num_queries: int | None = None
    dim_out: int | None = None
    num_params: int | None = None
    """Trainable ones, the classifier's included."""
    recipe: str | None = None
    optimizer: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    seed: int | None = None
    shots: int | None = None
    train_images: int
    val_top1: float | None = None
    test_top1: float | None = None
    """At the epoch that held-out training data chose."""
    test_top1_best: float | None = None
    """Best epoch on the evaluation split, as published tables print it."""
    test_top1_last: float | None = None
    best_epoch: int | None = None
    """From 0; chosen on held-out data, or on the evaluation split where there are none."""
    test_top5: float | None = None
    seconds: float
    device: str
    precision: str
    epcache_version: str
    k: int | None = None
    temperature: float | None = None
    method: str | None = None
    """logistic or ridge; None for probes and k-NN."""
    l2: float | None = None
    average_layers: int | None = None
    """Tokens are averaged over so many layers, the last of them ``layer``; None for one."""
    share: float | None = None
    """Of each class of train, such as 0.01, where the subset is a percentage; ``shots`` is None."""

    @property
    def score(self) -> float | None:
        """What to report: at the chosen epoch, or the best where nothing was held out."""
        return self.test_top1_best if self.val_top1 is None else self.test_top1

    @property
    def classifier(self) -> str:
        """``ep``, or with what classifies pooled features ``knn gap``, ``ridge cls``."""
        method = "knn" if self.k is not None else self.method
        return self.pooler if method is None else f"{method} {self.pooler}"

    def to_json(self) -> dict[str, Any]:
        """The row as others read it; fields of few rows only where they apply."""
        data = asdict(self)
        for names in (("k", "temperature"), ("method", "l2"), ("average_layers",), ("share",)):
            if all(data[name] is None for name in names):
                for name in names:
                    del data[name]
        return data

    @property
    def training(self) -> tuple[str | None, str | None, int | None]:
        """Recipe, optimizer and epochs: rows that differ in it are no points of one curve."""
        return self.recipe, self.optimizer, self.epochs

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Inverse of ``to_json``; fields of a newer version are left out."""
        if not isinstance(data, Mapping):
            raise TypeError(f"expected an object, got {data!r}")
        kinds = {field.name: str(field.type) for field in fields(cls)}
        kept = {key: value for key, value in data.items() if key in kinds}
        for key, value in kept.items():
            if not _is_of(kinds[key], value):
                raise TypeError(f"{key} is {value!r}, expected {kinds[key]}")
        return cls(**kept)


def _is_of(kind: str, value: object) -> bool:
    """Whether a JSON value is what a field's annotation says; a whole number is a float too."""
    kinds = kind.split(" | ")
    if value is None or isinstance(value, bool):
        return value is None and "None" in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    return type(value).__name__ in kinds


def results_dir() -> Path:
    """``<home>/results``."""
    return home_dir() / "results"


def run_name(identity: Mapping[str, Any]) -> str:
    """Twelve hex digits of everything that decides a result (JSON types only)."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]


def append_rows(rows: Iterable[Row], folder: Path) -> None:
    """Append durably; two processes may append at once.

    A torn last line, of a disk that was full or a machine that stopped, never counted: it goes
    first, or it would take the new row with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows)
    path = folder / ROWS
    with disk_full_is_clear(path), path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(_whole_bytes(file))
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _whole_bytes(file: BinaryIO) -> int:
    """Length of a file up to its last newline."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while end and b"\n" not in tail:
        start = max(0, end - 4096)
        file.seek(start)
        tail, end = file.read(end - start), start
    return end + tail.rfind(b"\n") + 1


def read_rows(folder: Path) -> list[Row]:
    """All rows, oldest first; of two rows of one run the later counts.

    A last line without its newline was being written when the machine stopped: it never counted.

    Raises:
        DataError: A whole line cannot be read.
    """
    path = folder / ROWS
    if not path.exists():
        return []
    rows: dict[str, Row] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = Row.from_json(json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path} is damaged in line {number} ({error}); delete that line to go on"
            ) from None
        rows.pop(row.run, None)
        rows[row.run] = row
    return list(rows.values())


def count(number: int, noun: str) -> str:
    """``1 row``, ``1,200 rows``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def study_json(store: Path, digest: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The object that every command with rows of one store prints."""
    best = best_row(rows)
    return {
        "store": str(store),
        "digest": digest,
        "results": [row.to_json() for row in rows],
        "best": best.to_json() if best else None,
    }


def best_row(rows: Sequence[Row]) -> Row | None:
    """Highest ``val_top1``; ``test_top1_best`` where there is no held-out data."""
    judged = [row for row in rows if row.val_top1 is not None]
    if judged:
        return max(judged, key=lambda row: row.val_top1 or 0.0)
    return max(rows, key=lambda row: row.test_top1_best or -1.0, default=None)
