"""The spec of a store: identity, geometry, tasks, and that ``docs/store.md`` says the same."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import PROVENANCE, small_spec, temporary_dir, write_store
from strategies import JSON_VALUES, store_specs

from epcache.errors import ConfigError, StoreError
from epcache.store import journal, spec, writer
from epcache.store.documents import root_attributes, seal_of
from epcache.store.spec import (
    Geometry,
    LayerShape,
    ShardTask,
    SplitSpec,
    StoreSpec,
    TokenArraySpec,
    canonical_json,
    default_shard_rows,
)

PAGE = (Path(__file__).parents[1] / "docs" / "store.md").read_text(encoding="utf-8")
VIT_L = {23: LayerShape(grid=(16, 16), num_patches=256, num_prefix=1, dim=1024)}
VIT_S = {11: LayerShape(grid=(16, 16), num_patches=256, num_prefix=1, dim=384)}
IMAGENET = {"train": SplitSpec(num_rows=1_281_167), "val": SplitSpec(num_rows=50_000)}

IDENTITY_CHANGES = {
    "identity": {"identity": {"backbone": "tiny", "seed": 1}},
    "identity, a new key": {"identity": {"backbone": "tiny", "seed": 0, "more": None}},
    "num_layers": {"num_layers": 7},
    "layer left out": {"layers": {0: small_spec().layers[0]}},
    "layer number": {"layers": {0: small_spec().layers[0], 4: small_spec().layers[5]}},
    "rows": {"splits": {"train": SplitSpec(num_rows=11), "val": SplitSpec(num_rows=5)}},
    "views": {"splits": small_spec().splits | {"train": SplitSpec(num_rows=10, num_views=2)}},
    "split name": {"splits": {"train": SplitSpec(num_rows=10), "test": SplitSpec(num_rows=5)}},
} | {
    f"layer {field}": {"layers": small_spec().layers | {5: LayerShape(**{**SHAPE, **change})}}
    for SHAPE in [dataclasses.asdict(small_spec().layers[5])]
    for field, change in {
        "grid": {"grid": (4, 1)},
        "patches": {"grid": (2, 3), "num_patches": 6},
        "prefix": {"num_prefix": 1},
        "dim": {"dim": 9},
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("change", IDENTITY_CHANGES.values(), ids=IDENTITY_CHANGES.keys())
def test_digest_follows_everything_that_decides_the_bytes(change):
    """Any other identity, layer shape, split size or number of views is another store."""
    assert dataclasses.replace(small_spec(), **change).digest != small_spec().digest


@pytest.mark.parametrize(
    "geometry", [Geometry(shard_rows=5), Geometry(shard_rows=4, compress=True)]
)
def test_digest_ignores_geometry(geometry):
    """How rows lie in files changes no token, so it is not part of the identity."""
    assert dataclasses.replace(small_spec(), geometry=geometry).digest == small_spec().digest


def test_digest_follows_the_spec_version(monkeypatch):
    """Another version of the specification never passes for this one."""
    before = small_spec().digest
    monkeypatch.setattr(spec, "SPEC_VERSION", 2)
    assert small_spec().digest != before


def test_digest_is_what_the_page_says():
    """The digest is the sha256 of the canonical JSON that ``docs/store.md`` shows."""
    shown = re.search(r'^\{"spec_version".*\}$', PAGE, re.MULTILINE).group()
    data = json.loads(shown.replace("...", "null"))
    said = small_spec().to_json()
    data |= {key: said[key] for key, value in data.items() if value is None}
    assert spec.canonical_digest(data) == small_spec().digest


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4))
def test_canonical_json_has_one_text_for_one_value(data):
    """The order of keys does not matter, and the text reads back as the value."""
    text = canonical_json(data)
    assert text == canonical_json(dict(reversed(data.items())))
    assert json.loads(text) == data
    assert text.isascii()


def test_canonical_json_refuses_nan():
    """NaN is no JSON, and is not equal to itself."""
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"x": math.nan})


@given(store_specs())
def test_spec_survives_json(store_spec):
    """``from_json`` undoes ``to_json``, through text, with the digest unchanged."""
    back = StoreSpec.from_json(json.loads(json.dumps(store_spec.to_json())))
    assert back == store_spec
    assert back.digest == store_spec.digest
    assert canonical_json(back.to_json()) == canonical_json(store_spec.to_json())


@given(store_specs(most_rows=200))
def test_tasks_cover_each_row_once(store_spec):
    """Together the tasks hold every row of every view exactly once, in order."""
    rows = {}
    for task in store_spec.tasks():
        assert 0 < task.num_rows <= store_spec.geometry.shard_rows
        assert task.rows[0] == task.shard * store_spec.geometry.shard_rows
        rows.setdefault((task.split, task.view), []).extend(range(*task.rows))
    assert rows == {
        (name, view): list(range(split.num_rows))
        for name, split in store_spec.splits.items()
        for view in range(split.num_views)
    }


@settings(deadline=None)
@given(store_specs(), st.integers(2, 5))
def test_ranks_share_the_tasks(store_spec, world_size):
    """Each task belongs to exactly one rank, and shares differ by one task at most."""
    with temporary_dir() as folder:
        shares = [
            writer.StoreWriter(folder, store_spec, rank=rank, world_size=world_size).tasks()
            for rank in range(world_size)
        ]
    assert sorted(task.key for share in shares for task in share) == sorted(
        task.key for task in store_spec.tasks()
    )
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(
    st.integers(1, 2048), st.integers(1, 2048), st.integers(1, 3_000_000), st.integers(1, 10_000)
)
def test_default_shard_rows_are_bounded(num_patches, dim, num_rows, num_rows_val):
    """A power of two; shards near their aim, unless the split needs fewer rows or more."""
    layers = {0: LayerShape(grid=(1, num_patches), num_patches=num_patches, num_prefix=1, dim=dim)}
    splits = {"train": SplitSpec(num_rows=num_rows), "val": SplitSpec(num_rows=num_rows_val)}
    rows = default_shard_rows(layers, splits)
    largest = max(num_rows, num_rows_val)
    assert rows & (rows - 1) == 0
    assert rows < 2 * largest
    assert math.ceil(largest / rows) <= spec.MAX_SHARDS
    row_bytes = num_patches * dim * 2
    if rows > 1 and math.ceil(2 * largest / rows) <= spec.MAX_SHARDS:  # half would do
        assert rows <= spec.MAX_SHARD_ROWS
        assert rows * row_bytes <= spec.SHARD_BYTES
    if rows < largest:
        assert 2 * rows * row_bytes > spec.SHARD_BYTES or 2 * rows > spec.MAX_SHARD_ROWS


def test_default_shard_rows_of_known_sets():
    """About 64 MiB; more where ImageNet would have thousands, less where data is small."""
    small = {"train": SplitSpec(num_rows=5_994), "test": SplitSpec(num_rows=5_794)}
    assert default_shard_rows(VIT_L, small) == 128  # 64 MiB
    assert default_shard_rows(VIT_S, small) == 256  # 48 MiB
    assert default_shard_rows(VIT_L, {"train": SplitSpec(num_rows=100)}) == 128
    assert default_shard_rows(VIT_L, {"train": SplitSpec(num_rows=1)}) == 1
    assert default_shard_rows(VIT_L, IMAGENET) == 8192
    array = next(
        StoreSpec(
            identity={}, layers=VIT_L, num_layers=24, splits=IMAGENET,
            geometry=Geometry(shard_rows=8192),
        ).arrays("train")
    )  # fmt: skip
    assert array.num_shards == 157
    assert array.chunk_bytes <= spec.CHUNK_BYTES or array.chunk_rows == 1


@given(st.integers(1, 5000), st.integers(1, 400), st.integers(1, 2000))
def test_chunk_rows_rule(shard_rows, num_tokens, dim):
    """The largest divisor of a shard's rows whose chunk fits the limit; at least one row."""
    array = TokenArraySpec(
        path="a/layers/0/patch", num_rows=1, num_tokens=num_tokens, dim=dim,
        geometry=Geometry(shard_rows=shard_rows),
    )  # fmt: skip
    row_bytes = num_tokens * dim * 2
    fitting = [
        rows
        for rows in range(1, shard_rows + 1)
        if shard_rows % rows == 0 and (rows == 1 or rows * row_bytes <= spec.CHUNK_BYTES)
    ]
    assert array.chunk_rows == fitting[-1]


