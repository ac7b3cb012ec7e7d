"""Poolers in which tokens attend together with one more token or with each other.

clip puts the mean token in front and cait its query; vit_block lets all tokens attend to all.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from epcache.poolers.base import (
    Grid,
    Pooler,
    attend_all,
    replace_map,
    resolve_heads,
    split_heads,
)
from epcache.poolers.layers import Mlp, linear, trunc_linear, trunc_normal
from epcache.poolers.views import (
    NormView,
    PrependView,
    bias_scores,
    fold_queries,
    project_heads,
)


def _without_first(weights_BhN: Tensor) -> Tensor:
    """Drop the first token's weight and let the rows sum to 1 again."""
    rest_BhN = weights_BhN[..., 1:]
    return rest_BhN / rest_BhN.sum(dim=-1, keepdim=True)


def _level(weights_BhN: Tensor, index: int) -> Tensor:
    """Spread what one map gives to the tokens evenly over them; the first token keeps its own."""
    rest_BN = weights_BhN[:, index, 1:]
    even_BN = rest_BN.mean(dim=-1, keepdim=True).expand_as(rest_BN)
    return replace_map(weights_BhN, index, torch.cat([weights_BhN[:, index, :1], even_BN], dim=-1))


class ClipPooler(Pooler):
    """Attention pooling of CLIP's ResNets behind a LayerNorm: (B, N, D) -> (B, D).

    The mean token goes in front, a learned position is added to each token, the mean token
    attends to all of them. `attention` returns one map per head: the mean token's attention to
    the patch tokens, without its attention to itself and scaled to sum to 1.

    Args:
        dim: Token width D.
        grid: Token grid; need not be square. The positions belong to it.
        num_heads: Number of heads.
        generator: Draws positions and the fused qkv from N(0, 1/D), truncated, then the output
            projection.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language
    Supervision" (CLIP, 2021), section 2.4, attention pooling.
    """

    name = "clip"
    needs_grid = True

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid,
        num_heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        assert self.grid is not None
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        num_tokens = 1 + self.grid[0] * self.grid[1]
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pos_embed = trunc_normal(num_tokens, dim, std=dim**-0.5, generator=generator)
        self.qkv = trunc_linear(dim, 3 * dim, std=dim**-0.5, generator=generator)
        self.proj = linear(dim, dim, generator=generator)

    def _attend(self, tokens_BND: Tensor) -> tuple[PrependView, Tensor]:
        """Return the positioned tokens and the first one's attention, (B, h, 1 + N)."""
        self.check_tokens(tokens_BND)
        normed = NormView(tokens_BND, self.norm)
        uniform_B1N = torch.full_like(normed.rstd_BN, 1 / tokens_BND.shape[1])[:, None]
        first_BD = normed.pool(uniform_B1N)[:, 0] + self.pos_embed[0]
        view = PrependView(normed, first_BD, self.pos_embed[1:])

        dim = self.dim
        query_BD = functional.linear(first_BD, self.qkv.weight[:dim], self.qkv.bias[:dim])
        key_weight_DD = self.qkv.weight[dim : 2 * dim]
        scores_BhN = view.scores(fold_queries(query_BD, key_weight_DD, self.num_heads))
        key_bias_D = self.qkv.bias[dim : 2 * dim]
        scores_BhN = scores_BhN + bias_scores(query_BD, key_bias_D, self.num_heads)
        return view, scores_BhN.softmax(dim=-1)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self._finish(*self._attend(tokens_BND))

    def _finish(self, view: PrependView, weights_BhN: Tensor) -> Tensor:
        """Pool by the heads' weights, then value and output projections."""
        value_weight_DD = self.qkv.weight[2 * self.dim :]
        y_BD = project_heads(view.pool(weights_BhN), value_weight_DD)
        out: Tensor = self.proj(y_BD + self.qkv.bias[2 * self.dim :])
        return out

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the mean token's heads over the patches, shape (B, num_heads, N)."""
        return _without_first(self._attend(tokens_BND)[1])

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; a head's attention to the mean token stays as it is."""
        view, weights_BhN = self._attend(tokens_BND)
        levelled = [_level(weights_BhN, head) for head in range(self.num_heads)]
        return torch.stack([self._finish(view, weights) for weights in levelled], dim=1)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image, pooled first; positions are scored and summed apart."""
        per_head = 2 * (2 * num_tokens + 1) * self.dim
        return 4 * self.dim**2 + num_tokens * self.dim + self.num_heads * per_head

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when all tokens attend to all and only then one is kept."""
        tokens = num_tokens + 1
        return 4 * tokens * self.dim**2 + 2 * tokens**2 * self.dim


