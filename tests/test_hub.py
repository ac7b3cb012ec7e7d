"""hub.py: weights that cannot be had are one line, at once, with the way round it."""

from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from timm.models import get_pretrained_cfg

from epcache.backbone import (
    list_backbones,
    load_backbone,
)
from epcache.errors import WeightsError
from epcache.weights import hub

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


def test_cached_weights_need_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the hub's cache holds is used as it is, and recorded as the hub's."""
    source = load_backbone("test_vit", weights="random:3", image_size=160)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(source._model.state_dict(), path)
    asked: list[str] = []

    def cached(repo: str, filename: str, revision: str | None = None) -> str:
        asked.append(f"{repo}/{filename}@{revision}")
        return str(path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    backbone = load_backbone("test_vit")
    assert asked == ["timm/test_vit.r160_in1k/model.safetensors@None"]
    assert backbone.weights == "hub:r160_in1k"
    assert backbone.weights_digest == source.weights_digest


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("no answer"), "the hub does not answer"),
        (EntryNotFoundError("404"), "has none of model.safetensors, pytorch_model.bin"),
        (OSError("disk on fire\nand more"), "disk on fire"),
    ],
)
def test_failed_downloads(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hub client raises becomes one line."""

    def fails(*_arguments: object, **_options: object) -> str:
        raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_probe", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(WeightsError, match=words) as caught:
        load_backbone("test_vit")
    assert "\n" not in str(caught.value)


def test_no_weights_at_all() -> None:
    """A timm model that nobody trained says so."""
    with pytest.raises(WeightsError, match="timm has no weights for vit_small_patch16_36x1_224"):
        load_backbone("vit_small_patch16_36x1_224")
