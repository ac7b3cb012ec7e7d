"""From a row back to the command that makes it again.

A run's name is a hash of everything that decides its result, so a command is right exactly if it
leads to the same name. For probes ``config.json`` says it all; k-NN and linear rows do not carry
the share that was held out, which is found by trying the usual ones against the name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from epcache.errors import EpcacheError
from epcache.linear import LOW_SHOT_CS
from epcache.recipes import resolve
from epcache.results import Row, run_name
from epcache.store.reader import Store

SHARES = (0.1, 0.05, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, "loo")
"""Held-out shares that k-NN and linear rows are tried with, the usual ones first."""
UNKNOWN_STORE = "STORE"
UNSURE = "  # from the row alone: what it does not say is as usual"
"""Ends a command that may lead to another run."""


def command_of(row: Row, config: Mapping[str, Any] | None, store: Store | None) -> str:
    """A shell command, or Python where the command line lacks an option."""
    path = str(config["store"]) if config and "store" in config else UNKNOWN_STORE
    if store is not None:
        path = str(store.path)
    if row.k is not None:
        options, is_sure = _knn_options(row)
        return shlex.join(["epcache", "knn", path, *options]) + ("" if is_sure else UNSURE)
    if row.method is not None:
        options, is_sure = _linear_options(row)
        return shlex.join(["epcache", "linear", path, *options]) + ("" if is_sure else UNSURE)
    try:
        asked = dict((config or {})["probe"])
    except (KeyError, TypeError, ValueError):
        return shlex.join(["epcache", "probe", path, *_guessed_options(row)]) + UNSURE
    if isinstance(config, Mapping) and "imported" in config:
        return shlex.join(["epcache", "probe", path, *_import_options(row, config)])
    if asked.get("options") or not _warmup_is_usual(row, asked):
        return _python(path, asked, row)
    num_views = None if store is None else _train_views(store)
    return shlex.join(["epcache", "probe", path, *_probe_options(row, asked, num_views)])


def _probe_options(row: Row, asked: Mapping[str, Any], num_views: int | None) -> list[str]:
    """Of a probe's config: all that decides its numbers, without what is the default anyway."""
    options = ["--pooler", str(asked["pooler"])]
    for option, name in (("--M", "num_queries"), ("--dim-out", "dim_out")):
        if asked.get(name) is not None:
            options += [option, str(asked[name])]
    options += ["--layer", str(asked["layer"]), "--norm", str(asked["norm"])]
    if (average := asked.get("average_layers")) not in (None, 1):
        options += ["--average-layers", str(average)]
    if asked["pooler"] != "cls" and asked["tokens"] != "patch":
        options += ["--tokens", str(asked["tokens"])]
    if asked["views"] != num_views and (num_views is not None or asked["views"] != 1):
        options += ["--views", str(asked["views"])]
    for option, name in (("--shots", "shots"), ("--share", "share")):
        if asked.get(name) is not None:
            options += [option, f"{asked[name]!r}"]
    options += ["--recipe", str(asked["recipe"])]
    usual = _usual(row, asked)
    for option, name in (
        ("--optimizer", "optimizer"), ("--epochs", "epochs"), ("--batch-size", "batch_size"),
        ("--label-smoothing", "label_smoothing"),
    ):  # fmt: skip
        if asked[name] != usual.get(name):
            options += [option, f"{asked[name]}"]
    options += ["--lr", f"{asked['lr']!r}", "--weight-decay", f"{asked['weight_decay']!r}"]
    options += ["--seed", str(asked["seed"])]
    if asked["order_seed"]:
        options += ["--order-seed", str(asked["order_seed"])]
    if asked["holdout"] != 0.1:
        options += ["--holdout", f"{asked['holdout']!r}"]
    return [*options, "--precision", row.precision]


def _import_options(row: Row, config: Mapping[str, Any]) -> list[str]:
    """Of a published head that was scored."""
    options = ["--import", str(config["imported"]["file"]), "--layer", str(row.layer)]
    return [*options, "--norm", row.norm, "--tokens", row.tokens, "--precision", row.precision]


