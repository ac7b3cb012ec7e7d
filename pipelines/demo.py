"""The whole pipeline on what the package brings: a tiny masked autoencoder and real digits."""

from __future__ import annotations

from typing import Any

from epcache.pipelines.extract import Observer, extract
from epcache.plan import ExtractConfig


def demo(observer: Observer) -> dict[str, Any]:
    """Extract all layers of the bundled backbone over the bundled digits."""
    config = ExtractConfig(
        backbone="digits_mae",
        dataset="digits",
        layers="all",
        command="epcache demo",
    )
    return {"extract": extract(config, observer)}
