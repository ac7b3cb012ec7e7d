"""What a store is, before any byte of it exists: identity, shapes, chunks, shards, Zarr metadata.

Everything here is a pure function of its arguments; nothing touches a disk. ``docs/store.md`` is
the same text for people, and a test holds that the two agree.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from epcache.errors import ConfigError, StoreError

SPEC_VERSION = 1

TOKEN_BYTES = 2
"""float16. Zarr has no bfloat16, and every backbone we know of fits (the writer checks)."""

CHUNK_BYTES = 256 * 2**10
"""Aim for one chunk: small enough that one image is cheap to read through any Zarr reader."""

SHARD_BYTES = 64 * 2**20
"""Aim for one shard: what a crash may cost, and the unit that two machines share work by."""

MAX_SHARD_ROWS = 4096

MAX_SHARDS = 256
"""Per array, unless asked otherwise: a map costs a file descriptor, and 1024 are common."""

RESERVED_NAMES = ("zarr.json", "journal.jsonl", "final_norm.safetensors")

INDEX_ENTRY_BYTES = 16
INDEX_CHECKSUM_BYTES = 4
MISSING_CHUNK = 2**64 - 1
"""Offset and length of a chunk that is not in the shard (Zarr v3 sharding codec)."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one layer gives for one image."""

    grid: tuple[int, int]
    """Rows and columns of patch tokens, row-major; ``num_patches`` is their product."""
    num_patches: int
    num_prefix: int
    """[CLS] and registers, in the backbone's order; 0 where there are none."""
    dim: int

    def __post_init__(self) -> None:
        """Refuse a token count that is not the grid's."""
        if self.num_patches != self.grid[0] * self.grid[1] or self.num_patches < 1 or self.dim < 1:
            raise ConfigError(
                f"num_patches {self.num_patches} is not the token grid {self.grid[0]} x "
                f"{self.grid[1]} (or nothing is left, dim {self.dim}); check the backbone's output"
            )


