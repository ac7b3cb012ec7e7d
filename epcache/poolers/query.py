"""Learned queries on raw tokens: efficient probing (ep), and what it came from (mhca, aim)."""

import torch
from torch import Tensor

from epcache.errors import ConfigError
from epcache.poolers.base import (
    Grid,
    Pooler,
    choice,
    flag,
    nearest_divisors,
    nearest_multiples,
    positive_int,
    resolve_heads,
    split_heads,
)
from epcache.poolers.layers import BatchNorm, linear, normal
from epcache.poolers.views import (
    RawView,
    StandardView,
    View,
    fold_queries,
    project_heads,
)


class EpPooler(Pooler):
    """Efficient probing: M queries score the raw tokens, each fills its slice of the output.

        a_m = softmax_n(D**-0.5 <u_m, x_n>)      y_m = W_V[m-th slice of O/M rows] sum_n a_mn x_n

    `attention` returns one map per query.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_queries: Number of queries M.
        dim_out: Pooled width O, a multiple of M; `dim` when None.
        value: Keep W_V. Without it query m pools the m-th slice of D/M channels of the tokens
            themselves (ablation), and O = D.
        generator: Draws the queries from N(0, 0.02^2) and W_V from torch's default for Linear.

    Source: "Attention, Please! Revisiting Attentive Probing Through the Lens of Efficiency"
    (ICLR 2026), efficient probing; the scale is that of the published numbers.
    """

    name = "ep"
    fills_slices = True

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_queries: int = 32,
        dim_out: int | None = None,
        value: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        width = dim if dim_out is None else positive_int(self.name, "dim_out", dim_out)
        super().__init__(dim=dim, grid=grid, dim_out=width, num_maps=num_queries)
        if not flag(self.name, "value", value) and width != dim:
            raise ConfigError(
                f"pooler ep: dim_out={width} differs from dim={dim}, which needs value=True; "
                f"without a projection the only valid dim_out is {dim}"
            )
        _check_queries(positive_int(self.name, "num_queries", num_queries), width, free=value)
        self.num_queries = num_queries
        self.scale = dim**-0.5
        self.queries = normal(num_queries, dim, std=0.02, generator=generator)
        self.value = linear(dim, width, bias=False, generator=generator) if value else None

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, O)."""
        return self.pool(tokens_BND, self.attention(tokens_BND))

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the queries, shape (B, M, N)."""
        self.check_tokens(tokens_BND)
        return RawView(tokens_BND).scores(self.queries * self.scale).softmax(dim=-1)

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given maps, shape (B, O)."""
        if self.value is None:
            slices_BNMk = split_heads(tokens_BND, self.num_queries)
            return torch.einsum("bmn,bnmk->bmk", attention_BMN, slices_BNMk).flatten(1)
        return project_heads(RawView(tokens_BND).pool(attention_BMN), self.value.weight)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: scores and sums N*D*M each, then W_V once."""
        scores = num_tokens * self.dim * self.num_queries
        if self.value is None:
            return scores + num_tokens * self.dim
        return 2 * scores + self.dim * self.dim_out

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token is projected."""
        projection = 0 if self.value is None else num_tokens * self.dim * self.dim_out
        return projection + num_tokens * (self.dim * self.num_queries + self.dim_out)


def _check_queries(num_queries: int, dim_out: int, *, free: bool) -> None:
    """Refuse M that does not divide O; `free` says that another O could be chosen."""
    if dim_out % num_queries == 0:
        return
    remedy = f"nearest valid num_queries: {nearest_divisors(dim_out, num_queries)}"
    if free:
        remedy += f", nearest valid dim_out: {nearest_multiples(num_queries, dim_out)}"
    raise ConfigError(
        f"pooler ep: num_queries={num_queries} does not divide dim_out={dim_out}; {remedy}"
    )


class MhcaPooler(Pooler):
    """Multi-head cross-attention with one learned query: (B, N, D) -> (B, D).

    W_K and W_V without bias, no output projection, heads concatenated. `attention` returns one
    map per head.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads; None gives heads of 64 channels (12 at D=768, 16 at 1024).
        key: "linear" learns W_K. "identity" fixes W_K to the identity (ablation): head h's slice
            of the query scores the h-th channel slice of the raw token. The other reading, an
            identity D x D map for each head, gives every head a query of full width: that is
            `ep`, which the same ablation table lists apart.
        generator: Draws query, W_K, W_V.

    Source: "Attention, Please!" (ICLR 2026), multi-head cross-attention and its ablations.
    """

    name = "mhca"
    fills_slices = True

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int | None = None,
        key: str = "linear",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        learned = choice(self.name, "key", key, ("linear", "identity")) == "linear"
        self.queries = normal(1, dim, std=0.02, generator=generator)
        self.key = linear(dim, dim, bias=False, generator=generator) if learned else None
        self.value = linear(dim, dim, bias=False, generator=generator)

    def view(self, tokens_BND: Tensor, *, update: bool) -> View:
        """Return the tokens as keys and values see them; `update` allows running statistics."""
        self.check_tokens(tokens_BND)
        return RawView(tokens_BND)

    def weights(self, view: View, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the heads, shape (B, h, N)."""
        query_D = self.queries[0]
        if self.key is not None:
            folded_hD = fold_queries(query_D, self.key.weight, self.num_heads)
            return view.scores(folded_hD).softmax(dim=-1)
        query_hk = split_heads(query_D, self.num_heads)
        scale = query_hk.shape[1] ** -0.5
        slices_BNhk = split_heads(tokens_BND, self.num_heads)
        return torch.einsum("hk,bnhk->bhn", query_hk * scale, slices_BNhk).softmax(dim=-1)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        view = self.view(tokens_BND, update=True)
        return project_heads(view.pool(self.weights(view, tokens_BND)), self.value.weight)

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the heads, shape (B, num_heads, N)."""
        return self.weights(self.view(tokens_BND, update=False), tokens_BND)

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given maps, shape (B, D)."""
        view = self.view(tokens_BND, update=False)
        return project_heads(view.pool(attention_BMN), self.value.weight)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: folding, scores and sums for each head, then W_V once."""
        per_head = num_tokens * self.dim * self.num_heads
        if self.key is None:
            return num_tokens * self.dim + per_head + self.dim**2
        return 2 * self.dim**2 + 2 * per_head

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token becomes a key and a value."""
        projections = 1 if self.key is None else 2
        return num_tokens * (projections * self.dim**2 + 2 * self.dim)


class AimPooler(MhcaPooler):
    """`mhca` behind an affine-free batch normalisation of the tokens: (B, N, D) -> (B, D).

    The statistics are per channel, over images and tokens together. `attention` returns one map
    per head.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws query, W_K, W_V.

    Source: El-Nouby et al., "Scalable Pre-training of Large Autoregressive Image Models" (AIM,
    2024), attentive probe.
    """

    name = "aim"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid, num_heads=num_heads, generator=generator)
        self.norm = BatchNorm(dim, eps=1e-6)

    def view(self, tokens_BND: Tensor, *, update: bool) -> View:
        """Return the standardised tokens."""
        self.check_tokens(tokens_BND)
        return StandardView(tokens_BND, self.norm, update=update)
