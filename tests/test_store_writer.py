"""Writing a store: any crash, full disk or rival ends in the same bytes or in a clear error."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from storekit import (
    FINAL_NORM,
    PROVENANCE,
    all_files,
    samples_of,
    sizes_of,
    small_spec,
    temporary_dir,
    tokens_of,
    write_store,
    write_task,
)

from epcache.errors import SpaceError, StoreError
from epcache.store import journal
from epcache.store.documents import is_sealed
from epcache.store.files import WriterLock, file_sha256, remove_partials
from epcache.store.journal import append_entry, read_journal
from epcache.store.reader import open_store
from epcache.store.shard import ShardWriter
from epcache.store.spec import Geometry, TokenArraySpec
from epcache.store.verify import verify_store
from epcache.store.writer import Samples, StoreWriter

SCRIPT = Path(__file__).with_name("crash_runs.py")
LAST_CALL = 10_000


@pytest.fixture
def tmp_path():
    """Every store of these tests fsyncs dozens of files."""
    with temporary_dir() as folder:
        yield folder


@pytest.fixture(scope="module")
def whole_files():
    """The files of a store that was written without interruption."""
    with temporary_dir() as folder:
        assert write_store(folder / "s")
        yield all_files(folder / "s")


def crash_runs(mode: str, folder: Path) -> list[dict]:
    """Run a scenario in a process that may fork; see ``crash_runs.py``."""
    command = [sys.executable, str(SCRIPT), mode, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def begin(store: StoreWriter) -> None:
    store.begin(samples_of(store.spec), PROVENANCE, FINAL_NORM)


def kept_files(path: Path) -> dict[str, bytes]:
    """All files but those that only a run at work has."""
    return {name: data for name, data in all_files(path).items() if not name.startswith(".")}


# Crashes


@pytest.mark.parametrize(
    "mode", ["kill_points", pytest.param("kill_all_points", marks=pytest.mark.slow)]
)
def test_a_kill_at_any_system_call_costs_one_task(tmp_path, mode):
    """Killed at a sync, rename or mkdir and run again: the same bytes, nothing computed twice."""
    runs = crash_runs(mode, tmp_path)
    assert len(runs) > 20
    assert all(run["killed"] == -signal.SIGKILL for run in runs)
    assert [run for run in runs if not (run["same"] and run["kept"] and run["status"] == 0)] == []
    assert {run["committed"] for run in runs} == {0, 1, 2, 3}  # killed before, between and after


def test_a_kill_at_any_moment_costs_open_tasks(tmp_path):
    """The same with random delays, two kills in a row, and two ranks finished by one process."""
    runs = crash_runs("kill_anywhere", tmp_path)
    assert any(-signal.SIGKILL in run["killed"] for run in runs)
    assert [run for run in runs if not (run["same"] and run["kept"] and run["status"] == 0)] == []


def test_ranks_make_the_bytes_of_one_process(tmp_path):
    """Two, three, or more processes than tasks: all end well and the store does not show it."""
    runs = crash_runs("ranks", tmp_path)
    assert [run for run in runs if not run["same"] or any(run["status"])] == []
    assert {run["world_size"] for run in runs} == {2, 3, 8}


def test_ranks_may_seal_together(tmp_path):
    """Every rank that finds all tasks committed seals; they do not get in each other's way."""
    runs = crash_runs("seal_together", tmp_path)
    assert [run for run in runs if not run["same"] or any(run["status"])] == []


def test_a_torn_journal_line_is_dropped(tmp_path, whole_files):
    """Cut at any byte of its last line, the journal holds the lines before, and goes on well."""
    path = tmp_path / "s"
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        tasks = store.tasks()
        for task in tasks[:2]:
            write_task(store, task)
    file = path / "journal.jsonl"
    text = file.read_bytes()
    start = text.index(b"\n") + 1
    entry = read_journal(path)[tasks[1].key]
    for cut in range(start, len(text)):
        file.write_bytes(text[:cut])
        assert list(read_journal(path)) == [tasks[0].key]
        append_entry(path, entry)
        assert file.read_bytes() == text
    file.write_bytes(text[:-1])
    computed = []
    assert write_store(path, on_task=computed.append)
    assert computed == tasks[1:]
    assert all_files(path) == whole_files


