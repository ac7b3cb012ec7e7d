"""Stage one: run a frozen backbone once over a data set and leave a sealed store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from epcache.backbone import load_backbone
from epcache.dataset import BatchPlan, ImageLoader
from epcache.extraction import Progress, extract_tokens, half_tokens
from epcache.manifest import load_manifest
from epcache.plan import ExtractConfig, ExtractPlan, make_plan
from epcache.store.files import free_bytes
from epcache.store.journal import committed_bytes
from epcache.store.reader import Store, open_store
from epcache.store.writer import StoreWriter, is_complete


class Observer(Protocol):
    """What a caller may want to show while a run goes on."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def plan(self, plan: ExtractPlan, committed: int) -> None:
        """What is about to happen, and the bytes that an earlier run committed."""

    def start(self, num_images: int) -> None:
        """The loop begins; this many rows are left to do."""

    def progress(self, progress: Progress) -> None:
        """A batch is through."""


def plan_extraction(config: ExtractConfig, observer: Observer) -> ExtractPlan:
    """Find the data and the weights, resolve every choice, and show it."""
    manifest = load_manifest(
        config.dataset,
        data_dir=config.data_dir,
        splits=config.splits or None,
        download=config.download,
        progress=observer.message,
    )
    backbone = load_backbone(config.backbone, weights=config.weights, image_size=config.image_size)
    plan = make_plan(config, manifest, backbone)
    observer.plan(plan, committed_bytes(plan.store_path))
    return plan


def extract(config: ExtractConfig, observer: Observer) -> dict[str, Any]:
    """Run, or go on with, an extraction. Returns the command's JSON object."""
    started = time.monotonic()
    plan = plan_extraction(config, observer)
    if is_complete(plan.store_path, plan.spec):
        observer.message(f"{plan.store_path} is sealed already: nothing to do")
        return result_json(open_store(plan.store_path), seconds=0.0, num_images=0)
    plan.check_space(committed_bytes(plan.store_path))
    num_images = 0

    def progress(state: Progress) -> None:
        nonlocal num_images
        num_images = state.num_images
        observer.progress(state)

    with StoreWriter(
        plan.store_path, plan.spec, rank=config.rank, world_size=config.world_size
    ) as store:
        norm = plan.backbone.final_norm
        store.begin(plan.samples(), plan.provenance(), norm.to_bytes() if norm else None)
        tasks = store.tasks()  # looks at every committed file, so once
        if tasks:
            observer.message(self_check(plan))
        observer.start(sum(task.num_rows for task in tasks))
        extract_tokens(
            plan.backbone,
            plan.manifest.splits,
            plan.orders,
            store,
            image_loader(plan),
            batch_size=plan.batch_size,
            precision=plan.precision,
            max_bad=config.max_bad,
            progress=progress,
        )
        if not store.seal():
            return {**unsealed_json(plan), "seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    return result_json(open_store(plan.store_path), seconds=seconds, num_images=num_images)


def estimate(config: ExtractConfig, observer: Observer) -> dict[str, Any]:
    """What a run would do, how long it would take, and whether it fits; writes nothing."""
    plan = plan_extraction(config, observer)
    committed = committed_bytes(plan.store_path)
    observer.message(self_check(plan))
    started = time.monotonic()
    for batch in image_loader(plan).load([first_batch(plan)]):
        half_tokens(plan.backbone, batch, tuple(plan.spec.layers), plan.precision)
        rate = len(batch.images) / (time.monotonic() - started)
    share = 1 - committed / plan.spec.num_bytes
    return {
        **unsealed_json(plan),
        "bytes": plan.spec.num_bytes,
        "free_bytes": free_bytes(plan.store_path),
        "fits": plan.needed_bytes(committed) <= free_bytes(plan.store_path),
        "seconds": share * plan.num_images / rate / config.world_size,
        "images_per_second": rate,
    }


def image_loader(plan: ExtractPlan) -> ImageLoader:
    """Decode threads for a plan."""
    return ImageLoader(plan.preprocess, seed=plan.config.seed, num_workers=plan.num_workers)


def first_batch(plan: ExtractPlan) -> BatchPlan:
    """The first rows of the first split."""
    split, order = next(iter(plan.orders.items()))
    return BatchPlan(split=plan.manifest.splits[split], indices=order[: plan.batch_size].tolist())


def self_check(plan: ExtractPlan) -> str:
    """Compare the tokens of the first batch with the backbone's own forward; also warms it up."""
    (batch,) = image_loader(plan).load([first_batch(plan)])
    check = plan.backbone.self_check(torch.from_numpy(batch.images), plan.precision)
    if check.max_relative_error is None:
        return f"self-check: {check.what}"
    return (
        f"self-check: {check.what} agree to {check.max_relative_error:.1e} "
        f"(allowed {check.tolerance:.0e})"
    )


def result_json(store: Store, *, seconds: float, num_images: int) -> dict[str, Any]:
    """A sealed store, as ``epcache extract --json`` says it."""
    return {
        "store": str(store.path),
        "digest": store.digest,
        "backbone": store.provenance["backbone"]["name"],
        "dataset": store.provenance["dataset"]["name"],
        "layers": list(store.layers),
        "sealed": True,
        "splits": {
            name: {
                "num_images": store[name].num_rows,
                "quarantined": int((~store[name].valid).sum()),
            }
            for name in store.splits
        },
        "tokens": dict(store.tokens),
        "bytes": store.num_bytes,
        "seconds": seconds,
        "images_per_second": num_images / seconds if seconds else None,
    }


def unsealed_json(plan: ExtractPlan) -> Mapping[str, Any]:
    """The same for a store that is not finished, or not begun."""
    spec = plan.spec
    return {
        "store": str(plan.store_path),
        "digest": spec.digest,
        "backbone": plan.backbone.name,
        "dataset": plan.manifest.name,
        "layers": list(spec.layers),
        "sealed": False,
        "splits": {
            name: {"num_images": split.num_rows, "quarantined": None}
            for name, split in spec.splits.items()
        },
        "tokens": spec.tokens_json(),
        "bytes": committed_bytes(plan.store_path),
        "seconds": None,
        "images_per_second": None,
    }
