"""hub.py: weights that cannot be had are one line, at once, with the way round it."""

from pathlib import Path

import pytest
from timm.models import get_pretrained_cfg

from epcache.backbone import (
    list_backbones,
    load_backbone,
)
from epcache.errors import WeightsError

ENTRIES = {entry.alias: entry for entry in list_backbones()}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("alias", ["mae_vits16", "simmim_vitb16", "ibot_vitb16", "capi_vitl14"])
def test_weights_by_file(alias: str) -> None:
    """Where no hub has the weights, the error says so and shows --weights."""
    with pytest.raises(WeightsError, match=f"{alias} are not on a hub.*--weights FILE"):
        load_backbone(alias)


@pytest.mark.parametrize("name", ["dinov2_vitb14", "convnext_atto", "ijepa_vith14"])
def test_offline_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without network, the error names what was looked for and the way round it."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cfg = get_pretrained_cfg(ENTRIES[name].timm_name if name in ENTRIES else name)
    with pytest.raises(WeightsError) as caught:
        load_backbone(name)
    message = str(caught.value)
    assert (f"{cfg.hf_hub_id}/model.safetensors" if cfg.hf_hub_id else cfg.url) in message
    assert "--weights FILE" in message
    assert "\n" not in message


def test_unreachable_hub_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that refuses the connection is given up at once, not retried for minutes."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"lvd142m/model\.safetensors.*no connection"):
        load_backbone("dinov2_vits14")
