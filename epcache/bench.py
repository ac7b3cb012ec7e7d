"""This machine's figures: each fast path against the plain way, in one run, as ratios.

A ratio of two rates that were measured in turn says more on a noisy machine than either rate, so
every benchmark alternates its contestants and reports the medians.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from epcache.backbone import Tokens, load_backbone
from epcache.dataset import Batch, BatchPlan, ImageLoader, Preprocess
from epcache.extraction import extract_tokens
from epcache.manifest import Split
from epcache.store.reader import open_store
from epcache.store.spec import Geometry, LayerShape, SplitSpec, StoreSpec, default_shard_rows
from epcache.store.writer import Samples, StoreWriter

VITS14 = LayerShape(grid=(16, 16), num_patches=256, num_prefix=1, dim=384)
"""DINOv2 ViT-S/14 at 224 pixels: what one layer gives for one image."""

PIECE_BYTES = 2**24
Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One comparison."""

    name: str
    unit: str
    ours: float
    """Median over the repeats."""
    reference: float
    what: str
    """What the reference is."""
    ratio: float
    """Ours over the reference, the median of the repeats' own ratios."""
    target: str
    num_repeats: int
    note: str = ""


def alternate(
    contestants: dict[str, Callable[[], float]], num_repeats: int
) -> dict[str, list[float]]:
    """Measure each in turn, again and again; one round before is not counted."""
    for measure in contestants.values():
        measure()
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(num_repeats):
        for name, measure in contestants.items():
            rates[name].append(measure())
    return rates


