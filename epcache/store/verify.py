"""Are a store's bytes what its journal and its seal say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from epcache.errors import StoreError
from epcache.store.documents import read_root, root_document, small_files
from epcache.store.files import LOCK, PARTIAL, file_sha256
from epcache.store.journal import Entry, ShardFile, read_journal
from epcache.store.spec import StoreSpec, canonical_digest

BLOCK_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with one file."""

    file: str
    """Below the store."""
    problem: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was looked at and what was found."""

    shards_checked: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is what it should be."""
        return not self.problems


def verify_store(
    path: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Read every byte of a store.

    Args:
        path: The store, sealed or not; of an unsealed one the committed shards are checked.
        progress: Called with bytes read and bytes to read.

    Raises:
        StoreError: There is no store, or its root document cannot be read at all.
    """
    root = read_root(path)
    if root is None:
        raise StoreError(f"no store at {path}. Make one: epcache extract --backbone B --dataset D")
    spec = StoreSpec.from_json(root["spec"])
    problems = []
    if spec.digest != root["digest"]:
        problems.append(Problem(file="zarr.json", problem="the spec does not have this digest"))
    rendered = root_document(spec, root["provenance"], root["sealed"])
    if (path / "zarr.json").read_bytes() != rendered:
        problems.append(Problem(file="zarr.json", problem="not as epcache wrote it; edited"))
    try:
        entries = read_journal(path)
    except StoreError as error:
        problems.append(Problem(file="journal.jsonl", problem=str(error)))
        entries = {}
    expected = {name: file for entry in entries.values() for name, file in entry.files.items()}
    problems += check_tasks(spec, entries, sealed=root["sealed"] is not None)
    problems += check_seal(path, spec, root)
    problems += check_extra(path, {*expected, *shard_names(spec)}, spec, root)
    total = sum(file.num_bytes for file in expected.values())
    done = 0
    for name, file in sorted(expected.items()):
        if problem := check_shard(path / name, file):
            problems.append(Problem(file=name, problem=problem))
        done += file.num_bytes
        progress(done, total)
    return Verification(
        shards_checked=len(expected), problems=tuple(sorted(problems, key=lambda p: p.file))
    )


def check_tasks(
    spec: StoreSpec, entries: dict[tuple[str, int, int], Entry], *, sealed: bool
) -> Iterator[Problem]:
    """Does the journal name every task, once, with the files that the spec asks for."""
    tasks = {task.key: task for task in spec.tasks()}
    missing = [task for key, task in tasks.items() if key not in entries]
    if not sealed:
        done = f"{len(tasks) - len(missing)} of {len(tasks)} tasks are committed"
        yield Problem(file="zarr.json", problem=f"not sealed: {done}; run the extraction again")
    elif missing:
        yield Problem(file="journal.jsonl", problem=f"{len(missing)} tasks are not in it")
    for key, entry in entries.items():
        if key not in tasks or entry.task != tasks[key]:
            yield Problem(file="journal.jsonl", problem=f"task {key} is not this store's")
            continue
        files = {array.shard_path(key[2]) for array in spec.arrays(key[0], key[1])}
        if files != set(entry.files):
            yield Problem(file="journal.jsonl", problem=f"task {key} names other files")


def check_seal(path: Path, spec: StoreSpec, root: dict[str, object]) -> Iterator[Problem]:
    """Are the small files, labels among them, those that were sealed."""
    sealed = root["sealed"]
    if sealed is None:
        return
    if not isinstance(sealed, dict) or not isinstance(sealed.get("files"), dict):
        yield Problem(file="zarr.json", problem="the seal cannot be read")
        return
    files = sealed["files"]
    if canonical_digest([files, spec.to_json(), root["provenance"]]) != sealed.get("sha256"):
        yield Problem(file="zarr.json", problem="changed after it was sealed")
    for name in sorted({*files, *small_files(spec, final_norm=False)}):
        if name not in files:
            yield Problem(file=name, problem="not covered by the seal")
        elif not (path / name).is_file():
            yield Problem(file=name, problem="missing")
        elif file_sha256(path / name) != files[name]:
            yield Problem(file=name, problem="changed after it was sealed")


def check_extra(
    path: Path, shards: set[str], spec: StoreSpec, root: dict[str, object]
) -> Iterator[Problem]:
    """Is there any file that no part of the store accounts for."""
    sealed = root["sealed"]
    if isinstance(sealed, dict):
        files = sealed.get("files")
        small = list(files) if isinstance(files, dict) else []
    else:
        small = small_files(spec, final_norm=True, boxes=tuple(spec.splits))
    known = {"zarr.json", *shards, *small}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        under_way = name == LOCK or name.startswith((f"{LOCK}.", f"{PARTIAL}/"))
        if sealed is None and under_way:
            continue
        if (file.is_symlink() or not file.is_dir()) and name not in known:
            yield Problem(file=name, problem="no file of this store")


def check_shard(path: Path, expected: ShardFile) -> str | None:
    """What is wrong with a shard file, or None."""
    if not path.is_file():
        return "missing"
    num_bytes = path.stat().st_size
    if num_bytes != expected.num_bytes:
        return f"has {num_bytes} bytes, {expected.num_bytes} were committed"
    crc = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                crc = google_crc32c.extend(crc, block)
    except OSError as error:
        return f"cannot be read: {error}"
    if f"{crc:08x}" != expected.crc32c:
        return f"checksum {crc:08x}, {expected.crc32c} was committed"
    return None


def shard_names(spec: StoreSpec) -> set[str]:
    """Every shard file that the spec asks for."""
    return {
        array.shard_path(shard)
        for name, split in spec.splits.items()
        for view in range(split.num_views)
        for array in spec.arrays(name, view)
        for shard in range(array.num_shards)
    }