@settings(max_examples=15, deadline=None)
@given(store_specs(most_rows=12, compress=st.just(False)))
def test_sizes_are_those_on_disk(store_spec):
    """``shard_file_bytes`` is the size of each file, ``num_bytes`` the sum over all of them."""
    with temporary_dir() as folder:
        write_store(folder / "s", store_spec)
        sizes = {
            array.shard_path(shard): array.shard_file_bytes(shard)
            for name, split in store_spec.splits.items()
            for view in range(split.num_views)
            for array in store_spec.arrays(name, view)
            for shard in range(array.num_shards)
        }
        real = {
            path.relative_to(folder / "s").as_posix(): path.stat().st_size
            for path in (folder / "s").rglob("layers/*/p*/c/*/0/0")
        }
    assert real == sizes
    assert store_spec.num_bytes == sum(real.values())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layers": {}}, "at least one layer"),
        ({"splits": {}}, "at least one layer and one split"),
        ({"splits": {"train": SplitSpec(num_rows=0)}}, "'train' has no rows"),
        ({"splits": {"a/b": SplitSpec(num_rows=1)}}, "'a/b' cannot be a folder's name"),
        ({"splits": {"": SplitSpec(num_rows=1)}}, "cannot be a folder's name"),
        ({"splits": {"..": SplitSpec(num_rows=1)}}, "cannot be a folder's name"),
        ({"splits": {".partial": SplitSpec(num_rows=1)}}, "cannot be a folder's name"),
        ({"splits": {"zarr.json": SplitSpec(num_rows=1)}}, "cannot be a folder's name"),
        ({"splits": {"__x": SplitSpec(num_rows=1)}}, "cannot be a folder's name"),
        ({"geometry": Geometry(shard_rows=0)}, "--shard-rows 0: expected 1 or more"),
    ],
)
def test_impossible_stores_are_refused(change, match):
    """A spec that no folder can hold is an error with the value in it."""
    with pytest.raises(ConfigError, match=re.escape(match)):
        dataclasses.replace(small_spec(), **change)


