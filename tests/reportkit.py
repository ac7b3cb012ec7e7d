"""Results folders for tests of the report: rows of several backbones and data sets, and runs."""

import json
import math
from dataclasses import replace

from epcache.results import Row, append_rows, run_name


def make_row(**changes):
    """A scored EP probe on all of train; ``run`` is made up from what is changed."""
    values = {
        "run": "", "backbone": "mae_vitb16", "dataset": "imagenet1k", "digest": "a" * 64,
        "layer": 11, "norm": "none", "tokens": "patch", "views": 1, "pooler": "ep",
        "num_queries": 32, "dim_out": 768, "num_params": 1_383_400, "recipe": "small",
        "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.0, "batch_size": 256, "epochs": 50,
        "seed": 0, "shots": None, "train_images": 5000, "val_top1": 0.7, "test_top1": 0.69,
        "test_top1_best": 0.7, "test_top1_last": 0.68, "best_epoch": 40, "test_top5": 0.9,
        "seconds": 10.0, "device": "cpu", "precision": "float32", "epcache_version": "0.1.0",
        **changes,
    }  # fmt: skip
    values["run"] = values["run"] or run_name(changes)
    return Row(**values)


PROBE = {
    "recipe": None, "optimizer": None, "lr": None, "weight_decay": None, "batch_size": None,
    "epochs": None, "best_epoch": None, "num_queries": None, "num_params": None, "seed": None,
}  # fmt: skip
"""What k-NN rows lack; linear ones have parameters."""
STRENGTH = {"mae_vitb16": (0.33, 0.65, 0.75), "clip_vitl14": (0.72, 0.82, 0.83),
            "dinov2_vitb14": (0.80, 0.80, 0.79)}  # fmt: skip
"""Accuracy under k-NN, linear and EP: MAE is far behind until it is asked by attention."""
HARDNESS = {"imagenet1k": 1.0, "cub200": 0.92}


def make_rows():
    """Three backbones, two data sets; layers, averages, rates, seeds, shots and shares."""
    rows = []
    for dataset, factor in HARDNESS.items():
        for number, (backbone, (knn, linear, ep)) in enumerate(STRENGTH.items()):
            where = {"backbone": backbone, "dataset": dataset,
                     "digest": f"{number}{len(dataset):x}" * 32}  # fmt: skip
            rows += [
                scored(knn * factor - 0.01 * place, pooler="gap", k=k, temperature=0.07,
                       **{**PROBE, **where})
                for place, k in enumerate((10, 20))
            ]  # fmt: skip
            rows.append(
                scored(linear * factor - 0.02, pooler="gap", method="ridge", l2=1.0,
                       **{**PROBE, **where, "num_params": 769_000})
            )  # fmt: skip
            for pooler, m, params, best in (
                ("ep", 32, 1_383_400, ep), ("ep", 8, 1_364_968, ep - 0.01),
                ("aim", None, 1_949_416, ep - 0.005), ("cls", None, 769_000, linear),
                ("gap", None, 769_000, linear - 0.01),
            ):  # fmt: skip
                head = {"pooler": pooler, "num_queries": m, "num_params": params, **where}
                rows += probes(best * factor, head)
    return rows


def probes(best, head):
    """Rates, seeds, layers, averages and subsets of one head."""
    rows = []
    for place, lr in enumerate((0.001, 0.003, 0.01, 0.03, 0.1)):
        loss = 0.02 * (place - 2) ** 2
        row = scored(best - loss, lr=lr, **head)
        if place != 2:
            row = replace(
                row, test_top1=None, test_top1_best=None, test_top1_last=None, test_top5=None
            )
        rows.append(row)
    rows += [scored(best - 0.003 * seed, seed=seed, **head) for seed in (1, 2)]
    rows += [scored(best - 0.03 * (10 - layer) ** 2 / 10, layer=layer, **head)
             for layer in (2, 5, 8, 10)]  # fmt: skip
    rows += [scored(best - 0.01 * count, average_layers=count, **head) for count in (2, 4)]
    for seed in (0, 1, 2):
        for shots in (1, 2, 4, 8, 16):
            top1 = best * (0.4 + 0.1 * math.log2(shots)) + 0.01 * seed
            rows.append(scored(top1, shots=shots, seed=seed, train_images=100 * shots, **head))
        for share in (0.01, 0.1):
            images = max(100, round(5000 * share))
            rows.append(scored(best * 0.7, share=share, seed=seed, train_images=images, **head))
    return rows


def scored(top1, **changes):
    """A row with this accuracy, chosen on held-out data."""
    top1 = round(max(0.02, top1), 4)
    return make_row(val_top1=top1 + 0.003, test_top1=top1, test_top1_best=top1 + 0.005,
                    test_top1_last=top1 - 0.004, **changes)  # fmt: skip


def write_results(folder, rows, *, with_runs=True):
    """``rows.jsonl``, and folders of the runs of probes."""
    append_rows(rows, folder)
    for row in rows if with_runs else ():
        if row.recipe is not None:
            write_run(folder / "runs" / row.run, row)
    return folder


def write_run(path, row):
    """``config.json`` and ``curve.json`` as the probe command writes them."""
    path.mkdir(parents=True)
    probe = {
        "pooler": row.pooler, "num_queries": row.num_queries, "dim_out": None, "options": {},
        "optimizer": row.optimizer, "lr": row.lr, "weight_decay": row.weight_decay,
        "seed": row.seed, "layer": row.layer, "tokens": row.tokens, "norm": row.norm,
        "views": row.views, "shots": row.shots, "recipe": row.recipe,
        "batch_size": row.batch_size, "epochs": row.epochs, "warmup_epochs": 5.0,
        "label_smoothing": 0.0, "order_seed": 0, "holdout": 0.1,
    }  # fmt: skip
    config = {
        "store": "/nowhere/store", "digest": row.digest, "probe": probe, "precision": "float32",
        "dim": 768, "grid": [14, 14], "num_prefix": 1, "classes": [str(i) for i in range(1000)],
        "train_split": "train", "eval_split": "val", "row": row.to_json(),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    if row.test_top1 is None:
        return
    epochs = range(1, row.epochs + 1)
    final = {
        "train_loss": [7 * math.exp(-0.1 * epoch) + 0.05 for epoch in epochs],
        "test_top1": [row.test_top1 * (1 - math.exp(-0.2 * epoch)) for epoch in epochs],
        "test_top5": [0.9 for _ in epochs],
    }
    (path / "curve.json").write_text(json.dumps({"select": None, "final": final}))
