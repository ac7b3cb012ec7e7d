"""Sealed stores whose classes can be learnt, small enough to train on in a test."""

import json

import numpy as np
import torch

from epcache.norm import FinalNorm
from epcache.store.journal import Quarantined
from epcache.store.spec import Geometry, LayerShape, SplitSpec, StoreSpec
from epcache.store.writer import Samples, StoreWriter

CLASSES = ("ape", "bee", "cat")
DIM, GRID = 16, (2, 3)
BAD_ROW = 5
"""Of train; not decodable."""


def learnable_store(
    path, *, num_train=61, num_val=24, num_views=1, dim=DIM, grid=GRID, seed=0, layers=(0, 3),
    backbone="tiny", num_prefix=1,
):  # fmt: skip
    """Some layers of a backbone of 4; one token of an image carries its class."""
    num_patches = grid[0] * grid[1]
    shape = LayerShape(grid=grid, num_patches=num_patches, num_prefix=num_prefix, dim=dim)
    spec = StoreSpec(
        identity={"backbone": backbone, "seed": seed},
        layers=dict.fromkeys(layers, shape),
        num_layers=4,
        splits={
            "train": SplitSpec(num_rows=num_train, num_views=num_views),
            "val": SplitSpec(num_rows=num_val, num_views=1),
        },
        geometry=Geometry(shard_rows=max(16, num_train // 20)),
    )
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((len(CLASSES), dim)) * 2
    samples, data = {}, {}
    for name, split in spec.splits.items():
        labels = np.arange(split.num_rows) % len(CLASSES)
        samples[name] = Samples(
            paths=[f"{name}/{row}.png" for row in range(split.num_rows)],
            labels=labels,
            class_names=[CLASSES[label] for label in labels],
            boxes=None,
        )
        for view in range(split.num_views):
            size = (len(layers), split.num_rows, num_patches + 1, dim)
            tokens = rng.standard_normal(size, np.float32)
            place = rng.integers(0, num_patches + 1, split.num_rows)
            tokens[:, np.arange(split.num_rows), place] += centres[labels]
            tokens[:, :, 0] += 0.5 * centres[labels]
            data[name, view] = tokens.astype(np.float16)
    provenance = {
        "command": "epcache extract ...",
        "backbone": {"name": backbone, "norm_policy": "final", "num_layers": 4},
        "dataset": {
            "name": "zoo", "classes": list(CLASSES), "train_split": "train", "eval_split": "val",
        },
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    norm = FinalNorm(
        kind="layernorm",
        weight=1 + 0.2 * torch.randn(dim, generator=generator),
        bias=0.1 * torch.randn(dim, generator=generator),
        eps=1e-6,
    )
    with StoreWriter(path, spec) as store:
        store.begin(samples, provenance, norm.to_bytes())
        for task in store.tasks():
            write_task(store, task, data[task.split, task.view])
        assert store.seal()
    return path


def write_task(store, task, tokens):
    """Rows of one task; one of them is bad."""
    writer = store.open_task(task)
    start, stop = task.rows
    part = tokens[:, start:stop].copy()
    bad = []
    if task.split == "train" and start <= BAD_ROW < stop:
        part[:, BAD_ROW - start] = 0
        bad = [Quarantined(row=BAD_ROW, path=f"train/{BAD_ROW}.png", reason="cut off")]
    arrays = {}
    for number, (layer, shape) in enumerate(store.spec.layers.items()):
        arrays[layer, "patch"] = np.ascontiguousarray(part[number, :, 1:])
        if shape.num_prefix:
            arrays[layer, "prefix"] = np.ascontiguousarray(part[number, :, :1])
    writer.append(arrays, [(9, 9)] * (stop - start), bad)
    writer.commit()


def numbers(rows):
    """Everything in rows that a repetition has to reproduce."""
    return [{k: v for k, v in row.to_json().items() if k not in ("seconds", "run")} for row in rows]


def curves(folder, run):
    return json.loads((folder / "runs" / run / "curve.json").read_text())


class Recorder:
    """An observer that remembers, and may stop the run."""

    def __init__(self, stop_at=None, phase="select"):
        self.messages, self.phases, self.epochs = [], [], []
        self.stop_at, self.phase = stop_at, phase

    def message(self, text):
        self.messages.append(text)

    def start(self, what, epochs):
        self.phases.append(what)

    def epoch(self, report):
        self.epochs.append((self.phases[-1].split()[0], report.epoch))
        if (self.phase, self.stop_at) == self.epochs[-1]:
            raise KeyboardInterrupt
