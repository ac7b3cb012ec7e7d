"""A grid of probes as a TOML file: parsed, checked and multiplied out. Pure; trains nothing.

stores = ["epcache-data/stores/digits/*"]     # none: the store sealed last
epochs = 20                                    # at the top: of every grid

[[grid]]                                       # a grid is every combination of its lists
pooler = ["ep", "gap"]
M = [8, 32]                                    # goes to the poolers that have queries
layer = "all"
lr = [0.001, 0.01]

[[grid]]
method = ["knn", "logistic"]                   # on pooled features
pooler = ["cls", "gap"]
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epcache.errors import ConfigError
from epcache.pooled import POOLED
from epcache.poolers import POOLERS, pooler_options
from epcache.probing import ProbeConfig
from epcache.store.reader import Store

METHODS = ("probe", "knn", "ridge", "logistic")

NUMBERS: dict[str, tuple[type, ...]] = {
    "M": (int,),
    "dim_out": (int,),
    "average_layers": (int,),
    "lr": (int, float),
    "weight_decay": (int, float),
    "epochs": (int,),
    "batch_size": (int,),
    "warmup_epochs": (int, float),
    "label_smoothing": (int, float),
    "shots": (int,),
    "share": (int, float),
    "views": (int,),
    "seed": (int,),
    "order_seed": (int,),
    "holdout": (int, float),
    "k": (int,),
    "temperature": (int, float),
}
"""Keys of a grid whose values are numbers, and of which type."""

WORDS = ("method", "pooler", "tokens", "norm", "recipe", "optimizer")
KEYS = ("stores", *WORDS, "layer", *NUMBERS)
OF_FEATURES = ("layer", "average_layers", "norm", "shots", "share", "seed")
"""Keys that k-NN, ridge and logistic regression look at, beside the pooler."""
SAME = {"num_queries": "M", "store": "stores", "learning_rate": "lr", "shot": "shots"}
"""Other names of keys; a plural s is understood too."""
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "method": ("probe",), "pooler": ("ep",), "layer": ("last",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FeatureJob:
    """One classifier on pooled features."""

    method: str
    pooler: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ``FeatureConfig``."""
    ks: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What a specification means on one store; nothing twice."""

    probes: Sequence[ProbeConfig]
    features: Sequence[FeatureJob]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A specification."""

    stores: Sequence[str]
    """Folders or patterns, as the file has them."""
    grids: Sequence[Mapping[str, tuple[Any, ...]]]
    """Of each grid, every key with its values."""

    @classmethod
    def parse(cls, text: str, name: str = "the specification") -> Sweep:
        """Read TOML.

        Args:
            text: Of the file.
            name: What errors call it.

        Raises:
            ConfigError: It is no TOML, or a key or value is not understood.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is no TOML: {error}") from None
        tables = data.pop("grid", [{}])
        if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
            raise ConfigError(f"{name}: grid is no list of tables; write [[grid]] above each")
        top = _checked(data, name)
        stores = top.pop("stores", ())
        grids = []
        for number, table in enumerate(tables, start=1):
            own = _checked(table, f"{name}, grid {number}")
            if "stores" in own:
                raise ConfigError(f"{name}, grid {number}: stores stand at the top, for all grids")
            grids.append({**top, **own})
        return cls(stores=stores, grids=grids)

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read a file.

        Raises:
            ConfigError: There is none, or it is not understood.
        """
        if not path.is_file():
            raise ConfigError(f"no specification {path}; write one, see epcache sweep --help")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text in UTF-8 ({error.reason})") from None
        return cls.parse(text, str(path))

    def jobs(self, store: Store) -> Jobs:
        """Everything to do on one store.

        Raises:
            ConfigError: A value cannot work, or a grid asks for nothing that exists.
        """
        probes: dict[str, ProbeConfig] = {}
        features: dict[str, FeatureJob] = {}
        for number, grid in enumerate(self.grids, start=1):
            found = 0
            for one in _combinations(grid, store):
                job = _job(one, grid, store)
                if isinstance(job, ProbeConfig):
                    probes.setdefault(str(job.to_json()), job)
                elif job is not None:
                    features.setdefault(str(job), job)
                found += job is not None
            if not found:
                raise ConfigError(
                    f"grid {number}: no combination of its values exists in store {store.path}; "
                    f"a pooler may have no such option, or the method no such pooler"
                )
        return Jobs(probes=list(probes.values()), features=list(features.values()))


