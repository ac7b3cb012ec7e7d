"""Write small stores of random tokens, whole or piece by piece, and look at their files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from epcache.store.journal import Quarantined
from epcache.store.spec import (
    Geometry,
    LayerShape,
    ShardTask,
    SplitSpec,
    StoreSpec,
    TokenArraySpec,
)
from epcache.store.writer import Samples, StoreWriter

PROVENANCE = {"command": "epcache extract --backbone tiny --dataset dots"}
FINAL_NORM = b"stands for a safetensors file"
BATCH = 3
MEMORY_DISK = Path("/dev/shm")


@contextlib.contextmanager
def temporary_dir() -> Iterator[Path]:
    """A folder for one example, in memory where that is possible: fsync costs nothing there."""
    memory = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def small_spec(
    *,
    shard_rows: int = 4,
    compress: bool = False,
    num_rows: Mapping[str, int] | None = None,
    num_views: int = 1,
) -> StoreSpec:
    """Two layers of different shapes, one of them with prefix tokens; a few shards."""
    sizes = num_rows or {"train": 10, "val": 5}
    return StoreSpec(
        identity={"backbone": "tiny", "seed": 0},
        layers={
            0: LayerShape(grid=(2, 3), num_patches=6, num_prefix=1, dim=4),
            5: LayerShape(grid=(2, 2), num_patches=4, num_prefix=0, dim=8),
        },
        num_layers=6,
        splits={
            name: SplitSpec(num_rows=rows, num_views=num_views if name == "train" else 1)
            for name, rows in sizes.items()
        },
        geometry=Geometry(shard_rows=shard_rows, compress=compress),
    )


def tokens_of(array: TokenArraySpec) -> NDArray[np.float16]:
    """All rows of an array: random, but always the same; every seventh row is zeros."""
    seed = int.from_bytes(hashlib.sha256(array.path.encode()).digest()[:4])
    shape = (array.num_rows, array.num_tokens, array.dim)
    tokens = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    tokens[::7] = 0
    return tokens


def samples_of(spec: StoreSpec, *, boxes: bool = False) -> dict[str, Samples]:
    """Rows whose labels cycle through three classes."""
    found = {}
    for name, split in spec.splits.items():
        labels = np.arange(split.num_rows) % 3
        found[name] = Samples(
            paths=[f"{name}/ü {row}.png" for row in range(split.num_rows)],
            labels=labels,
            class_names=["cat, big", 'dog "x"', "owl"] * (split.num_rows // 3 + 1),
            boxes=np.arange(split.num_rows * 4.0).reshape(-1, 4) if boxes else None,
        )
        found[name].class_names[split.num_rows :] = []
    return found


def sizes_of(task: ShardTask) -> list[tuple[int, int]]:
    """Widths and heights that tell rows apart."""
    return [(100 + row, 200 + row) for row in range(*task.rows)]


def write_task(store: StoreWriter, task: ShardTask) -> None:
    """Compute and commit one task in uneven batches; row 3 of ``train`` is undecodable."""
    writer = store.open_task(task)
    arrays = {
        (int(array.path.split("/")[-2]), array.path.split("/")[-1]): tokens_of(array)
        for array in store.spec.arrays(task.split, task.view)
    }
    sizes = sizes_of(task)
    for start in range(*task.rows, BATCH):
        stop = min(start + BATCH, task.rows[1])
        bad = [
            Quarantined(row=row, path=f"{task.split}/ü {row}.png", reason="cut off")
            for row in range(start, stop)
            if task.split == "train" and row == 3
        ]
        writer.append(
            {key: tokens[start:stop] for key, tokens in arrays.items()},
            sizes[start - task.rows[0] : stop - task.rows[0]],
            bad,
        )
    writer.commit()


def write_store(
    path: Path,
    spec: StoreSpec | None = None,
    *,
    boxes: bool = False,
    rank: int = 0,
    world_size: int = 1,
    on_task: Callable[[ShardTask], None] = lambda task: None,
) -> bool:
    """Write all tasks of a rank that are missing, then seal; ``on_task`` sees each one first."""
    spec = spec or small_spec()
    with StoreWriter(path, spec, rank=rank, world_size=world_size) as store:
        store.begin(samples_of(spec, boxes=boxes), PROVENANCE, FINAL_NORM)
        for task in store.tasks():
            on_task(task)
            write_task(store, task)
        return store.seal()


def all_files(path: Path) -> dict[str, bytes]:
    """Every file below a folder, by name; a folder that is empty shows as a name with a slash."""
    return {
        found.relative_to(path).as_posix() + ("/" if found.is_dir() else ""): (
            b"" if found.is_dir() else found.read_bytes()
        )
        for found in path.rglob("*")
        if found.is_file() or not any(found.iterdir())
    }