def compare(
    name: str, rates: dict[str, list[float]], ours: str, reference: str, **about: str
) -> Figure:
    """A figure from two contestants' rates."""
    pairs = zip(rates[ours], rates[reference], strict=True)
    return Figure(
        name=name,
        ours=statistics.median(rates[ours]),
        reference=statistics.median(rates[reference]),
        ratio=statistics.median(a / b for a, b in pairs),
        num_repeats=len(rates[ours]),
        unit=about["unit"],
        what=about["what"],
        target=about["target"],
        note=about.get("note", ""),
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def synthetic_spec(num_rows: int, num_layers: int) -> StoreSpec:
    """A store of ViT-S/14 tokens."""
    layers = dict.fromkeys(range(num_layers), VITS14)
    splits = {"train": SplitSpec(num_rows=num_rows)}
    return StoreSpec(
        identity={"backbone": "none", "purpose": "bench"},
        layers=layers,
        num_layers=num_layers,
        splits=splits,
        geometry=Geometry(shard_rows=default_shard_rows(layers, splits)),
    )


class FreeBackbone:
    """Costs nothing: the same random float16 tokens for every batch."""

    def __init__(self, num_layers: int, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(num_tokens: int) -> torch.Tensor:
            shape = (batch_size, num_tokens, VITS14.dim)
            return torch.randn(shape, generator=generator).to(torch.float16)

        self._tokens = {
            layer: Tokens(patch=random(VITS14.num_patches), prefix=random(VITS14.num_prefix))
            for layer in range(num_layers)
        }

    def tokens(
        self, images: torch.Tensor, layers: Iterable[int], precision: str
    ) -> dict[int, Tokens]:
        """Tokens for a batch, without a forward pass."""
        del precision
        num = len(images)
        return {
            layer: Tokens(
                patch=self._tokens[layer].patch[:num], prefix=self._tokens[layer].prefix[:num]
            )
            for layer in layers
        }


class FreeLoader:
    """Costs nothing: empty images of one pixel."""

    def load(self, plans: Iterable[BatchPlan]) -> Iterator[Batch]:
        """One batch a plan."""
        for plan in plans:
            num = len(plan.indices)
            images = np.zeros((num, 3, 1, 1), np.uint8)
            yield Batch(images=images, sizes=[(1, 1)] * num, bad={})


def rows_split(num_rows: int, open_image: Callable[[int], Image.Image]) -> Split:
    """A split of ``num_rows`` images of one class."""
    return Split(
        name="train",
        paths=tuple(f"{row}.jpg" for row in range(num_rows)),
        labels=np.zeros(num_rows, np.int64),
        boxes=None,
        open_image=open_image,
    )


def write_store(
    path: Path,
    spec: StoreSpec,
    backbone: Any,
    loader: Any,
    split: Split,
    *,
    batch_size: int,
) -> None:
    """Extract into a fresh store and seal it."""
    shutil.rmtree(path, ignore_errors=True)
    order = np.arange(len(split.paths))
    samples = Samples(
        paths=split.paths, labels=split.labels, class_names=["none"] * len(split.paths)
    )
    with StoreWriter(path, spec) as store:
        store.begin({"train": samples}, {"command": "epcache bench"}, None)
        extract_tokens(
            backbone,
            {"train": split},
            {"train": order},
            store,
            loader,
            batch_size=batch_size,
            precision="float32",
            max_bad=0.0,
        )
        store.seal()


def no_image(row: int) -> Image.Image:
    """For splits whose images nobody opens."""
    raise AssertionError(row)


def bench_write(
    work_dir: Path, *, num_images: int = 768, num_layers: int = 12, num_repeats: int = 5
) -> Figure:
    """Twelve layers of a backbone that costs nothing, against writing one large file."""
    spec = synthetic_spec(num_images, num_layers)
    num_bytes = spec.num_bytes
    backbone = FreeBackbone(num_layers, 16)
    store_path, plain_path = work_dir / "write-store", work_dir / "write-plain"
    piece = np.random.default_rng(0).bytes(PIECE_BYTES)

    def ours() -> float:
        split = rows_split(num_images, no_image)
        seconds = timed(
            lambda: write_store(store_path, spec, backbone, FreeLoader(), split, batch_size=16)
        )
        shutil.rmtree(store_path)
        return num_bytes / seconds / 1e9

    def plain() -> float:
        seconds = timed(lambda: write_plain(plain_path, piece, num_bytes))
        plain_path.unlink()
        return num_bytes / seconds / 1e9

    rates = alternate({"plain": plain, "ours": ours}, num_repeats)
    return compare(
        f"write {num_layers} layers",
        rates,
        "ours",
        "plain",
        unit="GB/s",
        what="one large file, written in 16 MiB pieces and fsynced",
        target=">= 0.70",
        note=f"{num_bytes / 1e9:.2f} GB each time, checksums and fsyncs included",
    )


def write_plain(path: Path, piece: bytes, num_bytes: int) -> None:
    """A large file, as fast as Python can."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, len(piece)):
            file.write(piece[: num_bytes - start])
        os.fsync(file.fileno())


def bench_read(work_dir: Path, *, num_images: int = 4096, num_repeats: int = 7) -> list[Figure]:
    """Reading rows: our reader, a numpy memmap of the same bytes, and zarr-python."""
    import zarr

    path, plain_path = work_dir / "read-store", work_dir / "read-plain"
    spec = synthetic_spec(num_images, 1)
    split = rows_split(num_images, no_image)
    write_store(path, spec, FreeBackbone(1, 256), FreeLoader(), split, batch_size=256)
    tokens = open_store(path)["train"].layer(0).patch
    tokens[:].tofile(plain_path)
    plain = np.memmap(plain_path, np.float16, "r", shape=tokens.shape)
    array = cast(Any, zarr.open_array(path / "train/layers/0/patch", mode="r"))
    order = np.random.default_rng(0).permutation(num_images)
    blocks = [np.arange(start, start + 128) for start in range(0, num_images - 127, 128)]
    out = np.empty((128, *tokens.shape[1:]), np.float16)
    row_bytes = out[0].nbytes

    def rate(
        read: Callable[[NDArray[np.int64]], object], batches: list[NDArray[np.int64]]
    ) -> float:
        num_bytes: int = sum(len(rows) for rows in batches) * row_bytes
        return num_bytes / timed(lambda: [read(rows) for rows in batches]) / 1e9

    def read_plain(rows: Rows) -> None:
        if rows[-1] - rows[0] == len(rows) - 1:
            out[:] = plain[rows[0] : rows[-1] + 1]
        else:
            np.take(plain, rows, axis=0, out=out, mode="clip")

    def read_zarr(rows: Rows) -> object:
        if rows[-1] - rows[0] == len(rows) - 1:
            return array[int(rows[0]) : int(rows[-1]) + 1]
        return array.oindex[rows]

    figures = []
    random = [order[start : start + 128] for start in range(0, num_images - 127, 128)]
    for kind, batches in (("in order", blocks), ("at random", random)):
        rates = alternate(
            {
                "plain": lambda b=batches: rate(read_plain, b),  # type: ignore[misc]
                "ours": lambda b=batches: rate(lambda rows: tokens.take(rows, out), b),  # type: ignore[misc]
                "zarr": lambda b=batches: rate(read_zarr, b[:4]),  # type: ignore[misc]
            },
            num_repeats,
        )
        for reference, what, target in (
            ("plain", "numpy memmap copy of the same bytes", ">= 0.80"),
            ("zarr", f"zarr-python {zarr.__version__} on the same store", ">= 5"),
        ):
            name = f"read rows {kind} / {reference}"
            figures.append(
                compare(name, rates, "ours", reference, unit="GB/s", what=what, target=target)
            )
    shutil.rmtree(path)
    plain_path.unlink()
    return figures


def write_jpegs(folder: Path, num_images: int) -> Path:
    """A folder of 500 x 375 pictures, soft enough to be the size of photographs."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for row in range(num_images):
        small = rng.integers(0, 256, (12, 16, 3), np.uint8)
        Image.fromarray(small).resize((500, 375)).save(folder / f"{row}.jpg", quality=90)
    return folder


def bench_extract(work_dir: Path, *, num_images: int = 256, num_repeats: int = 3) -> Figure:
    """All layers of a ViT-S/14, against the same loader and forward with tokens thrown away."""
    folder = write_jpegs(work_dir / "images", num_images)
    backbone = load_backbone("dinov2_vits14", weights="random:0", image_size=224)
    layers = tuple(range(backbone.num_layers))
    spec = synthetic_spec(num_images, backbone.num_layers)
    split = rows_split(num_images, lambda row: Image.open(folder / f"{row}.jpg"))
    loader = ImageLoader(Preprocess(image_size=224), seed=0, num_workers=os.cpu_count() or 1)
    batches = [list(range(start, start + 16)) for start in range(0, num_images, 16)]

    def bare() -> None:
        plans = (BatchPlan(split=split, indices=rows) for rows in batches)
        for batch in loader.load(plans):
            backbone.tokens(torch.from_numpy(batch.images), layers, "float32")

    def ours() -> None:
        write_store(work_dir / "extract-store", spec, backbone, loader, split, batch_size=16)

    rates = alternate(
        {"bare": lambda: num_images / timed(bare), "ours": lambda: num_images / timed(ours)},
        num_repeats,
    )
    shutil.rmtree(work_dir / "extract-store")
    shutil.rmtree(folder)
    return compare(
        "extract all layers",
        rates,
        "ours",
        "bare",
        unit="images/s",
        what="bare loop: same loader and forward, tokens thrown away",
        target=">= 0.95",
        note="DINOv2 ViT-S/14 shape, 224 px, float32, 500 x 375 JPEGs",
    )


def bench_memory(work_dir: Path, *, few: int = 512, many: int = 4096) -> Figure:
    """Peak memory of extracting eight times as many images, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    peaks = []
    for num_images in (few, many):
        with context.Pool(1) as pool:
            peaks.append(pool.apply(peak_memory, (work_dir / "memory-store", num_images)))
    return Figure(
        name="peak memory",
        unit="GB",
        ours=peaks[1],
        reference=peaks[0],
        what=f"{few} images instead of {many:,}",
        ratio=peaks[1] / peaks[0],
        target="<= 1.10",
        num_repeats=1,
        note="two layers, a backbone that costs nothing, so the queue is always full",
    )


def peak_memory(path: Path, num_images: int) -> float:
    """Extract in this process; its largest resident set in GB."""
    spec = synthetic_spec(num_images, 2)
    split = rows_split(num_images, no_image)
    write_store(path, spec, FreeBackbone(2, 16), FreeLoader(), split, batch_size=16)
    shutil.rmtree(path)
    return peak_resident_bytes() / 1e9


def peak_resident_bytes() -> int:
    """Largest resident set of this process.

    Linux counts in ``ru_maxrss`` what the parent had when it started us, so the kernel's own mark
    for this address space is read where there is one.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def hardware() -> dict[str, str]:
    """What the figures were measured on."""
    import numcodecs
    import zarr

    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "zarr": zarr.__version__,
        "numcodecs": numcodecs.__version__,
    }


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    extra = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([names[0] if names else platform.machine(), *extra])
