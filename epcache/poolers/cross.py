"""One learned query attends to all tokens, then a head of its own: cae, siglip, vjepa.

None of them projects the tokens: keys fold into the query, values into the pooled token, and
LayerNorm on the tokens into one number per token (`views`).
"""

import torch
from torch import Tensor, nn

from epcache.poolers.base import Grid, Pooler, replace_map, resolve_heads
from epcache.poolers.layers import Mlp, linear, trunc_linear, trunc_normal
from epcache.poolers.views import (
    NormView,
    RawView,
    View,
    bias_scores,
    fold_queries,
    project_heads,
    token_rstd,
)


class CrossPooler(Pooler):
    """A query that does not depend on the image, multi-head attention, then a head of its own.

    `attention` returns one map per head. Subclasses say how keys and values see the tokens, what
    scores them, and what becomes of the pooled tokens.
    """

    num_heads: int

    def views(self, tokens_BND: Tensor) -> tuple[View, View]:
        """Return the tokens as keys and as values see them."""
        view = RawView(tokens_BND)
        return view, view

    def scores(self, keys: View) -> Tensor:
        """Return the scores before the softmax, shape (B, h, N)."""
        raise NotImplementedError

    def finish(self, pooled_BhD: Tensor) -> Tensor:
        """Map the pooled tokens of the heads to the output, shape (B, D)."""
        raise NotImplementedError

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        self.check_tokens(tokens_BND)
        keys, values = self.views(tokens_BND)
        return self.finish(values.pool(self.scores(keys).softmax(dim=-1)))

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the heads, shape (B, num_heads, N)."""
        self.check_tokens(tokens_BND)
        return self.scores(self.views(tokens_BND)[0]).softmax(dim=-1)

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given maps, shape (B, D)."""
        return self.finish(self.views(tokens_BND)[1].pool(attention_BMN))

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; tokens are summed once for all maps and once evenly."""
        self.check_tokens(tokens_BND)
        keys, values = self.views(tokens_BND)
        maps_BMN = self.scores(keys).softmax(dim=-1)
        pooled_BhD = values.pool(maps_BMN)
        even_BD = values.pool(torch.full_like(maps_BMN[:, :1], 1 / maps_BMN.shape[-1]))[:, 0]
        replaced = [replace_map(pooled_BhD, head, even_BD) for head in range(self.num_heads)]
        return torch.stack([self.finish(pooled) for pooled in replaced], dim=1)

    def _attention_macs(self, num_tokens: int) -> int:
        """Query, fold, scores, sums, values and output projection."""
        return 4 * self.dim**2 + 2 * num_tokens * self.dim * self.num_heads

    def _attention_macs_published(self, num_tokens: int) -> int:
        """Query and output projection once, keys and values for every token."""
        return 2 * self.dim**2 + num_tokens * (2 * self.dim**2 + 2 * self.dim)


class CaePooler(CrossPooler):
    """Attentive probe of context autoencoders: (B, N, D) -> (B, D).

    Zero-initialised query; LayerNorm on query, key and value inputs; bias-free projections; an
    output projection; no residual, no MLP. `attention` returns one map per head.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws query, key, value and output projections.

    Source: Chen et al., "Context Autoencoder for Self-Supervised Representation Learning" (2022),
    attentive probing.
    """

    name = "cae"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        self.queries = nn.Parameter(torch.zeros(1, dim))
        self.norm_query = nn.LayerNorm(dim, eps=1e-5)
        self.norm_key = nn.LayerNorm(dim, eps=1e-5)
        self.norm_value = nn.LayerNorm(dim, eps=1e-5)
        self.query = linear(dim, dim, bias=False, generator=generator)
        self.key = linear(dim, dim, bias=False, generator=generator)
        self.value = linear(dim, dim, bias=False, generator=generator)
        self.proj = linear(dim, dim, generator=generator)

    def views(self, tokens_BND: Tensor) -> tuple[View, View]:
        """Two LayerNorms that share the tokens' statistics."""
        rstd_BN = token_rstd(tokens_BND, self.norm_key.eps)
        return (
            NormView(tokens_BND, self.norm_key, rstd_BN),
            NormView(tokens_BND, self.norm_value, rstd_BN),
        )

    def scores(self, keys: View) -> Tensor:
        """Scores of the normalised, projected query."""
        query_D = self.query(self.norm_query(self.queries))[0]
        return keys.scores(fold_queries(query_D, self.key.weight, self.num_heads))

    def finish(self, pooled_BhD: Tensor) -> Tensor:
        """Value and output projections."""
        out: Tensor = self.proj(project_heads(pooled_BhD, self.value.weight))
        return out

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image, pooled first."""
        return self._attention_macs(num_tokens)

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token becomes a key and a value."""
        return self._attention_macs_published(num_tokens)


