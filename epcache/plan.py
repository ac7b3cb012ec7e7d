"""What an extraction is about to do, before it does it: which store, which rows, how many bytes."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import epcache
from epcache import home
from epcache.dataset import Preprocess
from epcache.errors import ConfigError, SpaceError
from epcache.order import store_order
from epcache.store.documents import read_root
from epcache.store.files import LOCK, PARTIAL, format_bytes, free_bytes
from epcache.store.spec import Geometry, SplitSpec, StoreSpec, default_shard_rows
from epcache.store.writer import Samples

if TYPE_CHECKING:
    from epcache.backbone import Backbone
    from epcache.manifest import Manifest

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
MAX_IMAGE_SIZE = 4096
"""Pixels a side; attention over more patches than that gives fits no machine."""

SPARE_BYTES = 64 * 2**20
"""Room for the small files and the file system's own."""


@dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """What the user asks of an extraction; the fields are the command's options."""

    backbone: str
    """Alias, timm name or ``package.module:function``."""
    dataset: str
    """Name of a manifest, or ``imagefolder``."""
    data_dir: Path | None = None
    weights: str | None = None
    """A file, ``random``, ``random:SEED``, or None for the published ones."""
    layers: str = "last"
    """``last``, ``all``, or block indices such as ``2,5,-1``."""
    image_size: int | None = None
    views: int = 1
    """Views of each training image; view 0 is the evaluation crop."""
    splits: tuple[str, ...] = ()
    shard_rows: int | None = None
    compress: bool = False
    limit: int | None = None
    """Only the first rows of the stored order of each split."""
    out: Path | None = None
    precision: str = "auto"
    """``auto``: float16 autocast on CUDA, float32 elsewhere."""
    device: str = "auto"
    batch_size: int | None = None
    num_workers: int | None = None
    """Decode threads; default: one per core."""
    max_bad: float = 0.01
    seed: int = 0
    """Of the stored order and of the augmented views."""
    download: bool = False
    rank: int = 0
    world_size: int = 1
    command: str = "epcache extract ..."
    """How to start this run again; kept in the store."""

    def __post_init__(self) -> None:
        """Refuse values that no data set or backbone could make good."""
        for name in ("views", "shard_rows", "limit", "batch_size", "num_workers", "world_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.replace("_", "-").replace("num-workers", "workers")
                raise ConfigError(f"--{option} {value}: expected 1 or more")
        if self.image_size is not None and not 1 <= self.image_size <= MAX_IMAGE_SIZE:
            raise ConfigError(f"--image-size {self.image_size}: expected 1 to {MAX_IMAGE_SIZE}")
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"--precision {self.precision}: expected one of {', '.join(PRECISIONS)}"
            )
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"--max-bad {self.max_bad:g}: expected a share from 0 to 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"--rank {self.rank} of --world-size {self.world_size}: expected 0 to "
                f"{self.world_size - 1}"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class ExtractPlan:
    """Everything a run needs, resolved."""

    config: ExtractConfig
    manifest: Manifest
    backbone: Backbone
    spec: StoreSpec
    store_path: Path
    orders: Mapping[str, NDArray[np.int64]]
    """For each split the manifest's position of every stored row."""
    device: str
    precision: str
    batch_size: int
    num_workers: int

    @property
    def preprocess(self) -> Preprocess:
        """How an image file becomes the backbone's input."""
        return Preprocess(
            image_size=self.backbone.image_size,
            crop_pct=self.backbone.crop_pct,
            interpolation=self.backbone.interpolation,
        )

    @property
    def num_images(self) -> int:
        """Forward passes of one image in the whole store, views counted."""
        return sum(split.num_rows * split.num_views for split in self.spec.splits.values())

    def samples(self) -> dict[str, Samples]:
        """The rows of each split in stored order."""
        found = {}
        for name, order in self.orders.items():
            split = self.manifest.splits[name]
            labels = np.asarray(split.labels, np.int64)[order]
            found[name] = Samples(
                paths=[split.paths[i] for i in order.tolist()],
                labels=labels,
                class_names=[self.manifest.classes[label] for label in labels.tolist()],
                boxes=None if split.boxes is None else split.boxes[order],
            )
        return found

    def provenance(self) -> dict[str, Any]:
        """Where the store comes from: no part of its identity, and nothing that a rerun changes."""
        backbone = self.backbone
        return {
            "command": self.config.command,
            "epcache_version": epcache.__version__,
            "backbone": {
                "name": backbone.name,
                "timm_name": backbone.timm_name,
                "weights": backbone.weights,
                "weights_digest": backbone.weights_digest,
                "norm_policy": backbone.norm_policy,
                "num_layers": backbone.num_layers,
                "has_cls": backbone.has_cls,
            },
            "dataset": {
                "name": self.manifest.name,
                "root": str(self.manifest.root) if self.manifest.root else None,
                "digest": self.manifest.digest,
                "classes": list(self.manifest.classes),
                "train_split": self.manifest.train_split,
                "eval_split": self.manifest.eval_split,
            },
            "transform": transform_json(backbone),
            "precision": self.precision,
            "batch_size": self.batch_size,
            "environment": environment(self.device),
        }

    def needed_bytes(self, committed: int) -> int:
        """Room that this process still needs; 0 where compression makes it unknowable."""
        if self.config.compress:
            return 0
        return (self.spec.num_bytes - committed) // self.config.world_size + SPARE_BYTES

    def check_space(self, committed: int) -> None:
        """Refuse to start what cannot fit.

        Args:
            committed: Bytes that an earlier run committed.

        Raises:
            SpaceError: Names both sizes.
        """
        needed, free = self.needed_bytes(committed), free_bytes(self.store_path)
        if needed > free:
            raise SpaceError(
                f"the store needs {format_bytes(needed)} more ({format_bytes(SPARE_BYTES)} of it "
                f"to spare), {format_bytes(free)} are free at {self.store_path}. Use --out on a "
                f"larger disk, or fewer --layers, --views or rows (--limit)"
            )


