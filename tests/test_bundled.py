"""The bundled backbone is small, whole, honest about held-out digits, and can be made again."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from timm.models.vision_transformer import VisionTransformer

from epcache.dataset import Preprocess
from epcache.manifest import load_manifest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "pretrain_digits_mae.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrain_digits_mae", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def weights_path(script):
    return ROOT / "epcache" / str(script.bundled_entry().file)


@pytest.fixture(scope="module")
def encoder(script, weights_path):
    model = VisionTransformer(num_classes=0, **script.bundled_entry().kwargs).eval()
    model.load_state_dict({name: value.float() for name, value in load_file(weights_path).items()})
    return model


@pytest.fixture(scope="module")
def images(script):
    return script.train_images(script.bundled_entry())


@pytest.fixture
def one_recipe(script):
    """A fast recipe; pre-training sets global flags of torch, which are put back."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield script.Recipe(epochs=2, batch_size=64)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def test_file_is_small_half_precision_and_finite(script, weights_path):
    """At most 2 MB of finite float16."""
    assert weights_path.stat().st_size <= script.MAX_BYTES
    for name, value in load_file(weights_path).items():
        assert value.dtype == torch.float16, name
        assert torch.isfinite(value).all(), name


def test_file_is_exactly_the_architecture(encoder):
    """Every tensor of the timm model is in the file, and no other (loading is strict)."""
    assert encoder.patch_embed.num_patches == 64
    assert encoder.pos_embed.shape[1] == 65  # [CLS] first
    assert isinstance(encoder.norm, torch.nn.LayerNorm)


def test_held_out_images_are_left_out(script, images):
    """Pre-training sees the rows of train and none of test, not even as a copy of the pixels."""
    manifest = load_manifest("digits")
    train, test = (manifest.splits[name] for name in (manifest.train_split, manifest.eval_split))
    assert not set(train.paths) & set(test.paths)
    assert len(images) == len(train.paths)
    entry = script.bundled_entry()
    mean, std = entry.mean[0], entry.std[0]
    seen = {row.tobytes() for row in ((images[:, 0] * std + mean) * 255).round().byte().numpy()}
    crop = Preprocess(image_size=entry.image_size, crop_pct=entry.crop_pct).eval_crop
    held_out = {np.asarray(crop(test.open_image(row))).tobytes() for row in range(len(test.paths))}
    assert len(held_out) == len(test.paths)
    assert not seen & held_out
    assert np.asarray(crop(train.open_image(0))).tobytes() in seen


def test_training_reads_no_held_out_split(script, monkeypatch):
    """The script asks the manifest for train alone."""
    asked = []

    def spy(dataset, **options):
        asked.append((dataset, options))
        return load_manifest(dataset, **options)

    monkeypatch.setattr(script, "load_manifest", spy)
    script.train_images(script.bundled_entry())
    assert asked == [("digits", {"splits": ["train"]})]


def test_pretraining_lowers_the_loss_and_repeats(script, images, one_recipe):
    """Two short runs give the same losses and the same bytes; another seed gives others."""
    entry, few = script.bundled_entry(), images[:512]
    one, losses = script.pretrain(entry, few, one_recipe)
    other, losses_again = script.pretrain(entry, few, one_recipe)
    assert losses == losses_again
    assert save(one) == save(other)
    assert np.mean(losses[-4:]) < 0.8 * losses[0]
    changed, _ = script.pretrain(entry, few, replace(one_recipe, seed=1), num_steps=1)
    assert save(changed) != save(one)


def test_hidden_patches_do_not_reach_the_encoder(script, images, one_recipe):
    """What the encoder makes of an image does not depend on the patches that are hidden."""
    torch.manual_seed(0)
    entry = script.bundled_entry()
    model = script.MaskedAutoencoder(
        VisionTransformer(num_classes=0, **entry.kwargs), one_recipe
    ).eval()
    order = torch.rand(2, model.num_patches).argsort(1)
    changed = images[:2].clone()
    for row, hidden in enumerate(order[:, model.num_visible :].tolist()):
        for patch in hidden:
            y, x = divmod(patch, model.grid)
            size = model.patch
            changed[row, :, y * size : (y + 1) * size, x * size : (x + 1) * size] = 7.0
    assert not torch.equal(changed, images[:2])
    torch.testing.assert_close(model.encode(changed, order), model.encode(images[:2], order))


def test_targets_are_the_patches_in_order(script, images, one_recipe):
    """Patch n of the targets is the square of pixels that token n embeds."""
    entry = script.bundled_entry()
    model = script.MaskedAutoencoder(VisionTransformer(num_classes=0, **entry.kwargs), one_recipe)
    targets = model.targets(images[:3])
    for patch in (0, 1, model.grid, model.num_patches - 1):
        y, x = (model.patch * place for place in divmod(patch, model.grid))
        square = images[:3, 0, y : y + model.patch, x : x + model.patch]
        assert torch.equal(targets[:, patch], square.flatten(1))


def test_write_refuses_what_is_too_large(script, tmp_path):
    """Weights above the limit are refused and nothing is left behind."""
    with pytest.raises(ValueError, match="at most 2,000,000"):
        script.write({"weight": torch.zeros(1_000_001, dtype=torch.float16)}, tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_features_know_digits(script, encoder, images):
    """Held-out digits are told apart by ridge regression on mean patch tokens (95.0%)."""
    manifest = load_manifest("digits")
    test = manifest.splits["test"]
    entry = script.bundled_entry()
    crop = Preprocess(image_size=entry.image_size, crop_pct=entry.crop_pct).eval_crop
    held_out = np.stack(
        [np.asarray(crop(test.open_image(row).convert("RGB"))) for row in range(len(test.paths))]
    )
    x_test = (torch.from_numpy(held_out).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.inference_mode():
        train_BD, test_BD = (last_block(encoder, x).mean(1) for x in (images, x_test))
    mean, std = train_BD.mean(0), train_BD.std(0)
    design, held = (
        torch.cat([(x_BD - mean) / std, torch.ones(len(x_BD), 1)], 1).double()
        for x_BD in (train_BD, test_BD)
    )
    onehot = torch.eye(10, dtype=torch.float64)[torch.from_numpy(manifest.splits["train"].labels)]
    gram = design.T @ design + torch.eye(design.shape[1], dtype=torch.float64)
    guess = (held @ torch.linalg.solve(gram, design.T @ onehot)).argmax(1).numpy()
    assert (guess == test.labels).mean() > 0.92


def last_block(encoder, images_BCHW):
    """Patch tokens of the last block, before the final norm."""
    tokens_BND = encoder._pos_embed(encoder.patch_embed(images_BCHW))
    return encoder.blocks(tokens_BND)[:, 1:]
