"""What is in a store, and are its bytes whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epcache.errors import StoreError
from epcache.home import home_dir
from epcache.store.documents import is_sealed, read_root
from epcache.store.journal import committed_bytes, read_journal
from epcache.store.reader import open_store
from epcache.store.spec import StoreSpec
from epcache.store.verify import verify_store

__all__ = ["find_store", "info", "verify_store"]


def find_store(path: Path | None, *, say: Callable[[str], None], sealed: bool = True) -> Path:
    """The store that was named, or else the one sealed last below ``$EPCACHE_HOME``.

    Args:
        path: What the user named.
        say: Told which store was taken, where none was named.
        sealed: Refuse a store that is not finished.

    Raises:
        StoreError: There is none, or it is not sealed.
    """
    if path is None:
        stores = home_dir() / "stores"
        found = [d.parent for d in stores.glob("*/*/zarr.json") if is_sealed(d.parent)]
        if not found:
            raise StoreError(
                f"no sealed store below {stores}. Make one: epcache extract --backbone B "
                f"--dataset D (or name a store's folder)"
            )
        path = max(found, key=lambda store: (store / "zarr.json").stat().st_mtime_ns)
        say(f"store {path}")
    if sealed or read_root(path) is None:
        open_store(path)  # raises the error that fits
    return path


def info(path: Path) -> dict[str, Any]:
    """The command's JSON object, for a sealed store or one under way."""
    root = read_root(path)
    assert root is not None
    spec = StoreSpec.from_json(root["spec"])
    sealed = root["sealed"] is not None
    store = open_store(path) if sealed else None
    splits = {
        name: {
            "num_images": split.num_rows,
            "num_views": split.num_views,
            "quarantined": int((~store[name].valid).sum()) if store else None,
        }
        for name, split in spec.splits.items()
    }
    return {
        "store": str(path),
        "digest": root["digest"],
        "sealed": sealed,
        "provenance": root["provenance"],
        "splits": splits,
        "tokens": root["tokens"],
        "layers": list(spec.layers),
        "bytes": committed_bytes(path),
        "tasks": {"committed": len(read_journal(path)), "all": len(spec.tasks())},
        "geometry": spec.to_json()["geometry"],
    }