def test_a_damaged_journal_line_is_an_error(tmp_path):
    """A whole line that is no entry was not torn by a crash; it is named."""
    with StoreWriter(tmp_path / "s", small_spec()) as store:
        begin(store)
        write_task(store, store.tasks()[0])
    file = tmp_path / "s" / "journal.jsonl"
    file.write_bytes(file.read_bytes() + b'{"task": 3}\n')
    with pytest.raises(StoreError, match=r"journal\.jsonl is damaged in line 2.*Delete that line"):
        StoreWriter(tmp_path / "s", small_spec()).__enter__()
    WriterLock(tmp_path / "s").release()  # the failed attempt holds nothing


def test_a_missing_or_cut_shard_is_computed_again(tmp_path, whole_files):
    """To mend a store, delete the damaged file and run again: only its task is computed."""
    path = tmp_path / "s"
    write_store(path)
    for damage in (Path.unlink, lambda file: file.write_bytes(b"")):
        damage(path / "train/layers/5/patch/c/1/0/0")
        computed = []
        assert write_store(path, on_task=computed.append)
        assert [task.key for task in computed] == [("train", 0, 1)]
        assert all_files(path) == whole_files


def test_commit_is_in_order(tmp_path, monkeypatch):
    """Nothing is named in the journal before its bytes and its name are on the disk."""
    events: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "mkdir")}

    def fsync(handle):
        real["fsync"](handle)
        events.append(("fsync", str(Path(f"/proc/self/fd/{handle}").readlink())))

    def replace(source, target):
        events.append((f"from {source}", str(target)))
        real["replace"](source, target)

    def mkdir(path, *mode):
        real["mkdir"](path, *mode)
        events.append(("mkdir", str(path)))

    for function in (fsync, replace, mkdir):
        monkeypatch.setattr(os, function.__name__, function)
    path = tmp_path / "s"
    write_store(path)
    monkeypatch.undo()

    def synced(name: str, after: int, before: int) -> bool:
        return ("fsync", name) in events[after:before]

    commits = [at for at, event in enumerate(events) if event == ("fsync", f"{path}/journal.jsonl")]
    assert len(commits) == len(small_spec().tasks())
    entries = list(read_journal(path).values())
    for at, entry in zip(commits, entries, strict=True):
        for name in entry.files:
            target = str(path / name)
            (renamed,) = (i for i, event in enumerate(events) if event[1] == target)
            assert synced(events[renamed][0].removeprefix("from "), 0, renamed)
            assert synced(str(Path(target).parent), renamed, at)
    made = [(at, Path(name)) for at, (what, name) in enumerate(events) if what == "mkdir"]
    for at, folder in made:
        if ".partial" not in folder.parts:
            commit = next((c for c in commits if c > at), len(events))
            assert synced(str(folder.parent), at, commit), folder
    assert synced(str(path), commits[0], commits[1])  # the journal's own name
    assert events[-2:] == [(events[-2][0], f"{path}/zarr.json"), ("fsync", str(path))]


