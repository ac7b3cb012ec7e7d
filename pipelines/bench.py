"""This machine's figures, as a table and as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epcache import bench as parts
from epcache import bench_probe as probe_parts
from epcache.home import home_dir

BENCHES: dict[str, Callable[[Path], list[parts.Figure]]] = {
    "extract": lambda folder: [parts.bench_extract(folder)],
    "write": lambda folder: [parts.bench_write(folder)],
    "read": parts.bench_read,
    "memory": lambda folder: [parts.bench_memory(folder)],
    "step": lambda folder: probe_parts.bench_step(),
    "bank": lambda folder: probe_parts.bench_bank(),
    "linear": probe_parts.bench_linear,
    "epochs": probe_parts.bench_epochs,
}


def bench(names: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Run the named benchmarks in a folder below ``$EPCACHE_HOME``, on its disk."""
    folder = home_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[parts.Figure] = []
    try:
        for name in names:
            say(f"measuring {name} ...")
            figures += BENCHES[name](folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"hardware": parts.hardware(), "figures": [asdict(figure) for figure in figures]}
