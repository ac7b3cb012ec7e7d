"""Pool first: score and pool tokens without ever projecting all of them.

A head with query q_h, key map W_K and value map W_V over tokens t_n computes

    a_hn = softmax_n(<q_h, W_K[h] t_n>)         y_h = sum_n a_hn W_V[h] t_n

Both maps are linear, so the key map moves to the query (`fold_queries`) and the value map to the
pooled token (`project_heads`), the same algebra at a fraction of the work:

    u_h = W_K[h]^T q_h    a_hn = softmax_n(<u_h, t_n>)    z_h = sum_n a_hn t_n    y_h = W_V[h] z_h

Where t_n is itself an affine function of the stored token x_n, the function folds too. A `View`
is such a function, known only by its scores and its sums. The stored tokens are shared by all
probes of a pass; nothing the size of the tokens is computed per probe.

Source: "Attention, Please! Revisiting Attentive Probing Through the Lens of Efficiency"
(ICLR 2026), where the key map's redundancy motivates efficient probing.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from epcache.poolers.base import split_heads
from epcache.poolers.layers import BatchNorm, mean_and_variance


def fold_queries(query: Tensor, key_weight_DD: Tensor, num_heads: int) -> Tensor:
    """Move the key map and the usual scale to the queries.

    Args:
        query: Projected queries, (D,) shared by all images or (B, D) one per image; heads are
            contiguous slices.
        key_weight_DD: Key projection W_K.
        num_heads: Number of heads h.

    Returns:
        u_h = (D / h)**-0.5 W_K[h]^T q_h, shape (h, D) or (B, h, D).
    """
    weight_hkD = split_rows(key_weight_DD, num_heads)
    scale = weight_hkD.shape[1] ** -0.5
    return torch.einsum("...hk,hkd->...hd", split_heads(query, num_heads) * scale, weight_hkD)


def split_rows(weight_OD: Tensor, num_heads: int) -> Tensor:
    """Cut the output axis of a weight into contiguous head slices: (h, O / h, D)."""
    rows, dim = weight_OD.shape
    return weight_OD.reshape(num_heads, rows // num_heads, dim)


def bias_scores(query: Tensor, key_bias_D: Tensor, num_heads: int) -> Tensor:
    """Score of the key bias, shape (h, 1) or (B, h, 1).

    Constant over tokens, so the softmax ignores it; kept so that the bias has a gradient (zero).
    """
    product = split_heads(query * key_bias_D, num_heads)
    scale: float = product.shape[-1] ** -0.5
    return product.sum(-1, keepdim=True) * scale


def project_heads(pooled_BhD: Tensor, value_weight_OD: Tensor) -> Tensor:
    """Apply the h-th slice of the value map's rows to the h-th pooled token, shape (B, O)."""
    weight_hoD = split_rows(value_weight_OD, pooled_BhD.shape[1])
    return torch.einsum("bhd,hod->bho", pooled_BhD, weight_hoD).flatten(1)


class View(Protocol):
    """Tokens t_n = f(x_n), f affine, known by inner products and weighted sums."""

    def scores(self, folded: Tensor) -> Tensor:
        """Inner products <u_h, t_n> of (h, D) or (B, h, D) vectors, shape (B, h, N)."""

    def pool(self, weights_BhN: Tensor) -> Tensor:
        """Sums over n of weights times t_n, shape (B, h, D)."""


class RawView:
    """The stored tokens themselves."""

    def __init__(self, tokens_BND: Tensor) -> None:
        self.tokens_BND = tokens_BND

    def scores(self, folded: Tensor) -> Tensor:
        """See `View`; shared vectors score all images in one matrix product."""
        equation = "bhd,bnd->bhn" if folded.dim() == 3 else "hd,bnd->bhn"
        return torch.einsum(equation, folded, self.tokens_BND)

    def pool(self, weights_BhN: Tensor) -> Tensor:
        """See `View`."""
        return torch.einsum("bhn,bnd->bhd", weights_BhN, self.tokens_BND)


