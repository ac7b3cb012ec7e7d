"""backbone.py and what it stands on: raw tokens of any layer of any backbone, clear refusals."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from epcache.backbone import (
    Backbone,
    has_cls,
    list_backbones,
    load_backbone,
    plan_backbone,
)
from epcache.errors import ConfigError, NumericError
from epcache.norm import FinalNorm

ENTRIES = {entry.alias: entry for entry in list_backbones()}
ASSETS = Path(os.environ.get("EPCACHE_REAL_ASSETS", "~/.cache/epcache-real-assets")).expanduser()

ARCHITECTURES = {
    "vit_tiny_patch16_224": (32, (2, 2), 1, 192, 12),
    "vit_small_patch14_reg4_dinov2": (56, (4, 4), 5, 384, 12),
    "eva02_tiny_patch14_224": (56, (4, 4), 1, 192, 12),
    "hiera_tiny_224": (64, (2, 2), 0, 768, 4),
    "swin_tiny_patch4_window7_224": (64, (2, 2), 0, 768, 4),
    "convnext_atto": (64, (2, 2), 0, 320, 4),
    "resnet18": (64, (2, 2), 0, 512, 5),
    "cait_xxs24_224": (32, (2, 2), 0, 192, 24),
}
"""Image size, and grid, prefix tokens, width and number of the last layer."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tiny() -> Backbone:
    return load_backbone("test_vit", weights="random", image_size=64)


def images_for(backbone: Backbone, count: int = 2) -> Tensor:
    size = backbone.image_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith("cait") else ())
        for name in ARCHITECTURES
    ],
)
def test_architectures(name: str) -> None:
    """ViTs, registers, stages and convolutions all give tokens on a grid, in every precision."""
    size, grid, num_prefix, dim, num_layers = ARCHITECTURES[name]
    backbone = load_backbone(name, weights="random", image_size=size)
    images = images_for(backbone)
    assert backbone.num_layers == num_layers
    assert backbone.layer_shapes == plan_backbone(name, image_size=size).layer_shapes
    last = backbone.layer_shapes[num_layers - 1]
    assert (last.grid, last.num_prefix, last.dim) == (grid, num_prefix, dim)
    for precision in ("float32", "bfloat16", "float16"):
        check = backbone.self_check(images, precision)
        assert (check.max_relative_error is None) == (name in {"resnet18", "cait_xxs24_224"})
        for layer, tokens in backbone.tokens(images, range(num_layers), precision).items():
            shape = backbone.layer_shapes[layer]
            assert tokens.patch.shape == (2, shape.num_patches, shape.dim)
            assert tokens.prefix.shape == (2, shape.num_prefix, shape.dim)
            assert bool(torch.isfinite(tokens.patch).all())


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "swin_tiny_patch4_window7_224"])
def test_raw_block_outputs(name: str) -> None:
    """Tokens are what hooks on the blocks or stages see: no norm, row-major, prefix apart."""
    size, (height, width), num_prefix, dim, num_layers = ARCHITECTURES[name]
    backbone = load_backbone(name, weights="random", image_size=size)
    model = timm_model(backbone)
    last_block = model.blocks[-1] if num_prefix else model.layers[-1]
    seen: list[Tensor] = []
    handle = last_block.register_forward_hook(lambda _m, _i, output: seen.append(output))
    images = images_for(backbone)
    tokens = backbone.tokens(images, [num_layers - 1])[num_layers - 1]
    handle.remove()
    raw = seen[0].reshape(2, num_prefix + height * width, dim)  # Swin's maps are NHWC
    assert torch.equal(torch.cat([tokens.prefix, tokens.patch], dim=1), raw)


def timm_model(backbone: Backbone) -> nn.Module:
    return backbone._model  # the tests' only look inside


def test_one_pass_no_deeper_than_asked(tiny: Backbone) -> None:
    """Layers asked together equal layers asked alone, and blocks behind the last do not run."""
    images = images_for(tiny)
    together = tiny.tokens(images, [3, 0, 3])
    assert list(together) == [0, 3]
    ran: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, block in enumerate(timm_model(tiny).blocks)
    ]
    alone = tiny.tokens(images, [3])[3]
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 2, 3]
    assert torch.equal(alone.patch, together[3].patch)


def test_own_preprocessing(tiny: Backbone) -> None:
    """Pixels are scaled to [0, 1] and standardised with the backbone's own mean and std."""
    images = images_for(tiny)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (tiny.mean, tiny.std))
    reference = timm_model(tiny).forward_intermediates(
        (images / 255 - mean) / std, indices=[5], intermediates_only=True, output_fmt="NLC"
    )[0]
    assert torch.allclose(tiny.tokens(images, [5])[5].patch, reference, atol=1e-5)


def test_row_major_grid() -> None:
    """Token (row, column) comes from that part of the image, in row-major order."""
    backbone = load_backbone("test_resnet", weights="random", image_size=64)
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    images[1, :, 0:2, 60:62] = 255
    black, spot = backbone.tokens(images, [0])[0].patch
    changed = (black - spot).abs().amax(-1).reshape(backbone.layer_shapes[0].grid)
    rows, columns = changed.nonzero(as_tuple=True)
    assert rows.max() < changed.shape[0] // 4
    assert columns.min() > changed.shape[1] * 3 // 4


def test_frozen(tiny: Backbone) -> None:
    """Nothing trains, nothing drops, and autocast does not leak."""
    model = timm_model(tiny)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tokens = tiny.tokens(images_for(tiny), [0], "bfloat16")[0]
    assert tokens.patch.is_inference()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert tiny.to("cpu") is tiny


