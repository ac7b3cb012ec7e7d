"""Stage two: train probes on a sealed store; nothing here touches the backbone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epcache.convergence import Convergence, best_convergence
from epcache.errors import ConfigError
from epcache.importing import import_head
from epcache.poolers import pooler_options
from epcache.probing import ProbeConfig, fit_probes
from epcache.published import check_target, save_published
from epcache.results import ROWS, Row, best_row, results_dir, study_json
from epcache.runs import load_probe
from epcache.store.reader import open_store
from epcache.watch import Observer


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What the command asks."""

    store: Path
    configs: Sequence[ProbeConfig]
    memory_budget: int | None = None
    device: str = "auto"
    precision: str = "auto"
    again: bool = False
    export: Path | None = None
    """Write the best EP probe there, in the key layout of published heads."""


@dataclass(frozen=True, kw_only=True)
class ProbeStudy:
    """What came out."""

    store: Path
    digest: str
    rows: Sequence[Row]
    rows_path: Path
    exported: Path | None = None

    @property
    def best(self) -> Row | None:
        """The row that held-out data chooses."""
        return best_row(self.rows)

    @property
    def convergence(self) -> list[Convergence]:
        """Of the best probe of each pooler."""
        return best_convergence(self.rows, self.rows_path.parent)

    def to_json(self) -> dict[str, Any]:
        """The command's JSON object."""
        return study_json(self.store, self.digest, self.rows)


def probe(request: ProbeRequest, observer: Observer) -> ProbeStudy:
    """Train, or go on with, the probes that are asked for."""
    store = open_store(request.store)
    if request.export is not None and not any(c.pooler == "ep" for c in request.configs):
        raise ConfigError(f"--export {request.export}: no ep probe is asked for; add --pooler ep")
    if request.export is not None:
        check_target(request.export)
    rows = fit_probes(
        store,
        request.configs,
        memory_budget=request.memory_budget,
        device=request.device,
        precision=request.precision,
        progress=observer,
        again=request.again,
    )
    if not rows:
        raise ConfigError("every probe diverged; lower --lr (the messages above name the rates)")
    if request.export is not None:
        export(rows, request.export)
    return ProbeStudy(
        store=store.path,
        digest=store.digest,
        rows=rows,
        rows_path=results_dir() / ROWS,
        exported=request.export,
    )


def score_head(request: ProbeRequest, head: Path) -> ProbeStudy:
    """Score a published EP head as the request's first config reads tokens; nothing is trained."""
    store, config = open_store(request.store), request.configs[0]
    row = import_head(
        store,
        head,
        layer=config.layer,
        tokens=config.tokens,
        norm=config.norm,
        device=request.device,
        precision=request.precision,
    )
    return ProbeStudy(
        store=store.path, digest=store.digest, rows=[row], rows_path=results_dir() / ROWS
    )


def export(rows: Sequence[Row], path: Path) -> None:
    """Write the best EP probe of some rows as a published head."""
    best = best_row([row for row in rows if row.pooler == "ep" and row.test_top1_best is not None])
    if best is None:
        raise ConfigError(f"--export {path}: no ep probe trained to the end")
    save_published(load_probe(best.run).probe, path)


def make_configs(
    poolers: Sequence[str],
    *,
    num_queries: Sequence[int] = (),
    dim_outs: Sequence[int] = (),
    lrs: Sequence[float] = (),
    weight_decays: Sequence[float] = (),
    seeds: Sequence[int] = (),
    shared: Mapping[str, Any],
) -> list[ProbeConfig]:
    """Every combination; a size goes to the poolers that have it.

    Raises:
        ConfigError: No pooler has a size that was asked for, or a value cannot work.
    """
    takes = {pooler: pooler_options(pooler) for pooler in poolers}
    for name, option, values in (
        ("num_queries", "--M", num_queries),
        ("dim_out", "--dim-out", dim_outs),
    ):
        if values and not any(name in options for options in takes.values()):
            raise ConfigError(f"{option} {values[0]}: pooler {', '.join(poolers)} has none")
    configs = []
    for pooler, queries, dim_out, lr, decay, seed in itertools.product(
        poolers,
        num_queries or (None,),
        dim_outs or (None,),
        lrs or (None,),
        weight_decays or (None,),
        seeds or (0,),
    ):
        # of the linear pooler gap, only the ablation that projects has a width to choose
        sized = pooler not in ("gap", "cls")
        configs.append(
            ProbeConfig(
                pooler=pooler,
                num_queries=queries if "num_queries" in takes[pooler] else None,
                dim_out=dim_out if "dim_out" in takes[pooler] and sized else None,
                lr=lr,
                weight_decay=decay,
                seed=seed,
                **shared,
            )
        )
    return list({str(config.to_json()): config for config in configs}.values())