def make_plan(config: ExtractConfig, manifest: Manifest, backbone: Backbone) -> ExtractPlan:
    """Resolve every choice that the config leaves open.

    Raises:
        ConfigError: An option does not fit the backbone or the machine.
    """
    from epcache.backbone import resolve_layers

    device = resolve_device(config.device)
    precision = config.precision
    if precision == "auto":
        precision = "float16" if device.startswith("cuda") else "float32"
    layers = resolve_layers(config.layers, backbone.num_layers)
    shapes = {layer: backbone.layer_shapes[layer] for layer in layers}
    orders = {
        name: store_order(len(split.labels), seed=config.seed, split=name)[: config.limit]
        for name, split in manifest.splits.items()
    }
    splits = {
        name: SplitSpec(
            num_rows=len(order),
            num_views=config.views if name == manifest.train_split else 1,
        )
        for name, order in orders.items()
    }
    shard_rows = config.shard_rows or default_shard_rows(shapes, splits)
    if config.shard_rows:  # more rows than the largest split has would only be padding
        shard_rows = min(shard_rows, max(split.num_rows for split in splits.values()))
    spec = StoreSpec(
        identity={
            "backbone": backbone.name,
            "weights_digest": backbone.weights_digest,
            "transform": transform_json(backbone),
            "precision": precision,
            "dataset": manifest.name,
            "manifest_digest": manifest.digest,
            "seed": config.seed,
            "limit": config.limit,
        },
        layers=shapes,
        num_layers=backbone.num_layers,
        splits=splits,
        geometry=Geometry(
            shard_rows=shard_rows,
            compress=config.compress,
        ),
    )
    store_path = config.out or home.store_path(manifest.name, backbone.name, spec.digest)
    check_place(store_path, manifest.root)
    batch_size = config.batch_size or (64 if device.startswith("cuda") else 16)
    spec, batch_size = keep_begun(spec, batch_size, store_path, config)
    return ExtractPlan(
        config=config,
        manifest=manifest,
        backbone=backbone.to(device),
        spec=spec,
        store_path=store_path,
        orders=orders,
        device=device,
        precision=precision,
        batch_size=batch_size,
        num_workers=config.num_workers or os.cpu_count() or 1,
    )


