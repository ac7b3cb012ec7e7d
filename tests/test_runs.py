"""A run's folder is enough to use its probe on a live backbone."""

import json

import numpy as np
import pytest
import torch
from probekit import learnable_store

import epcache
from epcache.errors import ConfigError, WeightsError
from epcache.probing import ProbeConfig, fit_probes
from epcache.runs import find_run, load_probe

QUICK = {"epochs": 4, "batch_size": 10, "lr": 0.01}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return epcache.open_store(learnable_store(tmp_path_factory.mktemp("runs") / "store"))


def accuracy(probe, store, layer=-1):
    """Of a live probe on raw tokens, patch and prefix apart as a backbone gives them."""
    split = store["val"]
    tokens = split.layer(layer)
    with torch.no_grad():
        logits = probe(torch.from_numpy(tokens.patch[:]), torch.from_numpy(tokens.prefix[:]))
    assert logits.shape == (len(split), 3)
    return float((logits.argmax(1).numpy() == split.labels).mean())


@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize(
    "asked",
    [
        {"pooler": "ep", "num_queries": 4},
        {"pooler": "ep", "num_queries": 2, "dim_out": 8, "tokens": "all"},
        {"pooler": "cls"},
        {"pooler": "gap"},
        {"pooler": "aim", "options": {"num_heads": 4}},
    ],
)
def test_a_loaded_probe_scores_what_its_row_says(store, tmp_path, asked, norm):
    """Best is the state of test_top1, last that of test_top1_last; the norm is part of it."""
    (row,) = fit_probes(store, [ProbeConfig(norm=norm, **asked, **QUICK)], results_dir=tmp_path)
    for weights, expected in (("best", row.test_top1), ("last", row.test_top1_last)):
        probe = load_probe(row.run, results_dir=tmp_path, weights=weights)
        assert not probe.training
        assert accuracy(probe, store) == pytest.approx(expected, abs=1e-6)
        assert (probe.norm is not None) == (norm == "final")
    assert probe.row == row
    assert probe.classes == ("ape", "bee", "cat")


def test_tokens_that_start_with_cls_work_too(store, tmp_path):
    """A probe on all tokens takes them in one tensor or in two."""
    config = ProbeConfig(tokens="all", num_queries=4, **QUICK)
    (row,) = fit_probes(store, [config], results_dir=tmp_path)
    probe = load_probe(tmp_path / "runs" / row.run)
    tokens = store["val"].layer(-1)
    patch, prefix = torch.from_numpy(tokens.patch[:]), torch.from_numpy(tokens.prefix[:])
    joined = probe(torch.cat([prefix, patch], dim=1))
    assert torch.equal(joined, probe(patch, prefix))
    maps = probe.attention(patch, prefix)
    assert maps.shape == (len(patch), 4, 7)
    torch.testing.assert_close(maps.sum(2), torch.ones(len(patch), 4))


@pytest.mark.parametrize("asked", [{"tokens": "all", "num_queries": 4}, {"pooler": "cls"}])
def test_a_probe_on_an_average_takes_a_list_of_layers(tmp_path, asked):
    """Earliest first; each gets its norm before the mean. Another number is one clear error."""
    store = epcache.open_store(learnable_store(tmp_path / "store", layers=(0, 1, 2, 3)))
    (row,) = fit_probes(
        store, [ProbeConfig(average_layers=3, **asked, **QUICK)], results_dir=tmp_path
    )
    assert (row.layer, row.average_layers) == (3, 3)
    probe = load_probe(row.run, results_dir=tmp_path)
    split = store["val"]
    layers = [split.layer(layer) for layer in (1, 2, 3)]
    patch = [torch.from_numpy(layer.patch[:]) for layer in layers]
    prefix = [torch.from_numpy(layer.prefix[:]) for layer in layers]
    with torch.no_grad():
        logits = probe(patch, prefix)
    top1 = float((logits.argmax(1).numpy() == split.labels).mean())
    assert top1 == pytest.approx(row.test_top1, abs=1e-6)
    with pytest.raises(ConfigError, match=r"tokens of 1 layers: this probe looks at 3, layers 1"):
        probe(patch[0], prefix[0])
    with pytest.raises(ConfigError, match=r"prefix of 2 layers: .* give a list of 3 tensors"):
        probe(patch, prefix[:2])


