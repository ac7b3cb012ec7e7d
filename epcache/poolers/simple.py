"""Poolers without attention: the [CLS] token and the mean. What linear probing uses."""

import torch
from torch import Tensor

from epcache.errors import ConfigError
from epcache.poolers.base import Grid, Pooler, flag, positive_int
from epcache.poolers.layers import linear


class ClsPooler(Pooler):
    """The [CLS] token: (B, 1 + N, D) -> (B, D).

    Takes token 0, so the caller passes tokens that start with [CLS]; patch tokens alone would
    silently give the top left patch, which is why `needs_prefix` is True.

    Source: linear probing on [CLS], as in DINO and CLIP evaluations.
    """

    name = "cls"
    needs_prefix = True

    def __init__(
        self, *, dim: int, grid: Grid = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(dim=dim, grid=grid)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Return token 0, shape (B, D)."""
        self.check_tokens(tokens_BND)
        return tokens_BND[:, 0]

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: none."""
        return 0


class GapPooler(Pooler):
    """Global average pooling: (B, N, D) -> (B, O).

    Args:
        dim: Token width D.
        grid: Not needed.
        value: Project the mean by a bias-free W_V (O, D), the ablation "GAP + W_V".
        dim_out: Width of that projection; `dim` when None.
        generator: Draws W_V.

    Source: linear probing on the mean patch token; the projection is an ablation of "Attention,
    Please!" (ICLR 2026).
    """

    name = "gap"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        value: bool = False,
        dim_out: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        width = dim if dim_out is None else positive_int(self.name, "dim_out", dim_out)
        if not flag(self.name, "value", value) and width != dim:
            raise ConfigError(
                f"pooler gap: dim_out={width} differs from dim={dim}, which needs value=True; "
                f"without a projection the only valid dim_out is {dim}"
            )
        super().__init__(dim=dim, grid=grid, dim_out=width)
        self.value = linear(dim, width, bias=False, generator=generator) if value else None

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Return the mean token, projected when `value`, shape (B, O)."""
        self.check_tokens(tokens_BND)
        mean_BD = tokens_BND.mean(dim=1)
        if self.value is None:
            return mean_BD
        projected: Tensor = self.value(mean_BD)
        return projected

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: the projection of the mean."""
        return 0 if self.value is None else self.dim * self.dim_out

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token is projected."""
        return num_tokens * self.macs(num_tokens)