def check_place(store_path: Path, data_root: Path | None) -> None:
    """Refuse a place where a store cannot be, or where it would write over something else.

    Raises:
        ConfigError: The path is a file, cannot be written, holds or lies among other things.
    """
    place = store_path.absolute()
    if max(len(os.fsencode(part)) for part in place.parts) > 255:
        raise ConfigError(f"--out {store_path}: the name is too long for a folder (at most 255)")
    there = place
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"--out {store_path}: {there} is a file; give a folder for the store")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"--out {store_path}: {there} cannot be written; give another place")
    if data_root is not None:
        data, store = data_root.resolve(), place.resolve()
        if data == store or data in store.parents or store in data.parents:
            raise ConfigError(
                f"--out {store_path} and the data set {data_root} lie in one another; a store "
                f"needs a folder of its own"
            )
    # In this order: another rank may write the root document, or seal, between the two looks.
    if place.is_dir() and not is_begun_by_us(place) and read_root(place) is None:
        raise ConfigError(
            f"--out {store_path} is a folder with other things in it and no store; give a new or "
            f"an empty one"
        )


def is_begun_by_us(folder: Path) -> bool:
    """Whether a folder without a root document is empty, or was left by a run that just began.

    Such a run leaves its folder for uncommitted files, which holds one numbered folder a rank.
    """
    names = {path.name for path in folder.iterdir()}
    if all(name == LOCK or name.startswith(f"{LOCK}.") for name in names):
        return True
    try:
        return all(path.name.isdecimal() for path in (folder / PARTIAL).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def keep_begun(
    spec: StoreSpec, batch_size: int, store_path: Path, config: ExtractConfig
) -> tuple[StoreSpec, int]:
    """A store that was begun keeps its shards and its batches, so that it ends in the same bytes.

    Raises:
        ConfigError: The user asks for others, or another store lies at the path.
    """
    root = read_root(store_path)
    if root is None:
        return spec, batch_size
    begun = StoreSpec.from_json(root["spec"])
    if begun.digest != spec.digest:
        changed = [
            key for key in spec.identity if begun.identity.get(key) != spec.identity[key]
        ] or ["layers, splits or views"]
        raise ConfigError(
            f"{store_path} holds another store ({begun.digest[:8]}, this run makes "
            f"{spec.digest[:8]}); they differ in {', '.join(changed)}. Give another --out"
        )
    begun_batch = root["provenance"].get("batch_size", batch_size)
    for option, asked, has in (
        ("--shard-rows", config.shard_rows and spec.geometry.shard_rows, begun.geometry.shard_rows),
        ("--batch-size", config.batch_size, begun_batch),
    ):
        if asked is not None and asked != has:
            raise ConfigError(
                f"{option} {asked}: store {store_path} was begun with {has}. Leave the option out "
                f"to go on, or give another --out"
            )
    if config.compress and not begun.geometry.compress:
        raise ConfigError(
            f"--compress: store {store_path} was begun without. Leave the option out to go on, or "
            f"give another --out"
        )
    return begun, int(begun_batch)


def transform_json(backbone: Backbone) -> dict[str, Any]:
    """Preprocessing, as the identity and the provenance hold it."""
    return {
        "image_size": backbone.image_size,
        "crop_pct": backbone.crop_pct,
        "interpolation": backbone.interpolation,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    }


def environment(device: str) -> dict[str, str]:
    """Versions and hardware, for the provenance."""
    import timm

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "timm": str(timm.__version__),
        "device": f"{device} ({name})",
    }


def resolve_device(name: str) -> str:
    """``auto`` becomes CUDA, else MPS, else the CPU.

    Raises:
        ConfigError: The machine has no such device.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}") from None
    return name
