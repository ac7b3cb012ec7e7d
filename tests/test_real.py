"""The whole of stage one on real weights and real drawings."""

import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import zarr
from extractkit import run, run_json
from PIL import Image
from torchvision.transforms import (
    CenterCrop,
    Compose,
    InterpolationMode,
    Normalize,
    Resize,
    ToTensor,
)

import epcache
from epcache.norm import FinalNorm

pytestmark = [
    pytest.mark.real,
    # The tests open the large drawings themselves, too.
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]

ASSETS = Path(os.environ.get("EPCACHE_REAL_ASSETS", Path.home() / ".cache" / "epcache-real-assets"))
WEIGHTS = ASSETS / "dinov2_vits14.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes: among the one, drawings of 168 megapixels, in the other, the bomb."""
    root = tmp_path_factory.mktemp("drawings")
    for split in ("train", "val"):
        for name in ("food-fruit", "transportation-roadsigns"):
            target = root / split / name
            target.mkdir(parents=True)
            files = sorted((ASSETS / "clipart" / split / name).glob("*.png"))
            large = [file for file in files if megapixels(file) > 100]
            for file in dict.fromkeys([*large, *files[:6]]):
                (target / file.name).symlink_to(file)
    return root


def megapixels(file):
    with file.open("rb") as opened:
        header = opened.read(24)[16:]
    return int.from_bytes(header[:4], "big") * int.from_bytes(header[4:], "big") / 1e6


@pytest.fixture(scope="module")
def store(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "store"
    run(
        "extract", "--backbone", "dinov2_vits14", "--weights", WEIGHTS, "--dataset", "imagefolder",
        "--data-dir", folder, "--layers", "all", "--out", path, "--max-bad", "20%",
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def reference():
    """Timm's own model with these weights, and torchvision's own preprocessing."""
    model = timm.create_model(
        "vit_small_patch14_dinov2.lvd142m",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(WEIGHTS)},
        img_size=224,
        num_classes=0,
    ).eval()
    cfg = model.pretrained_cfg
    transform = Compose(
        [
            Resize(256, InterpolationMode.BICUBIC),
            CenterCrop(224),
            ToTensor(),
            Normalize(cfg["mean"], cfg["std"]),
        ]
    )
    return model, transform


def test_large_drawings_are_stored_and_the_bomb_is_set_aside(store):
    """Drawings of 168 megapixels are decoded; the bomb of 623 is quarantined with its reason."""
    sealed = epcache.open_store(store)
    sizes = np.concatenate([sealed[split].sizes for split in sealed.splits])
    assert (sizes.prod(axis=1) > 150e6).sum() >= 2
    bad = {
        sample.path
        for split in sealed.splits
        for sample, valid in zip(sealed[split].samples(), sealed[split].valid, strict=True)
        if not valid
    }
    assert len(bad) == 1
    assert "stop_sign" in bad.pop()
    assert "DecompressionBomb" in (store / "val/quarantine.jsonl").read_text()


def test_tokens_equal_timm_and_torchvision(store, folder, reference):
    """Every layer of every valid row equals timm's intermediate layers on torchvision's pixels."""
    model, transform = reference
    sealed = epcache.open_store(store)
    layers = list(sealed.layers)
    assert layers == list(range(12))
    split = sealed["val"]
    for sample in split.samples():
        if not split.valid[sample.row]:
            continue
        with Image.open(folder / sample.path) as image:
            pixels = transform(image.convert("RGB"))[None]
        with torch.inference_mode():
            outputs = model.get_intermediate_layers(
                pixels, n=layers, return_prefix_tokens=True, norm=False
            )
        for layer, (patch, prefix) in zip(layers, outputs, strict=True):
            reader = split.layer(layer)
            for ours, theirs in ((reader.patch, patch), (reader.prefix, prefix)):
                expected = theirs[0].numpy()
                tolerance = 1e-3 * np.abs(expected).max()
                np.testing.assert_allclose(ours[sample.row], expected, atol=tolerance)


def test_final_norm_gives_the_backbones_own_features(store, folder, reference):
    """Stored tokens of the last layer, finished by the stored norm, are ``forward_features``."""
    model, transform = reference
    split = epcache.open_store(store)["train"]
    norm = FinalNorm.load(store / "final_norm.safetensors")
    row = int(np.flatnonzero(split.valid)[0])
    with Image.open(folder / split.samples()[row].path) as image:
        pixels = transform(image.convert("RGB"))[None]
    with torch.inference_mode():
        features = model.forward_features(pixels)[0]
    layer = split.layer(-1)
    stored = np.concatenate([layer.prefix[row], layer.patch[row]])
    ours = norm(torch.from_numpy(stored.copy()))
    assert float((ours - features).abs().max() / features.abs().max()) < 2e-3


def test_zarr_python_reads_the_same(store):
    """Another reader of the format sees the same arrays."""
    sealed = epcache.open_store(store)
    group = zarr.open_group(store, mode="r")
    for split in sealed.splits:
        for layer in (0, 11):
            array = np.asarray(group[f"{split}/layers/{layer}/patch"])
            np.testing.assert_array_equal(sealed[split].layer(layer).patch[:], array)


def test_the_store_verifies(store, capsys):
    """Every byte is what was committed."""
    result = run_json(capsys, "verify", store)
    assert result["ok"] is True
    assert result["shards_checked"] == 2 * 12 * 2
