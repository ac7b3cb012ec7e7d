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
    from epcache.poolers import make_pooler
    from epcache.probing import ProbeConfig, fit_probes
    from epcache.runs import load_probe
    from epcache.store.reader import open_store
    from epcache.store.verify import verify_store

__version__ = "0.1.0"

_HOMES = {
    "EpcacheError": "epcache.errors",
    "ProbeConfig": "epcache.probing",
    "fit_probes": "epcache.probing",
    "load_backbone": "epcache.backbone",
    "load_manifest": "epcache.manifest",
    "load_probe": "epcache.runs",
    "make_pooler": "epcache.poolers",
    "open_store": "epcache.store.reader",
    "verify_store": "epcache.store.verify",
}

__all__ = [
    "EpcacheError",
    "ProbeConfig",
    "fit_probes",
    "load_backbone",
    "load_manifest",
    "load_probe",
    "make_pooler",
    "open_store",
    "verify_store",
]


def __dir__() -> list[str]:
    """The public names, which completion would not find otherwise."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import epcache`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'epcache' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
