"""A timm name -> an untrained network at an image size, and one way to ask any for its tokens.

timm's vision transformers give patch and prefix tokens; its hierarchical and convolutional
networks give maps, one a stage, whose pixels are the tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from epcache.catalog import unknown_backbone
from epcache.errors import ConfigError
from epcache.store.spec import LayerShape

LayerOutput = tuple[Tensor, Tensor, tuple[int, int]]
"""Patch tokens (B, N, D), prefix tokens (B, R, D) and the grid (h, w)."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a network without running it on anything."""

    layer_shapes: dict[int, LayerShape]
    num_params: int


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fix what an initialisation draws, and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def timm_cfg(name: str) -> Any:
    """What timm knows of a model's weights and preprocessing.

    Raises:
        ConfigError: If timm has no such model, or no such weights of it.
    """
    import timm
    from timm.models import get_pretrained_cfg

    if not timm.is_model(name):
        raise unknown_backbone(name, timm.list_models(pretrained=True))
    try:
        return get_pretrained_cfg(name)
    except RuntimeError:
        tags = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        raise ConfigError(f"timm has no weights {name}; it has {', '.join(tags)}") from None


def build_timm(
    name: str, image_size: int, kwargs: Mapping[str, Any], *, device: str = "cpu"
) -> nn.Module:
    """An untrained timm model without classifier.

    Args:
        name: timm's name; a tag is allowed.
        image_size: Pixels a side.
        kwargs: More arguments of the architecture.
        device: ``meta`` for shapes without memory.

    Raises:
        ConfigError: If it has no intermediate features, or its patches do not divide the image.
    """
    import timm

    options: dict[str, Any] = {"num_classes": 0, **kwargs}
    if timm_cfg(name).fixed_input_size:
        options["img_size"] = image_size
    with torch.device(device):
        model = timm.create_model(name, **options)
    if not hasattr(model, "forward_intermediates"):
        raise ConfigError(f"timm's {name} gives no intermediate features; it cannot be a backbone")
    return frozen(model)


def plan_timm(
    name: str, image_size: int, own_size: int, kwargs: Mapping[str, Any], *, label: str
) -> Outline | None:
    """What a timm model will give, without its memory.

    Args:
        name: timm's name.
        image_size: Pixels a side.
        own_size: The size that timm says it has.
        kwargs: More arguments of the architecture.
        label: The backbone's name for messages.

    Returns:
        Its outline; None for the few models that cannot run without values.

    Raises:
        ConfigError: If the model does not take images of this size.
    """
    try:
        model = build_timm(name, image_size, kwargs, device="meta")
        _check_patch_size(label, model, image_size)
        return outline(model, image_size)
    except ConfigError:
        raise
    except Exception as error:  # architectures refuse a size with whatever comes to hand
        if image_size == own_size:
            return None
        if plan_timm(name, own_size, own_size, kwargs, label=label) is None:
            return None
        model = build_timm(name, own_size, kwargs, device="meta")
        step = max(int(stage["reduction"]) for stage in model.feature_info)  # type: ignore[union-attr]
        reason = f"its stages shrink it {step} times"
        raise invalid_size(label, image_size, step, reason) from error


def build_bundled(kwargs: Mapping[str, Any], *, device: str = "cpu") -> nn.Module:
    """The project's own tiny vision transformer, untrained."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.device(device):
        return frozen(VisionTransformer(num_classes=0, **kwargs))


def outline(model: nn.Module, image_size: int) -> Outline:
    """Run a timm model on the meta device."""
    with torch.inference_mode():
        outputs = timm_outputs(
            model, torch.zeros(1, 3, image_size, image_size, device="meta"), None
        )
    return Outline(layer_shapes=layer_shapes(outputs), num_params=num_params(model))


def num_params(model: nn.Module) -> int:
    """Parameters of a network."""
    return sum(parameter.numel() for parameter in model.parameters())


def one_line(error: BaseException) -> str:
    """Type and first line of an error from code that is not ours."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def frozen(model: nn.Module) -> nn.Module:
    """Evaluation mode, no gradients."""
    return model.eval().requires_grad_(False)


def timm_filter(name: str) -> Callable[..., Any] | None:
    """The function with which timm reads published checkpoints of an architecture."""
    from timm.models import model_entrypoint

    module = sys.modules[model_entrypoint(name).__module__]
    function = getattr(module, "checkpoint_filter_fn", None) or getattr(
        module, "_checkpoint_filter_fn", None
    )
    if function is None:
        return None
    parameters = inspect.signature(function).parameters
    if "adapt_layer_scale" in parameters:  # DeiT III names that no other ViT file has
        return lambda state, model: function(state, model, adapt_layer_scale=True)
    return function if len(parameters) > 1 else lambda state, _model: function(state)


def timm_outputs(
    model: nn.Module, images_BCHW: Tensor, layers: Sequence[int] | None
) -> dict[int, LayerOutput]:
    """Raw outputs of blocks or stages of a timm model, in one pass no deeper than needed."""
    function: Any = model.forward_intermediates
    parameters = inspect.signature(function).parameters
    has_prefix = "return_prefix_tokens" in parameters and getattr(model, "num_prefix_tokens", 0) > 0
    options: dict[str, Any] = {"return_prefix_tokens": True} if has_prefix else {}
    if "stop_early" in parameters:
        options["stop_early"] = True
    outputs = function(
        images_BCHW,
        indices=None if layers is None else list(layers),
        output_fmt="NCHW",
        intermediates_only=True,
        **options,
    )
    indices = range(len(outputs)) if layers is None else layers
    return {index: _from_map(output) for index, output in zip(indices, outputs, strict=True)}


def layer_shapes(
    outputs: Mapping[int, LayerOutput],
) -> dict[int, LayerShape]:
    """Grid, counts and width of every layer."""
    return {
        index: LayerShape(
            grid=grid, num_patches=patch.shape[1], num_prefix=prefix.shape[1], dim=patch.shape[2]
        )
        for index, (patch, prefix, grid) in outputs.items()
    }


def _from_map(output: Tensor | Sequence[Tensor]) -> LayerOutput:
    patch_BDhw, prefix = (output, None) if isinstance(output, Tensor) else output
    patch_BND = patch_BDhw.flatten(2).transpose(1, 2)
    if prefix is None:
        prefix = patch_BND[:, :0]
    return patch_BND, prefix, (patch_BDhw.shape[2], patch_BDhw.shape[3])


def _check_patch_size(name: str, model: nn.Module, image_size: int) -> None:
    """A patch embedding that does not divide the image would silently drop its edge."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is None:
        return
    size = int(patch[0]) if isinstance(patch, Sequence) else int(patch)
    if image_size % size:
        raise invalid_size(name, image_size, size, "its patches do not divide that")


def invalid_size(name: str, image_size: int, step: int, reason: str) -> ConfigError:
    """An error that shows the nearest sizes that work."""
    below = image_size // step * step
    near = f"{below} or {below + step}" if below else str(step)
    return ConfigError(f"image size {image_size} does not fit {name}: {reason}; nearest: {near}")
