"""What every pooler has in common: its shape, its checks and its errors.

A pooler maps the tokens of an image to one vector, ``tokens_BND -> (B, O)``. It is a plain
``nn.Module``: static shapes, no data-dependent control flow and no in-place writes, so that
``torch.func.functional_call`` with ``vmap`` can train a stack of them in one pass.
"""

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from epcache.errors import ConfigError

Grid = tuple[int, int] | int | None
T = TypeVar("T")


class Pooler(nn.Module):
    """Base of all poolers.

    Args:
        dim: Token width D.
        grid: Token grid ``(height, width)``, row-major; an int is a square grid. May be None for
            poolers that treat tokens as a set (`needs_grid` is False).
        dim_out: Pooled width O; `dim` when None.
        num_maps: How many attention maps M `attention` returns; 0 when the pooler has none.
    """

    name: ClassVar[str]
    """The key in ``POOLERS``."""
    needs_prefix: ClassVar[bool] = False
    """The first token must be [CLS]: patch tokens alone cannot be pooled."""
    needs_grid: ClassVar[bool] = False
    """Tokens must be exactly the patch tokens of `grid`, without [CLS]."""
    fills_slices: ClassVar[bool] = False
    """Map m alone decides the m-th of `num_maps` equal slices of the output."""

    def __init__(
        self, *, dim: int, grid: Grid = None, dim_out: int | None = None, num_maps: int = 0
    ) -> None:
        super().__init__()
        self.dim = positive_int(self.name, "dim", dim)
        self.grid = normalise_grid(self.name, grid)
        self.dim_out = self.dim if dim_out is None else dim_out
        self.num_maps = num_maps
        if self.needs_grid and self.grid is None:
            raise ConfigError(
                f"pooler {self.name} needs the token grid and got grid=None; "
                "pass grid=(height, width) of the patch tokens"
            )

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Pool tokens into one vector per image, shape (B, O)."""
        raise NotImplementedError

    def attention(self, tokens_BND: Tensor) -> Tensor:
        """Attention maps over the tokens, shape (B, M, N), each row summing to 1.

        A view only: it never updates running statistics.

        Raises:
            ConfigError: If the pooler has no attention (cls, gap).
        """
        raise ConfigError(
            f"pooler {self.name} has no attention maps; use an attentive pooler such as ep or mhca"
        )

    def pool(self, tokens_BND: Tensor, attention_BMN: Tensor) -> Tensor:
        """Pool with the given maps in place of the pooler's own, shape (B, O).

        ``pool(x, attention(x)) == forward(x)``, so a map can be replaced and the rest kept.

        Raises:
            ConfigError: If the output is not a function of the maps that `attention` returns.
        """
        raise ConfigError(f"pooler {self.name} cannot pool with given attention maps")

    def ablate(self, tokens_BND: Tensor) -> Tensor:
        """Outputs with each map in turn replaced by uniform attention, shape (B, M, O).

        Everything else stays: the other maps, and the weight that the replaced one gives to the
        tokens in all. Never updates running statistics.

        Raises:
            ConfigError: If the pooler has no attention (cls, gap).
        """
        maps_BMN = self.attention(tokens_BND)
        uniform = 1 / maps_BMN.shape[-1]
        replaced = [replace_map(maps_BMN, index, uniform) for index in range(self.num_maps)]
        return torch.stack([self.pool(tokens_BND, maps) for maps in replaced], dim=1)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of `forward` per image as computed here, without the classifier.

        Matrix products and convolutions count; elementwise work, norms and means do not. What is
        computed once per batch (folded queries) counts in full for each image.
        """
        raise NotImplementedError

    def macs_published(self, num_tokens: int) -> int:
        """The same count for the published formulation, which projects every token."""
        return self.macs(num_tokens)

    def check_tokens(self, tokens_BND: Tensor) -> None:
        """Refuse tokens of another shape than this pooler was built for.

        Raises:
            ConfigError: If the tokens are not (B, N, D), or not one per grid cell where the pooler
                needs the grid.
        """
        shape = tuple(tokens_BND.shape)
        if len(shape) != 3 or shape[2] != self.dim:
            raise ConfigError(
                f"pooler {self.name} got tokens of shape {shape}; "
                f"expected (images, tokens, {self.dim})"
            )
        if self.needs_grid and self.grid is not None:
            height, width = self.grid
            if shape[1] != height * width:
                raise ConfigError(
                    f"pooler {self.name} got {shape[1]} tokens; its {height}x{width} grid has "
                    f"{height * width}: pass the patch tokens alone, without [CLS] or registers"
                )


