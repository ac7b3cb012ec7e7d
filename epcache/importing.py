"""A published EP head becomes a run: scored on a store's evaluation split, never trained.

Afterwards it is a run like any other: ``load_probe`` gives it back, and it has attention maps.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epcache import results
from epcache.bank import ProbeBank, Trainee
from epcache.errors import ConfigError
from epcache.hardware import PRECISIONS, describe_device, pick_precision
from epcache.norm import FinalNorm
from epcache.plan import resolve_device
from epcache.pooled import choose_norm
from epcache.probe import Probe
from epcache.probing import ProbeConfig
from epcache.published import load_published
from epcache.results import Row, append_rows, run_name
from epcache.runs import RunFiles, Trained
from epcache.selection import version
from epcache.store.reader import Store
from epcache.stream import TokenKind, TokenSource, TokenStream
from epcache.train import Outcome, evaluate

RECIPE = "imported"
"""In the row, where a recipe would stand: how it was trained is not known."""
BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What the head looks at."""

    store: Store
    layer: int
    tokens: TokenKind
    norm_name: str
    norm: FinalNorm | None


def import_head(
    store: Store,
    path: Path,
    *,
    layer: int = -1,
    tokens: TokenKind = "patch",
    norm: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    results_dir: Path | None = None,
) -> Row:
    """Score a published EP head and keep it as a run.

    Args:
        store: Sealed, of the backbone and the data set that the head was trained on.
        path: A torch file in the published layout (``epcache.published``).
        layer: Block whose tokens the head takes.
        tokens: ``patch``, or ``all`` for a head that saw [CLS] beside them.
        norm: auto, final or none: whether the head saw the backbone's last norm.
        device: auto, cpu, cuda, ...
        precision: auto, float32 or bfloat16.
        results_dir: Where the row and the run are kept; None is ``$EPCACHE_HOME/results``.

    Returns:
        Its row. There is no held-out score: the class order is the head's own, and an accuracy near
        chance means that it is another than the store's.

    Raises:
        WeightsError: The file is no published EP head.
        ConfigError: The head does not fit the store.
    """
    started = time.monotonic()
    device = resolve_device(device)
    precision = pick_precision(precision, device)
    probe = load_published(path)
    norm_name, final_norm = choose_norm(store, norm)
    place = _Place(
        store=store,
        layer=store.resolve_layer(layer),
        tokens=tokens,
        norm_name=norm_name,
        norm=final_norm,
    )
    classes = _check_fit(probe, place, path)
    config = ProbeConfig(
        pooler="ep",
        num_queries=probe.pooler.num_maps,
        dim_out=probe.pooler.dim_out,
        layer=place.layer,
        tokens=tokens,
        norm=norm_name,
        views=1,
        holdout=0.0,
    )
    outcome = _score(probe, config, place, device, precision)
    where: dict[str, Any] = {
        "digest": store.digest, "layer": place.layer, "tokens": tokens, "norm": norm_name,
    }  # fmt: skip
    head = hashlib.sha256(path.read_bytes()).hexdigest()
    row = Row(
        run=run_name({"command": "import", "head": head, "precision": precision, **where}),
        backbone=store.provenance["backbone"]["name"],
        dataset=store.provenance["dataset"]["name"],
        **where,
        views=1,
        pooler="ep",
        num_queries=config.num_queries,
        dim_out=config.dim_out,
        num_params=sum(p.numel() for p in probe.parameters()),
        recipe=RECIPE,
        train_images=0,
        test_top1_best=outcome.top1[0],
        test_top1_last=outcome.top1[0],
        test_top5=outcome.top5[0],
        seconds=time.monotonic() - started,
        device=describe_device(device),
        precision=precision,
        epcache_version=version(),
    )
    folder = results.results_dir() if results_dir is None else results_dir
    imported = {"file": str(path.resolve()), "sha256": head}
    about = _about(config, place, classes, precision, imported)
    RunFiles(folder, row.run).write(
        Trained(row=row, config=about, select=None, final=outcome, norm=final_norm)
    )
    append_rows([row], folder)
    return row


def _check_fit(probe: Probe, place: _Place, path: Path) -> tuple[str, ...]:
    """The classes, once the head has the store's width and number of classes."""
    store, shape = place.store, place.store.spec.layers[place.layer]
    dataset = store.provenance["dataset"]
    classes = tuple(dataset["classes"])
    num_classes, dim = probe.head.out_features, probe.pooler.dim
    if dim != shape.dim:
        raise ConfigError(
            f"{path} takes tokens of width {dim}; layer {place.layer} of {store.path} has width "
            f"{shape.dim}: give the store of the backbone that it was trained on"
        )
    if num_classes != len(classes):
        raise ConfigError(
            f"{path} has {num_classes} classes; {dataset['name']} in {store.path} has "
            f"{len(classes)}: give the store of the data set that it was trained on"
        )
    return classes


def _score(
    probe: Probe, config: ProbeConfig, place: _Place, device: str, precision: str
) -> Outcome:
    """Accuracies on the evaluation split, as those of one epoch."""
    store = place.store
    reader = store[store.provenance["dataset"]["eval_split"]]
    shape = store.spec.layers[place.layer]
    bank = ProbeBank(
        [Trainee(pooler="ep", options=config.pooler_options)],
        dim=shape.dim,
        grid=shape.grid,
        num_classes=probe.head.out_features,
        device=device,
    )
    (stack,) = bank.stacks
    state = {name: value.clone() for name, value in probe.state_dict().items()}
    with torch.no_grad():
        for name, value in stack.params.items():
            value.copy_(state[name][None])
    stack.buffers = {name: state[name][None].to(bank.device) for name in stack.buffers}
    source = TokenSource(
        split=reader,
        layer=place.layer,
        tokens=place.tokens,
        norm=place.norm,
        rows=np.flatnonzero(reader.valid).astype(np.int64),
        dtype=PRECISIONS[precision],
    )
    top1, top5 = evaluate(bank, TokenStream(source, batch_size=BATCH_ROWS, device=bank.device))
    return Outcome(
        train_loss=[], top1=[top1[0]], top5=[top5[0]], best_state=state, last_state=state
    )


def _about(
    config: ProbeConfig,
    place: _Place,
    classes: tuple[str, ...],
    precision: str,
    imported: dict[str, str],
) -> dict[str, Any]:
    """The run's config, as a trained one has it."""
    store, shape = place.store, place.store.spec.layers[place.layer]
    dataset = store.provenance["dataset"]
    return {
        "store": str(store.path.resolve()),
        "digest": store.digest,
        "imported": imported,
        "probe": config.to_json(),
        "precision": precision,
        "dim": shape.dim,
        "grid": list(shape.grid),
        "num_prefix": shape.num_prefix,
        "classes": list(classes),
        "train_split": dataset["train_split"],
        "eval_split": dataset["eval_split"],
    }
