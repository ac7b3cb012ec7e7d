"""``verify_store`` finds whatever is not as it was written, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import (
    PROVENANCE,
    all_files,
    samples_of,
    small_spec,
    temporary_dir,
    write_store,
    write_task,
)

from epcache.errors import StoreError
from epcache.store.verify import BLOCK_BYTES, Problem, verify_store
from epcache.store.writer import StoreWriter

SHARD = "train/layers/0/patch/c/1/0/0"


@pytest.fixture(scope="module")
def whole():
    """A sealed store that each test gets a copy of."""
    with temporary_dir() as folder:
        write_store(folder / "s", small_spec(num_rows={"train": 6, "val": 2}), boxes=True)
        yield folder / "s"


@pytest.fixture
def path(whole):
    with temporary_dir() as folder:
        shutil.copytree(whole, folder / "s")
        yield folder / "s"


def is_found(path: Path) -> bool:
    """Whether the store is reported as damaged, one way or the other."""
    try:
        return not verify_store(path).ok
    except StoreError:
        return True


def non_empty_files(path: Path) -> list[str]:
    return sorted(name for name, data in all_files(path).items() if data)


def problems_of(path: Path) -> dict[str, str]:
    found = verify_store(path)
    assert found.ok == (not found.problems)
    return {problem.file: problem.problem for problem in found.problems}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("boxes", [False, True])
def test_whole_store_has_no_problems(tmp_path, compress, boxes):
    """A store as the writer leaves it is fine, and every shard was looked at."""
    write_store(tmp_path / "s", small_spec(compress=compress, num_views=2), boxes=boxes)
    found = verify_store(tmp_path / "s")
    assert found.ok
    assert found.problems == ()
    assert found.shards_checked == len(list((tmp_path / "s").rglob("layers/*/p*/c/*/0/0")))


def test_every_byte_is_read(path, monkeypatch):
    """Each file is read whole: shards against their checksum, the others against the seal."""
    read: dict[str, int] = {}
    real_open = Path.open

    def counting_open(self, *args, **kwargs):
        file = real_open(self, *args, **kwargs)
        name = self.relative_to(path).as_posix()
        real_read, real_readinto = file.read, getattr(file, "readinto", None)

        class Counting:
            def __getattr__(self, attribute):
                return getattr(file, attribute)

            def __enter__(self):
                return self

            def __exit__(self, *exc_info):
                file.close()

            def read(self, *size):
                data = real_read(*size)
                read[name] = read.get(name, 0) + len(data)
                return data

            def readinto(self, buffer):
                count = real_readinto(buffer)
                read[name] = read.get(name, 0) + count
                return count

        return Counting()

    monkeypatch.setattr(Path, "open", counting_open)
    steps: list[tuple[int, int]] = []
    verify_store(path, progress=lambda done, total: steps.append((done, total)))
    monkeypatch.undo()
    files = all_files(path)
    assert {name for name, data in files.items() if data} <= set(read)
    assert all(read.get(name, 0) >= len(data) for name, data in files.items())
    shard_bytes = sum(path.stat().st_size for path in path.rglob("layers/*/p*/c/*/0/0"))
    assert steps[-1] == (shard_bytes, shard_bytes)
    assert steps == sorted(steps)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(whole, data):
    """One bit of one file, wherever it is: labels, index, padding, whitespace of a document."""
    name = data.draw(
        st.sampled_from(sorted(name for name, text in all_files(whole).items() if text))
    )
    original = (whole / name).read_bytes()
    bit = data.draw(st.integers(0, 8 * len(original) - 1))
    broken = bytearray(original)
    broken[bit // 8] ^= 1 << bit % 8
    try:
        (whole / name).write_bytes(broken)
        assert is_found(whole), (name, bit)
    finally:
        (whole / name).write_bytes(original)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zarr.json", "journal.jsonl"])
def test_flipped_bits_all_over_the_ledgers_are_found(path, name):
    """The two files that vouch for the others, from end to end."""
    original = (path / name).read_bytes()
    missed = []
    for bit in range(0, 8 * len(original), 5):  # each bit of a byte in turn
        broken = bytearray(original)
        broken[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(broken)
        if not is_found(path):
            missed.append(bit)
    assert missed == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_or_longer_file_is_found(whole, data):
    """A file that ends too early or too late."""
    name = data.draw(
        st.sampled_from(sorted(name for name, text in all_files(whole).items() if text))
    )
    original = (whole / name).read_bytes()
    length = data.draw(st.integers(0, len(original) - 1))
    try:
        for broken in (original[:length], original + b"\n"):
            (whole / name).write_bytes(broken)
            assert is_found(whole), name
    finally:
        (whole / name).write_bytes(original)


def test_any_missing_file_is_found(path):
    """Each file of the store, taken away in turn."""
    for name, data in all_files(path).items():
        (path / name).unlink()
        assert is_found(path), name
        (path / name).write_bytes(data)
    assert verify_store(path).ok


def test_what_is_wrong_is_said(path):
    """Each problem names its file and what was expected."""
    shard, other = path / SHARD, path / SHARD.replace("/1/0/0", "/0/0/0")
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    other.write_bytes(bytes(size))
    (path / "val/samples.csv").unlink()
    (path / "val/labels/c/0").write_bytes(bytes(16))
    found = problems_of(path)
    assert found[SHARD] == f"has {size - 1} bytes, {size} were committed"
    assert found[SHARD.replace("/1/0/0", "/0/0/0")].startswith("checksum ")
    assert found["val/samples.csv"] == "missing"
    assert found["val/labels/c/0"] == "changed after it was sealed"
    assert len(found) == 4


@pytest.mark.parametrize(
    "name",
    [
        "train/layers/0/patch/c/2/0/0",
        "train/layers/0/patch/c/0/0/1",
        "train/layers/3/patch/zarr.json",
        "notes.txt",
        "train/labels/c/1",
        "train/zarr.json.bak",
        ".lockpicks",
        ".zmetadata",
    ],
)
def test_extra_file_is_found(path, name):
    """A file that no part of the store accounts for, a shard too many among them."""
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(b"x")
    assert problems_of(path) == {name: "no file of this store"}


def test_swapped_shards_are_found(path):
    """Two shards of the right size in each other's place."""
    one, two = path / SHARD, path / SHARD.replace("train", "val").replace("/1/0/0", "/0/0/0")
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    assert len(problems_of(path)) == 2


