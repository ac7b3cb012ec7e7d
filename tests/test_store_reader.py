"""Reading a sealed store: through epcache, through any Zarr reader, and with NumPy alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import (
    FINAL_NORM,
    PROVENANCE,
    samples_of,
    small_spec,
    temporary_dir,
    tokens_of,
    write_store,
)
from strategies import array_keys, store_specs

from epcache.errors import ConfigError, StoreError
from epcache.store.array import ShardCache
from epcache.store.reader import format_ranges, open_store
from epcache.store.shard import compress_chunk, decompress_chunk
from epcache.store.spec import StoreSpec
from epcache.store.writer import StoreWriter

PAGE = (Path(__file__).parents[1] / "docs" / "store.md").read_text(encoding="utf-8")
PAGE_CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1:])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "compressed"])
def store_path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "s"
    write_store(path, small_spec(compress=request.param, num_views=2), boxes=True)
    return path


@pytest.fixture
def tmp_path():
    """Every store of these tests fsyncs dozens of files."""
    with temporary_dir() as folder:
        yield folder


@pytest.fixture
def plain_path(tmp_path):
    write_store(tmp_path / "s")
    return tmp_path / "s"


def all_arrays(spec: StoreSpec):
    """Every token array with its place: split, view, layer, kind."""
    for split, shape in spec.splits.items():
        for view in range(shape.num_views):
            for array in spec.arrays(split, view):
                *_, layer, kind = array.path.split("/")
                yield split, view, int(layer), kind, array


def edit_root(path: Path, change) -> None:
    root = json.loads((path / "zarr.json").read_text())
    change(root["attributes"]["epcache"])
    (path / "zarr.json").write_text(json.dumps(root))


@settings(max_examples=20, deadline=None)
@given(store_specs(most_rows=20))
def test_tokens_come_back(spec):
    """Whatever the shapes and with or without compression, every array reads as it was written."""
    with temporary_dir() as folder:
        write_store(folder / "s", spec)
        store = open_store(folder / "s")
        for split, view, layer, kind, array in all_arrays(spec):
            tokens = getattr(store[split].layer(layer, view=view), kind)
            np.testing.assert_array_equal(np.asarray(tokens), tokens_of(array))
            assert tokens.shape == tokens_of(array).shape


@settings(max_examples=20, deadline=None)
@given(store_specs(most_rows=20), st.data())
def test_page_alone_finds_any_token(spec, data):
    """The code on ``docs/store.md``, which needs NumPy and JSON only, reads any value."""
    page: dict = {}
    exec(PAGE_CODE, page)
    with temporary_dir() as folder:
        write_store(folder / "s", spec)
        for split, view, layer, kind, array in all_arrays(spec):
            row, token, width = (
                data.draw(st.integers(0, size - 1))
                for size in (array.num_rows, array.num_tokens, array.dim)
            )
            expected = tokens_of(array)[row, token, width]
            path, offset = page["locate"](folder / "s", split, layer, kind, row, token, width, view)
            chunk, local_row = divmod(row % spec.geometry.shard_rows, array.chunk_rows)
            stored = page["chunk_bytes"](path, chunk, array.chunks_per_shard)
            if spec.geometry.compress:
                from numcodecs.blosc import decompress

                stored = decompress(stored)
            else:
                where = (split, layer, kind, row, token, width)
                assert page["read_value"](folder / "s", *where, view=view) == expected
                assert path.read_bytes()[offset : offset + 2] == expected.tobytes()
            rows = np.frombuffer(stored, "<f2").reshape(-1, array.num_tokens, array.dim)
            assert rows[local_row, token, width] == expected


def test_page_code_does_not_use_epcache():
    """What the page promises is tested without the library."""
    assert "def locate" in PAGE_CODE
    assert "import epcache" not in PAGE_CODE
    assert "from epcache" not in PAGE_CODE


def test_page_columns_are_plain_files(store_path):
    """The page's one-liner for a column works as it stands."""
    labels = np.fromfile(store_path / "train/labels/c/0", "<i8")
    np.testing.assert_array_equal(labels, samples_of(small_spec())["train"].labels)


