"""Unpack an archive from elsewhere: nothing leaves the folder, nothing fills the disk."""

from __future__ import annotations

import gzip
import lzma
import posixpath
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from epcache.errors import DataError, SpaceError

_SPARE_BYTES = 64 << 20
"""Free space that unpacking never touches."""


_DAMAGED = (
    *(tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zipfile.BadZipFile),
    *(EOFError, KeyError, NotImplementedError),
)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar (plain or compressed) or zip file into a folder.

    Raises:
        DataError: If the archive is damaged, or a member would be written outside the folder:
            absolute paths, `..`, links that point outside, anything but files, folders and links.
        SpaceError: If what the members declare does not fit the free space.
    """
    try:
        if tarfile.is_tarfile(archive):
            _unpack_tar(archive, folder)
        elif zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder)
        else:
            raise DataError(f"{archive.name} is neither a tar nor a zip file; fetch it again")
    except _DAMAGED as exc:
        raise DataError(
            f"{archive.name} is damaged ({type(exc).__name__}: {exc}); remove it and fetch it again"
        ) from exc


def _unpack_tar(archive: Path, folder: Path) -> None:
    room = _Room(archive, folder)
    guard = _Guard(archive)
    with tarfile.open(archive) as tar:
        # Python 3.11.4 and later; the checks below do not rely on it.
        tar.extraction_filter = getattr(tarfile, "data_filter", tarfile.fully_trusted_filter)
        for member in tar:  # one pass: a list of members would decompress everything twice
            guard.check_name(member.name)
            if member.islnk():
                guard.check_link(member.name, member.linkname, base="")
            elif member.issym():
                guard.check_link(
                    member.name, member.linkname, base=posixpath.dirname(member.name), symbolic=True
                )
            elif not (member.isfile() or member.isdir()):
                raise guard.error(member.name, "is a device or pipe")
            room.take(member.size if member.isfile() else 0)
            tar.extract(member, folder)


def _unpack_zip(archive: Path, folder: Path) -> None:
    room = _Room(archive, folder)
    guard = _Guard(archive)
    with zipfile.ZipFile(archive) as bundle:
        for entry in bundle.infolist():
            # The raw name: zipfile itself would quietly drop what leads outside.
            guard.check_name(entry.orig_filename)
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise guard.error(entry.filename, "is a link or device")
            if entry.flag_bits & 1:
                raise guard.error(entry.filename, "is encrypted")
            room.take(entry.file_size)
        bundle.extractall(folder)


class _Room:
    """Counts what members declare against the space that was free at the start."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.archive, self.folder = archive, folder
        self.free = shutil.disk_usage(folder).free - _SPARE_BYTES
        self.taken = 0

    def take(self, num_bytes: int) -> None:
        self.taken += num_bytes
        if self.taken > self.free:
            raise SpaceError(
                f"{self.archive.name} unpacks to {self.taken:,} bytes or more and {self.folder} "
                f"has room for {max(self.free, 0):,}; free some space or use another --data-dir"
            )


class _Guard:
    """Refuses members that could be written, or could make others be written, outside."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.links: set[PurePosixPath] = set()

    def check_name(self, name: str) -> None:
        path = PurePosixPath(name)
        windows = PureWindowsPath(name)
        if path.is_absolute() or windows.drive or windows.root:
            raise self.error(name, "is an absolute path")
        if ".." in path.parts or ".." in windows.parts or "\0" in name:
            raise self.error(name, "leads outside the folder")
        if self.links.intersection((path, *path.parents)):
            raise self.error(name, "goes through a link of the same archive")

    def check_link(self, name: str, target: str, *, base: str, symbolic: bool = False) -> None:
        landing = PurePosixPath(posixpath.normpath(posixpath.join(base, target)))
        if PurePosixPath(target).is_absolute() or PureWindowsPath(target).drive:
            raise self.error(name, f"links to the absolute path {target}")
        if ".." in landing.parts:
            raise self.error(name, f"links to {target}, outside the folder")
        # `..` after a name goes up from wherever that name leads, should it be a link.
        ups = [part == ".." for part in PurePosixPath(target).parts]
        if ups != sorted(ups, reverse=True):
            raise self.error(name, f"links to {target}, which may lead anywhere")
        if self.links.intersection((landing, *landing.parents)):
            raise self.error(name, f"links to {target}, through another link")
        if symbolic:
            self.links.add(PurePosixPath(name))

    def error(self, name: str, problem: str) -> DataError:
        return DataError(
            f"{self.archive.name}: member {name!r} {problem}; nothing of it was kept, "
            "do not unpack this archive"
        )
