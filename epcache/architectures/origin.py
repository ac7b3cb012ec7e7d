"""Where a backbone comes from: an alias, a timm name or one's own function, with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from epcache.architectures.custom import build_custom, custom_outputs
from epcache.architectures.timm_models import (
    LayerOutput,
    Outline,
    build_bundled,
    build_timm,
    invalid_size,
    outline,
    plan_timm,
    timm_cfg,
    timm_filter,
    timm_outputs,
)
from epcache.catalog import CROP_PCT, BackboneEntry, find_backbone
from epcache.errors import ConfigError, WeightsError
from epcache.weights.fit import Convert, needed_keys
from epcache.weights.hub import fetch_weights

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How to build an architecture, run it, and find its weights."""

    name: str
    timm_name: str | None
    image_size: int
    crop_pct: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    norm_policy: str | None
    """``final`` or ``none``; None: final where there is a final norm."""
    build: Callable[[], nn.Module]
    outputs: Callable[[nn.Module, Tensor, Sequence[int] | None], dict[int, LayerOutput]]
    plan: Callable[[], Outline | None]
    """Shapes without memory, where that can be had."""
    needed: Callable[[nn.Module], set[str]]
    """Names of the state that a weights file must have."""
    convert: Convert | None
    default_weights: Callable[[], tuple[Path, str]] | None
    """File and label of the published weights; None where the module brings its own."""


def find_origin(name: str, image_size: int | None) -> Origin:
    """Look a backbone's name up.

    Args:
        name: An alias, a timm name, or ``package.module:function``.
        image_size: Pixels a side, or None for the backbone's own.

    Raises:
        ConfigError: If nothing has that name, or it does not take images of that size.
    """
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image size {image_size} is not positive; leave it out for the default")
    entry = find_backbone(name)
    if entry is not None and entry.file is not None:
        return _bundled(entry, image_size)
    if entry is not None and entry.module is not None:
        return _custom(name, entry.module, entry, image_size)
    if entry is None and ":" in name:
        return _custom(name, name, None, image_size)
    return _timm(name, entry, image_size)


def _timm(name: str, entry: BackboneEntry | None, image_size: int | None) -> Origin:
    timm_name = (entry.timm_name if entry else None) or name
    kwargs = entry.kwargs if entry else {}
    cfg = timm_cfg(timm_name)
    own_size = int(cfg.input_size[-1])
    size = image_size or (entry.image_size if entry else own_size)

    def default_weights() -> tuple[Path, str]:
        if entry is not None and entry.weights == "file":
            raise _needs_file(entry)
        return fetch_weights(name, cfg), f"hub:{cfg.tag or 'default'}"

    return Origin(
        name=name,
        timm_name=timm_name,
        image_size=size,
        crop_pct=entry.crop_pct if entry else CROP_PCT,
        mean=entry.mean if entry else _triple(cfg.mean),
        std=entry.std if entry else _triple(cfg.std),
        interpolation=str(cfg.interpolation),
        norm_policy=entry.norm if entry else None,
        build=lambda: build_timm(timm_name, size, kwargs),
        outputs=timm_outputs,
        plan=lambda: plan_timm(timm_name, size, own_size, kwargs, label=name),
        needed=needed_keys,
        convert=timm_filter(timm_name),
        default_weights=default_weights,
    )


def _bundled(entry: BackboneEntry, image_size: int | None) -> Origin:
    size = image_size or entry.image_size
    if size % entry.patch:
        raise invalid_size(entry.alias, size, entry.patch, "its patches do not divide that")
    kwargs = {**entry.kwargs, "img_size": size}

    def plan() -> Outline:
        return outline(build_bundled(kwargs, device="meta"), size)

    def default_weights() -> tuple[Path, str]:
        return Path(str(resources.files("epcache") / str(entry.file))), "bundled"

    return Origin(
        name=entry.alias,
        timm_name=None,
        image_size=size,
        crop_pct=entry.crop_pct,
        mean=entry.mean,
        std=entry.std,
        interpolation="bicubic",
        norm_policy=entry.norm,
        build=lambda: build_bundled(kwargs),
        outputs=timm_outputs,
        plan=plan,
        needed=needed_keys,
        convert=timm_filter("vit_tiny_patch16_224"),
        default_weights=default_weights,
    )


def _custom(name: str, target: str, entry: BackboneEntry | None, image_size: int | None) -> Origin:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        if not built:
            built.append(build_custom(target))
        return built[0]

    def published() -> tuple[Path, str]:
        assert entry is not None
        raise _needs_file(entry)

    if entry is None:
        model = build()  # only the module itself knows its preprocessing
        size = image_size or int(getattr(model, "image_size", 224))
        mean = _triple(getattr(model, "mean", IMAGENET_MEAN))
        std = _triple(getattr(model, "std", IMAGENET_STD))
    else:
        size, mean, std = image_size or entry.image_size, entry.mean, entry.std
    return Origin(
        name=name,
        timm_name=None,
        image_size=size,
        crop_pct=entry.crop_pct if entry else CROP_PCT,
        mean=mean,
        std=std,
        interpolation="bicubic",
        norm_policy=entry.norm if entry else None,
        build=build,
        outputs=custom_outputs,
        plan=lambda: None,
        needed=lambda model: set(model.state_dict()),  # which of it are heads, nobody knows
        convert=None,
        default_weights=published if entry else None,
    )


def _needs_file(entry: BackboneEntry) -> WeightsError:
    note = f" ({entry.note})" if entry.note else ""
    return WeightsError(
        f"the weights of {entry.alias} are not on a hub{note}; get the file and pass it with "
        f"--weights FILE"
    )


def _triple(values: Any) -> tuple[float, float, float]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != 3:
        raise ConfigError(f"mean and std need one number a colour channel; got {numbers}")
    return numbers
