"""Poolers that gate tokens by a score computed from each of them: abmilp, delf, cbam.

The gates are not linear in the token, so nothing folds: as computed is as published.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from epcache.poolers.base import (
    Grid,
    Pooler,
    attend_all,
    choice,
    positive_int,
)
from epcache.poolers.layers import BatchNorm, conv, linear


class FullAttention(nn.Module):
    """Single-head self-attention over all tokens, without residual: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.qkv = linear(dim, 3 * dim, bias=False, generator=generator)
        self.proj = linear(dim, dim, generator=generator)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Attend and project."""
        mixed_BND, _ = attend_all(self.qkv(tokens_BND), num_heads=1)
        out: Tensor = self.proj(mixed_BND)
        return out


class AbmilpPooler(Pooler):
    """Attention-based multiple-instance pooling: (B, N, D) -> (B, D).

    A small network scores each token, softmax over tokens weighs them. `attention` returns one
    map.

    Args:
        dim: Token width D.
        grid: Not needed.
        depth: Layers of the score: 1 is Linear(D, 1); 2 is Linear(D, D), tanh, Linear(D, 1).
        self_attention: Single-head self-attention before pooling: "none", "score" (scores see
            its output, values stay the tokens) or "both".
        generator: Draws self-attention, then the score's layers.

    Source: Ilse et al., "Attention-based Deep Multiple Instance Learning" (2018), equations 7-8,
    as used for probing in "Attention, Please!" (ICLR 2026), which has no self-attention.
    """

    name = "abmilp"

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid = None,
        depth: int = 2,
        self_attention: str = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid, num_maps=1)
        self.depth = choice(self.name, "depth", depth, (1, 2))
        self.mode = choice(self.name, "self_attention", self_attention, ("none", "score", "both"))
        self.self_attention = None if self.mode == "none" else FullAttention(dim, generator)
        hidden = [linear(dim, dim, generator=generator), nn.Tanh()] if depth == 2 else []
        self.score = nn.Sequential(*hidden, linear(dim, 1, generator=generator))

    def _seen(self, tokens_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens that scores see and those that are pooled."""
        self.check_tokens(tokens_BND)
        if self.self_attention is None:
            return tokens_BND, tokens_BND
        mixed_BND = self.self_attention(tokens_BND)
        return mixed_BND, mixed_BND if self.mode == "both" else tokens_BND

    def _weights(self, scored_BND: Tensor) -> Tensor:
        scores_BN1: Tensor = self.score(scored_BND)
        return scores_BN1.transpose(1, 2).softmax(dim=-1)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        scored_BND, values_BND = self._seen(tokens_BND)
        return (self._weights(scored_BND) @ values_BND)[:, 0]

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Softmax map of the score, shape (B, 1, N)."""
        return self._weights(self._seen(tokens_BND)[0])

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given map, shape (B, D)."""
        return (attention_BMN @ self._seen(tokens_BND)[1])[:, 0]

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image; nothing folds, so this is also the published count."""
        dim, per_token = self.dim, 2 * self.dim
        if self.depth == 2:
            per_token += dim**2
        if self.self_attention is not None:
            per_token += 4 * dim**2 + 2 * num_tokens * dim
        return num_tokens * per_token


class DelfPooler(Pooler):
    """Attentive local features: (B, N, D) -> (B, D).

        f_n = BN(W x_n + b)    s_n = softplus(<v, relu(f_n)> + c)    y = mean_n s_n f_n / |f_n|

    `attention` returns one map, the scores s_n divided by their sum (they are no softmax, so
    their total is part of the output and `pool` cannot take a map).

    Args:
        dim: Token width D.
        grid: Not needed.
        generator: Draws the projection, then the score.

    Source: Noh et al., "Large-Scale Image Retrieval with Attentive Deep Local Features" (2017),
    attention-based keypoint selection.
    """

    name = "delf"

    def __init__(
        self, *, dim: int, grid: Grid = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(dim=dim, grid=grid, num_maps=1)
        self.project = linear(dim, dim, generator=generator)
        self.norm = BatchNorm(dim, eps=1e-5, affine=True)
        self.score = linear(dim, 1, generator=generator)

    def _features(self, tokens_BND: Tensor, *, update: bool) -> tuple[Tensor, Tensor]:
        """Return features f (B, N, D) and scores s (B, N, 1)."""
        self.check_tokens(tokens_BND)
        features_BND: Tensor = self.norm(self.project(tokens_BND), update=update)
        return features_BND, functional.softplus(self.score(features_BND.relu()))

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self._finish(*self._features(tokens_BND, update=True))

    def _finish(self, features_BND: Tensor, scores_BN1: Tensor) -> Tensor:
        """Mean over the tokens of score times normalised feature."""
        norms_BN1: Tensor = torch.linalg.vector_norm(features_BND, dim=-1, keepdim=True).clamp_min(
            1e-12
        )
        weights_B1N = (scores_BN1 / norms_BN1).transpose(1, 2)
        total_BD: Tensor = (weights_B1N @ features_BND)[:, 0]
        return total_BD / features_BND.shape[1]

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Scores divided by their sum, shape (B, 1, N)."""
        scores_B1N = self._features(tokens_BND, update=False)[1].transpose(1, 2)
        return scores_B1N / scores_B1N.sum(dim=-1, keepdim=True)

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; every token gets the mean score."""
        features_BND, scores_BN1 = self._features(tokens_BND, update=False)
        even_BN1 = scores_BN1.mean(dim=1, keepdim=True).expand_as(scores_BN1)
        return self._finish(features_BND, even_BN1)[:, None]

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image; nothing folds, so this is also the published count."""
        return num_tokens * (self.dim**2 + 2 * self.dim)