def stored_layers(store: Store, asked: str | int | Sequence[str | int]) -> list[int]:
    """Block indices, ascending: ``all`` that are cached, ``last``, or ``2,5,-1``.

    Raises:
        ConfigError: It is none of these, or the store lacks a layer.
    """
    if isinstance(asked, str | int):
        asked = [asked]
    layers: set[int] = set()
    for part in itertools.chain.from_iterable(str(one).split(",") for one in asked):
        word = part.strip()
        if word == "all":
            layers.update(store.layers)
        elif word == "last":
            layers.add(store.resolve_layer(-1))
        else:
            try:
                number = int(word)
            except ValueError:
                raise ConfigError(
                    f"layers {word!r}: expected all, last or block indices such as 2,5,-1"
                ) from None
            layers.add(store.resolve_layer(number))
    return sorted(layers)


def _checked(table: Mapping[str, Any], where: str) -> dict[str, tuple[Any, ...]]:
    """Keys by their own names, with their values as tuples."""
    found: dict[str, tuple[Any, ...]] = {}
    for key, value in table.items():
        name = _key(key, where)
        if name in found:
            raise ConfigError(f"{where}: {key} says again what another key says; give it once")
        values = tuple(value) if isinstance(value, list) else (value,)
        if not values:
            raise ConfigError(f"{where}: {key} is an empty list; leave it out or give a value")
        found[name] = tuple(_value(name, one, where) for one in values)
    return found


def _key(key: str, where: str) -> str:
    for name in (key, key.removesuffix("s"), f"{key}s"):
        name = SAME.get(name, name)
        if name in KEYS:
            return name
    near = difflib.get_close_matches(key, [*KEYS, *SAME], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected some of {', '.join(KEYS)}"
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _value(name: str, value: Any, where: str) -> Any:
    """A value of the right type; shares may be given as percentages."""
    if name in ("share", "holdout") and isinstance(value, str) and value.endswith("%"):
        try:
            return float(value[:-1]) / 100
        except ValueError:
            raise ConfigError(f"{where}: {name}={value!r} is no percentage") from None
    if name == "layer":
        fits, wanted = isinstance(value, int | str), 'block indices, "all" or "last"'
    elif name in NUMBERS:
        fits, wanted = isinstance(value, NUMBERS[name]), "numbers"
        if NUMBERS[name] == (int,):
            wanted = "whole numbers"
    else:
        fits, wanted = isinstance(value, str), "text in quotes"
    if isinstance(value, bool) or not fits:
        raise ConfigError(f"{where}: {name}={value!r}; expected {wanted}, one or a list")
    if name == "method" and value not in METHODS:
        raise ConfigError(f"{where}: method={value!r}; expected some of {', '.join(METHODS)}")
    if name == "pooler":
        pooler_options(value)  # raises, with the nearest names
    return value


def _combinations(grid: Mapping[str, tuple[Any, ...]], store: Store) -> list[dict[str, Any]]:
    """Every combination, in the order of the keys; amounts of images stand side by side."""
    axes: list[list[dict[str, Any]]] = []
    for name, values in {**DEFAULTS, **grid}.items():
        if name in ("k", "temperature", "shots", "share"):
            continue  # of k-NN, which tries them together; of subsets, below
        if name == "layer":
            values = tuple(stored_layers(store, values))
        axes.append([{name: value} for value in dict.fromkeys(values)])
    subsets = [{n: v} for n in ("shots", "share") for v in dict.fromkeys(grid.get(n, ()))]
    axes.append(subsets or [{}])
    return [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*axes)
    ]


def _job(
    one: dict[str, Any], grid: Mapping[str, tuple[Any, ...]], store: Store
) -> ProbeConfig | FeatureJob | None:
    """One combination; None where a value does not exist for the pooler or the method."""
    asked = dict(one)
    method, pooler = asked.pop("method"), asked.pop("pooler")
    if pooler == "cls" and not store.has_cls(asked.get("layer", -1)):
        return None
    if method != "probe":
        if pooler not in POOLED:
            return None
        return FeatureJob(
            method=method,
            pooler=pooler,
            fields={name: asked[name] for name in OF_FEATURES if name in asked},
            ks=grid.get("k", ()) if method == "knn" else (),
            temperatures=grid.get("temperature", ()) if method == "knn" else (),
        )
    if pooler == "cls":
        asked["tokens"] = grid.get("tokens", ("patch",))[0]  # reads [CLS] whatever is asked
    if POOLERS[pooler].needs_grid and asked.get("tokens", "patch") != "patch":
        return None
    options = pooler_options(pooler)
    asked["num_queries"] = asked.pop("M", None)
    for name in ("num_queries", "dim_out"):
        # of the linear pooler gap, only the ablation that projects has a width to choose
        if name not in options or pooler in ("gap", "cls"):
            asked.pop(name, None)
    return ProbeConfig(pooler=pooler, **asked)