def test_zarr_reads_every_array(store_path):
    """zarr-python gives the same values, names and attributes, and has nothing to remark."""
    import zarr

    store = open_store(store_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(store_path, mode="r")
        assert group.attrs["epcache"]["digest"] == store.digest
        for _, _, _, _, spec in all_arrays(store.spec):
            array = zarr.open_array(store_path / spec.path, mode="r")
            assert json.loads(json.dumps(array.metadata.to_dict()))["shape"] == list(array.shape)
            assert array.metadata.dimension_names == ("row", "token", "width")
            assert array.shards == (spec.geometry.shard_rows, spec.num_tokens, spec.dim)
            assert array.chunks == (spec.chunk_rows, spec.num_tokens, spec.dim)
            np.testing.assert_array_equal(array[:], tokens_of(spec))
            np.testing.assert_array_equal(
                group[spec.path][2:9, 1:, ::2], tokens_of(spec)[2:9, 1:, ::2]
            )
        for split in store.splits:
            for column in ("labels", "valid", "sizes", "boxes"):
                values = getattr(store[split], column)
                array = group[f"{split}/{column}"]
                assert array.metadata.dimension_names == ("row", "value")[: values.ndim]
                assert array.dtype == values.dtype
                np.testing.assert_array_equal(array[:], values)


def test_zarr_walk_remarks_only_what_the_page_says(store_path):
    """Listing groups warns about the four files that the page names, and finds every array."""
    import zarr

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        members = dict(zarr.open_group(store_path, mode="r").members(max_depth=None))
    said = {
        re.search(r"Object at (\S+) is not", str(remark.message)).group(1) for remark in remarks
    }
    assert said == {"journal.jsonl", "final_norm.safetensors", "samples.csv", "quarantine.jsonl"}
    assert all(f"`{name}`" in PAGE.split("## Reading")[1] for name in said)
    assert {array.path for *_, array in all_arrays(open_store(store_path).spec)} <= set(members)


def test_zarr_metadata_is_what_zarr_would_write(store_path):
    """zarr-python's own document of each array says the same as ours, field by field."""
    import zarr

    for document in store_path.rglob("*/zarr.json"):
        ours = json.loads(document.read_text())
        if ours["node_type"] == "array":
            array = zarr.open_array(document.parent, mode="r")
            theirs = json.loads(json.dumps(array.metadata.to_dict(), default=str))
            assert theirs["shape"] == ours["shape"]
            assert theirs["data_type"] == ours["data_type"]
            assert theirs["chunk_grid"] == ours["chunk_grid"]
            assert theirs["chunk_key_encoding"] == ours["chunk_key_encoding"]
            assert [codec["name"] for codec in theirs["codecs"]] == [
                codec["name"] for codec in ours["codecs"]
            ]


@pytest.mark.parametrize("compress", [False, True])
def test_zero_tokens_are_stored(tmp_path, compress, monkeypatch):
    """A chunk, and a whole shard, of zeros is in the file: it never reads as missing."""
    monkeypatch.setattr("storekit.tokens_of", lambda array: np.zeros_like(tokens_of(array)))
    spec = small_spec(compress=compress)
    write_store(tmp_path / "s", spec)
    import zarr

    for split, _, layer, kind, array in all_arrays(spec):
        for shard in range(array.num_shards):
            data = (tmp_path / "s" / array.shard_path(shard)).read_bytes()
            index = np.frombuffer(data[-array.index_bytes : -4], "<u8").reshape(-1, 2)
            present = array.shard_num_chunks(shard)
            assert (index[:present, 1] > 0).all()
            assert (index[present:] == 2**64 - 1).all()
        assert not zarr.open_array(tmp_path / "s" / array.path)[:].any()
        (tmp_path / "s" / array.shard_path(0)).unlink()
        with pytest.raises(StoreError, match="cannot be read"):
            getattr(open_store(tmp_path / "s")[split].layer(layer), kind)[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_indexing_is_numpy_indexing(store_path, data):
    """Numbers, slices of any step, lists, masks and tuples of them give what NumPy gives."""
    store = open_store(store_path)
    *_, layer, kind, array = data.draw(
        st.sampled_from([found for found in all_arrays(store.spec) if not found[1]])
    )
    split = array.path.split("/")[0]
    tokens = getattr(store[split].layer(layer), kind)
    key = data.draw(array_keys(tokens.shape))
    np.testing.assert_array_equal(tokens[key], tokens_of(array)[key], strict=True)


REFUSED = [None, ([[0], [3]],), np.ones((10, 6), bool), True]
"""NumPy would give a new axis for these, or mix rows and tokens."""


@pytest.mark.parametrize(
    "key",
    [
        ([0, 9, 3], [1, 0, 5]),
        ([0, 9, 3], slice(None), [1, 0, 3]),
        (2, slice(None), [1, 0]),
        (slice(1, 9), [1, 0]),
        (..., 0),
        (..., 1, slice(2)),
        (3, ..., 2),
        (),
        (slice(2, 3), ..., [1, 2], 0),
        1.5,
        [0.5],
        "patch",
        np.ones(3, bool),
        *REFUSED,
        (0, 0, 0, 0),
        (..., ...),
        10,
        -11,
        [0, 10],
        (0, 6),
    ],
    ids=str,
)
def test_unusual_keys_do_not_differ_from_numpy(plain_path, key):
    """Fancy tuples and ellipses agree with NumPy; what cannot be is an IndexError."""
    tokens = open_store(plain_path)["train"].layer(0).patch
    expected = tokens_of(tokens.spec)
    try:
        wanted = expected[key]
    except IndexError:
        wanted = None
    if any(key is other for other in REFUSED):
        wanted = None
    if wanted is None:
        with pytest.raises(IndexError):
            tokens[key]
    else:
        np.testing.assert_array_equal(tokens[key], wanted, strict=True)


def test_wrong_rows_are_named(store_path):
    """The error has the row that was asked for and the range that there is."""
    tokens = open_store(store_path)["train"].layer(0).patch
    for key in (10, -11, [0, 1, 10], np.array([3, -11])):
        row = int(np.ravel(key)[-1])
        with pytest.raises(IndexError, match=rf"row {row} is not in \[0, 10\)"):
            tokens[key]
        with pytest.raises(IndexError, match=rf"row {row} is not in \[0, 10\)"):
            tokens.take(key)


def test_slice_inside_a_shard_is_the_map_itself(plain_path):
    """No copy is made, and the tokens of a store cannot be changed through it."""
    tokens = open_store(plain_path)["train"].layer(0).patch
    first, again = tokens[4:8], tokens[5:7]
    assert np.shares_memory(first, again)
    assert np.shares_memory(first, tokens[6])
    assert not first.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    across = tokens[3:6]
    assert across.flags.writeable
    assert not np.shares_memory(across, first)


def test_decoded_chunks_cannot_be_changed(tmp_path):
    """Writing into what a compressed store gave must not change what it gives next."""
    write_store(tmp_path / "s", small_spec(compress=True))
    part = open_store(tmp_path / "s")["train"].layer(0).patch[0:2]
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1


def test_take_fills_the_given_buffer(store_path):
    """A stream reuses its buffers: the array passed as ``out`` is what comes back."""
    tokens = open_store(store_path)["train"].layer(0).patch
    rows = [9, 0, 0, 3, 4, 5, -1]
    out = np.full((len(rows), *tokens.shape[1:]), 7, np.float16)
    assert tokens.take(rows, out=out) is out
    np.testing.assert_array_equal(out, tokens_of(tokens.spec)[rows])
    for wrong in (out[:-1], out.astype(np.float32)):
        with pytest.raises(ValueError, match=r"expected float16 \(7, 6, 4\)"):
            tokens.take(rows, out=wrong)


def test_compressed_store_equals_plain_store(tmp_path):
    """Compression changes the files and nothing else, the digest included."""
    for compress in (False, True):
        write_store(tmp_path / str(compress), small_spec(compress=compress, num_views=2))
    plain, packed = open_store(tmp_path / "False"), open_store(tmp_path / "True")
    assert plain.digest == packed.digest
    for split, view, layer, kind, _ in all_arrays(plain.spec):
        a, b = (getattr(s[split].layer(layer, view=view), kind) for s in (plain, packed))
        np.testing.assert_array_equal(a[:], b[:])


def test_split_has_its_columns_and_samples(store_path):
    """Labels, validity, sizes, boxes and names are those of the rows that were written."""
    split = open_store(store_path)["train"]
    given_samples = samples_of(small_spec(), boxes=True)["train"]
    assert len(split) == 10
    np.testing.assert_array_equal(split.labels, given_samples.labels)
    np.testing.assert_array_equal(np.flatnonzero(~split.valid), [3])
    np.testing.assert_array_equal(split.sizes, [(100 + row, 200 + row) for row in range(10)])
    np.testing.assert_array_equal(split.boxes, given_samples.boxes)
    samples = split.samples()
    assert [sample.row for sample in samples] == list(range(10))
    assert [sample.path for sample in samples] == list(given_samples.paths)
    assert [sample.label for sample in samples] == given_samples.labels.tolist()
    assert [sample.class_name for sample in samples] == list(given_samples.class_names)


def test_store_says_what_it_is(plain_path):
    """Layers, splits, digest, provenance and the final norm are at hand."""
    store = open_store(str(plain_path))
    assert store.layers == (0, 5)
    assert store.splits == ("train", "val")
    assert store.digest == small_spec().digest
    assert store.provenance == PROVENANCE
    assert store.final_norm_path.read_bytes() == FINAL_NORM
    assert store["train"].layer(-1).prefix is None
    assert store["train"].boxes is None
    assert store.tokens == {"grid": [2, 2], "num_patches": 4, "num_prefix": 0, "dim": 8}
    assert repr(store) == f"Store({str(plain_path)!r}, layers=[0, 5], splits=['train', 'val'])"


def test_missing_layer_split_or_view_is_named(plain_path):
    """The error says what the store has and which command makes the rest."""
    store = open_store(plain_path)
    where = re.escape(str(plain_path))
    for layer in (3, -3, 6, -7):
        with pytest.raises(
            ConfigError,
            match=rf"layer {layer} is not in store {where} \(has 0,5 of 0-5\)\. "
            rf"Run: epcache extract --layers {layer}",
        ):
            store["train"].layer(layer)
    with pytest.raises(ConfigError, match=rf"'test' is not in store {where} \(has train, val\)"):
        store["test"]
    with pytest.raises(ConfigError, match=rf"view 1 .* {where} \(has 1\)\. Run: .* --views 2"):
        store["train"].layer(0, view=1)


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 11], "0,2-3,11"), ([], "")]
)
def test_format_ranges(numbers, text):
    """Runs of numbers are shortened."""
    assert format_ranges(numbers) == text


