"""Which backbones have a name, and which layers an option means. Imports no torch, no timm."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from epcache.errors import ConfigError

CROP_PCT = 224 / 256
"""Evaluation resizes to 256/224 of the input size and crops the centre."""


@dataclass(frozen=True, kw_only=True)
class BackboneEntry:
    """One alias of ``backbones.toml``."""

    alias: str
    family: str
    timm_name: str | None
    """timm's name with the tag of its weights; None for what timm does not have."""
    image_size: int
    norm: str
    """What ``--norm auto`` means: ``final`` or ``none``."""
    norm_from: str
    """``protocol`` where the published protocol fixes it, ``choice``: this project's own."""
    weights: str
    """``hub``, ``file`` (has to be given with ``--weights``) or ``bundled``."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    params: float
    """Millions, without the classifier."""
    layers: int
    """Blocks, or stages where the width changes on the way."""
    dim: int
    """Token width of the last layer."""
    patch: int
    """Pixels a side of one token of the last layer."""
    crop_pct: float = CROP_PCT
    module: str | None = None
    """``package.module:function`` that builds what timm does not have."""
    file: str | None = None
    """Bundled weights, relative to the package."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@cache
def _entries() -> dict[str, BackboneEntry]:
    text = (resources.files("epcache") / "backbones.toml").read_text(encoding="utf-8")
    entries = {}
    for family in tomllib.loads(text).values():
        models = family.pop("models")
        for alias, own in models.items():
            values = {"timm": None, **family, **own}
            for key in ("mean", "std"):
                values[key] = tuple(values[key])
            entries[alias] = BackboneEntry(alias=alias, timm_name=values.pop("timm"), **values)
    return entries


def list_backbones() -> list[BackboneEntry]:
    """All aliases, in the order of ``backbones.toml``."""
    return list(_entries().values())


def find_backbone(name: str) -> BackboneEntry | None:
    """The entry of an alias, or None (the name may still be timm's)."""
    return _entries().get(name)


def unknown_backbone(name: str, timm_names: Sequence[str]) -> ConfigError:
    """An error that shows the names nearest to a wrong one."""
    near = difflib.get_close_matches(name, list(_entries()), n=3, cutoff=0.5)
    near += difflib.get_close_matches(name, timm_names, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return ConfigError(
        f"unknown backbone {name!r}: {hint}`epcache backbones` lists the aliases; any timm model "
        f"name and package.module:function work too"
    )


def resolve_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Turn a layer option into block indices.

    Args:
        text: ``last``, ``all``, or indices separated by commas; -1 is the last layer.
        num_layers: How many layers the backbone has.

    Returns:
        Indices in [0, num_layers), increasing, each once.

    Raises:
        ConfigError: If ``text`` is none of these or an index is out of range.
    """
    valid = f"0 to {num_layers - 1} (or -{num_layers} to -1), `last` or `all`"
    if text.strip() == "all":
        return tuple(range(num_layers))
    if text.strip() == "last":
        return (num_layers - 1,)
    try:
        indices = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"layers {text!r} is not a list of numbers such as 2,5,-1; valid layers: {valid}"
        ) from None
    for index in indices:
        if not -num_layers <= index < num_layers:
            raise ConfigError(f"layer {index} does not exist; this backbone has layers {valid}")
    return tuple(sorted({index % num_layers for index in indices}))
