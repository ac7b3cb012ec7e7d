"""What the maps of a trained pooler are worth: measures per query over a split of a store.

A map is what one query (or head) of the pooler gives to each token of an image, a distribution.
Tokens are streamed, so the maps of a few images are in memory at a time. Where a probe sees [CLS]
beside the patch tokens, its share is taken out of a map, and the rest sums to 1 again, before the
map is drawn or measured; the accuracy drop is of the probe as it is, [CLS] included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epcache.errors import ConfigError
from epcache.localization import BoxAccuracy, map_pixels, score_map
from epcache.poolers.base import split_heads
from epcache.probe import Probe
from epcache.runs import LiveProbe
from epcache.store.reader import Store
from epcache.stream import TokenKind, TokenSource, TokenStream

MAX_BATCH = 64
BATCH_NUMBERS = 2**24
"""Tokens times the larger of their number and width in a batch: 64 MB, a few times over."""

DEFINITIONS: Mapping[str, str] = {
    "accuracy_drop": (
        "Accuracy of the probe minus its accuracy when this query's map is replaced by uniform "
        "attention and all else is kept."
    ),
    "entropy": (
        "Entropy of the map divided by the logarithm of the number of patch tokens, averaged over "
        "images: 1 is uniform, 0 a single token."
    ),
    "centroid": "Mean position under the map, averaged over images: x and y from the top left.",
    "off_centre": (
        "Distance of the map's centroid from the centre of the crop, averaged over images; the "
        "crop has side 1."
    ),
    "centroid_in_box": (
        "Share of images whose map has its centroid inside a ground-truth box, of the images that "
        "show one."
    ),
    "complementarity": (
        "Total variation distance (half the sum of absolute differences) between the maps of two "
        "queries on the same image, averaged over images and pairs of queries: 0 where all maps "
        "are the same, 1 where no token is shared. Of a query: averaged over the others."
    ),
    "correlations": "Pearson correlation of two measures over the queries of one probe.",
    "max_box_acc_v2": (
        "MaxBoxAccV2 of the mean of all queries' maps, resized to 224 by bicubic interpolation and "
        "scaled from its minimum to its maximum."
    ),
    "max_box_acc_v1": "MaxBoxAcc of the same maps: largest contour, overlap of one half.",
}
"""What the numbers mean. The paper's own formula of complementarity is not known."""

MEASURES = ("accuracy_drop", "entropy", "off_centre", "complementarity", "centroid_in_box")
"""Those with one number a query, as tables and correlations have them."""


@dataclass(frozen=True, kw_only=True)
class QueryMeasures:
    """One query's map; see ``DEFINITIONS``."""

    query: int
    accuracy_drop: float
    entropy: float
    centroid: tuple[float, float]
    off_centre: float
    complementarity: float | None
    """None where there is no other query."""
    centroid_in_box: float | None
    """None without boxes."""

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {**vars(self), "centroid": list(self.centroid)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis:
    """All measures of one trained probe over one split."""

    queries: Sequence[QueryMeasures]
    accuracy: float
    """Of the probe as it is."""
    num_images: int
    num_boxed: int
    """Images of them that show a ground-truth box."""
    distances_MM: NDArray[np.float64]
    """Total variation between the maps of each pair of queries, averaged over images."""
    max_box_acc_v1: float | None
    max_box_acc_v2: float | None

    @property
    def complementarity(self) -> float | None:
        """Of all queries; None where there is one."""
        each = [query.complementarity for query in self.queries]
        known = [value for value in each if value is not None]
        return float(np.mean(known)) if known else None

    @property
    def correlations(self) -> dict[str, Any]:
        """``measures`` and their ``matrix``; None where a correlation is not defined."""
        columns = {
            name: [getattr(query, name) for query in self.queries]
            for name in MEASURES
            if all(getattr(query, name) is not None for query in self.queries)
        }
        return {"measures": list(columns), "matrix": correlate(list(columns.values()))}

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "queries": [query.to_json() for query in self.queries],
            "accuracy": self.accuracy,
            "complementarity": self.complementarity,
            "max_box_acc_v2": self.max_box_acc_v2,
            "max_box_acc_v1": self.max_box_acc_v1,
            "correlations": self.correlations,
            "num_images": self.num_images,
            "num_boxed": self.num_boxed,
            "definitions": dict(DEFINITIONS),
        }