def test_no_store_shows_the_command(tmp_path):
    """An empty or missing folder, or a file, is an error with the command to run."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(
            StoreError, match=rf"no store at {re.escape(str(path))}.*epcache extract"
        ):
            open_store(path)


def test_unsealed_store_is_refused(tmp_path):
    """It says that the extraction has not finished and shows its command."""
    with StoreWriter(tmp_path / "s", small_spec()) as writer:
        writer.begin(samples_of(small_spec()), PROVENANCE, None)
    with pytest.raises(StoreError, match=f"not sealed.*{PROVENANCE['command']}"):
        open_store(tmp_path / "s")


def test_other_version_is_refused(plain_path):
    """A store of another spec version is refused with what to do."""
    edit_root(plain_path, lambda root: root["spec"].update(version=2))
    with pytest.raises(StoreError, match=r"version 2.*reads version 1.*again"):
        open_store(plain_path)


def test_edited_spec_is_refused(plain_path):
    """A spec whose digest is not the document's was edited; nothing is read from it."""
    edit_root(plain_path, lambda root: root["spec"]["identity"].update(seed=1))
    with pytest.raises(StoreError, match=r"its spec has digest \w{8}.*edited"):
        open_store(plain_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"attributes": {"epcache": {}}}', "\xff", "7"])
