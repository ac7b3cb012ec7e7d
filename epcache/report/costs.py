"""Multiply-adds of a row's head, counted as ``epcache poolers`` counts them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from epcache.errors import EpcacheError
from epcache.results import Row


def macs_of(row: Row, config: Mapping[str, Any] | None) -> int | None:
    """Multiply-adds an image of pooler and classifier; None where they cannot be known."""
    if row.k is not None:
        return None  # as many as there are training images: not a property of the head
    if row.method is not None:
        return _linear_macs(row)
    if config is None:
        return None
    try:
        asked = config["probe"]
        height, width = config["grid"]
        sizes = {key: asked[key] for key in ("num_queries", "dim_out") if asked[key] is not None}
        options = json.dumps({**asked["options"], **sizes}, sort_keys=True)
        num_tokens = int(height) * int(width) + (row.tokens == "all")
        dim, num_classes = int(config["dim"]), len(config["classes"])
        return _pooler_macs(
            str(asked["pooler"]), dim, (int(height), int(width)), num_tokens, num_classes, options
        )
    except (KeyError, TypeError, ValueError, EpcacheError):
        return None


def _linear_macs(row: Row) -> int | None:
    """Of a matrix of O x C, whose size and bias the row counts: params = C (O + 1)."""
    if not row.num_params or not row.dim_out:
        return None
    return row.num_params // (row.dim_out + 1) * row.dim_out


@cache
def _pooler_macs(
    name: str, dim: int, grid: tuple[int, int], num_tokens: int, num_classes: int, options: str
) -> int:
    import torch

    from epcache.poolers import make_pooler

    with torch.device("meta"):
        pooler = make_pooler(name, dim=dim, grid=grid, **json.loads(options))
    return pooler.macs(num_tokens) + pooler.dim_out * num_classes