def test_layer_shape_refuses_tokens_that_are_not_the_grid():
    """The patch count is the grid's, or the backbone's output was misread."""
    with pytest.raises(ConfigError, match="num_patches 7 is not the token grid 2 x 3"):
        LayerShape(grid=(2, 3), num_patches=7, num_prefix=1, dim=4)


def test_other_spec_version_is_refused():
    """A reader never guesses at another version's layout."""
    with pytest.raises(StoreError, match=r"spec version 2; this epcache reads version 1\. Extract"):
        StoreSpec.from_json(small_spec().to_json() | {"version": 2})


@pytest.mark.parametrize("field", ["identity", "num_layers", "layers", "splits", "geometry"])
@pytest.mark.parametrize("value", [None, 3, "x", [1]])
def test_damaged_spec_is_refused(field, value):
    """A field that is missing or of the wrong kind is a clear error, never a crash later."""
    data = small_spec().to_json()
    if field == "num_layers" and value == 3:
        value = 2.5
    with pytest.raises(StoreError, match="spec cannot be read"):
        StoreSpec.from_json(data | {field: value})
    del data[field]
    with pytest.raises(StoreError, match="spec cannot be read"):
        StoreSpec.from_json(data)


def test_spec_imports_fast():
    """The spec needs neither torch nor zarr, so that ``--help`` can use it."""
    code = "import sys, epcache.store.spec as _; print({'torch', 'zarr'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def table(header: str) -> dict[str, list[str]]:
    """The page's table whose first header cell this is: first column to the others."""
    lines = PAGE.split(f"\n| {header} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): others for first, *others in rows}


def fields(of: type) -> list[str]:
    return [field.name for field in dataclasses.fields(of)]


def test_page_names_the_constants():
    """``docs/store.md`` has the numbers of the code, all of them."""
    shown = {name: int(value) for name, (value, _) in table("constant").items()}
    assert shown == {
        name: value
        for name, value in vars(spec).items()
        if name.isupper() and type(value) is int and name != "MISSING_CHUNK"
    }
    assert spec.MISSING_CHUNK == 2**64 - 1
    assert "2^64 - 1" in PAGE


def test_page_names_the_fields():
    """The page's tables list the fields of the root document, the journal, and the seal."""
    sealed = {"files", "sha256"}
    assert set(table("root attribute")) == set(root_attributes(small_spec(), PROVENANCE, None))
    assert list(table("spec field")) == list(small_spec().to_json())
    assert set(table("journal line")) == set(fields(journal.Entry))
    assert re.findall(r"`(\w+)`", table("journal line")["task"][0]) == [
        name for name in ("split", "view", "shard", "rows") if name in fields(ShardTask)
    ]
    assert re.findall(r"`(\w+)`", table("journal line")["files"][0]) == fields(journal.ShardFile)
    assert list(table("quarantine.jsonl")) == fields(journal.Quarantined)
    assert set(table("seal field")) == sealed
    for name, shape in [("layers", LayerShape), ("splits", SplitSpec), ("geometry", Geometry)]:
        assert re.findall(r"`(\w+)`", table("spec field")[name][0]) == fields(shape)
    for name, value in spec.BLOSC.items():
        assert f"`{name}` {value}" in PAGE


def test_page_names_what_a_sealed_store_holds(tmp_path):
    """The seal has the fields of the page, and columns the types that it lists."""
    write_store(tmp_path / "s", boxes=True)
    assert set(table("seal field")) == set(seal_of(tmp_path / "s", small_spec(), PROVENANCE))
    for column, (data_type, file, _) in table("column").items():
        document = json.loads((tmp_path / "s" / "train" / column / "zarr.json").read_text())
        assert document["data_type"] == data_type
        assert (tmp_path / "s" / "train" / column / file.strip("`")).is_file()
    header = (tmp_path / "s" / "train" / "samples.csv").read_text(encoding="utf-8").split("\n")[0]
    assert header.split(",") == list(table("samples.csv"))


@pytest.mark.parametrize("kind", ["patch", "prefix"])
def test_page_example_is_right(kind):
    """Every number of the worked example is what the code computes."""
    store_spec = StoreSpec(
        identity={}, layers=VIT_S, num_layers=12, splits={"train": SplitSpec(num_rows=1803)},
        geometry=Geometry(shard_rows=256),
    )  # fmt: skip
    array = {a.path.split("/")[-1]: a for a in store_spec.arrays("train")}[kind]
    column = {"patch": 1, "prefix": 2}[kind]
    shown = {name: int(cells[column]) for name, cells in table("quantity").items()}
    shard, local_row = divmod(1000, 256)
    token = 17 if kind == "patch" else 0
    assert shown == {
        **{name: getattr(array, name) for name in shown if hasattr(array, name)},
        "shard": shard,
        "local_row": local_row,
        "chunk": local_row // array.chunk_rows,
        "offset": local_row * array.row_bytes + (token * 384 + 5) * 2,
        "shard_rows_here": array.shard_num_rows(shard),
        "shard_file_bytes": array.shard_file_bytes(shard),
    }  # fmt: skip
