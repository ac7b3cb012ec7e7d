"""Attention pooling for many queries at once, with its gradient written by hand.

Tokens are constants of a probe, so nothing is ever differentiated with respect to them: of the six
matrix products that automatic differentiation would do, four are left, and all queries of all
probes take part in the same four. Images are taken a few at a time so that scores stay in cache.

    S = Q X^T      A = softmax(S)      Z = A X
    dA = dZ X^T    dS = A (dA - <dZ, Z>)      dQ = sum over images of dS X
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE_SCORES = 2**20
"""Scores (images x queries x tokens) a tile; 4 MB in float32 stay in the last-level cache."""


def attention_pool(queries_QD: Tensor, tokens_BND: Tensor) -> Tensor:
    """Pool tokens by softmax attention of shared queries.

    Args:
        queries_QD: Scaled queries in float32; scores are their plain inner products.
        tokens_BND: Tokens in the type in which to multiply: float32, or bfloat16 where it is fast.

    Returns:
        (B, Q, D) float32, differentiable with respect to the queries alone.
    """
    pooled: Tensor = _AttentionPool.apply(queries_QD, tokens_BND)
    return pooled


class _AttentionPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries_QD: Tensor, tokens_BND: Tensor) -> Tensor:
        num_images, num_tokens, dim = tokens_BND.shape
        num_queries = len(queries_QD)
        queries = queries_QD.to(tokens_BND.dtype)
        weights_BQN = tokens_BND.new_empty(num_images, num_queries, num_tokens)
        pooled_BQD = tokens_BND.new_empty(num_images, num_queries, dim)
        for tile in tiles(num_images, num_queries * num_tokens):
            tokens = tokens_BND[tile]
            scores = torch.matmul(queries, tokens.transpose(1, 2))
            weights_BQN[tile] = torch.softmax(scores, dim=-1, dtype=torch.float32)
            torch.bmm(weights_BQN[tile], tokens, out=pooled_BQD[tile])
        ctx.save_for_backward(tokens_BND, weights_BQN, pooled_BQD)
        return pooled_BQD.float()

    @staticmethod
    def backward(ctx: Any, grad_BQD: Tensor) -> tuple[Tensor, None]:
        tokens_BND, weights_BQN, pooled_BQD = ctx.saved_tensors
        num_images, num_queries, num_tokens = weights_BQN.shape
        grad_QD = grad_BQD.new_zeros(num_queries, tokens_BND.shape[2], dtype=torch.float32)
        for tile in tiles(num_images, num_queries * num_tokens):
            tokens, weights, grad = tokens_BND[tile], weights_BQN[tile], grad_BQD[tile]
            # sum_n a_n dA_n is <dZ, Z>: over the width once instead of over the tokens
            inner_BQ1 = (grad * pooled_BQD[tile]).sum(-1, keepdim=True)
            grad_weights = torch.bmm(grad.to(tokens.dtype), tokens.transpose(1, 2))
            grad_scores = weights * (grad_weights - inner_BQ1.to(tokens.dtype))
            grad_QD += torch.bmm(grad_scores, tokens).sum(0, dtype=torch.float32)
        return grad_QD, None


def tiles(num_images: int, scores_per_image: int) -> list[slice]:
    """Cut a batch so that the scores of a part stay small."""
    size = max(1, min(num_images, TILE_SCORES // scores_per_image))
    return [slice(start, start + size) for start in range(0, num_images, size)]
