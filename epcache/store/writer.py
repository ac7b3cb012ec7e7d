"""Shard tasks in, sealed store out; a run that stops anywhere is taken up where it stopped.

A task's arrays are written to temporary files, fsynced, renamed into place, and only then named in
the journal. ``seal`` is the last write of all, and nothing reads an unsealed store by accident.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epcache.errors import StoreError
from epcache.store.documents import (
    FINAL_NORM,
    document,
    read_root,
    root_document,
    seal_of,
)
from epcache.store.files import (
    PARTIAL,
    WriterLock,
    disk_full_is_clear,
    fsync_dir,
    make_dir_durably,
    one_at_a_time,
    remove_free_locks,
    write_durably,
)
from epcache.store.journal import JOURNAL, Entry, Quarantined, append_entry, read_journal
from epcache.store.shard import ShardWriter
from epcache.store.spec import (
    ShardTask,
    StoreSpec,
    column_metadata,
    group_metadata,
)

SYNC_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The rows of a split, in the order in which they are stored."""

    paths: Sequence[str]
    labels: NDArray[np.int64]
    class_names: Sequence[str]
    """Name of each row's class."""
    boxes: NDArray[np.float64] | None = None
    """(n, 4) x0 y0 x1 y1 in pixels of the image on disk, where the data set has them."""

    def to_csv(self) -> bytes:
        """``samples.csv``: row, path, label, class."""
        rows = zip(self.paths, self.labels.tolist(), self.class_names, strict=True)
        lines = [csv_line(["row", "path", "label", "class"])]
        lines += [csv_line([row, *values]) for row, values in enumerate(rows)]
        return "".join(lines).encode("utf-8", errors="surrogateescape")


def csv_line(values: Sequence[object]) -> str:
    """One line of CSV, ending in a newline."""
    text = io.StringIO()
    # A carriage return in a name is quoted only where lines end in one.
    csv.writer(text, lineterminator="\r\n").writerow(values)
    return text.getvalue().removesuffix("\r\n") + "\n"


