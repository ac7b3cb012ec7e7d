"""catalog.py and backbones.toml: every alias is what it is listed as; layer options."""

import subprocess
import sys

import pytest
import timm
from hypothesis import given
from hypothesis import strategies as st
from timm.models import get_pretrained_cfg

from epcache.backbone import (
    list_backbones,
    load_backbone,
    plan_backbone,
    resolve_layers,
)
from epcache.errors import ConfigError

ENTRIES = {entry.alias: entry for entry in list_backbones()}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "alias",
    [
        pytest.param(alias, marks=pytest.mark.slow if entry.params > 250 else ())
        for alias, entry in ENTRIES.items()
    ],
)
def test_alias_builds(alias: str) -> None:
    """Every alias builds at its size, with the depth, width, patch and parameters listed."""
    entry = ENTRIES[alias]
    if entry.module:
        return  # built at a small size by test_capi_*; its listing is checked there
    plan = plan_backbone(alias)
    last = plan.layer_shapes[entry.layers - 1]
    assert list(plan.layer_shapes) == list(range(entry.layers))
    assert last.dim == entry.dim
    assert last.grid == (plan.image_size // entry.patch,) * 2
    assert plan.image_size == entry.image_size
    assert plan.num_params / 1e6 == pytest.approx(entry.params, abs=0.05)


@pytest.mark.parametrize("alias", [a for a, e in ENTRIES.items() if e.weights == "hub"])
def test_alias_has_published_weights(alias: str) -> None:
    """A hub alias names weights that timm has, and their own mean and std."""
    entry = ENTRIES[alias]
    assert entry.timm_name in timm.list_models(pretrained=True)
    cfg = get_pretrained_cfg(entry.timm_name)
    assert entry.mean == pytest.approx(cfg.mean)
    assert entry.std == pytest.approx(cfg.std)


def test_policies() -> None:
    """Sizes and norms that published protocols fix: DINOv2 at 224 with the norm, MAE without."""
    assert ENTRIES["dinov2_vits14"].image_size == 224
    assert ENTRIES["dinov2_vits14"].norm == "final"
    assert ENTRIES["mae_vitb16"].norm == "none"
    assert ENTRIES["dinov2_vits14"].crop_pct == pytest.approx(0.875)
    assert {entry.norm for entry in ENTRIES.values()} <= {"final", "none"}
    assert {entry.norm_from for entry in ENTRIES.values()} <= {"protocol", "choice"}
    assert {entry.weights for entry in ENTRIES.values()} == {"hub", "file", "bundled"}


def test_listing_is_light() -> None:
    """Listing the aliases imports neither torch nor timm."""
    code = (
        "import sys; from epcache.catalog import list_backbones; assert list_backbones();"
        "sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_names() -> None:
    """A wrong name is answered with the nearest right ones."""
    with pytest.raises(ConfigError, match=r"did you mean .*dinov2_vits14"):
        load_backbone("dinov2_vits")
    with pytest.raises(ConfigError, match="vit_tiny_patch16_224"):
        load_backbone("vit_tiny_patch16_22")
    with pytest.raises(ConfigError, match="augreg_in21k"):
        load_backbone("vit_tiny_patch16_224.nope")
    with pytest.raises(ConfigError, match="`epcache backbones`"):
        load_backbone("zzzzzzzz")


@given(num_layers=st.integers(1, 40), data=st.data())
def test_resolve_layers(num_layers: int, data: st.DataObject) -> None:
    """Indices count from either end, each once, in order."""
    indices = data.draw(st.lists(st.integers(-num_layers, num_layers - 1), min_size=1))
    resolved = resolve_layers(",".join(map(str, indices)), num_layers)
    assert resolved == tuple(sorted({index % num_layers for index in indices}))
    assert resolve_layers("last", num_layers) == (num_layers - 1,)
    assert resolve_layers("all", num_layers) == tuple(range(num_layers))


@pytest.mark.parametrize("text", ["12", "-13", "2,12", "", "first", "1,,2", "1.5"])
def test_resolve_layers_refuses(text: str) -> None:
    """What is no layer is refused with those that are."""
    with pytest.raises(ConfigError, match="0 to 11"):
        resolve_layers(text, 12)