def test_a_probe_on_one_layer_takes_one_tensor(store, tmp_path):
    """A list of one is the same; more is refused."""
    (row,) = fit_probes(store, [ProbeConfig(num_queries=4, **QUICK)], results_dir=tmp_path)
    probe = load_probe(row.run, results_dir=tmp_path)
    patch = torch.from_numpy(store["val"].layer(-1).patch[:])
    assert torch.equal(probe(patch), probe([patch]))
    with pytest.raises(ConfigError, match="looks at 1, layer 3; give one tensor"):
        probe([patch, patch])


def test_without_held_out_data_best_is_the_best_epoch(store, tmp_path):
    """There the state is that of test_top1_best."""
    config = ProbeConfig(num_queries=4, holdout=0.0, **QUICK)
    (row,) = fit_probes(store, [config], results_dir=tmp_path)
    probe = load_probe(row.run, results_dir=tmp_path)
    assert accuracy(probe, store) == pytest.approx(row.test_top1_best, abs=1e-6)


def test_a_probe_that_was_not_chosen_is_kept_too(store, tmp_path):
    """Its weights are those of the selection."""
    configs = [ProbeConfig(num_queries=4, **{**QUICK, "lr": lr}) for lr in (0.01, 1e-5)]
    _, lost = fit_probes(store, configs, results_dir=tmp_path)
    probe = load_probe(lost.run, results_dir=tmp_path)
    assert lost.test_top1 is None
    assert 0 <= accuracy(probe, store) <= 1


def test_the_folder_says_how_to_repeat_the_run(store, tmp_path):
    """config.json alone gives a config that trains to the same row."""
    (row,) = fit_probes(store, [ProbeConfig(num_queries=4, **QUICK)], results_dir=tmp_path / "a")
    config = json.loads((find_run(row.run, tmp_path / "a") / "config.json").read_text())
    assert config["row"] == row.to_json()
    assert config["digest"] == store.digest
    (again,) = fit_probes(store, [ProbeConfig(**config["probe"])], results_dir=tmp_path / "b")
    assert again.run == row.run
    assert again.test_top1 == row.test_top1


def test_what_is_wrong_with_a_run_is_said(store, tmp_path):
    """No such run; weights cut off; no such weights."""
    with pytest.raises(ConfigError, match="no run nothing in"):
        load_probe("nothing", results_dir=tmp_path)
    (row,) = fit_probes(store, [ProbeConfig(num_queries=4, **QUICK)], results_dir=tmp_path)
    with pytest.raises(ConfigError, match="weights='worst': expected one of best, last"):
        load_probe(row.run, results_dir=tmp_path, weights="worst")
    path = find_run(row.run, tmp_path) / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WeightsError, match=r"damaged .* epcache probe --again"):
        load_probe(row.run, results_dir=tmp_path)


def test_a_run_that_lacks_its_folder_is_trained_again(store, tmp_path):
    """A row without its files is not taken for finished."""
    config = ProbeConfig(num_queries=4, **QUICK)
    (row,) = fit_probes(store, [config], results_dir=tmp_path)
    (find_run(row.run, tmp_path) / "config.json").unlink()
    (again,) = fit_probes(store, [config], results_dir=tmp_path)
    assert again.test_top1 == row.test_top1
    assert find_run(row.run, tmp_path)


def test_curves_have_an_entry_for_each_epoch(store, tmp_path):
    """Loss and both accuracies, of both trainings."""
    (row,) = fit_probes(store, [ProbeConfig(num_queries=4, **QUICK)], results_dir=tmp_path)
    curve = json.loads((find_run(row.run, tmp_path) / "curve.json").read_text())
    assert set(curve["select"]) == {"train_loss", "val_top1", "val_top5"}
    assert set(curve["final"]) == {"train_loss", "test_top1", "test_top5"}
    for part in curve.values():
        assert {len(values) for values in part.values()} == {4}
        assert np.isfinite(list(part.values())).all()
