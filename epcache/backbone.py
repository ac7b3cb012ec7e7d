"""A frozen backbone: images in, raw tokens of any layer out, and proof that they are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from epcache.architectures.origin import Origin, find_origin
from epcache.architectures.timm_models import Outline, layer_shapes, num_params, one_line, seeded
from epcache.catalog import BackboneEntry, list_backbones, resolve_layers
from epcache.errors import ConfigError, NumericError
from epcache.norm import find_final_norm
from epcache.selfcheck import SelfCheck, compare, not_applicable, nothing_to_compare
from epcache.store.spec import LayerShape
from epcache.weights.checkpoint import existing
from epcache.weights.fit import LoadReport, digest_weights, load_weights

__all__ = [
    "Backbone",
    "BackboneEntry",
    "BackbonePlan",
    "SelfCheck",
    "Tokens",
    "list_backbones",
    "load_backbone",
    "plan_backbone",
    "resolve_layers",
]

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Autocast type of each precision; weights stay in float32."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Raw output of one layer for a batch."""

    patch: Tensor
    """(B, N, D), row-major over the grid."""
    prefix: Tensor
    """(B, R, D), [CLS] and registers in the backbone's order; R may be 0."""


@dataclass(frozen=True, kw_only=True)
class BackbonePlan:
    """What a backbone will give, known before its weights are loaded."""

    name: str
    image_size: int
    layer_shapes: dict[int, LayerShape]
    num_params: int