class CaitPooler(Pooler):
    """Class-attention block of CaiT: (B, N, D) -> (B, D).

    The query attends to itself and the tokens, all under one LayerNorm; two residual branches
    scaled by learned gammas; a last LayerNorm. `attention` returns one map per head: the query's
    attention to the tokens, without its attention to itself and scaled to sum to 1.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws query, its projection, key, value, output projection and MLP from
            N(0, 0.02^2), truncated; gammas start at 1e-5.

    Source: Touvron et al., "Going deeper with Image Transformers" (CaiT, 2021), class-attention
    layers and LayerScale.
    """

    name = "cait"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        num_heads: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid)
        self.num_maps = self.num_heads = resolve_heads(self.name, dim, num_heads)
        self.queries = trunc_normal(1, dim, std=0.02, generator=generator)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-5))
        self.gamma_mlp = nn.Parameter(torch.full((dim,), 1e-5))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.query = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.key = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.value = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.proj = trunc_linear(dim, dim, std=0.02, generator=generator)
        self.norm_mlp = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(
            trunc_linear(dim, 4 * dim, std=0.02, generator=generator),
            trunc_linear(4 * dim, dim, std=0.02, generator=generator),
        )
        self.norm_out = nn.LayerNorm(dim, eps=1e-5)

    def _attend(self, tokens_BND: Tensor) -> tuple[PrependView, Tensor]:
        """Return the normalised [query; tokens] and the query's attention, (B, h, 1 + N)."""
        self.check_tokens(tokens_BND)
        first_D = self.norm(self.queries)[0]
        view = PrependView(NormView(tokens_BND, self.norm), first_D)
        query_D = self.query(first_D)
        scores_BhN = view.scores(fold_queries(query_D, self.key.weight, self.num_heads))
        scores_BhN = scores_BhN + bias_scores(query_D, self.key.bias, self.num_heads)
        return view, scores_BhN.softmax(dim=-1)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self._finish(*self._attend(tokens_BND))

    def _finish(self, view: PrependView, weights_BhN: Tensor) -> Tensor:
        """Pool by the heads' weights, then the rest of the block."""
        heads_BD = project_heads(view.pool(weights_BhN), self.value.weight) + self.value.bias
        y_BD = self.queries + self.gamma * self.proj(heads_BD)
        y_BD = y_BD + self.gamma_mlp * self.mlp(self.norm_mlp(y_BD))
        out: Tensor = self.norm_out(y_BD)
        return out

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the query's heads over the tokens, shape (B, num_heads, N)."""
        return _without_first(self._attend(tokens_BND)[1])

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; a head's attention to the query itself stays as it is."""
        view, weights_BhN = self._attend(tokens_BND)
        levelled = [_level(weights_BhN, head) for head in range(self.num_heads)]
        return torch.stack([self._finish(view, weights) for weights in levelled], dim=1)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image, pooled first."""
        return 12 * self.dim**2 + 2 * (num_tokens + 1) * self.dim * self.num_heads

    def macs_published(self, num_tokens: int) -> int:
        """Multiply-adds per image when every token becomes a key and a value."""
        per_token = 2 * self.dim**2 + 2 * self.dim
        return 10 * self.dim**2 + (num_tokens + 1) * per_token


class VitBlockPooler(Pooler):
    """One more transformer block, then the mean token: (B, N, D) -> (B, D).

    Every token is a query and an MLP follows, so nothing folds: as computed is as published.
    `attention` returns one map per head, the mean of the attention rows of all tokens.

    Args:
        dim: Token width D.
        grid: Not needed.
        num_heads: Number of heads.
        generator: Draws the fused qkv, output projection and MLP.

    Source: "Attention, Please!" (ICLR 2026), a ViT block as pooler; Dosovitskiy et al., "An Image
    is Worth 16x16 Words" (2021), section 3.1, for the block.
    """

    name = "vit_block"

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
        self.norm = nn.LayerNorm(dim, eps=1e-5)
        self.qkv = linear(dim, 3 * dim, bias=False, generator=generator)
        self.proj = linear(dim, dim, generator=generator)
        self.norm_mlp = nn.LayerNorm(dim, eps=1e-5)
        self.mlp = Mlp.default(dim, generator)

    def _attend(self, tokens_BND: Tensor) -> tuple[Tensor, Tensor]:
        self.check_tokens(tokens_BND)
        return attend_all(self.qkv(self.norm(tokens_BND)), self.num_heads)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self._finish(tokens_BND, self._attend(tokens_BND)[0])

    def _finish(self, tokens_BND: Tensor, mixed_BND: Tensor) -> Tensor:
        """Residual, MLP and mean."""
        y_BND: Tensor = tokens_BND + self.proj(mixed_BND)
        y_BND = y_BND + self.mlp(self.norm_mlp(y_BND))
        return y_BND.mean(dim=1)

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax maps of the heads, averaged over the tokens that attend, (B, num_heads, N)."""
        return self._attend(tokens_BND)[1].mean(dim=2)

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; all tokens attend evenly in the head whose map is replaced."""
        self.check_tokens(tokens_BND)
        qkv_BNE: Tensor = self.qkv(self.norm(tokens_BND))
        mixed_BNhk = split_heads(attend_all(qkv_BNE, self.num_heads)[0], self.num_heads)
        mean_Bhk = split_heads(qkv_BNE[..., 2 * self.dim :].mean(dim=1), self.num_heads)
        outputs = []
        for head in range(self.num_heads):
            levelled_BNhk = mixed_BNhk.clone()
            levelled_BNhk[:, :, head] = mean_Bhk[:, None, head]
            outputs.append(self._finish(tokens_BND, levelled_BNhk.flatten(2)))
        return torch.stack(outputs, dim=1)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image; nothing folds, so this is also the published count."""
        return num_tokens * (12 * self.dim**2 + 2 * num_tokens * self.dim)