def _usual(row: Row, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe's own values for so many training images; empty where there is no such recipe."""
    try:
        recipe = resolve(
            str(asked["recipe"]), row.train_images, optimizer=asked["optimizer"],
            epochs=asked["epochs"], batch_size=asked["batch_size"], lrs=(0.1,),
        )  # fmt: skip
        plain = resolve(str(asked["recipe"]), row.train_images, lrs=(0.1,))
    except (EpcacheError, KeyError, TypeError):
        return {}
    return {
        "optimizer": plain.optimizer, "epochs": plain.epochs, "batch_size": plain.batch_size,
        "label_smoothing": plain.label_smoothing, "warmup_epochs": recipe.warmup_epochs,
    }  # fmt: skip


def _warmup_is_usual(row: Row, asked: Mapping[str, Any]) -> bool:
    """Whether the command line, which has no option for it, gives the same warm-up."""
    usual = _usual(row, asked)
    return not usual or asked.get("warmup_epochs") == usual["warmup_epochs"]


def _python(path: str, asked: Mapping[str, Any], row: Row) -> str:
    """The same from Python, for what has no option of its own."""
    kept = {name: value for name, value in asked.items() if value is not None and value != {}}
    config = ", ".join(f"{name}={value!r}" for name, value in kept.items())
    code = (
        f"import epcache; epcache.fit_probes(epcache.open_store({path!r}), "
        f"[epcache.ProbeConfig({config})], precision={row.precision!r})"
    )
    return shlex.join(["python", "-c", code])


def _guessed_options(row: Row) -> list[str]:
    """Of a row whose run's folder is gone: what the row says, defaults for the rest."""
    options = ["--pooler", row.pooler]
    for option, value in (
        ("--M", row.num_queries), ("--layer", row.layer), ("--norm", row.norm),
        ("--views", row.views), ("--shots", row.shots), ("--recipe", row.recipe),
        ("--optimizer", row.optimizer), ("--epochs", row.epochs),
        ("--batch-size", row.batch_size), ("--lr", row.lr),
        ("--weight-decay", row.weight_decay), ("--seed", row.seed),
    ):  # fmt: skip
        if value is not None:
            options += [option, str(value)]
    if row.tokens == "all":
        options += ["--tokens", "all"]
    if row.val_top1 is None:
        options += ["--holdout", "0"]
    return [*options, "--precision", row.precision]


def _feature_options(row: Row) -> list[str]:
    """What k-NN and linear commands share."""
    options = ["--layer", str(row.layer), "--pooler", row.pooler, "--norm", row.norm]
    for option, value in (
        ("--average-layers", row.average_layers), ("--shots", row.shots), ("--share", row.share)
    ):  # fmt: skip
        if value is not None:
            options += [option, f"{value!r}"]
    return options if not row.seed else [*options, "--seed", str(row.seed)]


def _identity(row: Row, command: str, **own: Any) -> dict[str, Any]:
    """What a k-NN or linear run is named after."""
    where = {"digest": row.digest, "layer": row.layer, "norm": row.norm, "pooler": row.pooler}
    which = {"shots": row.shots, "share": row.share, "average_layers": row.average_layers}
    present = {name: value for name, value in which.items() if value is not None}
    return {"command": command, **own, "seed": row.seed, **where, **present}


def _knn_options(row: Row) -> tuple[list[str], bool]:
    """Options, and whether they lead to the row's name."""
    asked = {"k": row.k, "temperature": row.temperature}
    holdouts = list(_holdouts(row))
    names = [run_name(_identity(row, "knn", holdout=h, **asked)) for h in holdouts]
    is_sure = row.run in names
    holdout = holdouts[names.index(row.run) if is_sure else 0]
    options = [*_feature_options(row), "--k", str(row.k), "--temperature", f"{row.temperature!r}"]
    return [*options, "--holdout", _holdout_text(holdout)], is_sure


def _linear_options(row: Row) -> tuple[list[str], bool]:
    """Options, and whether they lead to the row's name."""
    grids = (None, [row.l2], list(LOW_SHOT_CS))
    pairs = [(holdout, l2) for holdout in _holdouts(row) for l2 in grids]
    names = [
        run_name(_identity(row, "linear", method=row.method, holdout=h, l2=l2)) for h, l2 in pairs
    ]
    is_sure = row.run in names
    holdout, l2 = pairs[names.index(row.run) if is_sure else 0]
    options = [*_feature_options(row), "--method", str(row.method)]
    if l2 is not None:
        options += ["--l2", ",".join(f"{each!r}" for each in l2)]
    return [*options, "--holdout", _holdout_text(holdout)], is_sure


def _holdouts(row: Row) -> Iterator[float | str]:
    """What can have been held out, judging by what the row says; the likeliest first."""
    if row.val_top1 is None:
        yield from (0.0, 0)
        return
    if row.shots is not None or row.share is not None:
        yield "outside"
    elif row.k is not None and row.seed is None:
        yield "loo"
    yield from SHARES


def _holdout_text(holdout: float | str) -> str:
    """As an option; a subset is judged by images outside it whatever the share."""
    return "0.1" if holdout == "outside" else str(holdout)


def _train_views(store: Store) -> int | None:
    name = store.provenance.get("dataset", {}).get("train_split")
    return store[name].num_views if name in store.splits else None