def token_rstd(tokens_BND: Tensor, eps: float) -> Tensor:
    """Reciprocal standard deviation of each token, shape (B, N), in float32 or wider."""
    _, variance_BN = mean_and_variance(tokens_BND, (-1,))
    return (variance_BN + eps).rsqrt()


class NormView:
    """LayerNorm of the tokens, without normalising any of them.

    LN(x) = w * C(x) * rstd + b, where C subtracts the mean over channels. C is symmetric and
    linear: <u, LN(x)> = rstd <C(w * u), x> + <u, b>, and the sum over tokens of weights a is
    w * C(sum a rstd x) + b sum a. One number per token is all that is needed of the tokens.

    Args:
        tokens_BND: Stored tokens.
        norm: The LayerNorm.
        rstd_BN: `token_rstd`, when another view of the same tokens already has it.
    """

    def __init__(
        self, tokens_BND: Tensor, norm: nn.LayerNorm, rstd_BN: Tensor | None = None
    ) -> None:
        self.raw = RawView(tokens_BND)
        self.norm = norm
        self.rstd_BN = token_rstd(tokens_BND, norm.eps) if rstd_BN is None else rstd_BN

    def scores(self, folded: Tensor) -> Tensor:
        """See `View`."""
        centred = _centre(folded * self.norm.weight)
        scores = self.raw.scores(centred) * self.rstd_BN[:, None]
        return scores + (folded * self.norm.bias).sum(-1, keepdim=True)

    def pool(self, weights_BhN: Tensor) -> Tensor:
        """See `View`."""
        pooled = _centre(self.raw.pool(weights_BhN * self.rstd_BN[:, None]))
        return pooled * self.norm.weight + weights_BhN.sum(-1, keepdim=True) * self.norm.bias


def _centre(vectors: Tensor) -> Tensor:
    return vectors - vectors.mean(dim=-1, keepdim=True)


class StandardView:
    """Tokens standardised per channel by batch statistics, without touching any token.

    Args:
        tokens_BND: Stored tokens.
        norm: Affine-free batch normalisation over images and tokens.
        update: Let a training batch enter the running statistics.
    """

    def __init__(self, tokens_BND: Tensor, norm: BatchNorm, *, update: bool) -> None:
        self.raw = RawView(tokens_BND)
        self.mean_D, var_D = norm.moments(tokens_BND, update=update)
        self.rstd_D = (var_D + norm.eps).rsqrt()

    def scores(self, folded: Tensor) -> Tensor:
        """See `View`."""
        scaled = folded * self.rstd_D
        return self.raw.scores(scaled) - (scaled * self.mean_D).sum(-1, keepdim=True)

    def pool(self, weights_BhN: Tensor) -> Tensor:
        """See `View`."""
        total = weights_BhN.sum(-1, keepdim=True)
        return (self.raw.pool(weights_BhN) - total * self.mean_D) * self.rstd_D


class PrependView:
    """Another view with one more token in front, and optionally a position added to each token.

    Args:
        rest: The tokens after the first.
        first: The first token, (D,) or (B, D).
        positions_ND: Added to the tokens of `rest`.
    """

    def __init__(self, rest: View, first: Tensor, positions_ND: Tensor | None = None) -> None:
        self.rest = rest
        self.first = first
        self.positions_ND = positions_ND

    def scores(self, folded: Tensor) -> Tensor:
        """See `View`; N counts the first token."""
        rest_BhN = self.rest.scores(folded)
        if self.positions_ND is not None:
            rest_BhN = rest_BhN + folded @ self.positions_ND.transpose(0, 1)
        first = (folded * self.first.unsqueeze(-2)).sum(-1, keepdim=True)
        return torch.cat([first.expand(*rest_BhN.shape[:2], 1), rest_BhN], dim=-1)

    def pool(self, weights_BhN: Tensor) -> Tensor:
        """See `View`; N counts the first token."""
        first_Bh1, rest_BhN = weights_BhN[..., :1], weights_BhN[..., 1:]
        pooled = first_Bh1 * self.first.unsqueeze(-2) + self.rest.pool(rest_BhN)
        if self.positions_ND is not None:
            pooled = pooled + rest_BhN @ self.positions_ND
        return pooled
