"""Where stores and results lie unless the user says otherwise."""

from __future__ import annotations

import os
import re
from pathlib import Path


def home_dir() -> Path:
    """``$EPCACHE_HOME``, by default ``./epcache-data``."""
    return Path(os.environ.get("EPCACHE_HOME") or "epcache-data").expanduser()


def store_path(dataset: str, backbone: str, digest: str) -> Path:
    """``<home>/stores/<dataset>/<backbone>-<digest8>``."""
    folder = re.sub(r"[^A-Za-z0-9._-]+", "_", backbone)
    return home_dir() / "stores" / dataset / f"{folder}-{digest[:8]}"
