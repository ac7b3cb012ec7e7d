"""The data sets that can be named: one frozen `DatasetInfo` per TOML of `data_manifests`."""

from __future__ import annotations

import difflib
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any, Literal

from epcache.errors import ConfigError

_NUM_HEX = {"md5": 32, "sha256": 64}


@dataclass(frozen=True, kw_only=True)
class Download:
    """One archive that `--download` may fetch: nothing is fetched without a checksum."""

    url: str
    algorithm: Literal["md5", "sha256"]
    checksum: str
    """Lower-case hexadecimal digest of the archive."""
    members: tuple[str, ...]
    """What is kept of the archive, by name; the archive is not needed where all of them exist."""
    into: str
    """Folder that receives the members, relative to the download folder."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What is known of a data set before any of its files are seen."""

    name: str
    title: str
    num_classes: int | None
    """Number of classes; None where only the folders tell (`imagefolder`)."""
    splits: dict[str, int]
    """Split name to number of images; empty where only the folders tell (`imagefolder`)."""
    lists: dict[str, tuple[str, ...]]
    """Split name to the official lists or folders that it is made of."""
    train_split: str
    eval_split: str
    layout: str
    """The tree that is expected, one path pattern a line."""
    source: str
    """Home page."""
    licence: str
    obtain: str
    """Where the data come from and what to do with them, for error messages."""
    reader: str
    """Key into `layouts.READERS`."""
    folders: tuple[str, ...]
    """Names under which the data may lie below the data folder, the usual one first."""
    markers: tuple[str, ...]
    """Paths by which the data's own folder is known; `a|b` means either. None: no folder needed."""
    downloads: tuple[Download, ...]

    @property
    def download(self) -> bool:
        """Whether `--download` can fetch it."""
        return bool(self.downloads)

    @property
    def expected(self) -> str:
        """The layout on one line, and how to come by the data, for error messages."""
        tree = "; ".join(line.strip() for line in self.layout.splitlines())
        page = f" Home page: {self.source}." if "://" in self.source else ""
        return f"expected: {tree}. {self.obtain}{page} `epcache datasets` shows all layouts"


def list_datasets() -> list[DatasetInfo]:
    """All data sets that can be named, sorted by name."""
    return [parse_info(toml) for _, toml in sorted(_tomls().items())]


def dataset_info(name: str) -> DatasetInfo:
    """The data set of that name.

    Raises:
        ConfigError: If there is none; the message has the nearest names and all of them.
    """
    tomls = _tomls()
    if name in tomls:
        return parse_info(tomls[name])
    plain = name.lower().replace("-", "_")
    near = difflib.get_close_matches(plain, sorted(tomls), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"dataset {name!r} is not known: {hint}Known are {', '.join(sorted(tomls))}; "
        "any folder of <split>/<class>/<image> reads as imagefolder"
    )


def parse_info(path: Traversable) -> DatasetInfo:
    """One TOML of `data_manifests` as a `DatasetInfo`.

    Raises:
        ConfigError: If the file is not TOML, or a key is missing, unknown or of the wrong type;
            the message names file and key.
    """
    try:
        table = _Table(tomllib.loads(path.read_text(encoding="utf-8")), path.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"data manifest {path.name} is not TOML: {exc}; mend the file") from exc
    splits = {
        name: _Table(split, path.name, f"splits.{name}.")
        for name, split in table.take("splits", dict).items()
    }
    info = DatasetInfo(
        name=path.name.removesuffix(".toml"),
        title=table.take("title", str),
        num_classes=table.take("num_classes", int) if splits else None,
        splits={name: split.take("images", int) for name, split in splits.items()},
        lists={name: split.strings("lists") for name, split in splits.items()},
        train_split=table.take("train_split", str),
        eval_split=table.take("eval_split", str),
        layout=table.take("layout", str).strip(),
        source=table.take("source", str),
        licence=table.take("licence", str),
        obtain=table.take("obtain", str).strip(),
        reader=table.take("reader", str),
        folders=table.strings("folders"),
        markers=table.strings("markers"),
        downloads=tuple(
            _download(_Table(entry, path.name, f"downloads[{i}]."))
            for i, entry in enumerate(table.take("downloads", list, []))
        ),
    )
    for part in [table, *splits.values()]:
        part.done()
    for key in ("train_split", "eval_split"):
        if info.splits and getattr(info, key) not in info.splits:
            raise table.error(key, f"is {getattr(info, key)!r}, not one of {list(info.splits)}")
    return info


def _tomls() -> dict[str, Traversable]:
    """Data set name to its TOML."""
    entries = files("epcache.data_manifests").iterdir()
    return {e.name.removesuffix(".toml"): e for e in entries if e.name.endswith(".toml")}


def _download(table: _Table) -> Download:
    """One `[[downloads]]` entry."""
    algorithm: Literal["md5", "sha256"] = "md5" if "md5" in table.left else "sha256"
    entry = Download(
        url=table.take("url", str),
        algorithm=algorithm,
        checksum=table.take(algorithm, str),
        members=table.strings("members"),
        into=table.take("into", str, ""),
    )
    table.done()
    not_hex = set(entry.checksum) - set(string.hexdigits.lower())
    if len(entry.checksum) != _NUM_HEX[algorithm] or not_hex:
        raise table.error(algorithm, f"is {entry.checksum!r}, not a lower-case {algorithm}")
    if not entry.members:
        raise table.error("members", "is empty; name what the archive brings")
    for key, name in [*(("members", name) for name in entry.members), ("into", entry.into)]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise table.error(key, f"has {name!r}, which leaves the download folder")
    return entry


class _Table:
    """A TOML table that names file and key in every complaint, and knows what was not asked for."""

    def __init__(self, values: Any, file: str, prefix: str = "") -> None:
        self.file, self.prefix = file, prefix
        if not isinstance(values, Mapping):
            raise self.error("", f"is {values!r}, not a table")
        self.left = dict(values)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, checked for its type."""
        value = self.left.pop(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not of type {kind.__name__}")
        if isinstance(value, int) and value <= 0:
            raise self.error(key, f"is {value}, not positive")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; it may be empty, not missing."""
        values = self.take(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, f"is {values!r}, not a list of strings")
        return tuple(values)

    def done(self) -> None:
        """Refuse keys that nobody asked for: they are slips of the pen."""
        for key in self.left:
            raise self.error(key, "is not a known key")

    def error(self, key: str, problem: str) -> ConfigError:
        """An error that names file and key."""
        where = f"{self.prefix}{key}".rstrip(".")
        return ConfigError(f"data manifest {self.file}: key {where!r} {problem}; mend the file")
