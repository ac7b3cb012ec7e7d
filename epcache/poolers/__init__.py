"""Poolers: the tokens of an image to one vector. Start with ``query.py``, then ``views.py``.

``make_pooler("ep", dim=384, grid=(16, 16), num_queries=32)`` builds any of them by name.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from epcache.errors import ConfigError
from epcache.poolers.base import Grid, Pooler, normalise_grid, positive_int
from epcache.poolers.blocks import CaitPooler, ClipPooler, VitBlockPooler
from epcache.poolers.cross import CaePooler, SiglipPooler, VjepaPooler
from epcache.poolers.gated import AbmilpPooler, CbamPooler, DelfPooler
from epcache.poolers.query import AimPooler, EpPooler, MhcaPooler
from epcache.poolers.shared import CocaPooler, SimpoolPooler
from epcache.poolers.simple import ClsPooler, GapPooler

__all__ = ["POOLERS", "Pooler", "describe_poolers", "make_pooler", "pooler_options"]

POOLERS: dict[str, type[Pooler]] = {
    "cls": ClsPooler,
    "gap": GapPooler,
    "ep": EpPooler,
    "mhca": MhcaPooler,
    "aim": AimPooler,
    "abmilp": AbmilpPooler,
    "simpool": SimpoolPooler,
    "delf": DelfPooler,
    "cae": CaePooler,
    "vjepa": VjepaPooler,
    "vit_block": VitBlockPooler,
    "siglip": SiglipPooler,
    "clip": ClipPooler,
    "cait": CaitPooler,
    "coca": CocaPooler,
    "cbam": CbamPooler,
}
"""Every pooler by name, in the order of the tables."""


def make_pooler(
    name: str,
    *,
    dim: int,
    grid: Grid = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Pooler:
    """Build a pooler.

    Args:
        name: A key of `POOLERS`.
        dim: Token width D.
        grid: Token grid (height, width); an int is a square grid.
        generator: Source of the initial values; None is torch's global generator.
        **options: The pooler's own options (`pooler_options`).

    Returns:
        The pooler, mapping tokens (B, N, D) to (B, O).

    Raises:
        ConfigError: If the name or an option is unknown or its value cannot work.
    """
    allowed = pooler_options(name)
    for option in options:
        if option not in allowed:
            takes = ", ".join(allowed) if allowed else "no options"
            raise ConfigError(f"pooler {name} has no option {option!r}; it takes {takes}")
    build: Callable[..., Pooler] = POOLERS[name]
    return build(dim=dim, grid=grid, generator=generator, **options)


def pooler_options(name: str) -> dict[str, Any]:
    """Return the options of a pooler with their defaults.

    Raises:
        ConfigError: If there is no such pooler; the message names the nearest.
    """
    if name not in POOLERS:
        near = difflib.get_close_matches(str(name), POOLERS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"unknown pooler {name!r}; {hint}it is one of {', '.join(POOLERS)}")
    parameters = inspect.signature(POOLERS[name]).parameters
    shared = ("dim", "grid", "generator")
    return {key: value.default for key, value in parameters.items() if key not in shared}


def describe_poolers(
    dim: int,
    num_classes: int,
    grid: tuple[int, int] | int = 14,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Size every pooler together with its classifier Linear(O, C).

    Args:
        dim: Token width D.
        num_classes: Number of classes C.
        grid: Token grid; its cells are the tokens that multiply-adds are counted for.
        options: Options by pooler name, where the defaults are not wanted.

    Returns:
        A dict for each pooler: name, num_params (trainable), macs and macs_published (multiply-adds
        per image). Where the defaults cannot work at this width the three are None and `problem`
        says why.

    Raises:
        ConfigError: If a width, the grid or one of the given options cannot work.
    """
    for option, value in (("dim", dim), ("num_classes", num_classes)):
        positive_int("table", option, value)
    sides = normalise_grid("table", grid)
    assert sides is not None
    given = options or {}
    for name in given:
        with torch.device("meta"):
            make_pooler(name, dim=dim, grid=sides, **given[name])
    return [_describe(name, dim, num_classes, sides, given.get(name, {})) for name in POOLERS]


def _describe(
    name: str, dim: int, num_classes: int, grid: tuple[int, int], options: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        with torch.device("meta"):
            pooler = make_pooler(name, dim=dim, grid=grid, **options)
    except ConfigError as error:
        sizes = {"num_params": None, "macs": None, "macs_published": None}
        return {"name": name, **sizes, "problem": str(error)}
    num_tokens = grid[0] * grid[1]
    head_macs = pooler.dim_out * num_classes
    params = sum(p.numel() for p in pooler.parameters() if p.requires_grad)
    return {
        "name": name,
        "num_params": params + head_macs + num_classes,
        "macs": pooler.macs(num_tokens) + head_macs,
        "macs_published": pooler.macs_published(num_tokens) + head_macs,
    }