def test_ranks_begin_one_after_the_other(tmp_path):
    """A rank that begins late must not undo what another has begun and committed."""
    path = tmp_path / "s"
    asked, go_on = threading.Event(), threading.Event()

    class SlowSamples(dict):
        def __getitem__(self, split):
            asked.set()
            assert go_on.wait(30)
            return super().__getitem__(split)

    with (
        StoreWriter(path, small_spec(), rank=0, world_size=2) as slow,
        StoreWriter(path, small_spec(), rank=1, world_size=2) as quick,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(slow.begin, SlowSamples(samples_of(small_spec())), PROVENANCE, None)
        assert asked.wait(30)
        second = pool.submit(begin, quick)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        go_on.set()
        first.result(timeout=30)
        second.result(timeout=30)
        write_task(quick, quick.tasks()[0])
    assert len(read_journal(path)) == 1


# Rivals


def test_a_second_writer_is_refused(tmp_path, whole_files):
    """It is told who holds the store, and the first is not disturbed."""
    path = tmp_path / "s"
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        writer = store.open_task(store.tasks()[0])
        for rank, world_size in ((0, 1), (0, 2), (1, 2)):
            with pytest.raises(
                StoreError, match=rf"is being written by process {os.getpid()} on \S+\. Nothing is"
            ):
                StoreWriter(path, small_spec(), rank=rank, world_size=world_size).__enter__()
        writer.abandon()
        for task in store.tasks():
            write_task(store, task)
        assert store.seal()
    assert all_files(path) == whole_files


def test_ranks_share_and_keep_others_out(tmp_path):
    """Other ranks come in; the same rank twice, or a run of one process, does not."""
    path = tmp_path / "s"
    with (
        StoreWriter(path, small_spec(), rank=0, world_size=2),
        StoreWriter(path, small_spec(), rank=1, world_size=2),
    ):
        for rank, world_size in ((1, 2), (0, 1)):
            with pytest.raises(StoreError, match=rf"by process {os.getpid()} on .* of 2 ranks"):
                StoreWriter(path, small_spec(), rank=rank, world_size=world_size).__enter__()
    assert write_store(path)
    assert verify_store(path).ok


def test_a_killed_writer_leaves_no_lock(tmp_path):
    """The holder's process is named while it lives; once it is killed the store is free."""
    path = tmp_path / "s"
    command = [sys.executable, str(SCRIPT), "hold", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "holding\n"
            with pytest.raises(StoreError, match=rf"is being written by process {holder.pid} on "):
                StoreWriter(path, small_spec()).__enter__()
        finally:
            holder.kill()
    spec = small_spec(num_rows={"train": 7, "val": 3})
    computed = []
    assert write_store(path, spec, on_task=computed.append)
    assert len(computed) == len(spec.tasks()) - 1


def test_another_store_in_the_folder_is_refused(tmp_path):
    """Neither another identity nor other shards are ever mixed into what is there."""
    path = tmp_path / "s"
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        write_task(store, store.tasks()[0])
    before = kept_files(path)
    other = dataclasses.replace(small_spec(), identity={"backbone": "other"})
    digests = f"holds store {small_spec().digest[:8]}, this run makes {other.digest[:8]}"
    with pytest.raises(StoreError, match=rf"{digests}; give another --out"):
        write_store(path, other)
    for geometry in (Geometry(shard_rows=2), Geometry(shard_rows=4, compress=True)):
        with pytest.raises(StoreError, match=rf"shard_rows=4.*shard_rows={geometry.shard_rows}"):
            write_store(path, dataclasses.replace(small_spec(), geometry=geometry))
    assert kept_files(path) == before


def test_a_folder_without_root_document_holds_nothing(tmp_path, whole_files):
    """A journal without its root document may be another store's: its tasks do not count."""
    path = tmp_path / "s"
    write_store(path, dataclasses.replace(small_spec(), identity={"backbone": "other"}))
    (path / "zarr.json").unlink()
    computed = []
    assert write_store(path, on_task=computed.append)
    assert computed == small_spec().tasks()
    assert all_files(path) == whole_files


# A full disk


def runs_after_error(path: Path, whole: dict[str, bytes]) -> int:
    """Check what a failed run left, finish it, and say how many tasks were kept."""
    file = path / "journal.jsonl"
    assert not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")
    assert not [name for name in all_files(path) if name[0] == "." and name[-1] != "/"]
    committed = list(read_journal(path))
    computed = []
    assert write_store(path, on_task=computed.append)
    assert [task.key for task in computed] == [
        task.key for task in small_spec().tasks() if task.key not in committed
    ]
    assert all_files(path) == whole
    return len(committed)


def assert_clear(error: SpaceError, reason: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert f": {reason} (" in text
    assert text.startswith("cannot write ")
    assert text.endswith("make room and run the same command again to go on")


@pytest.fixture
def small_disk():
    """Mount a tmpfs with given options; needs the right to mount."""
    folder = Path("/tmp") / f"epcache-small-disk-{os.getpid()}"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode:
            pytest.skip(f"may not mount: {done.stderr.decode().strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)
    folder.rmdir()


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [("size={}k", range(8, 320, 12)), ("nr_inodes={},size=4m", range(2, 140, 9))],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_keeps_what_was_committed(small_disk, whole_files, limit, sizes):
    """However little room there is: one clear line, and with room the same bytes."""
    kept = set()
    disk = small_disk(limit.format(sizes[0]))
    remount = ["mount", "-o", "", str(disk)]
    for size in sizes:
        remount[2] = f"remount,{limit.format(size)}"
        subprocess.run(remount, check=True)
        try:
            write_store(disk / "s")
        except SpaceError as error:
            assert_clear(error, "no space left on device")
            remount[2] = "remount,size=4m,nr_inodes=1000"
            subprocess.run(remount, check=True)
            kept.add(runs_after_error(disk / "s", whole_files))
        else:
            break
        shutil.rmtree(disk / "s")
    else:
        pytest.fail("never finished")
    assert len(kept) > 2


def test_a_limit_on_file_sizes_is_a_clear_error(tmp_path):
    """A refused write (EFBIG) is told like a full disk and undone like it."""
    runs = crash_runs("file_size_limits", tmp_path)
    assert [run for run in runs if not (run["same"] and run["kept"]) or run["torn"]] == []
    assert [run for run in runs if run["left"] or run["limited"] or run["status"]] == []
    failed = [run["message"] for run in runs if run["message"] != "finished"]
    assert len(runs) > len(failed) > 5
    for message in failed:
        assert_clear(SpaceError(message), "file too large")


def test_a_limit_inside_the_journal_leaves_no_torn_line(tmp_path):
    """What the system took of a line is cut off, and the rest is not written by a later call."""
    runs = crash_runs("journal_limits", tmp_path)
    assert [run for run in runs if not run["whole"]] == []
    assert len(runs) > 5
    for run in runs:
        assert_clear(SpaceError(run["message"]), "file too large")
        assert "journal.jsonl" in run["message"]


def test_a_disk_that_is_full_at_any_sync_is_survived(tmp_path, whole_files, monkeypatch):
    """The system may tell of a full disk only when it syncs: in begin, shards, journal or seal."""
    real, calls = os.fsync, 0

    def fsync(handle):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    kept = set()
    monkeypatch.setattr(os, "fsync", fsync)
    for failing in range(1, LAST_CALL, 5):
        calls = 0
        path = tmp_path / str(failing)
        try:
            write_store(path)
        except SpaceError as error:
            assert_clear(error, "no space left on device")
        else:
            break
        kept.add(runs_after_error(path, whole_files))
        shutil.rmtree(path)
    assert failing > 30
    assert len(kept) > 3


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_disk_full_in_the_journal_leaves_no_torn_line(tmp_path, whole_files, monkeypatch, share):
    """Whatever part of a line fits is taken back at once, and not written by a later call."""

    def write_part(file, data):
        file.write(data[: int(len(data) * share)])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "s"
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        first, second, *_ = store.tasks()
        write_task(store, first)
        text = (path / "journal.jsonl").read_bytes()
        monkeypatch.setattr(journal, "write_all", write_part)
        with pytest.raises(SpaceError, match=r"journal\.jsonl: no space left"):
            write_task(store, second)
        assert (path / "journal.jsonl").read_bytes() == text
        monkeypatch.undo()
        write_task(store, second)
        assert list(read_journal(path)) == [first.key, second.key]
    assert write_store(path)
    assert all_files(path) == whole_files


def test_other_disk_errors_are_not_disguised(tmp_path, monkeypatch):
    """Only a full disk is told as one."""

    def fsync(handle):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="broken") as caught:
        write_store(tmp_path / "s")
    assert not isinstance(caught.value, SpaceError)


# Bytes


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=8), st.booleans())
def test_batches_do_not_show(batches, compress):
    """Cut into batches of any sizes, empty ones too, rows make the same file."""
    array = TokenArraySpec(
        path="train/layers/0/patch",
        num_rows=max(1, sum(batches)),
        num_tokens=100,
        dim=300,  # 60 kB a row: chunks of several rows
        geometry=Geometry(shard_rows=80, compress=compress),
    )
    assert array.chunk_rows > 1
    tokens = tokens_of(array)
    with temporary_dir() as folder:
        whole = ShardWriter(array, 0, folder / "whole")
        whole.append(tokens)
        pieces = ShardWriter(array, 0, folder / "pieces")
        buffer = np.empty((max(batches), 100, 300), np.float16)
        start = 0
        for size in batches if sum(batches) else [1]:
            buffer = np.resize(buffer, (max(size, len(buffer)), 100, 300))
            buffer[:size] = tokens[start : start + size]
            pieces.append(buffer[:size])
            buffer[:] = np.nan  # the caller may use it again
            start += size
        assert pieces.finish() == whole.finish()
        assert (folder / "pieces").read_bytes() == (folder / "whole").read_bytes()


def test_compressed_bytes_are_the_same_each_time(tmp_path, monkeypatch):
    """Blosc's own threads would put a chunk's blocks in the order in which they finish."""
    monkeypatch.setattr(blosc, "use_threads", None)  # the default, which zarr's plugin changes
    array = TokenArraySpec(
        path="x/layers/0/patch", num_rows=8, num_tokens=1024, dim=1024,
        geometry=Geometry(shard_rows=16, compress=True),
    )  # fmt: skip
    hashes = set()
    for _ in range(4):
        shard = ShardWriter(array, 0, tmp_path / "shard")
        shard.append(tokens_of(array))
        shard.finish()
        hashes.add(file_sha256(tmp_path / "shard"))
    assert len(hashes) == 1


@pytest.mark.parametrize("compress", [False, True])
def test_two_runs_make_the_same_bytes(tmp_path, compress):
    """A store is a function of its spec, samples and tokens."""
    for name in ("a", "b"):
        write_store(tmp_path / name, small_spec(compress=compress, num_views=2), boxes=True)
    assert all_files(tmp_path / "a") == all_files(tmp_path / "b")


def test_a_sealed_store_stays_as_it_is(tmp_path, whole_files):
    """Running again computes nothing and changes nothing."""
    write_store(tmp_path / "s")
    assert write_store(tmp_path / "s", on_task=lambda task: pytest.fail("computed again"))
    assert all_files(tmp_path / "s") == whole_files
    assert not [name for name in whole_files if name.startswith(".")]


def test_seal_waits_for_every_task(tmp_path):
    """With a task missing nothing is written, and the store stays unsealed."""
    path = tmp_path / "s"
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        for task in store.tasks()[:-1]:
            write_task(store, task)
        before = kept_files(path)
        assert not store.seal()
        assert kept_files(path) == before
    assert not is_sealed(path)


def test_an_open_task_leaves_nothing(tmp_path):
    """A task that is never committed gives back the room that it took."""
    path = tmp_path / "s"
    patch = tokens_of(next(small_spec().arrays("train")))
    with StoreWriter(path, small_spec()) as store:
        begin(store)
        task = store.tasks()[0]
        store.open_task(task).append({(0, "patch"): patch[:2]}, sizes_of(task)[:2])
        assert any(name.startswith(".partial/") for name in all_files(path))
    assert not [name for name in all_files(path) if name[0] == "." and name[-1] != "/"]
    assert read_journal(path) == {}


@pytest.mark.parametrize(
    "name", ["a,b", 'say "x"', "line\nbreak", "return\r", "both\r\n", " space ", "ü/日本", "\udcff"]
)
def test_samples_survive_any_name(tmp_path, name):
    """Paths and class names come back as they were, whatever a file system allows."""
    spec = small_spec(num_rows={"train": 2})
    samples = Samples(paths=[name, "b"], labels=np.array([1, 0]), class_names=["c", name])
    with StoreWriter(tmp_path / "s", spec) as store:
        store.begin({"train": samples}, PROVENANCE, None)
        for task in store.tasks():
            write_task(store, task)
        assert store.seal()
    read = open_store(tmp_path / "s")["train"].samples()
    assert [sample.path for sample in read] == [name, "b"]
    assert [sample.class_name for sample in read] == ["c", name]
    assert [sample.label for sample in read] == [1, 0]


def test_quarantine_is_told_with_its_rows(tmp_path):
    """The file names row, path and reason; ``valid`` is false there and nowhere else."""
    write_store(tmp_path / "s")
    lines = (tmp_path / "s/train/quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 3, "path": "train/ü 3.png", "reason": "cut off"}
    ]
    assert (tmp_path / "s/val/quarantine.jsonl").read_bytes() == b""
    assert np.flatnonzero(~open_store(tmp_path / "s")["train"].valid).tolist() == [3]


def test_partial_files_of_dead_runs_go_and_of_living_ones_stay(tmp_path):
    """What a killed run left beside a file goes; what a living process writes stays."""
    target = tmp_path / "fit.safetensors"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = tmp_path / f"fit.safetensors.{dead.pid}.partial"
    stays = [tmp_path / f"fit.safetensors.{os.getpid()}.partial", tmp_path / "fit.safetensors.bak"]
    for path in (target, gone, *stays):
        path.write_bytes(b"x")
    remove_partials(target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *stays])
