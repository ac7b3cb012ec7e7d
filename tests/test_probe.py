"""Probe: pooler, batch normalisation, classifier."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from epcache.errors import ConfigError
from epcache.poolers import POOLERS, make_pooler
from epcache.probe import Probe

GOLDEN = Path(os.environ.get("EPCACHE_GOLDEN", Path(__file__).parent / "golden"))


def ep_probe(dim=16, num_queries=4, dim_out=8, num_classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    options = {"num_queries": num_queries, "dim_out": dim_out}
    pooler = make_pooler("ep", dim=dim, generator=generator, **options)
    return Probe(pooler, num_classes, generator)


def recipe_probe(data, when):
    """The reference trajectory's probe, at its `init` or `final` state."""
    state = {k.split("/", 1)[1]: torch.tensor(data[k]) for k in data if k.startswith(when)}
    num_queries, dim = state["queries"].shape
    options = {"num_queries": num_queries, "dim_out": len(state["value.weight"])}
    probe = Probe(make_pooler("ep", dim=dim, **options), len(state["head.bias"]))
    for name in ("queries", "value.weight"):
        state[f"pooler.{name}"] = state.pop(name)
    state["norm.num_batches_tracked"] = torch.tensor(0)
    probe.load_state_dict(state)
    return probe


@pytest.mark.parametrize("recipe", ["lars", "adamw", "sgd"])
def test_reference_trajectory_ends(recipe):
    """The first step's training loss and the last step's evaluation logits are the reference's."""
    data = np.load(GOLDEN / f"recipe_{recipe}.npz")
    assert json.loads(str(data["options"]))
    tokens, labels = torch.tensor(data["x"]).float(), torch.tensor(data["y"]).long()
    rows = torch.tensor(data["batches"][0])
    logits = recipe_probe(data, "init").train()(tokens[rows])
    loss = torch.nn.functional.cross_entropy(logits, labels[rows]).item()
    assert loss == pytest.approx(float(data["loss"][0]), rel=1e-5)
    expected = torch.tensor(data["logits"])
    difference = (recipe_probe(data, "final").eval()(tokens) - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()


def test_probe_is_its_three_parts():
    """Logits are the classifier of torch's own batch norm of the pooled vector, in both modes."""
    probe, tokens = ep_probe(), torch.randn(6, 9, 16)
    norm = torch.nn.BatchNorm1d(8, eps=1e-6, momentum=0.1, affine=False)
    for _ in range(2):
        expected = probe.head(norm(probe.pooler(tokens)))
        assert torch.allclose(probe(tokens), expected, atol=1e-5)
    probe.eval(), norm.eval()
    assert torch.allclose(probe(tokens), probe.head(norm(probe.pooler(tokens))), atol=1e-5)
    assert probe.norm.num_batches_tracked == 2


def test_trainable_parameters_of_ep():
    """D*O + M*D + O*C + C, and the norm learns nothing."""
    probe = ep_probe()
    assert sum(p.numel() for p in probe.parameters()) == 16 * 8 + 4 * 16 + 8 * 5 + 5
    assert set(probe.state_dict()) == {
        "pooler.queries",
        "pooler.value.weight",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize("name", list(POOLERS))
def test_every_pooler_trains_in_a_probe(name):
    """A few steps of gradient descent on a fixed batch lower the loss, whatever the pooler."""
    generator = torch.Generator().manual_seed(0)
    probe = Probe(make_pooler(name, dim=32, grid=3, generator=generator), 4, generator)
    tokens = torch.randn(16, 9, 32, generator=generator)
    labels = torch.arange(16) % 4
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(probe(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None for p in probe.parameters())


def test_probe_is_a_function_of_its_seed():
    """Same seed, same probe; global state is neither read nor moved."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = ep_probe(seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = ep_probe(seed=3).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["head.weight"], ep_probe(seed=4).state_dict()["head.weight"])


@pytest.mark.parametrize("num_classes", [0, -1, True, "10"])
def test_bad_number_of_classes_is_refused(num_classes):
    """The number of classes is a positive integer."""
    with pytest.raises(ConfigError, match="num_classes must be a positive integer"):
        Probe(make_pooler("gap", dim=8), num_classes)
