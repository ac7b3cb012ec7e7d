"""Differences between published checkpoints and timm's models that timm's own filters leave."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from epcache.weights.checkpoint import State

SHARED_BIAS = "rel_pos_bias.relative_position_bias_table"


def repaired(state: State, model: nn.Module) -> tuple[State, tuple[str, ...], str]:
    """A copy of a state dict that is closer to a model's own.

    Args:
        state: Tensors by name, nesting and prefix already off.
        model: The timm model they are meant for.

    Returns:
        The state, notes on what was changed, and a problem (empty if none) that rules it out.
    """
    state, notes = dict(state), []
    keys = set(model.state_dict())
    notes += _spread_shared_bias(state, keys)
    notes += _rename_final_norm(state, keys)
    problem = _drop_zero_biases(state, keys)
    if "pos_embed" in state and "register_tokens" not in state and not problem:
        more, problem = _fit_prefix(state, model)
        notes += more
    return state, tuple(notes), problem


def _spread_shared_bias(state: State, keys: set[str]) -> list[str]:
    """BEiT and SimMIM pre-train one position bias for all blocks, and use it in each."""
    if SHARED_BIAS not in state or SHARED_BIAS in keys:
        return []
    table = state.pop(SHARED_BIAS)
    own = [key for key in keys if key.endswith(".attn.relative_position_bias_table")]
    for key in own:
        state.setdefault(key, table)
    return [f"{SHARED_BIAS} copied to {len(own)} blocks"] if own else []


def _rename_final_norm(state: State, keys: set[str]) -> list[str]:
    """Timm keeps the last norm before or after pooling, whatever the file did."""
    notes = []
    for ours, theirs in (("fc_norm", "norm"), ("norm", "fc_norm")):
        if f"{ours}.weight" not in keys or f"{theirs}.weight" in keys:
            continue
        if f"{theirs}.weight" not in state or f"{ours}.weight" in state:
            continue
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                state[f"{ours}.{kind}"] = state.pop(f"{theirs}.{kind}")
        notes.append(f"{theirs} used as {ours}")
    return notes


def _drop_zero_biases(state: State, keys: set[str]) -> str:
    """DINOv3 checkpoints carry attention biases that training left at zero; timm's lack them."""
    if any(key.endswith(("qkv.bias", "q_bias")) for key in keys):
        return ""
    for key in [key for key in state if key.endswith(".attn.qkv.bias")]:
        if bool(state[key].any()):
            return f"the file has attention biases ({key}), the backbone has none"
        del state[key]
    return ""


def _fit_prefix(state: State, model: nn.Module) -> tuple[list[str], str]:
    """Give the position embedding an entry for [CLS] where the model's has one, or take it off."""
    target, grid = getattr(model, "pos_embed", None), pos_grid(model)
    table = state["pos_embed"]
    if not isinstance(target, Tensor) or target.ndim != 3 or table.ndim != 3 or grid is None:
        return [], ""
    num_prefix = target.shape[1] - grid[0] * grid[1]
    extra = _num_extra(table.shape[1], num_prefix)
    if extra is None:
        return [], f"its pos_embed of {table.shape[1]} entries is no square grid of positions"
    if extra and not num_prefix:
        # Adding the [CLS] position to the token itself is the same sum.
        if "cls_token" in state:
            state["cls_token"] = state["cls_token"] + table[:, :1]
        state["pos_embed"] = table[:, extra:]
        return ["pos_embed: entry of [CLS] taken off"], ""
    if num_prefix and not extra:
        zeros = table.new_zeros(1, num_prefix, table.shape[2])
        state["pos_embed"] = torch.cat([zeros, table], dim=1)
        return ["pos_embed: zero entry for [CLS] added"], ""
    return [], ""


def resampled(state: State, model: nn.Module) -> State:
    """The state with its position embedding on the model's grid, where timm's filter left it."""
    target, grid, table = getattr(model, "pos_embed", None), pos_grid(model), state.get("pos_embed")
    if not isinstance(target, Tensor) or not isinstance(table, Tensor) or grid is None:
        return state
    if table.shape == target.shape or table.ndim != 3 or target.ndim != 3:
        return state
    from timm.layers.pos_embed import resample_abs_pos_embed

    num_prefix = target.shape[1] - grid[0] * grid[1]
    table = resample_abs_pos_embed(table, new_size=list(grid), num_prefix_tokens=num_prefix)
    return {**state, "pos_embed": cast(Tensor, table)}


def pos_grid(model: nn.Module) -> tuple[int, int] | None:
    """Token grid that a model's position embedding is for."""
    embed = getattr(model, "patch_embed", None)
    grid = getattr(embed, "grid_size", None) or getattr(model, "tokens_spatial_shape", None)
    return (int(grid[0]), int(grid[1])) if grid is not None and len(grid) == 2 else None


def _num_extra(length: int, num_prefix: int) -> int | None:
    """How many of the entries come before a square grid: as in the model, else one, else none."""
    for extra in dict.fromkeys((num_prefix, 1, 0)):
        if length > extra and math.isqrt(length - extra) ** 2 == length - extra:
            return extra
    return None
