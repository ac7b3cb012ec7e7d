"""Attention whose heads share their values: simpool (the tokens) and coca (one 64-wide head)."""

import torch
from torch import Tensor, nn

from epcache.poolers.base import Grid, Pooler, flag, positive_int, resolve_heads, split_heads
from epcache.poolers.cross import CrossPooler
from epcache.poolers.layers import linear, normal
from epcache.poolers.views import NormView, View, fold_queries


class SimpoolPooler(Pooler):
    """SimPool, the mean token as query: (B, N, D) -> (B, D).

    Query W_q mean(x), keys W_k LN(x), values LN(x), no projection of values. With
    ``linear=False``: query LN(mean(x)), keys LN(x), values x. Heads are slices of the channels.
    `attention` returns one map per head (M = 1 by default).

    Args:
        dim: Token width D.
        grid: Not needed.
        linear: Keep W_q and W_k.
        num_heads: Number of heads; None gives 1 when `linear`, else heads of 64 channels (12 at
            D=768).
        generator: Draws W_q, then W_k.

    Source: Psomas et al., "Keep It SimPool: Who Said Supervised Transformers Suffer from
    Attention Deficit?" (2023), the SimPool algorithm; ``linear=False`` as in "Attention,
    Please!" (ICLR 2026).
    """

    name = "simpool"
    fills_slices = True

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        linear: bool = True,
        num_heads: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.linear = flag(self.name, "linear", linear)
        heads = 1 if linear and num_heads is None else num_heads
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, heads)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.query = _square(dim, generator) if linear else None
        self.key = _square(dim, generator) if linear else None

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self.pool(tokens_BND, self.attention(tokens_BND))

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the heads, shape (B, num_heads, N)."""
        self.check_tokens(tokens_BND)
        mean_BD = tokens_BND.mean(dim=1)
        if self.query is None or self.key is None:
            query_Bhk = split_heads(self.norm(mean_BD), self.num_heads)
            keys_BNhk = split_heads(self.norm(tokens_BND), self.num_heads)
            scale = query_Bhk.shape[-1] ** -0.5
            scores_BhN = torch.einsum("bhk,bnhk->bhn", query_Bhk * scale, keys_BNhk)
        else:
            folded_BhD = fold_queries(self.query(mean_BD), self.key.weight, self.num_heads)
            scores_BhN = NormView(tokens_BND, self.norm).scores(folded_BhD)
        return scores_BhN.softmax(dim=-1)

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given maps, shape (B, D)."""
        if not self.linear:
            values_BNhk = split_heads(tokens_BND, self.num_heads)
            return torch.einsum("bhn,bnhk->bhk", attention_BMN, values_BNhk).flatten(1)
        pooled_BhD = NormView(tokens_BND, self.norm).pool(attention_BMN)
        # Each head keeps its own slice of channels: the diagonal of (head, slice).
        slices_Bkh = split_heads(pooled_BhD, self.num_heads).diagonal(dim1=1, dim2=2)
        return slices_Bkh.transpose(1, 2).flatten(1)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: query, fold, then scores and sums for each head."""
        if not self.linear:
            return 2 * num_tokens * self.dim
        return 2 * self.dim**2 + 2 * num_tokens * self.dim * self.num_heads

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token becomes a key."""
        projections = self.dim**2 * (1 + num_tokens) if self.linear else 0
        return projections + 2 * num_tokens * self.dim


def _square(dim: int, generator: torch.Generator | None) -> nn.Linear:
    return linear(dim, dim, bias=False, generator=generator)


class CocaPooler(CrossPooler):
    """Attentional pooler of CoCa: (B, N, D) -> (B, D).

    Learned queries under a bias-free LayerNorm, several query heads of width 64 over one shared
    key and value head, an output projection; the output is that of query 0. The other queries
    are parameters that nothing reads: they count, and their gradient is zero. `attention` returns
    one map per head of query 0.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of query heads.
        num_queries: Number of queries.
        generator: Draws queries from N(0, 1), then query, key_value and output projections.

    Source: Yu et al., "CoCa: Contrastive Captioners are Image-Text Foundation Models" (2022),
    attentional poolers.
    """

    name = "coca"
    head_dim = 64

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 8,
        num_queries: int = 196,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = positive_int(self.name, "num_heads", num_heads)
        self.num_queries = positive_int(self.name, "num_queries", num_queries)
        self.inner = num_heads * self.head_dim
        self.queries = normal(num_queries, dim, std=1.0, generator=generator)
        self.norm = nn.LayerNorm(dim, eps=1e-5, bias=False)
        self.query = linear(dim, self.inner, bias=False, generator=generator)
        self.key_value = linear(dim, 2 * self.head_dim, bias=False, generator=generator)
        self.proj = linear(self.inner, dim, bias=False, generator=generator)

    def scores(self, keys: View) -> Tensor:
        """Scores of query 0's heads."""
        query_hk = split_heads(self.query(self.norm(self.queries[0])), self.num_heads)
        folded_hD = query_hk * self.head_dim**-0.5 @ self.key_value.weight[: self.head_dim]
        return keys.scores(folded_hD)

    def finish(self, pooled_BhD: Tensor) -> Tensor:
        """Shared value projection of each head, then the output projection."""
        heads_Bhk = pooled_BhD @ self.key_value.weight[self.head_dim :].transpose(0, 1)
        out: Tensor = self.proj(heads_Bhk.flatten(1))
        return out

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image: query, fold, values, projection; scores and sums per head."""
        return 4 * self.dim * self.inner + 2 * num_tokens * self.dim * self.num_heads

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image for all queries, with every token projected."""
        per_query = 2 * self.dim * self.inner + 2 * num_tokens * self.inner
        return self.num_queries * per_query + num_tokens * self.dim * 2 * self.head_dim
