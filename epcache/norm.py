"""The backbone's last norm, apart from it: stores hold raw block outputs, readers apply this."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from epcache.errors import ConfigError, WeightsError
from epcache.store.files import write_durably

KINDS = ("layernorm", "rmsnorm")
PLACES = ("final_norm", "norm", "fc_norm", "head.norm")
"""One's own attribute, then timm's: before pooling, after pooling, in a head that pools first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinalNorm:
    """A LayerNorm or RMSNorm over the token width, computed in float32."""

    kind: str
    """``layernorm`` or ``rmsnorm``."""
    weight: Tensor
    """(D,) float32."""
    bias: Tensor | None
    """(D,) float32, or None."""
    eps: float

    def __post_init__(self) -> None:
        """Refuse a kind nobody knows and shapes that do not fit."""
        if self.kind not in KINDS:
            raise ConfigError(f"final norm kind {self.kind!r} is unknown; expected one of {KINDS}")
        if self.weight.ndim != 1 or (
            self.bias is not None and self.bias.shape != self.weight.shape
        ):
            raise ConfigError(
                f"final norm weight has shape {tuple(self.weight.shape)}; expected (D,), and a "
                f"bias of the same shape or none"
            )

    @property
    def dim(self) -> int:
        """Token width D that the norm is for."""
        return self.weight.shape[0]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Normalise the last axis.

        Args:
            tokens: (..., D), any floating type.

        Returns:
            (..., D) float32, on the tokens' device.
        """
        if tokens.shape[-1] != self.dim:
            raise ConfigError(
                f"final norm is for tokens of width {self.dim}, these have width "
                f"{tokens.shape[-1]}; only layers as wide as the last one have it: use --norm none"
            )
        tokens = tokens.float()
        weight = self.weight.to(tokens.device)
        bias = None if self.bias is None else self.bias.to(tokens.device)
        if self.kind == "layernorm":
            return nn.functional.layer_norm(tokens, (self.dim,), weight, bias, self.eps)
        tokens = tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True) + self.eps) * weight
        return tokens if bias is None else tokens + bias

    def to_bytes(self) -> bytes:
        """The contents of ``final_norm.safetensors``."""
        tensors = {"weight": self.weight.contiguous()}
        if self.bias is not None:
            tensors["bias"] = self.bias.contiguous()
        metadata = {"kind": self.kind, "eps": json.dumps(self.eps)}
        return with_sorted_header(safetensors.torch.save(tensors, metadata))

    def save(self, path: Path) -> None:
        """Write ``final_norm.safetensors``, whole or not at all."""
        write_durably(path, self.to_bytes(), partial_dir=path.parent)

    @classmethod
    def load(cls, path: Path) -> FinalNorm:
        """Read what :meth:`save` wrote: a file, or the one in a store's folder.

        Raises:
            WeightsError: If the file is missing or is none of ours.
        """
        if path.is_dir():
            path = path / "final_norm.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return cls(
                kind=metadata["kind"],
                weight=tensors["weight"].float(),
                bias=tensors["bias"].float() if "bias" in tensors else None,
                eps=float(metadata["eps"]),
            )
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            raise WeightsError(
                f"{path} holds no final norm ({error}); expected safetensors with weight, maybe "
                f"bias, and metadata kind and eps"
            ) from error


def with_sorted_header(data: bytes) -> bytes:
    """The same safetensors file with its header's keys in order.

    The library writes metadata in a random order, and a store's bytes must not be random.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":"))
    padded = header.encode() + b" " * (-len(header.encode()) % 8)
    return len(padded).to_bytes(8, "little") + padded + data[8 + length :]


def find_final_norm(model: nn.Module, dim: int) -> FinalNorm | None:
    """The last norm of a backbone.

    Args:
        model: A timm model, or a module of one's own with an attribute ``final_norm``.
        dim: Token width of its last layer.

    Returns:
        A copy of the norm, or None where the model ends in something else (batch norm, nothing).
    """
    for place in PLACES:
        module: object = model
        for part in place.split("."):
            module = getattr(module, part, None)
        norm = final_norm_from(module)
        if norm is not None and norm.dim == dim:
            return norm
    return None


def final_norm_from(module: object) -> FinalNorm | None:
    """A copy of a LayerNorm or RMSNorm module; None for any other module."""
    if isinstance(module, FinalNorm):
        return module
    name = type(module).__name__.lower()
    if not isinstance(module, nn.Module) or "act" in name:
        return None  # norm and activation in one module: not a linear readout's norm
    if isinstance(module, nn.LayerNorm):
        kind = "layernorm"
    elif isinstance(module, nn.RMSNorm) or name.startswith("rmsnorm"):
        kind = "rmsnorm"
    else:
        return None
    shape = tuple(int(size) for size in module.normalized_shape)  # type: ignore[union-attr]
    if len(shape) != 1:
        return None
    weight, bias = module.weight, getattr(module, "bias", None)
    eps = module.eps if module.eps is not None else torch.finfo(torch.float32).eps
    return FinalNorm(
        kind=kind,
        weight=torch.ones(shape) if weight is None else _plain(weight),
        bias=None if bias is None else _plain(bias),
        eps=float(eps),  # type: ignore[arg-type]
    )


def _plain(parameter: Tensor | nn.Module) -> Tensor:
    assert isinstance(parameter, Tensor)
    return parameter.detach().float().cpu().clone()
