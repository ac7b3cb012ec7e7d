"""Proof that stored tokens are the backbone's: finished by its norm, they are its own features."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from epcache.errors import NumericError
from epcache.norm import FinalNorm
from epcache.store.spec import LayerShape

TOLERANCES = {"float32": 2e-3, "bfloat16": 3e-2, "float16": 7e-3}
"""Largest relative difference allowed: the rounding of float16, in which tokens are stored, and of
a few operations."""

CLASS_ATTENTION = ("blocks_token_only", "cls_attn_blocks", "post_network")
"""CaiT, XCiT and VOLO go on after the blocks, so their own features are not the last block's."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Whether our tokens lead to the backbone's own features."""

    max_relative_error: float | None
    """Largest difference over the largest feature; None where there is nothing to compare with."""
    tolerance: float
    what: str
    """What was compared, or why nothing was."""


def nothing_to_compare(model: nn.Module, norm: FinalNorm | None) -> str:
    """Why a network's own features say nothing about its last layer; empty where they do."""
    if not hasattr(model, "forward_features"):
        return "the module gives its tokens and nothing else"
    if any(hasattr(model, part) for part in CLASS_ATTENTION):
        return "class attention follows the blocks"
    if norm is None:
        return "it ends in no LayerNorm or RMSNorm"
    return ""


def not_applicable(reason: str, precision: str) -> SelfCheck:
    """The check that could not be made."""
    what = f"not applicable: {reason}"
    return SelfCheck(max_relative_error=None, tolerance=TOLERANCES[precision], what=what)


def compare(
    tokens_BTD: Tensor,
    features: Tensor,
    *,
    shape: LayerShape,
    norm: FinalNorm,
    name: str,
    precision: str,
) -> SelfCheck:
    """Compare raw last tokens with a network's own features.

    Args:
        tokens_BTD: Prefix and patch tokens of the last layer.
        features: What ``forward_features`` gave for the same images.
        shape: Of the last layer.
        norm: The network's last norm.
        name: The backbone's, for messages.
        precision: What both were computed in.

    Raises:
        NumericError: If they differ by more than rounding.
    """
    tolerance = TOLERANCES[precision]
    theirs = _as_tokens(features, shape)
    if theirs is None:
        return not_applicable(f"its features have shape {tuple(features.shape)}", precision)
    raw = tokens_BTD[:, -theirs.shape[1] :].half().float()  # as a store holds them
    # Some networks norm inside forward_features, some after pooling; either match is proof.
    error, what = min(
        (_relative_error(norm(raw), theirs), "final norm of the last layer and forward_features"),
        (_relative_error(raw, theirs), "last layer and forward_features (normed after pooling)"),
    )
    if error > tolerance:
        raise NumericError(
            f"self-check of {name} failed: {what} differ by {error:.2g} of the largest value "
            f"(allowed {tolerance:g} in {precision}); these tokens would be wrong"
        )
    return SelfCheck(max_relative_error=error, tolerance=tolerance, what=what)


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value; infinite where one is not a number."""
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))
    return math.inf if math.isnan(error) else error


def _as_tokens(features: Tensor, shape: LayerShape) -> Tensor | None:
    """A backbone's own features as (B, N, D) or (B, R + N, D) float32; None if they are neither."""
    if features.ndim == 4 and features.shape[1:] == (shape.dim, *shape.grid):
        features = features.flatten(2).transpose(1, 2)
    elif features.ndim == 4 and features.shape[1:] == (*shape.grid, shape.dim):
        features = features.flatten(1, 2)
    counts = (shape.num_patches, shape.num_patches + shape.num_prefix)
    if features.ndim != 3 or features.shape[1] not in counts or features.shape[2] != shape.dim:
        return None
    return features.float()
