"""Layers of many probes at once, with the gradients that a bank needs and no others.

``nn.Linear`` and ``BatchNorm1d`` of S stacked probes as single operations. Their gradients are
written by hand for the memory they move: automatic differentiation gives a weight's gradient as a
transposed view, which an optimizer has to copy, and takes a norm in twice as many passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epcache.workspace import Workspace


def stacked_linear(x_SBI: Tensor, weight_SOI: Tensor, workspace: Workspace | None = None) -> Tensor:
    """``x @ weight.T`` for every S, (S, B, O); `x` may be a transposed view and is not copied.

    The gradient of `x` lies in the workspace, until the next gradient there.
    """
    y_SBO: Tensor = _StackedLinear.apply(x_SBI, weight_SOI, workspace or Workspace())
    return y_SBO


def stacked_norm(x_SBO: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each of S stacks normalised over its batch, as batch normalisation does it in training.

    Args:
        x_SBO: Contiguous or not.
        eps: Added to the variance.

    Returns:
        The normalised values (S, B, O), differentiable, and the mean and the biased variance
        (S, O) that they were normalised with, which are not.
    """
    normal_SBO, mean_SO, var_SO = _StackedNorm.apply(x_SBO, eps)
    return normal_SBO, mean_SO, var_SO


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBI: Tensor, weight_SOI: Tensor, workspace: Workspace) -> Tensor:
        ctx.save_for_backward(x_SBI, weight_SOI)
        ctx.workspace = workspace
        return torch.bmm(x_SBI, weight_SOI.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad_SBO: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x_SBI, weight_SOI = ctx.saved_tensors
        grad_weight = torch.bmm(grad_SBO.transpose(1, 2), x_SBI)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        grad_x = ctx.workspace.empty("gradient", x_SBI.shape, grad_SBO)
        torch.bmm(grad_SBO, weight_SOI, out=grad_x)
        return grad_x, grad_weight, None


class _StackedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBO: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean_S1O = x_SBO.mean(1, keepdim=True)
        normal_SBO = x_SBO - mean_S1O
        norm_S1O = torch.linalg.vector_norm(normal_SBO, dim=1, keepdim=True)
        var_S1O = norm_S1O.square_().div_(x_SBO.shape[1])
        inverse_S1O = (var_S1O + eps).rsqrt_()
        normal_SBO.mul_(inverse_S1O)
        ctx.save_for_backward(normal_SBO, inverse_S1O)
        mean_SO, var_SO = mean_S1O.squeeze(1), var_S1O.squeeze(1)
        ctx.mark_non_differentiable(mean_SO, var_SO)
        return normal_SBO, mean_SO, var_SO

    @staticmethod
    def backward(ctx: Any, grad_SBO: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        normal_SBO, inverse_S1O = ctx.saved_tensors
        shared_S1O = (grad_SBO * normal_SBO).mean(1, keepdim=True)
        grad_x = grad_SBO - grad_SBO.mean(1, keepdim=True)
        return grad_x.addcmul_(normal_SBO, shared_S1O, value=-1).mul_(inverse_S1O), None
