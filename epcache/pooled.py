"""Features of a store: every image's tokens pooled to one vector, by rules without parameters.

What k-NN and the linear classifiers eat. A split is read once, front to back, a few images at a
time; only the vectors stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.store.reader import SplitReader, Store
from epcache.stream import TokenKind, TokenSource, pool

POOLED: dict[str, TokenKind] = {"cls": "cls", "gap": "patch"}
"""Pooler to the tokens that it looks at: [CLS] itself, the mean of the patch tokens."""
NORMS = ("auto", "final", "none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pooled:
    """Vectors of the valid rows of a split."""

    features: NDArray[np.float32]
    """(n, D)."""
    labels: NDArray[np.int64]
    """(n,), from 0."""
    rows: NDArray[np.int64]
    """(n,) rows of the split, ascending; those whose image could not be decoded are left out."""

    def __len__(self) -> int:
        """How many vectors."""
        return len(self.rows)

    def of_rows(self, rows: NDArray[np.int64]) -> Pooled:
        """The vectors of some of the rows, which are rows of the split."""
        index = np.searchsorted(self.rows, rows)
        return Pooled(features=self.features[index], labels=self.labels[index], rows=rows)


def pool_split(
    split: SplitReader,
    *,
    layer: int,
    pooler: str,
    norm: FinalNorm | None,
    average_layers: int = 1,
    view: int = 0,
    chunk_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pooled:
    """Pool one layer of a split.

    Args:
        split: Of an opened store.
        layer: Block index; negative ones count from the end.
        pooler: ``cls`` or ``gap``.
        norm: Applied to every token before pooling, as the backbone would; None pools raw block
            outputs.
        average_layers: Average the tokens of so many layers, the last of them ``layer``.
        view: Which cached view.
        chunk_rows: Images at a time; None is as many as fit 64 MiB. It does not change the vectors.
        progress: Told how many bytes of tokens are through, and of how many.

    Raises:
        ConfigError: If there is no such pooler, layer, view or [CLS] token.
    """
    check_pooler(split.store, layer, pooler)
    rows = np.flatnonzero(split.valid)
    if not len(rows):
        raise ConfigError(f"split {split.name!r} of store {split.store.path} has no valid image")
    source = TokenSource(
        split=split,
        layer=layer,
        average_layers=average_layers,
        tokens=POOLED[pooler],
        norm=norm,
        rows=rows,
    )
    features_ND = pool(source, view=view, chunk_rows=chunk_rows, progress=progress)
    return Pooled(features=features_ND.numpy(), labels=split.labels[rows], rows=rows)


def check_pooler(store: Store, layer: int, pooler: str) -> None:
    """Refuse a pooler that has parameters, or tokens that the layer does not have.

    Raises:
        ConfigError: It is one of those.
    """
    if pooler not in POOLED:
        raise ConfigError(
            f"pooler {pooler!r}: expected one of {', '.join(POOLED)}; poolers with parameters are "
            f"trained by epcache probe"
        )
    if pooler == "cls" and not store.has_cls(layer):
        raise ConfigError(
            f"pooler cls: layer {layer} of store {store.path} has no [CLS] token; use gap"
        )


def choose_norm(store: Store, norm: str) -> tuple[str, FinalNorm | None]:
    """What ``--norm`` means for a store.

    Args:
        store: Whose tokens are to be pooled.
        norm: ``final``, ``none``, or ``auto``: what the published protocol of the backbone does.

    Returns:
        ``final`` or ``none``, and the norm to apply.

    Raises:
        ConfigError: If there is no such choice, or no final norm to apply.
    """
    if norm not in NORMS:
        raise ConfigError(f"--norm {norm}: expected one of {', '.join(NORMS)}")
    chosen = str(store.provenance["backbone"]["norm_policy"]) if norm == "auto" else norm
    if chosen == "none":
        return chosen, None
    if store.final_norm_path is None:
        raise ConfigError(
            f"--norm {norm}: the backbone of store {store.path} has no final norm; use --norm none"
        )
    return chosen, FinalNorm.load(store.final_norm_path)
