"""The small files of a store: the root document, what must lie beside it, and the seal over all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epcache.errors import StoreError
from epcache.store.files import file_sha256
from epcache.store.journal import JOURNAL
from epcache.store.spec import StoreSpec, canonical_digest, group_metadata

FINAL_NORM = "final_norm.safetensors"


def read_root(store: Path) -> dict[str, Any] | None:
    """The ``epcache`` attributes of a store, sealed or not; None where no store was begun.

    Raises:
        StoreError: The folder's ``zarr.json`` is not an epcache store's.
    """
    try:
        text = (store / "zarr.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{store / 'zarr.json'} cannot be read: {error.strerror}") from None
    try:
        attributes = json.loads(text)["attributes"]["epcache"]
        missing = {"spec", "digest", "provenance", "tokens", "sealed"} - set(attributes)
        if missing:
            raise KeyError(*missing)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{store / 'zarr.json'} is not the document of an epcache store ({error!r}); "
            f"name another folder, or extract again"
        ) from None
    return dict(attributes)


def is_sealed(store: Path) -> bool:
    """Whether a finished store lies there."""
    root = read_root(store)
    return root is not None and root["sealed"] is not None


def root_attributes(
    spec: StoreSpec, provenance: Mapping[str, Any], sealed: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What the root document says under ``epcache``."""
    return {
        "spec": spec.to_json(),
        "digest": spec.digest,
        "provenance": dict(provenance),
        "tokens": spec.tokens_json(),
        "sealed": sealed,
    }


def root_document(
    spec: StoreSpec, provenance: Mapping[str, Any], sealed: Mapping[str, Any] | None
) -> bytes:
    """The root ``zarr.json``."""
    return document(group_metadata({"epcache": root_attributes(spec, provenance, sealed)}))


def small_files(spec: StoreSpec, *, final_norm: bool, boxes: Sequence[str] = ()) -> list[str]:
    """Every file of a sealed store that is neither a shard nor the root document."""
    names = {JOURNAL}
    if final_norm:
        names.add(FINAL_NORM)
    for split, shape in spec.splits.items():
        columns = ["labels", "valid", "sizes", *(["boxes"] if split in boxes else [])]
        names |= {f"{split}/samples.csv", f"{split}/quarantine.jsonl"}
        for column in columns:
            chunk = "c/0" if column in ("labels", "valid") else "c/0/0"
            names |= {f"{split}/{column}/zarr.json", f"{split}/{column}/{chunk}"}
        for view in range(shape.num_views):
            for array in spec.arrays(split, view):
                parts = array.path.split("/")
                names |= {"/".join(parts[: d + 1]) + "/zarr.json" for d in range(len(parts))}
    return sorted(names)


def seal_of(store: Path, spec: StoreSpec, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The seal: a hash of every small file, and one over the root document itself."""
    names = small_files(
        spec,
        final_norm=(store / FINAL_NORM).exists(),
        boxes=[split for split in spec.splits if (store / split / "boxes").exists()],
    )
    files = {name: file_sha256(store / name) for name in names}
    return {"files": files, "sha256": canonical_digest([files, spec.to_json(), dict(provenance)])}


def document(metadata: Mapping[str, Any]) -> bytes:
    """A ``zarr.json``, indented for people."""
    return (json.dumps(metadata, indent=2, allow_nan=False) + "\n").encode()