@dataclass
class StoreWriter:
    """One process's hold on a store that is being written. Use as a context manager."""

    path: Path
    spec: StoreSpec
    rank: int = 0
    world_size: int = 1
    _lock: WriterLock = field(init=False)
    _entries: dict[tuple[str, int, int], Entry] = field(init=False, default_factory=dict)
    _open: list[TaskWriter] = field(init=False, default_factory=list)

    def __enter__(self) -> StoreWriter:
        """Take the lock and read what is committed; see ``begin`` for a new store."""
        with disk_full_is_clear(self.path):
            make_dir_durably(self.path)
        self._lock = WriterLock(self.path, rank=self.rank, world_size=self.world_size)
        try:
            shutil.rmtree(self.path / PARTIAL if self.world_size == 1 else self.partial_dir, True)
            self._entries = read_journal(self.path)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Give the store free for another run; uncommitted files go."""
        for task in self._open:
            task.abandon()
        if (self.path / PARTIAL).exists():
            shutil.rmtree(self.partial_dir, ignore_errors=True)
        self._lock.release()

    @property
    def partial_dir(self) -> Path:
        """Where this rank keeps files that are not committed."""
        return self.path / PARTIAL / str(self.rank)

    @property
    def committed(self) -> dict[tuple[str, int, int], Entry]:
        """Tasks that are in the journal and whose files still have their size."""
        return entries_on_disk(self.path, self._entries)

    def begin(
        self,
        samples: Mapping[str, Samples],
        provenance: Mapping[str, Any],
        final_norm: bytes | None,
    ) -> None:
        """Write everything that is known before the first token, and is not there yet.

        The root document comes last: a folder without one holds nothing that counts.

        Raises:
            StoreError: The folder holds another store, or this one in shards of another size.
        """
        with one_at_a_time(self.path):
            begun = self._is_begun()
            if not begun:
                (self.path / JOURNAL).unlink(missing_ok=True)
                self._entries = {}
            self._write_beginning(samples, final_norm, only_missing=begun)
            if not begun:
                self._write_root(provenance, sealed=None)

    def _is_begun(self) -> bool:
        root = read_root(self.path)
        if root is None:
            return False
        if root["digest"] != self.spec.digest:
            raise StoreError(
                f"{self.path} holds store {root['digest'][:8]}, this run makes "
                f"{self.spec.digest[:8]}; give another --out"
            )
        begun = StoreSpec.from_json(root["spec"]).geometry
        if begun != self.spec.geometry:
            raise StoreError(
                f"store {self.path} was begun with {begun}, this run has {self.spec.geometry}; "
                f"give the same, another --out, or delete the store"
            )
        return True

    def _write_beginning(
        self, samples: Mapping[str, Samples], final_norm: bytes | None, *, only_missing: bool
    ) -> None:
        files: dict[str, bytes] = {}
        for name, split in self.spec.splits.items():
            rows = samples[name]
            assert len(rows.paths) == len(rows.labels) == len(rows.class_names) == split.num_rows
            files |= self._group_files(name)
            files[f"{name}/samples.csv"] = rows.to_csv()
            files |= column_files(f"{name}/labels", rows.labels.astype("<i8"))
            if rows.boxes is not None:
                files |= column_files(f"{name}/boxes", rows.boxes.astype("<f8"))
        if final_norm is not None:
            files[FINAL_NORM] = final_norm
        for name, data in files.items():
            if not (only_missing and (self.path / name).is_file()):
                self._write(name, data)

    def tasks(self) -> list[ShardTask]:
        """This rank's tasks that are not committed, in order."""
        committed = self.committed
        mine = self.spec.tasks()[self.rank :: self.world_size]
        return [task for task in mine if task.key not in committed]

    def open_task(self, task: ShardTask) -> TaskWriter:
        """Start to write a task; the caller appends all its rows, then calls ``commit``."""
        self._open = [writer for writer in self._open if not writer.done]
        self._open.append(TaskWriter(self, task))
        return self._open[-1]

    def commit(self, entry: Entry) -> None:
        """Append to the journal."""
        append_entry(self.path, entry)
        self._entries[entry.task.key] = entry

    def seal(self) -> bool:
        """Finish the store if every task of every rank is committed; else change nothing."""
        with one_at_a_time(self.path):
            return self._seal()

    def _seal(self) -> bool:
        self._entries = read_journal(self.path)
        committed = self.committed
        tasks = self.spec.tasks()
        if any(task.key not in committed for task in tasks):
            return False
        entries = [committed[task.key] for task in tasks]
        for name in self.spec.splits:
            self._write_split_results(
                name, [entry for entry in entries if entry.task.split == name]
            )
        # Ranks commit in any order; a sealed store must not show it.
        self._write(JOURNAL, "".join(entry.to_line() for entry in entries).encode())
        root = read_root(self.path)
        assert root is not None
        shutil.rmtree(self.path / PARTIAL, ignore_errors=True)  # of ranks that died, too
        self._write_root(
            root["provenance"], sealed=seal_of(self.path, self.spec, root["provenance"])
        )
        shutil.rmtree(self.path / PARTIAL, ignore_errors=True)
        remove_free_locks(self.path)
        return True

    def _write_split_results(self, split: str, entries: list[Entry]) -> None:
        num_rows = self.spec.splits[split].num_rows
        valid = np.ones(num_rows, bool)
        sizes = np.zeros((num_rows, 2), "<i4")
        bad: dict[int, Quarantined] = {}
        for entry in entries:
            if entry.task.view == 0:
                sizes[slice(*entry.task.rows)] = entry.sizes
            bad |= {image.row: image for image in entry.quarantined}
        valid[list(bad)] = False
        lines = [
            json.dumps({"row": bad[row].row, "path": bad[row].path, "reason": bad[row].reason})
            for row in sorted(bad)
        ]
        self._write(f"{split}/quarantine.jsonl", "".join(f"{line}\n" for line in lines).encode())
        self._write_column(f"{split}/valid", valid)
        self._write_column(f"{split}/sizes", sizes)

    def _group_files(self, split: str) -> dict[str, bytes]:
        """The Zarr documents of a split: groups above its arrays, and the arrays themselves."""
        files = {}
        for view in range(self.spec.splits[split].num_views):
            for array in self.spec.arrays(split, view):
                parts = array.path.split("/")
                for depth in range(1, len(parts)):
                    group = "/".join(parts[:depth])
                    files[f"{group}/zarr.json"] = document(group_metadata())
                files[f"{array.path}/zarr.json"] = document(array.metadata())
        return files

    def _write_column(self, name: str, values: NDArray[Any]) -> None:
        for path, data in column_files(name, values).items():
            self._write(path, data)

    def _write_root(self, provenance: Mapping[str, Any], sealed: Mapping[str, Any] | None) -> None:
        self._write("zarr.json", root_document(self.spec, provenance, sealed))

    def _write(self, name: str, data: bytes) -> None:
        write_durably(self.path / name, data, partial_dir=self.partial_dir)