def test_foreign_root_document_is_refused(plain_path, text):
    """Another Zarr group, or anything else under that name, is no store."""
    (plain_path / "zarr.json").write_bytes(text.encode("latin1"))
    with pytest.raises(StoreError, match="not the document of an epcache store"):
        open_store(plain_path)


@pytest.mark.parametrize("column", ["labels", "valid", "sizes"])
def test_damaged_column_is_refused(plain_path, column):
    """A column that is cut off or gone is an error that names the file."""
    file = next((plain_path / "train" / column / "c").rglob("0"), None)
    file = file if file.is_file() else file / "0"
    file.write_bytes(file.read_bytes()[:-1] if column == "valid" else file.read_bytes()[:-8])
    with pytest.raises(StoreError, match=f"{column}.* has the wrong size"):
        _ = open_store(plain_path)["train"].sizes
    file.unlink()
    with pytest.raises(StoreError, match=f"{column}.* cannot be read .No such file"):
        _ = open_store(plain_path)["train"].sizes


@pytest.mark.parametrize("compress", [False, True])
def test_cut_off_shard_is_an_error(tmp_path, compress):
    """However much of a shard is left, reading it raises; it never ends the process by a signal."""
    write_store(tmp_path / "s", small_spec(compress=compress))
    array = next(iter(small_spec(compress=compress).arrays("train")))
    file = tmp_path / "s" / array.shard_path(0)
    data = file.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(StoreError, match="epcache verify"):
            open_store(tmp_path / "s")["train"].layer(0).patch[0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_compressed_chunk_is_an_error_or_reads(compressed_shard, data):
    """A flipped byte of a compressed chunk never gives uninitialised memory or ends the process."""
    path, file, whole = compressed_shard
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(broken)
    tokens = open_store(path)["train"].layer(0).patch
    try:
        first = tokens[0:4].copy()
    except StoreError:
        return
    np.testing.assert_array_equal(open_store(path)["train"].layer(0).patch[0:4], first)


def test_chunk_of_another_size_is_an_error():
    """A chunk that decodes to fewer bytes would leave the rest of the rows uninitialised."""
    out = np.ones((2, 6, 4), np.float16)
    half = compress_chunk(np.zeros((1, 6, 4), np.float16))
    for data in (
        half,
        compress_chunk(np.zeros((3, 6, 4), np.float16)),
        half[:-1],
        half + b"x",
        b"",
    ):
        with pytest.raises(StoreError, match="a compressed chunk is damaged"):
            decompress_chunk(data, out)
    assert (out == 1).all()


@pytest.fixture(scope="module")
def compressed_shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("compressed") / "s"
    spec = small_spec(compress=True)
    write_store(path, spec)
    file = path / next(iter(spec.arrays("train"))).shard_path(0)
    return path, file, file.read_bytes()


def open_maps(path: Path) -> int:
    """File descriptors of this process that lead below a folder."""
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(handle.readlink()))
        except FileNotFoundError:
            continue
    return sum(link.startswith(str(path)) for link in links)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_open_shards_are_bounded(tmp_path):
    """A store of many shards never holds more descriptors than the cache's capacity."""
    write_store(tmp_path / "s", small_spec(shard_rows=1, num_rows={"train": 40}))
    store = open_store(tmp_path / "s")
    store._shards = ShardCache(capacity=5)
    tokens = store["train"].layer(0).patch
    most = 0
    for row in [*range(40), *range(0, 40, 3), 1, 2, 1, 2]:
        np.testing.assert_array_equal(tokens[row], tokens_of(tokens.spec)[row])
        most = max(most, open_maps(tmp_path))
    assert most == 5
    kept = tokens[7]
    np.testing.assert_array_equal(tokens[:], tokens_of(tokens.spec))
    np.testing.assert_array_equal(kept, tokens_of(tokens.spec)[7])
    assert open_maps(tmp_path) == 6  # the view keeps its own


def test_threads_share_a_store(tmp_path):
    """Read-ahead threads may gather from one store whose cache is smaller than what they read."""
    from concurrent.futures import ThreadPoolExecutor

    write_store(tmp_path / "s", small_spec(shard_rows=1, num_rows={"train": 40}))
    store = open_store(tmp_path / "s")
    store._shards = ShardCache(capacity=2)
    tokens = store["train"].layer(0).patch
    expected = tokens_of(tokens.spec)
    orders = [np.random.default_rng(seed).integers(0, 4, 40) for seed in range(100)]
    with ThreadPoolExecutor(8) as pool:
        for order, got in zip(orders, pool.map(tokens.take, orders), strict=True):
            np.testing.assert_array_equal(got, expected[order])


def test_opening_imports_neither_torch_nor_zarr(plain_path):
    """A store opens and reads at once: heavy imports are for those who need them."""
    code = f"""
import sys
from epcache.store.reader import open_store
open_store({str(plain_path)!r})["train"].layer(0).patch[:3]
print({{"torch", "zarr", "tensorstore", "PIL"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
