"""Durable files: written under a temporary name, fsynced, renamed; and who may write at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from epcache.errors import SpaceError, StoreError

PARTIAL = ".partial"
"""Folder in an unsealed store for files that are not committed yet."""
LOCK = ".lock"


def write_durably(path: Path, data: bytes, *, partial_dir: Path) -> None:
    """Replace or create ``path`` so that a crash leaves the old file or the new one, whole."""
    partial = partial_dir / f"{path.name}.{os.getpid()}{PARTIAL}"
    with disk_full_is_clear(path):
        partial_dir.mkdir(parents=True, exist_ok=True)
        make_dir_durably(path.parent)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        fsync_dir(path.parent)


def remove_partials(path: Path) -> None:
    """Remove what runs that were killed left beside ``path`` in the middle of ``write_durably``.

    The name holds the process; what a living one is writing stays.
    """
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL}"):
        process = partial.name.removeprefix(f"{path.name}.").removesuffix(PARTIAL)
        if not (process.isdecimal() and is_running(int(process))):
            partial.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def make_dir_durably(path: Path) -> None:
    """Create a folder, and those above it, so that a crash cannot lose their names."""
    if not path.is_dir():
        make_dir_durably(path.parent)
        path.mkdir(exist_ok=True)
        fsync_dir(path.parent)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take only a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_full_is_clear(path: Path) -> Iterator[None]:
    """Turn "no space left" into an error that says how much is free and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason, free = os.strerror(error.errno).lower(), format_bytes(free_bytes(path))
        raise SpaceError(
            f"cannot write {path}: {reason} ({free} free there). What was committed is kept: make "
            f"room and run the same command again to go on"
        ) from error


def format_bytes(num_bytes: float) -> str:
    """``1.23 GB``, ``45.6 MB`` or ``7.8 KB``, powers of ten."""
    unit, size = next(
        ((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= size),
        ("KB", 1e3),
    )
    number = num_bytes / size
    return f"{number:,.0f} {unit}" if number >= 1e3 else f"{number:.3g} {unit}"


def free_bytes(path: Path) -> int:
    """Bytes a user may still write on the disk of ``path``, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class WriterLock:
    """Keeps two runs out of one store, and lets the ranks of one run in together.

    A single process holds the store alone. Ranks of a parallel run share it, each holding its own
    rank. The locks are advisory ``flock`` locks: the kernel drops them with the process, however
    it ends, so a killed run never leaves a store locked.
    """

    def __init__(self, store: Path, *, rank: int = 0, world_size: int = 1) -> None:
        self._files: list[BinaryIO] = []
        self._store = store
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            if world_size == 1:
                self._take(LOCK, fcntl.LOCK_EX)
            else:
                self._holder += f" (one of {world_size} ranks)"
                self._take(LOCK, fcntl.LOCK_SH)
                self._take(f"{LOCK}.{rank}", fcntl.LOCK_EX)
        except BaseException:
            self.release()
            raise

    def _take(self, name: str, kind: int) -> None:
        path = self._store / name
        try:
            with disk_full_is_clear(path):
                file = open_locked(path, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = first_line(path) or "another process"
            raise StoreError(
                f"store {self._store} is being written by {holder}. Nothing is lost: wait until "
                f"it ends (then run this again to go on where it stopped), or stop it"
            ) from None
        self._files.append(file)
        with disk_full_is_clear(path):
            file.truncate(0)
            file.write(f"{self._holder}\n".encode())

    def release(self) -> None:
        """Let go, and remove what nobody else holds; safe to call twice."""
        while self._files:
            with self._files.pop() as file, contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if same_file(file, Path(file.name)):
                    Path(file.name).unlink()


def remove_free_locks(store: Path) -> None:
    """Remove the lock files of ranks that were killed."""
    for path in store.glob(f"{LOCK}.*"):
        with (
            contextlib.suppress(BlockingIOError),
            open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            path.unlink()


@contextlib.contextmanager
def one_at_a_time(store: Path) -> Iterator[None]:
    """Let the ranks of a run do what concerns the whole store one after the other."""
    path = store / f"{LOCK}.store"
    with disk_full_is_clear(path):
        file = open_locked(path, fcntl.LOCK_EX)
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def open_locked(path: Path, kind: int) -> BinaryIO:
    """A lock file under an ``flock`` of this kind.

    Raises:
        BlockingIOError: ``kind`` has ``LOCK_NB`` and another process holds the lock.
    """
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, kind)
            if same_file(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # whoever had it removed the file while we waited


def first_line(path: Path) -> str:
    """What a lock's holder wrote into it; of ranks, any one."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").partition("\n")[0]
    return ""


def same_file(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one that its name means."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
