"""epcache: probe a frozen vision backbone many times while running it once.

Shape letters used in names (``tokens_BND``): B images, N tokens, D token width, M queries,
O pooled width, C classes, P probes, L layers, R prefix tokens, H and W the token grid.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epcache.backbone import load_backbone
    from epcache.errors import EpcacheError
    from epcache.manifest import load_manifest
    from epcache.store.reader import open_store
    from epcache.store.verify import verify_store

__version__ = "0.1.0"

_HOMES = {
    "EpcacheError": "epcache.errors",
    "load_backbone": "epcache.backbone",
    "load_manifest": "epcache.manifest",
    "open_store": "epcache.store.reader",
    "verify_store": "epcache.store.verify",
}

__all__ = ["EpcacheError", "load_backbone", "load_manifest", "open_store", "verify_store"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import epcache`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'epcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
