"""Fetch data sets: resume, verify, unpack aside, and move into place in one step."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from epcache import __version__
from epcache.errors import ConfigError, DataError, SpaceError
from epcache.layouts.info import DatasetInfo, Download
from epcache.unpack import unpack

Progress = Callable[[str], None]

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_REPORT_BYTES = 64 << 20


def download_dataset(info: DatasetInfo, folder: Path, *, progress: Progress | None = None) -> None:
    """Fetch and unpack what a data set's manifest names and the folder lacks.

    Args:
        info: The data set.
        folder: The data folder; created if need be. It may be named like the data set's own
            folder (`.../CUB_200_2011`), which then comes to lie there.
        progress: Receives a line now and then.

    Raises:
        ConfigError: If the manifest names no download.
        DataError: If the network fails, a checksum is wrong or an archive is unsafe.
        SpaceError: If the disk is too full.
    """
    if not info.downloads:
        raise ConfigError(
            f"{info.name} cannot be downloaded: no public source with a known checksum; "
            f"{info.expected}"
        )
    own = Path(info.folders[0]).parts[0] if info.folders else None
    folder = folder.absolute()
    if folder.name == own:
        folder = folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    archives = folder / "downloads"
    with _alone(folder):
        for entry in info.downloads:
            if all((folder / entry.into / name).exists() for name in entry.members):
                continue
            archive = archives / _file_name(entry.url)
            fetch(entry.url, archive, entry.algorithm, entry.checksum, progress=progress)
            _say(progress, f"unpacking {archive.name} into {folder}")
            install(archive, entry, folder)
            archive.unlink()
        with suppress(OSError):  # not empty, or never made
            archives.rmdir()


def fetch(
    url: str,
    path: Path,
    algorithm: Literal["md5", "sha256"],
    checksum: str,
    *,
    progress: Progress | None = None,
) -> None:
    """Fetch one file, resuming `<path>.partial`, and give it its name only when it is right.

    A connection that breaks is taken up again as long as each one brings something.

    Raises:
        DataError: If the network fails, or the file is not the one that the checksum says; such
            a file is removed.
        SpaceError: If the disk is too full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    if path.exists():  # by hand, or from a run that was stopped while unpacking
        path.replace(partial)
    sha = _hash_file(partial, algorithm)
    have = partial.stat().st_size if partial.exists() else 0
    while sha.hexdigest() != checksum:
        before = have
        have, sha, complete = _fetch_rest(url, partial, have, sha, algorithm, progress)
        if complete:
            break
        if have <= before:
            raise _network_error(url, f"the connection broke after {have:,} bytes", partial)
    if sha.hexdigest() != checksum:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"{url}: wrong {algorithm}, expected {checksum}, got {sha.hexdigest()} "
            f"({have:,} bytes); the file was removed, run again or report that the source changed"
        )
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def install(archive: Path, entry: Download, folder: Path) -> None:
    """Unpack an archive beside its place and rename its members into it.

    A run that is killed leaves an odd temporary folder, never a half tree that looks whole.
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as aside:
        unpack(archive, Path(aside))
        found = {name: _member(Path(aside), archive, name) for name in entry.members}
        target = folder / entry.into
        target.mkdir(parents=True, exist_ok=True)
        for name, path in found.items():
            if not (target / name).exists():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                path.rename(target / name)


def _member(aside: Path, archive: Path, name: str) -> Path:
    """A member by its path in the archive, or by its name where only one member has that."""
    if (aside / name).exists():
        return aside / name
    deeper = list(aside.rglob(name))
    if len(deeper) != 1:
        raise DataError(f"{archive.name} has {len(deeper)} members {name}, expected one")
    return deeper[0]


def _fetch_rest(
    url: str, partial: Path, have: int, sha: Any, algorithm: str, progress: Progress | None
) -> tuple[int, Any, bool]:
    """One connection: append what is missing, or start over where the server cannot resume.

    Returns:
        Bytes in the partial file, their hash, and whether the server sent all it has.
    """
    _say(progress, f"fetching {url}" + (f" from byte {have:,}" if have else ""))
    headers = {"User-Agent": f"epcache/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with _open(url, headers) as response:
            start, total = _extent(response)
            if start != have:  # the server ignored the range, or means another one
                if start:
                    raise _network_error(url, f"byte {start} came for byte {have}", partial)
                have, sha = 0, hashlib.new(algorithm, usedforsecurity=False)
            _need_room(url, partial, (total or have) - have)
            with partial.open("r+b" if have else "wb") as file:
                file.seek(have)
                have = _copy(response, file, have, total, sha, url, progress)
            return have, sha, total is None or have >= total
    except urllib.error.HTTPError as exc:
        with exc:
            if exc.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                # Nothing beyond what is here, and the checksum says that this is not the file.
                partial.unlink()
                return have, sha, True
            raise _network_error(url, f"HTTP {exc.code} {exc.reason}", partial) from exc
    except SpaceError:
        raise
    except (OSError, http.client.HTTPException) as exc:
        if getattr(exc, "errno", None) == errno.ENOSPC:
            raise SpaceError(
                f"{partial.parent} is full; free some space and run again to resume {url}"
            ) from exc
        got = partial.stat().st_size if partial.exists() else 0
        if got > have:  # broken in the middle: what came is good
            return got, _hash_file(partial, algorithm), False
        raise _network_error(url, getattr(exc, "reason", None) or repr(exc), partial) from exc


def _open(url: str, headers: dict[str, str]) -> Any:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url} is not an http or https address; mend the data manifest")
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


def _extent(response: Any) -> tuple[int, int | None]:
    """First byte that a response brings, and the size of the whole file if it says so."""
    if response.status == http.client.PARTIAL_CONTENT:
        match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if match:
            return int(match[1]), None if match[2] == "*" else int(match[2])
    length = response.headers.get("Content-Length")
    return 0, int(length) if length and length.isdigit() else None


def _copy(
    response: Any,
    file: Any,
    have: int,
    total: int | None,
    sha: Any,
    url: str,
    progress: Progress | None,
) -> int:
    """Copy a response to a file and its hash; returns the size of the file."""
    told = have
    while chunk := response.read(_CHUNK_BYTES):
        file.write(chunk)
        sha.update(chunk)
        have += len(chunk)
        if have - told >= _REPORT_BYTES:
            told = have
            of = f" of {total / 1e6:,.0f}" if total else ""
            _say(progress, f"{_file_name(url)}: {have / 1e6:,.0f}{of} MB")
    return have


def _hash_file(path: Path, algorithm: str) -> Any:
    sha = hashlib.new(algorithm, usedforsecurity=False)
    if path.exists():
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sha.update(chunk)
    return sha


def _need_room(url: str, partial: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if num_bytes > free:
        raise SpaceError(
            f"{url} needs {num_bytes:,} bytes and {partial.parent} has {free:,}; "
            "free some space or use another --data-dir"
        )


def _network_error(url: str, problem: object, partial: Path) -> DataError:
    return DataError(
        f"{url} cannot be fetched: {problem}; run again to resume, or put the file at "
        f"{partial.with_suffix('')} by hand"
    )


def _file_name(url: str) -> str:
    return Path(unquote(urlsplit(url).path)).name


def _say(progress: Progress | None, line: str) -> None:
    if progress is not None:
        progress(line)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time fetch into a folder; others wait and find the work done."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):  # no locks on this system or file system
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
