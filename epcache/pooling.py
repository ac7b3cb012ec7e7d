"""Attention pooling for many queries at once, with its gradient written by hand.

Tokens are constants of a probe, so nothing is ever differentiated with respect to them: of the six
matrix products that automatic differentiation would do, four are left, and all queries of all
probes take part in the same four. Images are taken a few at a time so that scores stay in cache.

    S = X Q^T      A = softmax over tokens of S      Z = A^T X
    dA = X dZ^T    dS = A (dA - sum over tokens of A dA)    dQ = sum over images of dS^T X

Scores lie as images x tokens x queries: then S and dQ are one product each over the tokens of all
images of a part, and few queries cost little more than their share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epcache.workspace import Workspace

TILE_SCORES = 2**19
"""Scores (images x tokens x queries) of a part; 2 MB in float32 stay in a core's cache."""


def attention_pool(
    queries: Sequence[Tensor], tokens_BND: Tensor, workspace: Workspace | None = None
) -> tuple[Tensor, ...]:
    """Pool tokens by softmax attention of shared queries.

    Args:
        queries: Scaled queries (Q, D) in float32, in one group or more; scores are their plain
            inner products.
        tokens_BND: Tokens in the type in which to multiply: float32, or bfloat16 where it is fast.
        workspace: Where the results lie, until the next call with it; None takes new memory.

    Returns:
        For each group (B, Q, D) float32, differentiable with respect to its queries alone.
    """
    pooled: tuple[Tensor, ...] = _AttentionPool.apply(
        workspace or Workspace(), tokens_BND, *queries
    )
    return pooled


class _AttentionPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, workspace: Workspace, tokens_BND: Tensor, *queries: Tensor
    ) -> tuple[Tensor, ...]:
        num_images, num_tokens, dim = tokens_BND.shape
        queries_DQ = _joined(queries, 0).to(tokens_BND.dtype).T
        num_queries = queries_DQ.shape[1]
        ctx.sizes = [len(group) for group in queries]
        shape = num_images, num_tokens, num_queries
        weights_BNQ = workspace.empty("weights", shape, tokens_BND)
        pooled = [
            workspace.empty(f"pooled {group}", (num_images, size, dim), tokens_BND)
            for group, size in enumerate(ctx.sizes)
        ]
        for tile in tiles(num_images, num_queries * num_tokens):
            tokens, weights = tokens_BND[tile], weights_BNQ[tile]
            torch.mm(tokens.reshape(-1, dim), queries_DQ, out=weights.view(-1, num_queries))
            softmax_over_tokens(weights)
            for pooled_BQD, part in zip(
                pooled, torch.split(weights, ctx.sizes, dim=2), strict=True
            ):
                torch.bmm(part.transpose(1, 2), tokens, out=pooled_BQD[tile])
        ctx.save_for_backward(tokens_BND, weights_BNQ)
        return tuple(pooled_BQD.float() for pooled_BQD in pooled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens_BND, weights_BNQ = ctx.saved_tensors
        num_images, num_tokens, num_queries = weights_BNQ.shape
        dim = tokens_BND.shape[2]
        grad_QD = grads[0].new_zeros(num_queries, dim)
        for tile in tiles(num_images, num_queries * num_tokens):
            tokens, weights = tokens_BND[tile], weights_BNQ[tile]
            grad = _joined([part[tile] for part in grads], 1).to(tokens.dtype)
            grad_scores = torch.bmm(tokens, grad.transpose(1, 2)).mul_(weights)
            total = grad_scores.sum(1, keepdim=True, dtype=torch.float32).to(tokens.dtype)
            grad_scores.addcmul_(weights, total, value=-1)
            grad_QD += grad_scores.view(-1, num_queries).T @ tokens.reshape(-1, dim)
        return None, None, *torch.split(grad_QD, ctx.sizes)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts side by side; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def softmax_over_tokens(scores_BNQ: Tensor) -> None:
    """In place, in float32 whatever the scores' type."""
    if scores_BNQ.dtype == torch.float32:
        torch.softmax(scores_BNQ, dim=1, out=scores_BNQ)
    else:
        scores_BNQ.copy_(torch.softmax(scores_BNQ, dim=1, dtype=torch.float32))


def tiles(num_images: int, scores_per_image: int) -> list[slice]:
    """Cut a batch so that the scores of a part stay small."""
    size = max(1, min(num_images, TILE_SCORES // scores_per_image))
    return [slice(start, start + size) for start in range(0, num_images, size)]