def test_journal_and_seal_must_agree(path):
    """A shard and its journal line edited together still do not fit the seal."""
    journal = path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))
    found = problems_of(path)
    assert found["journal.jsonl"] in ("changed after it was sealed", "1 tasks are not in it")
    journal.write_bytes(b"".join(reversed(lines)))
    assert problems_of(path) == {"journal.jsonl": "changed after it was sealed"}
    journal.write_bytes(b"{}\n" + b"".join(lines))
    assert "line 1" in problems_of(path)["journal.jsonl"] or not verify_store(path).ok


def test_block_size_does_not_matter(path, monkeypatch):
    """A shard larger than one block is checked as a whole."""
    assert BLOCK_BYTES > 2**20
    monkeypatch.setattr("epcache.store.verify.BLOCK_BYTES", 7)
    assert verify_store(path).ok


def test_unsealed_store_says_how_far_it_is(tmp_path):
    """What is committed is checked; the rest is counted."""
    spec = small_spec()
    with StoreWriter(tmp_path / "s", spec) as store:
        store.begin(samples_of(spec), PROVENANCE, None)
        for task in store.tasks()[:2]:
            write_task(store, task)
        store.open_task(store.tasks()[0])
        found = verify_store(tmp_path / "s")
    assert found.problems == (
        Problem(
            file="zarr.json",
            problem="not sealed: 2 of 5 tasks are committed; run the extraction again",
        ),
    )
    assert found.shards_checked == 6
    (tmp_path / "s" / "notes.txt").touch()
    assert problems_of(tmp_path / "s")["notes.txt"] == "no file of this store"
    (tmp_path / "s" / SHARD).write_bytes(b"")
    assert SHARD in problems_of(tmp_path / "s")


def test_no_store_is_an_error(tmp_path):
    """There is nothing to verify, and the command that would make something is shown."""
    with pytest.raises(StoreError, match=r"no store at .* Make one: epcache extract"):
        verify_store(tmp_path)