class MapReader:
    """The patch maps of a trained probe on rows of a store.

    Args:
        probe: In evaluation mode.
        store: The one that it was trained on.
        split: Name of the split.
        device: Where to compute.

    Raises:
        ConfigError: The pooler has no maps, or the split no image.
    """

    def __init__(self, probe: LiveProbe, store: Store, split: str, *, device: str = "cpu") -> None:
        pooler = probe.probe.pooler
        if not pooler.num_maps:
            raise ConfigError(
                f"run {probe.row.run}: pooler {pooler.name} has no attention maps; take a run of "
                f"an attentive pooler such as ep or vjepa"
            )
        self.probe = probe.probe.to(device)
        self.device = device
        self.row = probe.row
        rows = np.flatnonzero(store[split].valid).astype(np.int64)
        if not len(rows):
            raise ConfigError(f"split {split!r} of store {store.path} has no valid image")
        self.source = TokenSource(
            split=store[split],
            layer=probe.row.layer,
            tokens=cast("TokenKind", probe.row.tokens),
            average_layers=probe.row.average_layers or 1,
            norm=probe.norm,
            rows=rows,
        )
        self.grid = store.spec.layers[probe.row.layer].grid

    @property
    def num_maps(self) -> int:
        """M."""
        return self.probe.pooler.num_maps

    @property
    def batch_size(self) -> int:
        """Images at a time: fewer where they have many tokens."""
        numbers = self.source.num_tokens * max(self.source.num_tokens, self.source.dim)
        return max(1, min(MAX_BATCH, BATCH_NUMBERS // numbers))

    @torch.inference_mode()
    def maps(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Maps (B, M, H, W) of the rows at these positions of ``source``."""
        tokens_BND = self.source.read(positions).to(self.device)
        maps_BMN = self.patch_maps(self.probe.pooler.attention(tokens_BND))
        maps_BMHW: NDArray[np.float32] = (
            maps_BMN.cpu().numpy().reshape(len(positions), -1, *self.grid)
        )
        return maps_BMHW

    def patch_maps(self, maps_BMN: Tensor) -> Tensor:
        """Without [CLS], every row summing to 1."""
        if self.source.tokens != "all":
            return maps_BMN
        rest = maps_BMN[..., 1:]
        total = rest.sum(-1, keepdim=True)
        # All attention may lie on [CLS], to the last bit
        return torch.where(total > 0, rest / total, 1 / rest.shape[-1])


def analyse(
    maps: MapReader,
    *,
    boxes: Sequence[NDArray[np.float64]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Analysis:
    """Measure every query over all images of a split.

    Args:
        maps: Probe and images.
        boxes: For each image, in the order of ``maps.source``, the ground-truth boxes (k, 4) in
            shares of the crop (``EvalCrop.carry_boxes``); images with none do not count where
            boxes are needed. None where nothing is known of boxes.
        progress: Told how many images are through, and of how many.
    """
    stream = TokenStream(maps.source, batch_size=maps.batch_size, device=maps.device)
    sums = _Sums(maps, boxes)
    with torch.inference_mode():
        for tokens_BND, labels_B in stream.in_order():
            logits_BC, ablated_BMC = ablated_logits(maps.probe, tokens_BND)
            maps_BMN = maps.patch_maps(maps.probe.pooler.attention(tokens_BND))
            sums.add_accuracy(logits_BC.argmax(-1) == labels_B, ablated_BMC.argmax(-1), labels_B)
            sums.add_maps(maps_BMN)
            progress(sums.num_images, len(maps.source))
    return sums.finish()


def ablated_logits(probe: Probe, tokens_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Class scores (B, C), and (B, M, C) with each map in turn replaced by uniform attention.

    Where a map fills a slice of the pooled vector, only the slice's share of the logits changes:
    normalisation and classifier are affine, so all M cost one product with the classifier.
    """
    pooler, num_maps = probe.pooler, probe.pooler.num_maps
    if not pooler.fills_slices:
        return probe(tokens_BND), probe.head(probe.norm(pooler.ablate(tokens_BND)))
    maps_BMN = pooler.attention(tokens_BND)
    own_BO = probe.norm(pooler.pool(tokens_BND, maps_BMN))
    even_BMN = torch.full_like(maps_BMN, 1 / maps_BMN.shape[-1])
    even_BO = probe.norm(pooler.pool(tokens_BND, even_BMN))
    change_BMo = split_heads(even_BO - own_BO, num_maps)
    weight_CMo = split_heads(probe.head.weight, num_maps)
    logits_BC: Tensor = probe.head(own_BO)
    return logits_BC, logits_BC[:, None] + torch.einsum("bmo,cmo->bmc", change_BMo, weight_CMo)


class _Sums:
    """Measures summed over the images that went by."""

    def __init__(self, maps: MapReader, boxes: Sequence[NDArray[np.float64]] | None) -> None:
        num_maps = maps.num_maps
        self.grid, self.boxes = maps.grid, boxes
        self.num_images = self.num_boxed = 0
        self.correct = 0
        self.correct_M = np.zeros(num_maps, np.int64)
        self.entropy_M = np.zeros(num_maps)
        self.centroid_M2 = np.zeros((num_maps, 2))
        self.off_centre_M = np.zeros(num_maps)
        self.in_box_M = np.zeros(num_maps)
        self.distances_MM = np.zeros((num_maps, num_maps))
        self.localised = BoxAccuracy()

    def add_accuracy(self, right_B: Tensor, ablated_BM: Tensor, labels_B: Tensor) -> None:
        """Who was right."""
        self.correct += int(right_B.sum())
        self.correct_M += (ablated_BM == labels_B[:, None]).sum(0).cpu().numpy()

    def add_maps(self, maps_BMN: Tensor) -> None:
        """What the maps look like."""
        centroids_BM2 = centroids(maps_BMN, self.grid)
        self.entropy_M += entropy(maps_BMN).sum(0).cpu().numpy()
        self.centroid_M2 += centroids_BM2.sum(0).cpu().numpy()
        self.off_centre_M += (centroids_BM2 - 0.5).norm(dim=-1).sum(0).cpu().numpy()
        self.distances_MM += total_variation(maps_BMN).sum(0).cpu().numpy()
        if self.boxes is not None:
            mean_BHW = maps_BMN.mean(1).cpu().numpy().reshape(-1, *self.grid)
            places_BM2 = centroids_BM2.cpu().numpy()
            first = self.num_images
            for mean_HW, places_M2, boxes_k4 in zip(
                mean_BHW, places_BM2, self.boxes[first : first + len(mean_BHW)], strict=True
            ):
                if len(boxes_k4):
                    self.in_box_M += inside_any(places_M2, boxes_k4)
                    self.localised.add(score_map(mean_HW), map_pixels(boxes_k4))
                    self.num_boxed += 1
        self.num_images += len(maps_BMN)

    def finish(self) -> Analysis:
        """Averages."""
        n = self.num_images
        distances_MM, num_maps = self.distances_MM / n, len(self.entropy_M)
        queries = [
            QueryMeasures(
                query=m,
                accuracy_drop=(self.correct - int(self.correct_M[m])) / n,
                entropy=float(self.entropy_M[m]) / n,
                centroid=(float(self.centroid_M2[m, 0]) / n, float(self.centroid_M2[m, 1]) / n),
                off_centre=float(self.off_centre_M[m]) / n,
                complementarity=(
                    float(distances_MM[m].sum()) / (num_maps - 1) if num_maps > 1 else None
                ),
                centroid_in_box=(
                    float(self.in_box_M[m]) / self.num_boxed if self.num_boxed else None
                ),
            )
            for m in range(num_maps)
        ]
        return Analysis(
            queries=queries,
            accuracy=self.correct / n,
            num_images=n,
            num_boxed=self.num_boxed,
            distances_MM=distances_MM,
            max_box_acc_v1=self.localised.max_box_acc_v1 if self.num_boxed else None,
            max_box_acc_v2=self.localised.max_box_acc_v2 if self.num_boxed else None,
        )


def entropy(maps_BMN: Tensor) -> Tensor:
    """Entropy divided by its maximum, (B, M): 1 for a uniform map, 0 for a single token."""
    most = math.log(maps_BMN.shape[-1])
    return torch.special.entr(maps_BMN).sum(-1) / most if most else maps_BMN.sum(-1) * 0


def centroids(maps_BMN: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean position (x, y) under each map, (B, M, 2), in shares of the crop from the top left."""
    height, width = grid
    y_N = (torch.arange(height, device=maps_BMN.device) + 0.5).repeat_interleave(width) / height
    x_N = (torch.arange(width, device=maps_BMN.device) + 0.5).repeat(height) / width
    return maps_BMN @ torch.stack([x_N, y_N], dim=-1).to(maps_BMN.dtype)


def total_variation(maps_BMN: Tensor) -> Tensor:
    """Half the sum of absolute differences of each pair of an image's maps, (B, M, M)."""
    return torch.cdist(maps_BMN, maps_BMN, p=1) / 2


def inside_any(places_M2: NDArray[np.floating], boxes_k4: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each place lies in one of the boxes, (M,)."""
    places = places_M2[:, None]
    after, before = places >= boxes_k4[None, :, :2], places <= boxes_k4[None, :, 2:]
    within: NDArray[np.bool_] = np.any(np.all(after & before, axis=-1), axis=-1)
    return within


def correlate(columns: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Pearson correlations of every pair of columns.

    None where there are fewer than three numbers, or a column does not vary.
    """
    data = np.asarray(columns, np.float64)
    centred = data - data.mean(axis=1, keepdims=True)
    lengths = np.sqrt((centred**2).sum(axis=1))
    # Constant but for rounding: its direction is noise
    varies = lengths > 1e-12 * np.maximum(1, np.abs(data).max(axis=1))

    def pair(i: int, j: int) -> float | None:
        if data.shape[1] < 3 or not (varies[i] and varies[j]):
            return None
        return float(np.clip(centred[i] @ centred[j] / (lengths[i] * lengths[j]), -1, 1))

    return [[pair(i, j) for j in range(len(data))] for i in range(len(data))]
