"""One probe, written to be read: pooler, batch normalisation, linear classifier.

This is the reference that every faster path is tested against.
"""

import torch
from torch import Tensor, nn

from epcache.errors import ConfigError
from epcache.poolers.base import Pooler
from epcache.poolers.layers import BatchNorm, linear


class Probe(nn.Module):
    """Tokens to class logits: pooler -> affine-free BatchNorm(O) -> Linear(O, C).

    Trainable parameters are the pooler's and the classifier's, D*O + M*D + O*C + C for `ep`.

    Args:
        pooler: Maps tokens (B, N, D) to (B, O).
        num_classes: Number of classes C.
        generator: Draws the classifier from torch's default for Linear; None is torch's global
            generator.

    Raises:
        ConfigError: If `num_classes` is not a positive integer.

    Source: "Attention, Please! Revisiting Attentive Probing Through the Lens of Efficiency"
    (ICLR 2026): the head of every published probe, eps 1e-6 and momentum 0.1.
    """

    def __init__(
        self, pooler: Pooler, num_classes: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
            raise ConfigError(f"num_classes must be a positive integer, got {num_classes!r}")
        self.pooler = pooler
        self.norm = BatchNorm(pooler.dim_out, eps=1e-6, momentum=0.1)
        self.head = linear(pooler.dim_out, num_classes, generator=generator)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Classify, logits of shape (B, C)."""
        logits_BC: Tensor = self.head(self.norm(self.pooler(tokens_BND)))
        return logits_BC
