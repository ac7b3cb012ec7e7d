"""A backbone of one's own: ``package.module:function`` -> a module, and its tokens in one form."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from epcache.architectures.timm_models import LayerOutput, frozen, one_line
from epcache.errors import ConfigError

_SHAPES = (
    "a backbone of your own must return patch tokens (B, N, D), or (prefix, patch), or a list or "
    "dict of those, one a layer"
)


def build_custom(target: str) -> nn.Module:
    """Call ``package.module:function``, with the current folder importable.

    Raises:
        ConfigError: If there is no such module or function, or it returns no ``nn.Module``.
    """
    module_name, _, function_name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # stays: the module may import more when it runs
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"backbone {target}: cannot import {module_name} ({one_line(error)}); expected "
            f"package.module:function, importable from {here}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"backbone {target}: {module_name} has no function {function_name!r}")
    try:
        model = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"backbone {target} cannot be built: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"backbone {target}: it returned {type(model).__name__}; expected a torch.nn.Module"
        )
    return frozen(model)


def custom_outputs(
    model: nn.Module, images_BCHW: Tensor, layers: Sequence[int] | None
) -> dict[int, LayerOutput]:
    """What a module of one's own returned, brought into one form."""
    try:
        returned = model(images_BCHW)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the backbone failed on a batch of {len(images_BCHW)} images: {one_line(error)}"
        ) from error
    if isinstance(returned, Tensor | tuple):
        returned = [returned]
    if isinstance(returned, Mapping):
        if sorted(returned) != list(range(len(returned))):
            raise ConfigError(
                f"a backbone's layers have keys {list(returned)}; expected 0, 1, 2, ..."
            )
        returned = [returned[index] for index in range(len(returned))]
    if not isinstance(returned, list) or not returned:
        raise ConfigError(f"{_SHAPES}; it returned {type(returned).__name__}")
    grid = getattr(model, "grid", None)
    indices = range(len(returned)) if layers is None else layers
    if max(indices) >= len(returned):
        raise ConfigError(f"the backbone gave {len(returned)} layers, more for the first image")
    return {index: _from_tokens(returned[index], images_BCHW.shape[0], grid) for index in indices}


def _from_tokens(output: object, num_images: int, grid: Sequence[int] | None) -> LayerOutput:
    prefix: object = None
    patch = output
    if isinstance(output, tuple | list) and len(output) == 2:
        prefix, patch = output
    if prefix is None and isinstance(patch, Tensor):
        prefix = patch[:, :0]
    if not isinstance(patch, Tensor) or not isinstance(prefix, Tensor):
        raise ConfigError(f"{_SHAPES}; a layer is {type(output).__name__}")
    for tokens in (patch, prefix):
        if tokens.ndim != 3 or len(tokens) != num_images or tokens.shape[2] != patch.shape[-1]:
            raise ConfigError(f"{_SHAPES}; got {tuple(tokens.shape)} for {num_images} images")
        if not tokens.is_floating_point():
            raise ConfigError(f"{_SHAPES}; got {tokens.dtype}, expected a floating type")
    side = int(patch.shape[1] ** 0.5)
    height, width = (side, side) if grid is None else (int(grid[0]), int(grid[1]))
    if height * width != patch.shape[1]:
        raise ConfigError(
            f"{patch.shape[1]} patch tokens are no {height} x {width} grid; set the module's "
            f"attribute grid = (rows, columns)"
        )
    return patch, prefix, (height, width)