class Backbone:
    """A backbone in evaluation mode, without gradients, with the preprocessing it was made for."""

    def __init__(
        self,
        *,
        origin: Origin,
        model: nn.Module,
        layer_shapes: dict[int, LayerShape],
        weights: str,
        load_report: LoadReport,
    ) -> None:
        self.name = origin.name
        self.timm_name = origin.timm_name
        self.image_size = origin.image_size
        self.crop_pct = origin.crop_pct
        self.mean, self.std = origin.mean, origin.std
        self.interpolation = origin.interpolation
        self.weights = weights
        self.load_report = load_report
        self.weights_digest = digest_weights(model, origin.needed(model))
        self.device = torch.device("cpu")
        self._origin, self._model = origin, model
        self.layer_shapes = layer_shapes
        self.num_layers = len(self.layer_shapes)
        self.has_cls = has_cls(model)
        self.final_norm = find_final_norm(model, layer_shapes[self.num_layers - 1].dim)
        default = "none" if self.final_norm is None else "final"
        self.norm_policy = origin.norm_policy or default

    def to(self, device: torch.device | str) -> Backbone:
        """Move the network; returns itself."""
        self.device = torch.device(device)
        self._model.to(self.device)
        return self

    def tokens(
        self, images_BCHW: Tensor, layers: Sequence[int], precision: str = "float32"
    ) -> dict[int, Tokens]:
        """Raw tokens of some layers, in one forward pass.

        Args:
            images_BCHW: uint8 (B, 3, S, S) of the backbone's image size, on any device.
            layers: Block indices in [0, num_layers).
            precision: ``float32``, or ``bfloat16`` or ``float16`` for autocast.

        Returns:
            Tokens of each layer in the type it was computed in, on the backbone's device.

        Raises:
            ConfigError: If layers, precision or images cannot be right.
        """
        wanted = sorted(set(layers))
        if not wanted or wanted[0] < 0 or wanted[-1] >= self.num_layers:
            raise ConfigError(f"layers {list(layers)}: {self.name} has 0 to {self.num_layers - 1}")
        with torch.inference_mode(), self._autocast(precision):
            outputs = self._origin.outputs(self._model, self._normalised(images_BCHW), wanted)
        shapes = layer_shapes(outputs)
        for layer in wanted:
            if shapes[layer] != self.layer_shapes[layer]:
                raise ConfigError(
                    f"layer {layer} of {self.name} gave {shapes[layer]}; expected "
                    f"{self.layer_shapes[layer]} as for the first image"
                )
        return {
            layer: Tokens(patch=outputs[layer][0], prefix=outputs[layer][1]) for layer in wanted
        }

    def self_check(self, images_BCHW: Tensor, precision: str = "float32") -> SelfCheck:
        """Compare our last tokens, finished by the final norm, with the backbone's own features.

        The same images have to give the same tokens a second time, too.

        Args:
            images_BCHW: uint8 (B, 3, S, S); one or two images are enough.
            precision: As in :meth:`tokens`.

        Returns:
            The largest relative difference, and what was compared.

        Raises:
            NumericError: If they differ by more than rounding: tokens are not what they should be.
        """
        last = self.num_layers - 1
        tokens = self.tokens(images_BCHW, [last], precision)[last]
        again = self.tokens(images_BCHW, [last], precision)[last]
        if not torch.allclose(tokens.patch.float(), again.patch.float(), rtol=1e-2, atol=1e-3):
            raise NumericError(
                f"self-check of {self.name} failed: the same images give other tokens each time; "
                f"it has to be deterministic (dropout off, no sampling)"
            )
        reason = nothing_to_compare(self._model, self.final_norm)
        if reason or self.final_norm is None:
            return not_applicable(reason, precision)
        with torch.inference_mode(), self._autocast(precision):
            features = self._model.forward_features(self._normalised(images_BCHW))  # type: ignore[operator]
        return compare(
            torch.cat([tokens.prefix, tokens.patch], dim=1),
            features,
            shape=self.layer_shapes[last],
            norm=self.final_norm,
            name=self.name,
            precision=precision,
        )

    def _normalised(self, images_BCHW: Tensor) -> Tensor:
        expected = (3, self.image_size, self.image_size)
        if images_BCHW.dtype != torch.uint8 or tuple(images_BCHW.shape[1:]) != expected:
            raise ConfigError(
                f"{self.name} takes uint8 images (B, 3, {self.image_size}, {self.image_size}); got "
                f"{images_BCHW.dtype} {tuple(images_BCHW.shape)}"
            )
        images = images_BCHW.to(self.device).float() / 255
        mean, std = (
            torch.tensor(v, device=self.device).view(3, 1, 1) for v in (self.mean, self.std)
        )
        return (images - mean) / std

    def _autocast(self, precision: str) -> AbstractContextManager[object]:
        if precision not in PRECISIONS:
            raise ConfigError(
                f"precision {precision!r} is unknown; expected {', '.join(PRECISIONS)}"
            )
        dtype = PRECISIONS[precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def load_backbone(
    name: str, *, weights: str | Path | None = None, image_size: int | None = None
) -> Backbone:
    """Build a backbone and fill it with weights.

    Args:
        name: An alias (:func:`list_backbones`), a timm name, or ``package.module:function``.
        weights: A file; ``random`` or ``random:SEED`` for an untrained one; None for the
            published weights.
        image_size: Pixels a side; None for the size of the published protocol.

    Returns:
        The backbone, on the CPU.

    Raises:
        ConfigError: If the name or the size cannot be.
        WeightsError: If the weights cannot be had or are another backbone's.
    """
    origin = find_origin(name, image_size)
    planned = origin.plan()  # an impossible size is refused before any memory is spent
    seed = _random_seed(weights)
    path: Path | None = None
    if seed is not None:
        if origin.default_weights is None:
            raise ConfigError(f"backbone {name} brings its own weights; leave --weights out")
        label = f"random:{seed}"
    elif weights is not None:
        path = existing(Path(weights).expanduser())
        label = path.name
    elif origin.default_weights is not None:
        path, label = origin.default_weights()
    else:
        label = "custom"
    with seeded(seed or 0):
        model = origin.build()
    if path is not None:
        report = load_weights(
            model, path, name=name, convert=origin.convert, needed=origin.needed(model)
        )
    else:
        report = LoadReport(loaded=0 if seed is not None else len(model.state_dict()))
    return Backbone(
        origin=origin,
        model=model,
        layer_shapes=planned.layer_shapes if planned else _probe(origin, model),
        weights=label,
        load_report=report,
    )


def plan_backbone(name: str, *, image_size: int | None = None) -> BackbonePlan:
    """Layers and shapes of a backbone without its weights, and mostly without its memory."""
    origin = find_origin(name, image_size)
    found = origin.plan()
    if found is None:
        with seeded(0):
            model = origin.build()
        found = Outline(layer_shapes=_probe(origin, model), num_params=num_params(model))
    return BackbonePlan(
        name=name,
        image_size=origin.image_size,
        layer_shapes=found.layer_shapes,
        num_params=found.num_params,
    )


def _probe(origin: Origin, model: nn.Module) -> dict[int, LayerShape]:
    """Ask for every layer of one black image."""
    black = torch.zeros(1, 3, origin.image_size, origin.image_size)
    try:
        with torch.inference_mode():
            return layer_shapes(origin.outputs(model, black, None))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"backbone {origin.name} fails on one image of {origin.image_size} pixels: "
            f"{one_line(error)}"
        ) from error


def _random_seed(weights: str | Path | None) -> int | None:
    if not isinstance(weights, str) or not re.match(r"random(:|$)", weights):
        return None
    seed = weights.partition(":")[2] or "0"
    if not seed.isdecimal():
        raise ConfigError(f"weights {weights!r}: expected random or random:SEED with a whole SEED")
    if int(seed) >= 2**63:
        raise ConfigError(f"weights {weights!r}: SEED must be below 2**63")
    return int(seed)


def has_cls(model: nn.Module) -> bool:
    """Whether the first prefix token, where there are any, is [CLS] and no register.

    timm's networks say so; one of the user's own may, as ``has_class_token``.
    """
    said: bool | None = getattr(model, "has_class_token", None)
    if said is not None:
        return bool(said)
    return getattr(model, "cls_token", True) is not None