def positive_int(pooler: str, option: str, value: object) -> int:
    """Return `value` if it is a positive int (not a bool), else raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"pooler {pooler}: {option} must be a positive integer, got {value!r}")
    return value


def flag(pooler: str, option: str, value: object) -> bool:
    """Return `value` if it is a bool, else raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"pooler {pooler}: {option} must be true or false, got {value!r}")
    return value


def choice(pooler: str, option: str, value: object, allowed: Sequence[T]) -> T:
    """Return the allowed value equal to `value`, else raise ConfigError naming all of them."""
    for item in allowed:
        if type(value) is type(item) and value == item:
            return item
    names = ", ".join(repr(item) for item in allowed)
    raise ConfigError(f"pooler {pooler}: {option} must be one of {names}, got {value!r}")


def normalise_grid(pooler: str, grid: object) -> tuple[int, int] | None:
    """Return the grid as ``(height, width)``; an int is a square grid, None stays None."""
    if grid is None:
        return None
    sides = grid if isinstance(grid, (tuple, list)) else (grid, grid)
    if len(sides) != 2:
        raise ConfigError(
            f"pooler {pooler}: grid must be (height, width) or one int for a square grid, "
            f"got {grid!r}"
        )
    return positive_int(pooler, "grid", sides[0]), positive_int(pooler, "grid", sides[1])


def nearest_divisors(number: int, wanted: int) -> str:
    """Name the divisors of `number` next to `wanted` below and above: ``"8 or 16"``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)


def nearest_multiples(factor: int, wanted: int) -> str:
    """Name the positive multiples of `factor` next to `wanted`: ``"1020 or 1032"``."""
    below = wanted // factor * factor
    return " or ".join(str(m) for m in (below, below + factor) if m > 0)


def resolve_heads(pooler: str, dim: int, num_heads: int | None) -> int:
    """Return a valid number of heads; None means heads as wide as the backbones' own (64).

    Raises:
        ConfigError: If `num_heads` does not divide `dim`.
    """
    if num_heads is None:
        wanted = max(1, dim // 64)
        return max(d for d in range(1, wanted + 1) if dim % d == 0)
    positive_int(pooler, "num_heads", num_heads)
    if dim % num_heads:
        raise ConfigError(
            f"pooler {pooler}: num_heads={num_heads} does not divide dim={dim}; "
            f"nearest valid num_heads: {nearest_divisors(dim, num_heads)}"
        )
    return num_heads


def replace_map(maps_BMN: Tensor, index: int, value: Tensor | float) -> Tensor:
    """Return a copy of the maps with one of them replaced; `value` broadcasts to (B, N)."""
    replaced = maps_BMN.clone()
    replaced[:, index] = value
    return replaced


def split_heads(tokens: Tensor, num_heads: int) -> Tensor:
    """Cut the last axis into contiguous head slices: (..., D) -> (..., h, D / h)."""
    width = tokens.shape[-1] // num_heads
    return tokens.reshape(*tokens.shape[:-1], num_heads, width)


def attend_all(qkv_BNE: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Let every token attend to every token.

    Written out: the fused kernels have no vmap rule on a CPU, and memory of (B, h, N, N) is the
    price.

    Args:
        qkv_BNE: Queries, keys and values side by side, E = 3 D.
        num_heads: Number of heads h.

    Returns:
        The mixed values (B, N, D) and the attention (B, h, N, N), rows summing to 1.
    """
    query, key, value = (
        split_heads(part, num_heads).transpose(1, 2) for part in qkv_BNE.chunk(3, dim=-1)
    )
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    maps_BhNN = torch.softmax(scores, dim=-1)
    return (maps_BhNN @ value).transpose(1, 2).flatten(2), maps_BhNN
