"""What the trained poolers look at: measures, localisation and pictures of one or more runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from epcache.attention import Analysis, MapReader, analyse
from epcache.errors import ConfigError, StoreError
from epcache.gallery import (
    Exhibit,
    choose_images,
    gallery,
    group_queries,
    load_crops,
    scatter,
    small_multiples,
    to_bytes,
)
from epcache.localization import EvalCrop, boxes_of_rows, read_boxes
from epcache.plan import resolve_device
from epcache.results import Row, best_row, read_rows, results_dir
from epcache.runs import LiveProbe, load_probe
from epcache.store.files import remove_partials, write_durably
from epcache.store.reader import Store, open_store

ATTENTION = "attention"
"""Folder of results."""
DOCUMENT = "attention.json"


class Observer(Protocol):
    """What a caller may want to show meanwhile."""

    def message(self, text: str) -> None:
        """One line for the user."""

    def start(self, what: str, total: int) -> None:
        """A run of so many images begins."""

    def images(self, done: int, total: int) -> None:
        """So many images are through."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What the command asks."""

    store: Path | None
    """None is the store that the runs were trained on."""
    runs: Sequence[str] = ()
    """None is the store's best run of an attentive pooler."""
    boxes: Path | None = None
    """A file ``path,x0,y0,x1,y1``; None takes those of the store, where it has any."""
    num_images: int = 6
    """In the gallery."""
    split: str | None = None
    """None is the evaluation split."""
    out: Path | None = None
    """Each run gets a folder there; None is ``<results>/attention``."""
    seed: int = 0
    """Of the choice of images."""
    device: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.num_images < 0:
            raise ConfigError(f"--images {self.num_images}: expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunStudy:
    """One run's result, and where it is."""

    row: Row
    split: str
    analysis: Analysis
    figures: Sequence[str]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """The command's JSON object, which is also ``attention.json``."""
        return {
            "run": self.row.run,
            "backbone": self.row.backbone,
            "dataset": self.row.dataset,
            "split": self.split,
            "digest": self.row.digest,
            "layer": self.row.layer,
            "tokens": self.row.tokens,
            "pooler": self.row.pooler,
            "num_maps": len(self.analysis.queries),
            **self.analysis.to_json(),
            "figures": list(self.figures),
        }


@dataclass(frozen=True, kw_only=True)
class AttentionStudy:
    """What came out, run by run."""

    store: Path
    runs: Sequence[RunStudy]

    def to_json(self) -> dict[str, Any]:
        """One run's object; of several, a list of them under ``runs``."""
        found = [{**run.to_json(), "folder": str(run.folder)} for run in self.runs]
        return found[0] if len(found) == 1 else {"store": str(self.store), "runs": found}


def attention(request: AttentionRequest, observer: Observer) -> AttentionStudy:
    """Measure and draw each run that is asked for."""
    device = resolve_device(request.device)
    probes = [load_probe(run) for run in dict.fromkeys(request.runs)]
    store = find_store_of(request.store, probes)
    if not probes:
        probes = [load_probe(best_attentive(store, observer).run)]
    for probe in probes:
        if probe.row.digest != store.digest:
            raise ConfigError(
                f"run {probe.row.run} was trained on store {probe.row.digest[:8]} "
                f"({probe.config['store']}), this is {store.digest[:8]} ({store.path}); give the "
                f"runs of one store at a time"
            )
    split = request.split or store.provenance["dataset"]["eval_split"]
    readers = [MapReader(probe, store, split, device=device) for probe in probes]
    boxes = crop_boxes(store, split, request.boxes, observer)
    runs = [run_study(reader, boxes, request, observer) for reader in readers]
    return AttentionStudy(store=store.path, runs=runs)


def find_store_of(path: Path | None, probes: Sequence[LiveProbe]) -> Store:
    """The store that was named, or else the one that the first run was trained on.

    Raises:
        StoreError: It is not there any more.
    """
    if path is not None:
        return open_store(path)
    recorded = Path(probes[0].config["store"])
    try:
        return open_store(recorded)
    except StoreError as error:
        raise StoreError(
            f"{error}; run {probes[0].row.run} was trained there: name the store's folder"
        ) from None


def best_attentive(store: Store, observer: Observer) -> Row:
    """The store's best run that has maps.

    Raises:
        ConfigError: There is none.
    """
    attentive = [
        row
        for row in read_rows(results_dir())
        if row.digest == store.digest
        and row.recipe is not None
        and row.pooler not in ("cls", "gap")
    ]
    scored = [row for row in attentive if row.test_top1_best is not None]
    best = best_row(scored or attentive)
    if best is None:
        raise ConfigError(
            f"no run of an attentive pooler on store {store.path} in {results_dir()}. Run: epcache "
            f"probe {store.path} --pooler ep"
        )
    observer.message(f"run {best.run}: {best.pooler}, the best attentive one of this store")
    return best


def crop_boxes(
    store: Store, split: str, path: Path | None, observer: Observer
) -> list[NDArray[np.float64]] | None:
    """Ground truth of each valid row in shares of the crop; None where there is none at all."""
    reader = store[split]
    rows = np.flatnonzero(reader.valid)
    if path is not None:
        paths = [reader.samples()[row].path for row in rows]
        per_row = boxes_of_rows(read_boxes(path), paths, str(path))
    elif (stored := reader.boxes) is not None:
        per_row = [stored[row : row + 1] for row in rows]
    else:
        return None
    transform = store.provenance["transform"]
    crop = EvalCrop(image_size=transform["image_size"], crop_pct=transform["crop_pct"])
    sizes = reader.sizes[rows].tolist()
    carried = [
        crop.carry_boxes(boxes, (width, height))
        for boxes, (width, height) in zip(per_row, sizes, strict=True)
    ]
    shown = sum(1 for boxes in carried if len(boxes))
    lost = sum(
        1 for before, after in zip(per_row, carried, strict=True) if len(before) > len(after)
    )
    outside = f"; {lost:,} have boxes outside of the crop" if lost else ""
    observer.message(f"boxes: {shown:,} of {len(rows):,} images show one{outside}")
    return carried


def run_study(
    maps: MapReader,
    boxes: Sequence[NDArray[np.float64]] | None,
    request: AttentionRequest,
    observer: Observer,
) -> RunStudy:
    """Measure one run, draw it, and write both."""
    row, split = maps.row, maps.source.split.name
    observer.start(f"{row.pooler} {row.run}", len(maps.source))
    analysis = analyse(maps, boxes=boxes, progress=observer.images)
    folder = (request.out or results_dir() / ATTENTION) / row.run
    files = draw(maps, analysis, boxes, request, observer)
    for name, data in files.items():
        _write(folder / name, data)
    study = RunStudy(row=row, split=split, analysis=analysis, figures=tuple(files), folder=folder)
    document = json.dumps(study.to_json(), indent=1, allow_nan=False) + "\n"
    _write(folder / DOCUMENT, document.encode())
    for stale in set(folder.glob("gallery*.png")) - {folder / name for name in files}:
        stale.unlink()  # of an earlier call with more images
    return study


def draw(
    maps: MapReader,
    analysis: Analysis,
    boxes: Sequence[NDArray[np.float64]] | None,
    request: AttentionRequest,
    observer: Observer,
) -> dict[str, bytes]:
    """Pictures by file name."""
    row, source = maps.row, maps.source
    groups = group_queries(analysis.distances_MM)
    name = f"{row.pooler} on {row.backbone}, {row.dataset}"
    files: dict[str, bytes] = {}
    if request.num_images:
        exhibits = choose_exhibits(maps, boxes, request, observer)
        title = f"{name}: attention over images of {source.split.name}"
        files["gallery.png"] = to_bytes(gallery(exhibits, groups, analysis, title), "png")
        if len(groups) < maps.num_maps:
            for number, exhibit in enumerate(exhibits, start=1):
                title = f"{name}: all {maps.num_maps} queries on one image of {exhibit.label}"
                figure = small_multiples(exhibit, groups, analysis, title)
                files[f"gallery-{number}.png"] = to_bytes(figure, "png")
    if maps.num_maps > 1:
        figure = scatter(analysis, groups, f"{name}: what a query is worth, and how it looks")
        files |= {f"scatter.{kind}": to_bytes(figure, kind) for kind in ("png", "svg")}
    return files


def choose_exhibits(
    maps: MapReader,
    boxes: Sequence[NDArray[np.float64]] | None,
    request: AttentionRequest,
    observer: Observer,
) -> list[Exhibit]:
    """Images of the gallery with their maps; those with a box come first."""
    source, split = maps.source, maps.source.split
    boxed = None if boxes is None else np.array([len(each) > 0 for each in boxes])
    labels = split.labels[source.rows]
    positions = choose_images(labels, request.num_images, seed=request.seed, first=boxed)
    samples = split.samples()
    shown = [samples[row] for row in source.rows[positions]]
    crops = load_crops(
        split.store, split.name, [sample.path for sample in shown], say=observer.message
    )
    maps_BMHW = maps.maps(positions)
    none = np.empty((0, 4))
    return [
        Exhibit(
            label=sample.class_name,
            crop=crop,
            maps_MHW=maps_MHW,
            boxes_k4=none if boxes is None else boxes[position],
        )
        for sample, crop, maps_MHW, position in zip(shown, crops, maps_BMHW, positions, strict=True)
    ]


def _write(path: Path, data: bytes) -> None:
    write_durably(path, data, partial_dir=path.parent)
    remove_partials(path)
