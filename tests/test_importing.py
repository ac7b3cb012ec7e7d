"""Published EP heads that become runs of a store."""

import json

import pytest
import torch
from probekit import CLASSES, DIM, learnable_store

import epcache
from epcache.errors import ConfigError, WeightsError
from epcache.importing import import_head
from epcache.poolers import make_pooler
from epcache.probe import Probe
from epcache.probing import ProbeConfig, fit_probes
from epcache.published import save_published
from epcache.results import read_rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A sealed store."""
    return epcache.open_store(learnable_store(tmp_path_factory.mktemp("store") / "zoo"))


@pytest.mark.parametrize(("norm", "tokens"), [("final", "patch"), ("none", "all")])
def test_a_head_that_was_exported_comes_back_with_its_score(store, tmp_path, norm, tokens):
    """The imported run scores what the exported one did, and gives the same logits."""
    config = ProbeConfig(
        num_queries=4, lr=1e-2, epochs=3, holdout=0.0, norm=norm, tokens=tokens, layer=0
    )
    (trained,) = fit_probes(store, [config], results_dir=tmp_path)
    before = epcache.load_probe(trained.run, results_dir=tmp_path, weights="last")
    save_published(before.probe, tmp_path / "head.pth")
    row = import_head(
        store, tmp_path / "head.pth", layer=0, norm=norm, tokens=tokens, results_dir=tmp_path
    )
    assert row.test_top1_last == pytest.approx(trained.test_top1_last)
    assert row.num_params == trained.num_params
    assert (row.recipe, row.num_queries, row.dim_out) == ("imported", 4, DIM)
    assert (row.lr, row.val_top1, row.test_top1) == (None, None, None)
    assert read_rows(tmp_path)[-1] == row
    after = epcache.load_probe(row.run, results_dir=tmp_path)
    tokens_BND = torch.randn(3, 7 if tokens == "all" else 6, DIM)
    torch.testing.assert_close(after(tokens_BND), before(tokens_BND))
    about = json.loads((tmp_path / "runs" / row.run / "config.json").read_text())
    assert about["digest"] == store.digest
    assert about["imported"]["file"] == str(tmp_path / "head.pth")


def test_a_head_of_another_backbone_or_data_set_is_refused(store, tmp_path):
    """Its width and its number of classes must be the store's; nothing is written."""
    for dim, num_classes, reason in (
        (DIM * 2, len(CLASSES), f"takes tokens of width {DIM * 2}"),
        (DIM, 5, "has 5 classes; zoo"),
    ):
        probe = Probe(make_pooler("ep", dim=dim, num_queries=2), num_classes)
        save_published(probe, tmp_path / "head.pth")
        with pytest.raises(ConfigError, match=reason):
            import_head(store, tmp_path / "head.pth", results_dir=tmp_path / "results")
    (tmp_path / "head.pth").write_bytes(b"rubbish")
    with pytest.raises(WeightsError, match="neither a safetensors"):
        import_head(store, tmp_path / "head.pth", results_dir=tmp_path / "results")
    assert not (tmp_path / "results").exists()