class ChannelGate(nn.Module):
    """Channel attention: a shared bias-free MLP on mean and maximum, (B, N, D) -> (B, D)."""

    def __init__(self, dim: int, hidden: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.fc1 = linear(dim, hidden, bias=False, generator=generator)
        self.fc2 = linear(hidden, dim, bias=False, generator=generator)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Return the gate in (0, 1)."""
        squeezed_B2D = torch.stack([tokens_BND.mean(dim=1), tokens_BND.amax(dim=1)], dim=1)
        excited_B2D: Tensor = self.fc2(self.fc1(squeezed_B2D).relu())
        return excited_B2D.sum(dim=1).sigmoid()


class SpatialGate(nn.Module):
    """Spatial attention: 7x7 convolution on channel mean and maximum, (B, N, D) -> (B, N)."""

    def __init__(self, grid: tuple[int, int], generator: torch.Generator | None) -> None:
        super().__init__()
        self.grid = grid
        self.conv = conv(2, 1, kernel=7, generator=generator)
        self.norm = BatchNorm(1, eps=1e-5, affine=True)

    def forward(self, tokens_BND: Tensor, *, update: bool) -> Tensor:
        """Return the gate in (0, 1)."""
        squeezed_B2N = torch.stack([tokens_BND.mean(dim=2), tokens_BND.amax(dim=2)], dim=1)
        mixed_B1HW: Tensor = self.conv(squeezed_B2N.reshape(-1, 2, *self.grid))
        gate_BN1: Tensor = self.norm(mixed_B1HW.flatten(2).transpose(1, 2), update=update)
        return gate_BN1[..., 0].sigmoid()


class CbamPooler(Pooler):
    """Convolutional block attention: (B, N, D) -> (B, D), over the token grid.

        u = x * channel_gate(x)      y = mean_n relu(u * spatial_gate(u) + x)

    `attention` returns one map, the spatial gate divided by its sum (gates are no softmax).

    Args:
        dim: Token width D.
        grid: Token grid; need not be square.
        reduction: Divides D to give the channel gate's hidden width.
        generator: Draws channel gate, then spatial gate.

    Source: Woo et al., "CBAM: Convolutional Block Attention Module" (2018), section 3.
    """

    name = "cbam"
    needs_grid = True

    def __init__(
        self,
        *,
        dim: int,
        grid: Grid,
        reduction: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(dim=dim, grid=grid, num_maps=1)
        assert self.grid is not None
        self.hidden = max(1, dim // positive_int(self.name, "reduction", reduction))
        self.channel = ChannelGate(dim, self.hidden, generator)
        self.spatial = SpatialGate(self.grid, generator)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool, shape (B, D)."""
        return self._finish(tokens_BND, *self._gates(tokens_BND, update=True))

    def _gates(self, tokens_BND: Tensor, *, update: bool) -> tuple[Tensor, Tensor]:
        """Return the tokens behind the channel gate and the spatial gate (B, N)."""
        self.check_tokens(tokens_BND)
        gated_BND = tokens_BND * self.channel(tokens_BND)[:, None]
        gate_BN: Tensor = self.spatial(gated_BND, update=update)
        return gated_BND, gate_BN

    def _finish(self, tokens_BND: Tensor, gated_BND: Tensor, gate_BN: Tensor) -> Tensor:
        refined_BND: Tensor = (gated_BND * gate_BN[..., None] + tokens_BND).relu()
        return refined_BND.mean(dim=1)

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Spatial gate divided by its sum, shape (B, 1, N)."""
        gate_B1N = self._gates(tokens_BND, update=False)[1][:, None]
        return gate_B1N / gate_B1N.sum(dim=-1, keepdim=True)

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """See `Pooler.ablate`; every token gets the mean spatial gate."""
        gated_BND, gate_BN = self._gates(tokens_BND, update=False)
        even_BN = gate_BN.mean(dim=1, keepdim=True).expand_as(gate_BN)
        return self._finish(tokens_BND, gated_BND, even_BN)[:, None]

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds per image; nothing folds, so this is also the published count."""
        return 4 * self.dim * self.hidden + 2 * 49 * num_tokens
