"""The CAPI encoder, which timm does not have: registers with positions, rotary embedding, RMSNorm.

Parameter names are those of the published checkpoints, whose decoder is not built.
Source: "Cluster and Predict Latent Patches for Improved Masked Image Modeling", 2025, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

MAX_FREQUENCY, MIN_FREQUENCY = 7.0, 7e-4
"""Turns per image side of the fastest and of the slowest rotary pair."""


class CapiEncoder(nn.Module):
    """A pre-norm ViT without biases whose registers sit on the edge of the image.

    Returns (prefix, patch) of every block, which is what a backbone of one's own may return.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    has_class_token = False
    """All prefix tokens are registers."""

    def __init__(
        self, *, dim: int, depth: int, num_heads: int, patch_size: int = 14, num_registers: int = 16
    ) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, num_registers, dim) * 0.02)
        self.patch_embed = nn.Conv2d(3, dim, patch_size, stride=patch_size)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(depth))
        self.final_norm = nn.RMSNorm(dim, eps=1e-5, elementwise_affine=False)
        self.patch_size = patch_size

    def forward(self, images_BCHW: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, R, D) registers and (B, N, D) patch tokens after each block."""
        embedded_BDhw = self.patch_embed(images_BCHW)
        height, width = embedded_BDhw.shape[-2:]
        num_registers = self.registers.shape[1]
        coords_T2 = torch.cat([_edge_coords(num_registers), _grid_coords(height, width)])
        tokens = torch.cat(
            [
                self.registers.expand(len(images_BCHW), -1, -1),
                embedded_BDhw.flatten(2).transpose(1, 2).to(self.registers.dtype),
            ],
            dim=1,
        )
        coords_T2 = coords_T2.to(tokens.device)
        layers = []
        for block in self.encoder.blocks:  # type: ignore[union-attr]
            tokens = block(tokens, coords_T2)
            layers.append((tokens[:, :num_registers], tokens[:, num_registers:]))
        return layers


def capi_vitl14() -> CapiEncoder:
    """CAPI ViT-L/14."""
    return CapiEncoder(dim=1024, depth=24, num_heads=16)


class _Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.residual1 = _Residual(dim, _Attention(dim, num_heads))
        self.residual2 = _Residual(dim, _Mlp(dim))

    def forward(self, tokens_BTD: Tensor, coords_T2: Tensor) -> Tensor:
        tokens_BTD = self.residual1(tokens_BTD, coords_T2)
        return self.residual2(tokens_BTD)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, dim: int, function: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.fn = function

    def forward(self, tokens_BTD: Tensor, *arguments: Tensor) -> Tensor:
        return tokens_BTD + self.fn(self.norm(tokens_BTD), *arguments)  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim, bias=False)
        self.fc2 = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(tokens_BTD)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.rope = _Rope(dim // num_heads)

    def forward(self, tokens_BTD: Tensor, coords_T2: Tensor) -> Tensor:
        query, key, value = (
            layer(tokens_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rope(coords_T2)
        query, key = (
            (part * cos + _rotate_half(part) * sin).to(value.dtype) for part in (query, key)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Rope(nn.Module):
    """Angles that are linear in a token's row (first half of the channels) and column (second)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        quarter = torch.linspace(0, -1, head_dim // 4)
        half = (MAX_FREQUENCY * (MAX_FREQUENCY / MIN_FREQUENCY) ** quarter).repeat(2)
        freqs = torch.zeros(2, head_dim)
        freqs[0, : head_dim // 2] = half
        freqs[1, head_dim // 2 :] = half
        self.freqs = nn.Parameter(2 * math.pi * freqs)

    def forward(self, coords_T2: Tensor) -> tuple[Tensor, Tensor]:
        # Not a matrix product: autocast would round the angles to half precision.
        angles = coords_T2[:, :1] * self.freqs[0] + coords_T2[:, 1:] * self.freqs[1]
        return angles.cos(), angles.sin()


def _rotate_half(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _grid_coords(height: int, width: int) -> Tensor:
    return torch.cartesian_prod(torch.linspace(0, 1, height), torch.linspace(0, 1, width))


def _edge_coords(count: int) -> Tensor:
    """Evenly spaced points on the border of the unit square, one side after the other."""
    steps = torch.arange(count // 4) / (count // 4)
    zeros, ones = torch.zeros_like(steps), torch.ones_like(steps)
    sides = [(steps, zeros), (ones, steps), (1 - steps, ones), (zeros, 1 - steps)]
    return torch.cat([torch.stack(side, dim=-1) for side in sides])
