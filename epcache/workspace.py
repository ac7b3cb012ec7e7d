"""Memory that is used again in every step.

An allocator gives a tensor of 100 MB back to the system when it is freed, and the next one comes
back page by page: for the largest tensors of a step that costs as much as a fifth of its products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


class Workspace:
    """Tensors by name, each kept from one step to the next.

    Whoever still needs the values of an earlier step must not share its names; where autograd has
    saved them, it notices that they were overwritten and refuses.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of any content, of another's type and device; the last one of that name ends."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if (
            kept is None
            or kept.numel() < size
            or (kept.dtype, kept.device) != (like.dtype, like.device)
        ):
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(*shape).detach()