def test_precisions_are_close_and_differ(tiny: Backbone) -> None:
    """Autocast rounds, and only rounds."""
    images = images_for(tiny)
    exact = tiny.tokens(images, [5])[5].patch
    for precision, limit in (("bfloat16", 3e-2), ("float16", 5e-3)):
        rounded = tiny.tokens(images, [5], precision)[5].patch.float()
        error = (rounded - exact).abs().max() / exact.abs().max()
        assert 0 < error < limit


def test_bad_requests(tiny: Backbone) -> None:
    """Layers, precisions and images that cannot be right are refused with what would be."""
    images = images_for(tiny)
    for layers in ([], [6], [-1]):
        with pytest.raises(ConfigError, match="0 to 5"):
            tiny.tokens(images, layers)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        tiny.tokens(images, [0], "int8")
    for wrong in (images.float(), images[:, :, :32], images[0]):
        with pytest.raises(ConfigError, match=r"uint8 images \(B, 3, 64, 64\)"):
            tiny.tokens(wrong, [0])


@pytest.mark.parametrize(
    ("name", "size", "near"),
    [
        ("dinov2_vits14", 225, "224 or 238"),
        ("test_vit", 7, "16"),
        ("swin_tiny_patch4_window7_224", 70, "68 or 72"),
        ("hiera_b", 72, "64 or 96"),
        ("digits_mae", 30, "28 or 32"),
    ],
)
def test_impossible_sizes(name: str, size: int, near: str) -> None:
    """A size that the patches do not divide is refused with the nearest ones that work."""
    with pytest.raises(ConfigError, match=f"{size} does not fit {name}.*nearest: {near}"):
        load_backbone(name, weights="random", image_size=size)
    with pytest.raises(ConfigError, match="not positive"):
        load_backbone(name, weights="random", image_size=0)


def test_sizes() -> None:
    """Without an alias the size is the model's own, and every backbone crops by 224/256."""
    backbone = load_backbone("test_vit", weights="random")
    assert backbone.image_size == 160
    assert backbone.crop_pct == pytest.approx(224 / 256)
    assert backbone.interpolation == "bicubic"
    assert load_backbone("test_convnext", weights="random", image_size=75).layer_shapes


# Random weights


def test_random_weights() -> None:
    """The seed decides untrained weights, and the global generator is left alone."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = load_backbone("test_vit", weights="random", image_size=64)
    assert torch.equal(torch.rand(3), expected)
    same = load_backbone("test_vit", weights="random:0", image_size=64)
    other = load_backbone("test_vit", weights="random:1", image_size=64)
    assert first.weights == same.weights == "random:0"
    assert first.weights_digest == same.weights_digest != other.weights_digest
    assert other.weights == "random:1"
    for wrong in ("random:x", "random:-1", "random:1.5"):
        with pytest.raises(ConfigError, match="random:SEED"):
            load_backbone("test_vit", weights=wrong)


# Self-check


def test_self_check_finds_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that do not lead to the backbone's own features stop everything."""
    backbone = load_backbone("test_vit", weights="random", image_size=64)
    images = images_for(backbone)
    check = backbone.self_check(images)
    assert check.max_relative_error is not None
    assert check.max_relative_error <= check.tolerance
    norm = backbone.final_norm
    assert norm is not None
    monkeypatch.setattr(
        backbone,
        "final_norm",
        FinalNorm(kind="rmsnorm", weight=norm.weight * 1.01, bias=None, eps=norm.eps),
    )
    with pytest.raises(NumericError, match="tokens would be wrong"):
        backbone.self_check(images)


@pytest.mark.real
def test_real_dinov2() -> None:
    """Real DINOv2 weights at 224 pixels: timm's own tokens, from every layer."""
    file = ASSETS / "dinov2_vits14.safetensors"
    backbone = load_backbone("dinov2_vits14", weights=file)
    assert backbone.weights == file.name
    assert backbone.load_report.missing == ()
    assert backbone.load_report.resized == ("pos_embed 1x1370x384 -> 1x257x384",)
    shape = backbone.layer_shapes[11]
    assert (shape.grid, shape.num_patches, shape.num_prefix, shape.dim) == ((16, 16), 256, 1, 384)
    drawings = sorted((ASSETS / "clipart" / "val" / "animals-birds").glob("*.png"))[:2]
    pixels = [
        np.asarray(Image.open(d).convert("RGBA").convert("RGB").resize((224, 224)))
        for d in drawings
    ]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    check = backbone.self_check(images)
    assert check.max_relative_error is not None
    reference = timm.create_model(
        "vit_small_patch14_dinov2.lvd142m",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file)},
        img_size=224,
        num_classes=0,
    ).eval()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (backbone.mean, backbone.std))
    with torch.inference_mode():
        expected = reference.get_intermediate_layers(
            (images / 255 - mean) / std, n=range(12), return_prefix_tokens=True, norm=False
        )
    for layer, tokens in backbone.tokens(images, range(12)).items():
        for ours, theirs in zip((tokens.patch, tokens.prefix), expected[layer], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"reg_tokens": 2}, True),
        ({"class_token": False, "global_pool": "avg"}, False),
        ({"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, False),
    ],
)
def test_registers_are_told_from_cls(options: dict[str, Any], expected: bool) -> None:
    """Only a network with a class token has [CLS], whatever its prefix tokens."""
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, **options)
    assert has_cls(model) is expected
    assert has_cls(torch.nn.Identity()), "a network of one's own that does not say"