class TaskWriter:
    """All arrays of one task, written side by side."""

    def __init__(self, store: StoreWriter, task: ShardTask) -> None:
        self.store = store
        self.task = task
        self.done = False
        """Committed or abandoned."""
        store.partial_dir.mkdir(parents=True, exist_ok=True)
        self._shards: dict[str, ShardWriter] = {}
        self._sizes: list[tuple[int, int]] = []
        self._quarantined: list[Quarantined] = []
        try:
            for array in store.spec.arrays(task.split, task.view):
                partial = store.partial_dir / array.shard_path(task.shard).replace("/", "~")
                with disk_full_is_clear(partial):
                    self._shards[array.path] = ShardWriter(array, task.shard, partial)
        except BaseException:
            self.abandon()
            raise

    def append(
        self,
        tokens: Mapping[tuple[int, str], NDArray[np.float16]],
        sizes: Sequence[tuple[int, int]],
        quarantined: Sequence[Quarantined] = (),
    ) -> None:
        """Add rows: tokens (B, N, D) by (layer, "patch" or "prefix"), and their images' sizes."""
        base = next(iter(self._shards)).split("/layers/")[0]
        for (layer, kind), values in tokens.items():
            self._shards[f"{base}/layers/{layer}/{kind}"].append(values)
        self._sizes.extend(sizes)
        self._quarantined.extend(quarantined)

    def commit(self) -> Entry:
        """Make the task durable and name it in the journal.

        fsync waits for the disk, so the shards' files, and then the folders, are synced together.
        """
        with ThreadPoolExecutor(SYNC_THREADS) as pool, disk_full_is_clear(self.store.path):
            done = list(pool.map(ShardWriter.finish, self._shards.values()))
            files, folders = {}, set()
            for shard, file in zip(self._shards.values(), done, strict=True):
                name = shard.array.shard_path(shard.shard)
                target = self.store.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shard.partial.replace(target)
                folders |= set(target.parents[:4])  # up to the array's, which holds "c"
                files[name] = file
            list(pool.map(fsync_dir, folders))
        entry = Entry(
            task=self.task,
            files=files,
            sizes=tuple(self._sizes),
            quarantined=tuple(self._quarantined),
        )
        assert len(self._sizes) == self.task.num_rows
        self.store.commit(entry)
        self.done = True
        return entry

    def abandon(self) -> None:
        """Remove what is not committed."""
        self.done = True
        for shard in self._shards.values():
            shard.abandon()


def entries_on_disk(
    store: Path, entries: Mapping[tuple[str, int, int], Entry]
) -> dict[tuple[str, int, int], Entry]:
    """Those entries whose files are all there and have their size."""
    return {
        key: entry
        for key, entry in entries.items()
        if all(
            (store / name).is_file() and (store / name).stat().st_size == file.num_bytes
            for name, file in entry.files.items()
        )
    }


def column_files(name: str, values: NDArray[Any]) -> dict[str, bytes]:
    """Document and only chunk of ``labels``, ``valid``, ``sizes`` or ``boxes``."""
    metadata = column_metadata(values.shape, str(values.dtype))
    chunk = f"{name}/c/{'/'.join('0' * values.ndim)}"
    return {f"{name}/zarr.json": document(metadata), chunk: values.tobytes()}


def is_complete(store: Path, spec: StoreSpec) -> bool:
    """Whether a store is sealed and no file was deleted since; takes no lock, writes nothing."""
    root = read_root(store)
    if root is None or not isinstance(root["sealed"], dict):
        return False
    committed = entries_on_disk(store, read_journal(store))
    small = root["sealed"].get("files", {})
    return all(task.key in committed for task in spec.tasks()) and all(
        (store / name).is_file() for name in small
    )