@dataclass(frozen=True, kw_only=True)
class SplitSpec:
    """How many rows of a split are stored, and how many views of each."""

    num_rows: int
    num_views: int = 1
    """View 0 is the evaluation crop; the others are seeded augmentations."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How the rows lie in files. Decides no token's value, so it is not part of the identity."""

    shard_rows: int
    compress: bool = False


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """Everything that decides a store's bytes; two equal specs with one geometry are one store."""

    identity: Mapping[str, Any]
    """What decides the values: backbone, weights, preprocessing, manifest, seed (JSON types)."""
    layers: Mapping[int, LayerShape]
    """By block index; only the layers that are stored."""
    num_layers: int
    """Depth of the backbone: what -1 counts from."""
    splits: Mapping[str, SplitSpec]
    geometry: Geometry

    def __post_init__(self) -> None:
        """Refuse what no store can hold."""
        if not self.layers or not self.splits:
            raise ConfigError("a store needs at least one layer and one split; none was given")
        for name, split in self.splits.items():
            if split.num_rows < 1 or split.num_views < 1:
                raise ConfigError(f"split {name!r} has no rows or no views: {split}")
            reserved = name in RESERVED_NAMES or name.startswith((".", "__"))
            if not name or reserved or "/" in name or "\\" in name:
                raise ConfigError(f"split {name!r} cannot be a folder's name; rename the folder")
        if self.geometry.shard_rows < 1:
            raise ConfigError(f"--shard-rows {self.geometry.shard_rows}: expected 1 or more")

    @property
    def digest(self) -> str:
        """Sha256 of the canonical JSON of the identity and the stored shapes."""
        return canonical_digest(
            {
                "spec_version": SPEC_VERSION,
                "dtype": "float16",
                "identity": dict(self.identity),
                "num_layers": self.num_layers,
                "layers": {str(layer): asdict(shape) for layer, shape in self.layers.items()},
                "splits": {name: asdict(split) for name, split in self.splits.items()},
            }
        )

    def arrays(self, split: str, view: int = 0) -> Iterator[TokenArraySpec]:
        """All token arrays of one view of a split, in the order they are written."""
        for layer in self.layers:
            yield from self.layer_arrays(split, layer, view)

    def layer_arrays(self, split: str, layer: int, view: int = 0) -> Iterator[TokenArraySpec]:
        """The patch array of a layer, then its prefix array where there is one."""
        shape = self.layers[layer]
        for kind, num_tokens in (("patch", shape.num_patches), ("prefix", shape.num_prefix)):
            if num_tokens:
                yield TokenArraySpec(
                    path=f"{view_path(split, view)}/layers/{layer}/{kind}",
                    num_rows=self.splits[split].num_rows,
                    num_tokens=num_tokens,
                    dim=shape.dim,
                    geometry=self.geometry,
                )

    def tasks(self) -> list[ShardTask]:
        """Every unit of work, in the order in which one process does them."""
        found = []
        for name, split in self.splits.items():
            for view in range(split.num_views):
                for shard, start in enumerate(range(0, split.num_rows, self.geometry.shard_rows)):
                    stop = min(start + self.geometry.shard_rows, split.num_rows)
                    found.append(ShardTask(split=name, view=view, shard=shard, rows=(start, stop)))
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all token shards when they are not compressed."""
        return sum(
            array.shard_file_bytes(shard)
            for name, split in self.splits.items()
            for view in range(split.num_views)
            for array in self.arrays(name, view)
            for shard in range(array.num_shards)
        )

    def tokens_json(self) -> dict[str, Any]:
        """The deepest stored layer's shape, as commands print it."""
        shape = self.layers[max(self.layers)]
        return {**asdict(shape), "grid": list(shape.grid)}

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON types; ``from_json`` is its inverse."""
        return {
            "version": SPEC_VERSION,
            "identity": dict(self.identity),
            "num_layers": self.num_layers,
            "layers": {str(layer): asdict(shape) for layer, shape in self.layers.items()},
            "splits": {name: asdict(split) for name, split in self.splits.items()},
            "geometry": asdict(self.geometry),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoreSpec:
        """Read back what ``to_json`` wrote.

        Raises:
            StoreError: Another spec version, or a field that is missing or of the wrong kind.
        """
        if data.get("version") != SPEC_VERSION:
            raise StoreError(
                f"store of spec version {data.get('version')}; this epcache reads version "
                f"{SPEC_VERSION}. Extract it again, or use the epcache that wrote it"
            )
        try:
            return cls(
                identity=dict(data["identity"].items()),
                num_layers=whole(data["num_layers"]),
                layers={
                    int(layer): LayerShape(
                        grid=(whole(shape["grid"][0]), whole(shape["grid"][1])),
                        **{key: whole(value) for key, value in shape.items() if key != "grid"},
                    )
                    for layer, shape in data["layers"].items()
                },
                splits={
                    name: SplitSpec(**{key: whole(value) for key, value in split.items()})
                    for name, split in data["splits"].items()
                },
                geometry=Geometry(
                    **{**data["geometry"], "shard_rows": whole(data["geometry"]["shard_rows"])}
                ),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"the store's spec cannot be read ({error!r}); extract it again"
            ) from None


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Rows [a, b) of one view of a split: computed, written and committed together."""

    split: str
    view: int
    shard: int
    rows: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """How many rows the task holds."""
        return self.rows[1] - self.rows[0]

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells tasks of one store apart."""
        return (self.split, self.view, self.shard)


@dataclass(frozen=True, kw_only=True)
class TokenArraySpec:
    """One float16 array (num_rows, num_tokens, dim) and the arithmetic of its files."""

    path: str
    """Below the store, with forward slashes."""
    num_rows: int
    num_tokens: int
    dim: int
    geometry: Geometry

    @property
    def row_bytes(self) -> int:
        """Bytes of one image's tokens."""
        return self.num_tokens * self.dim * TOKEN_BYTES

    @property
    def chunk_rows(self) -> int:
        """The largest divisor of ``shard_rows`` whose chunk stays below ``CHUNK_BYTES``."""
        most = max(1, CHUNK_BYTES // self.row_bytes)
        return max(rows for rows in divisors(self.geometry.shard_rows) if rows <= most)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk before compression."""
        return self.chunk_rows * self.row_bytes

    @property
    def chunks_per_shard(self) -> int:
        """Entries of a shard's index."""
        return self.geometry.shard_rows // self.chunk_rows

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of a shard, its checksum included."""
        return self.chunks_per_shard * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES

    @property
    def num_shards(self) -> int:
        """Files of this array."""
        return math.ceil(self.num_rows / self.geometry.shard_rows)

    def shard_num_rows(self, shard: int) -> int:
        """Rows in a shard: all but the last are full."""
        return min(self.geometry.shard_rows, self.num_rows - shard * self.geometry.shard_rows)

    def shard_num_chunks(self, shard: int) -> int:
        """Chunks present in a shard; the last may be padded with zero rows."""
        return math.ceil(self.shard_num_rows(shard) / self.chunk_rows)

    def shard_path(self, shard: int) -> str:
        """The file of a shard, below the store."""
        return f"{self.path}/c/{shard}/0/0"

    def shard_file_bytes(self, shard: int) -> int:
        """Size of an uncompressed shard file."""
        return self.shard_num_chunks(shard) * self.chunk_bytes + self.index_bytes

    def metadata(self) -> dict[str, Any]:
        """The array's ``zarr.json``."""
        inner: list[dict[str, Any]] = [LITTLE_ENDIAN]
        if self.geometry.compress:
            inner.append({"name": "blosc", "configuration": BLOSC})
        sharding = {
            "chunk_shape": [self.chunk_rows, self.num_tokens, self.dim],
            "codecs": inner,
            "index_codecs": [LITTLE_ENDIAN, {"name": "crc32c"}],
            "index_location": "end",
        }
        return array_metadata(
            shape=(self.num_rows, self.num_tokens, self.dim),
            chunk_shape=(self.geometry.shard_rows, self.num_tokens, self.dim),
            data_type="float16",
            fill_value=0.0,
            codecs=[{"name": "sharding_indexed", "configuration": sharding}],
            dimension_names=("row", "token", "width"),
        )


LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {"typesize": 2, "cname": "zstd", "clevel": 3, "shuffle": "shuffle", "blocksize": 0}


def view_path(split: str, view: int) -> str:
    """The group that holds a view's layers: the split itself for view 0."""
    return split if view == 0 else f"{split}/views/{view}"


def default_shard_rows(layers: Mapping[int, LayerShape], splits: Mapping[str, SplitSpec]) -> int:
    """A power of two that makes the widest layer's shards about ``SHARD_BYTES``.

    Larger where an array would have more than ``MAX_SHARDS``; no larger than the largest split
    needs, so that a small store is not all padding.
    """
    row_bytes = max(shape.num_patches * shape.dim * TOKEN_BYTES for shape in layers.values())
    by_bytes = 1 << (max(1, SHARD_BYTES // row_bytes).bit_length() - 1)
    num_rows = max(split.num_rows for split in splits.values())
    least = next_power_of_two(math.ceil(num_rows / MAX_SHARDS))
    return min(max(min(by_bytes, MAX_SHARD_ROWS), least), next_power_of_two(num_rows))


def array_metadata(
    *,
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    data_type: str,
    fill_value: bool | float,
    codecs: list[dict[str, Any]],
    dimension_names: tuple[str, ...],
) -> dict[str, Any]:
    """A Zarr v3 array document. Source: Zarr core specification v3, array metadata."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": list(dimension_names),
        "storage_transformers": [],
    }


def column_metadata(shape: tuple[int, ...], data_type: str) -> dict[str, Any]:
    """Of ``labels``, ``valid``, ``sizes`` or ``boxes``: one plain chunk, ``c/0`` or ``c/0/0``."""
    return array_metadata(
        shape=shape,
        chunk_shape=shape,
        data_type=data_type,
        fill_value={"bool": False, "float64": 0.0}.get(data_type, 0),
        codecs=[{"name": "bytes"} if data_type == "bool" else LITTLE_ENDIAN],
        dimension_names=("row", "value")[: len(shape)],
    )


def group_metadata(attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A Zarr v3 group document."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def canonical_json(data: object) -> str:
    """One text for one value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_digest(data: object) -> str:
    """Sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def whole(value: object) -> int:
    """The value, which must be an integer: JSON has ``4.0``, and Python counts ``true``."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def divisors(number: int) -> list[int]:
    """All divisors of a positive number."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