class FusedCrossPooler(CrossPooler):
    """`CrossPooler` with biased maps, keys and values fused in one, and an MLP in the head."""

    queries: nn.Parameter
    query: nn.Linear
    key_value: nn.Linear
    proj: nn.Linear

    def scores(self, keys: View) -> Tensor:
        """Scores of the projected query."""
        query_D = self.query(self.queries)[0]
        key_weight_DD, key_bias_D = (
            self.key_value.weight[: self.dim],
            self.key_value.bias[: self.dim],
        )
        folded_hD = fold_queries(query_D, key_weight_DD, self.num_heads)
        return keys.scores(folded_hD) + bias_scores(query_D, key_bias_D, self.num_heads)

    def attended(self, pooled_BhD: Tensor) -> Tensor:
        """Apply the value and output projections to the pooled tokens, shape (B, D)."""
        value_weight_DD, value_bias_D = (
            self.key_value.weight[self.dim :],
            self.key_value.bias[self.dim :],
        )
        out: Tensor = self.proj(project_heads(pooled_BhD, value_weight_DD) + value_bias_D)
        return out

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image, pooled first."""
        return self._attention_macs(num_tokens) + 8 * self.dim**2

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token becomes a key and a value."""
        return self._attention_macs_published(num_tokens) + 8 * self.dim**2


class SiglipPooler(FusedCrossPooler):
    """Multi-head attention pooling (MAP) head: (B, N, D) -> (B, D).

    Latent query, biased projections, then y + MLP(y) without norm. `attention` returns one map
    per head.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws query, its projection, key_value, output projection and MLP.

    Source: Zhai et al., "Scaling Vision Transformers" (2022), multi-head attention pooling, the
    head of SigLIP.
    """

    name = "siglip"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 8,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        self.queries = trunc_normal(1, dim, std=dim**-0.5, generator=generator)
        self.query = linear(dim, dim, generator=generator)
        self.key_value = linear(dim, 2 * dim, generator=generator)
        self.proj = linear(dim, dim, generator=generator)
        self.mlp = Mlp.default(dim, generator)

    def finish(self, pooled_BhD: Tensor) -> Tensor:
        """Value and output projections, then the MLP."""
        y_BD = self.attended(pooled_BhD)
        out: Tensor = y_BD + self.mlp(y_BD)
        return out


class VjepaPooler(FusedCrossPooler):
    """Cross-attention block of V-JEPA's attentive probe: (B, N, D) -> (B, D).

    As `siglip` with LayerNorm on the tokens, a residual from the query, and LayerNorm before the
    MLP. `attention` returns one map per head.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws query, its projection, key_value, output projection and MLP from
            N(0, 0.02^2), truncated; proj and fc2 are then divided by sqrt(2).

    Source: Bardes et al., "Revisiting Feature Prediction for Learning Visual Representations from
    Video" (V-JEPA, 2024), attentive probing.
    """

    name = "vjepa"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        self.queries = trunc_normal(1, dim, std=0.02, generator=generator)
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.query = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.key_value = trunc_linear(dim, 2 * dim, std=0.02, generator=generator)
        self.proj = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.norm_mlp = nn.LayerNorm(dim, eps=1e-5)
        self.mlp = Mlp(
            trunc_linear(dim, 4 * dim, std=0.02, generator=generator),
            trunc_linear(4 * dim, dim, std=0.02, generator=generator),
        )
        with torch.no_grad():
            self.proj.weight.div_(2**0.5)
            self.mlp.fc2.weight.div_(2**0.5)

    def views(self, tokens_BND: Tensor) -> tuple[View, View]:
        """One LayerNorm for keys and values."""
        view = NormView(tokens_BND, self.norm)
        return view, view

    def finish(self, pooled_BhD: Tensor) -> Tensor:
        """Residual from the query, then the residual MLP."""
        y_BD = self.queries + self.attended(pooled_BhD)
        out: Tensor = y_BD + self.mlp(self.norm_mlp(y_BD))
        return out
