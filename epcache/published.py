"""Efficient-probing heads in the key layout of published checkpoints.

A file is a dict with one entry ``state_dict``, the head of ``nn.Sequential(ep, norm, linear)``:

    0.cls_token (1, M, D)     the queries
    0.v.weight (O, D)         W_V
    1.running_mean (O,)       1.running_var (O,)       1.num_batches_tracked (optional)
    2.weight (C, O)           2.bias (C,)

Files are read with ``weights_only=True``; nothing in them runs.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from epcache.errors import ConfigError, WeightsError
from epcache.poolers.query import EpPooler
from epcache.probe import Probe
from epcache.weights.checkpoint import read_checkpoint

_KEYS = {
    "0.cls_token": "pooler.queries",
    "0.v.weight": "pooler.value.weight",
    "1.running_mean": "norm.running_mean",
    "1.running_var": "norm.running_var",
    "2.weight": "head.weight",
    "2.bias": "head.bias",
}
_AXES = {
    "0.cls_token": ("1", "M", "D"),
    "0.v.weight": ("O", "D"),
    "1.running_mean": ("O",),
    "1.running_var": ("O",),
    "2.weight": ("C", "O"),
    "2.bias": ("C",),
}
_COUNTER = "1.num_batches_tracked"


def to_published(probe: Probe) -> dict[str, Tensor]:
    """Return an EP probe's state under the published keys, as copies on the CPU.

    Raises:
        ConfigError: If the pooler is not `ep` with its value projection.
    """
    if not isinstance(probe.pooler, EpPooler) or probe.pooler.value is None:
        raise ConfigError(
            f"a probe with pooler {probe.pooler.name} has no published layout; "
            "only ep with value=True has"
        )
    state = {key: tensor.detach().cpu().clone() for key, tensor in probe.state_dict().items()}
    published = {key: state[ours] for key, ours in _KEYS.items()}
    published["0.cls_token"] = published["0.cls_token"][None]
    published[_COUNTER] = state["norm.num_batches_tracked"]
    return published


def from_published(state: Mapping[str, Tensor]) -> Probe:
    """Build the EP probe of a published state; every size is read from the shapes.

    Returns:
        The probe in evaluation mode, float32, on the CPU.

    Raises:
        WeightsError: If a key is missing, unexpected, of the wrong shape or not finite.
    """
    _check_keys(state)
    sizes = _sizes(state)
    unused = torch.Generator()  # every value is replaced; leaves torch's global state alone
    try:
        pooler = EpPooler(
            dim=sizes["D"], num_queries=sizes["M"], dim_out=sizes["O"], generator=unused
        )
        probe = Probe(pooler, sizes["C"], unused)
    except ConfigError as error:
        raise WeightsError(f"published EP head cannot be built: {error}") from error
    ours = {_KEYS[key]: state[key].float() for key in _KEYS}
    ours["pooler.queries"] = ours["pooler.queries"][0]
    ours["norm.num_batches_tracked"] = state.get(_COUNTER, torch.tensor(0)).long()
    probe.load_state_dict(ours)
    return probe.eval()


def check_target(path: Path) -> None:
    """Refuse a place where no file can be written, before anything is trained for it.

    Raises:
        ConfigError: It is a folder, or lies in none.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--export {path}: expected a file in a folder that exists")


def save_published(probe: Probe, path: Path) -> None:
    """Write an EP probe to a published-layout file, whole or not at all.

    Raises:
        ConfigError: If the pooler is not `ep` with its value projection.
    """
    state = to_published(probe)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"state_dict": state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_published(path: Path) -> Probe:
    """Read an EP probe from a published-layout file.

    Returns:
        The probe in evaluation mode, float32, on the CPU.

    Raises:
        WeightsError: If the file is missing, is no file of tensors alone or holds something else
            than an EP head.
    """
    content = read_checkpoint(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        raise WeightsError(f"{path} has no 'state_dict'; expected one with {', '.join(_KEYS)}")
    try:
        return from_published(content["state_dict"])
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def _check_keys(state: Mapping[str, Tensor]) -> None:
    missing = [key for key in _KEYS if key not in state]
    unexpected = [str(key) for key in state if key not in _KEYS and key != _COUNTER]
    if missing or unexpected:
        raise WeightsError(
            f"not a published EP head: missing {missing or 'nothing'}, "
            f"unexpected {unexpected or 'nothing'}; expected {', '.join(_KEYS)}"
        )
    for key in _KEYS:
        if not isinstance(state[key], Tensor) or not bool(torch.isfinite(state[key]).all()):
            raise WeightsError(f"published EP head: {key} is not a tensor of finite numbers")


def _sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return M, D, O and C once every shape agrees on them."""
    sizes = {"1": 1}
    for key, axes in _AXES.items():
        shape = tuple(state[key].shape)
        named = dict(zip(axes, shape, strict=False))
        if len(shape) != len(axes) or any(sizes.get(axis, n) != n for axis, n in named.items()):
            expected = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            raise WeightsError(f"published EP head: {key} has shape {shape}, expected ({expected})")
        sizes |= named
    return sizes
