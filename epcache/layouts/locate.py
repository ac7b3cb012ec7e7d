"""Where a data set lies: the folder with its content, near the folder that the user names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from epcache.errors import ConfigError, DataError
from epcache.layouts.info import DatasetInfo

DATA_VARIABLE = "EPCACHE_DATA"


def find_root(info: DatasetInfo, data_dir: Path | None) -> Path:
    """The folder that has the data set's content, known by its marker files.

    Looks in `data_dir`, or without one in `$EPCACHE_DATA/<name>`: there, in the data set's usual
    folders below it, in any one folder below it, and one folder above it.

    Raises:
        ConfigError: If there is no folder to look in, or several below it that would do.
        DataError: If the data are not there; the message has where it looked, what it expected
            and where to obtain the data.
    """
    start = data_folder(info, data_dir)
    for places in _places(info, start):
        found = [place for place in places if not missing_markers(info, place)]
        if len({place.resolve() for place in found}) > 1:
            raise ConfigError(
                f"{info.name}: {start} has several folders that would do "
                f"({', '.join(place.name for place in found)}); pass one of them as --data-dir"
            )
        if found:
            return found[0]
    if data_dir is None:  # the variable's folder may hold the data under their usual name
        shared = [start.parent / folder for folder in info.folders]
        for place in shared:
            if not missing_markers(info, place):
                return place
    raise DataError(
        f"{info.name} is not at {start} ({_what_is_there(info, start)}); {info.expected}"
    )


def data_folder(info: DatasetInfo, data_dir: Path | None) -> Path:
    """Where the user says the data are: `data_dir`, or `$EPCACHE_DATA/<name>`.

    Raises:
        ConfigError: If neither is given.
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    shared = os.environ.get(DATA_VARIABLE)
    if info.name == "imagefolder":
        raise ConfigError(f"imagefolder needs the folder: pass --data-dir DIR; {info.expected}")
    if not shared:
        raise ConfigError(
            f"{info.name} has no folder to look in: pass --data-dir DIR, or set {DATA_VARIABLE} "
            f"to a folder that holds {info.name}/; {info.expected}"
        )
    return Path(shared).expanduser() / info.name


def missing_markers(info: DatasetInfo, place: Path) -> list[str]:
    """Markers that a folder lacks; none for the data set's root. `a|b` is met by either."""
    return [
        marker
        for marker in info.markers
        if not any((place / choice).exists() for choice in marker.split("|"))
    ]


def _places(info: DatasetInfo, start: Path) -> Iterator[list[Path]]:
    """Candidate roots, nearest first; more than one match within one list is ambiguous."""
    yield [start]
    for folder in info.folders:
        yield [start / folder]
    if start.is_dir():
        with os.scandir(start) as entries:
            below = sorted(
                entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."
            )
        yield [start / name for name in below]
        yield [start.absolute().parent]


def _what_is_there(info: DatasetInfo, start: Path) -> str:
    """Why the likeliest folder will not do: it is missing, or lacks a marker."""
    if not start.exists():
        return "no such folder"
    if not start.is_dir():
        return "not a folder"
    places = [start, *(start / folder for folder in info.folders)]
    nearest = min(places, key=lambda place: len(missing_markers(info, place)))
    lacks = [marker.replace("|", " or ") for marker in missing_markers(info, nearest)]
    return (
        f"looked there, in the folders below and the one above; {nearest} lacks {', '.join(lacks)}"
    )
