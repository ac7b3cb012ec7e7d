"""The journal: one JSON line per committed shard task, and the only proof that a shard is whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from epcache.errors import StoreError
from epcache.store.files import disk_full_is_clear, fsync_dir, write_all
from epcache.store.spec import ShardTask, canonical_json

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """What a shard file must be."""

    num_bytes: int
    crc32c: str
    """Of all bytes of the file, eight hex digits."""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """An image that could not be decoded; its row stays, marked invalid, its tokens are zeros."""

    row: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One committed task."""

    task: ShardTask
    files: Mapping[str, ShardFile]
    """By path below the store."""
    sizes: tuple[tuple[int, int], ...]
    """Width and height in pixels of each row's image as it lies on disk; (0, 0) if undecodable."""
    quarantined: tuple[Quarantined, ...] = field(default=())

    def to_line(self) -> str:
        """The entry as one line of JSON."""
        data = asdict(self)
        data["task"]["rows"] = list(self.task.rows)
        return canonical_json(data) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Inverse of ``to_line``."""
        task = data["task"]
        return cls(
            task=ShardTask(**{**task, "rows": tuple(task["rows"])}),
            files={path: ShardFile(**file) for path, file in data["files"].items()},
            sizes=tuple((int(width), int(height)) for width, height in data["sizes"]),
            quarantined=tuple(Quarantined(**bad) for bad in data["quarantined"]),
        )


def read_journal(store: Path) -> dict[tuple[str, int, int], Entry]:
    """Committed tasks by key; of two lines for one task the later counts.

    A last line without its newline was being written when the machine stopped: it never counted.

    Raises:
        StoreError: A whole line cannot be read, so the journal was damaged after it was written.
    """
    try:
        text = (store / JOURNAL).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"{store / JOURNAL} cannot be read: {error.strerror}") from None
    entries = {}
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            entry = Entry.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreError(
                f"{store / JOURNAL} is damaged in line {number}: expected one JSON object a line. "
                f"Delete that line to have its shards computed again"
            ) from None
        entries[entry.task.key] = entry
    return entries


def committed_bytes(store: Path) -> int:
    """Bytes of the shards that the journal names."""
    return sum(f.num_bytes for e in read_journal(store).values() for f in e.files.values())


def append_entry(store: Path, entry: Entry) -> None:
    """Commit: after this returns, no crash can undo the task.

    The lock serves the ranks of one run; a torn line that a crash left is cut off first, lest the
    new line be glued to it.
    """
    path = store / JOURNAL
    # Unbuffered: a buffer that could not be written would be written again on the next call.
    with disk_full_is_clear(path), path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        whole = end_of_last_line(path)
        if whole != file.seek(0, os.SEEK_END):
            file.truncate(whole)
        try:
            write_all(file, entry.to_line().encode())
            os.fsync(file.fileno())
            if not whole:
                fsync_dir(store)
        except OSError:
            file.truncate(whole)
            raise


def end_of_last_line(path: Path) -> int:
    """Size of a file up to and including its last newline."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0
