"""custom.py: any function that returns a module is a backbone, or says in one line why not."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from epcache.backbone import (
    Backbone,
    load_backbone,
)
from epcache.errors import ConfigError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def images_for(backbone: Backbone, count: int = 2) -> Tensor:
    size = backbone.image_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def inside(backbone: Backbone) -> nn.Module:
    return backbone._model  # the tests' only look inside


CUSTOM = """
import torch
from torch import nn

class Model(nn.Module):
    mean, std, image_size = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), 16

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.head = nn.Conv2d(3, 6, 4, stride=4)
        if form in ("norm", "dict"):
            self.final_norm = nn.LayerNorm(6)
        if form == "grid":
            self.grid = (2, 8)

    def forward(self, images):
        patch = self.head(images).flatten(2).transpose(1, 2)
        prefix = patch.mean(1, keepdim=True)
        return {
            "plain": patch, "norm": patch, "grid": patch, "pair": (prefix, patch),
            "list": [patch, (prefix, patch * 2)], "dict": {1: patch * 3, 0: (prefix, patch)},
            "text": "no", "keys": {3: patch}, "flat": patch[0], "odd": patch[:, :-1],
            "three": [patch, [patch, patch, patch]], "empty": [],
        }[self.form] if self.form != "crash" else self.nothing

def make(form):
    torch.manual_seed(0)
    return Model(form)

"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, with a function for each way to return tokens."""
    forms = "plain norm grid pair list dict text keys flat odd three empty crash"
    text = CUSTOM + "".join(f"def {form}(): return make('{form}')\n" for form in forms.split())
    text += "def number(): return 3\ndef fails(): return 1 / 0\nvalue = 4\n"
    (tmp_path / "my_broken_backbone.py").write_text("def (")
    (tmp_path / "my_own_backbone.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_own_backbone", raising=False)
    return "my_own_backbone"


def test_own_backbone(own: str) -> None:
    """A function in the current folder is a backbone: its tokens, preprocessing and digest."""
    backbone = load_backbone(f"{own}:plain")
    assert (backbone.name, backbone.timm_name, backbone.weights) == (f"{own}:plain", None, "custom")
    assert (backbone.image_size, backbone.mean) == (16, (0.1, 0.2, 0.3))
    assert (backbone.norm_policy, backbone.final_norm) == ("none", None)
    images = images_for(backbone)
    patch = backbone.tokens(images, [0])[0].patch
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (backbone.mean, backbone.std))
    model = inside(backbone)
    assert torch.allclose(patch, model((images / 255 - mean) / std), atol=1e-6)
    assert backbone.self_check(images).max_relative_error is None
    digest = backbone.weights_digest
    with torch.no_grad():
        model.head.bias[0] += 1
    assert digest == load_backbone(f"{own}:plain").weights_digest
    saved = {f"net.{key}": value for key, value in model.state_dict().items()}
    torch.save(saved, "mine.pth")
    assert load_backbone(f"{own}:plain", weights="mine.pth").weights_digest != digest
    with pytest.raises(ConfigError, match="brings its own weights"):
        load_backbone(f"{own}:plain", weights="random")


def test_own_backbone_forms(own: str) -> None:
    """Patch tokens, (prefix, patch), and lists or dicts of either; a grid that is not square."""
    assert load_backbone(f"{own}:grid").layer_shapes[0].grid == (2, 8)
    assert load_backbone(f"{own}:norm").norm_policy == "final"
    assert load_backbone(f"{own}:pair").layer_shapes[0].num_prefix == 1
    listed = load_backbone(f"{own}:list")
    assert [listed.layer_shapes[layer].num_prefix for layer in (0, 1)] == [0, 1]
    mapped = load_backbone(f"{own}:dict")
    tokens = mapped.tokens(images_for(mapped), [1, 0])
    assert torch.allclose(tokens[1].patch, tokens[0].patch * 3)
    assert mapped.final_norm is not None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("text", "must return patch tokens.*str"),
        ("empty", "must return patch tokens"),
        ("three", "must return patch tokens.*a layer is list"),
        ("flat", r"must return patch tokens.*\(16, 6\)"),
        ("keys", r"keys \[3\]; expected 0, 1, 2"),
        ("odd", "15 patch tokens are no 3 x 3 grid"),
        ("crash", "failed on a batch of 1 images: AttributeError"),
        ("number", "returned int; expected a torch.nn.Module"),
        ("fails", "cannot be built: ZeroDivisionError"),
        ("value", "no function 'value'"),
        ("absent", "no function 'absent'"),
    ],
)
def test_own_backbone_errors(own: str, form: str, words: str) -> None:
    """What a module must not do is one clear line."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_backbone(f"{own}:{form}")
    assert "\n" not in str(caught.value)


def test_own_module_not_found(own: str) -> None:
    """A module that is not importable is named, with the folder that was looked in."""
    assert own
    with pytest.raises(ConfigError, match=r"cannot import my_broken_backbone \(SyntaxError"):
        load_backbone("my_broken_backbone:build")
    with pytest.raises(ConfigError, match="cannot import no_such_module"):
        load_backbone("no_such_module:build")
