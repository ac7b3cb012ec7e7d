"""Seeded layers, batch normalisation without in-place writes, and stacks under vmap."""

import pytest
import torch
from pooler_cases import SMALL, ids, relative, small
from torch.func import functional_call, grad, stack_module_state, vmap

from epcache.errors import ConfigError
from epcache.poolers import make_pooler
from epcache.poolers.layers import BatchNorm, conv, linear, mean_and_variance


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_initial_values_depend_on_the_generator_alone(case):
    """Same seed, same values; global state is neither read nor moved."""

    def build(seed):
        generator = torch.Generator().manual_seed(seed)
        return make_pooler(case[0], dim=48, grid=2, generator=generator, **case[1]).state_dict()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build(7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = build(7), build(8)
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn = [key for key in first if key.endswith("weight") and "norm" not in key]
    assert all(not torch.equal(first[key], other[key]) for key in drawn)


def test_seeded_layers_draw_as_torch_does():
    """With the global generator, values are those of torch's own layers."""
    for ours, theirs in [
        (lambda: linear(5, 3, generator=None), lambda: torch.nn.Linear(5, 3)),
        (
            lambda: conv(2, 1, kernel=7, generator=None),
            lambda: torch.nn.Conv2d(2, 1, 7, padding=3, bias=False),
        ),
    ]:
        torch.manual_seed(3)
        mine = ours().state_dict()
        torch.manual_seed(3)
        assert all(torch.equal(mine[k], v) for k, v in theirs().state_dict().items())


def test_published_initial_values():
    """EP's queries are N(0, 0.02^2), CAE's zero, CaiT's gammas 1e-5, V-JEPA's proj rescaled."""
    generator = torch.Generator().manual_seed(0)

    def make(name):
        return make_pooler(name, dim=512, grid=2, generator=generator)

    assert make("ep").queries.std().item() == pytest.approx(0.02, rel=0.05)
    assert make("ep").value.weight.abs().max().item() == pytest.approx(512**-0.5, rel=0.01)
    assert make("coca").queries.std().item() == pytest.approx(1, rel=0.05)
    assert not make("cae").queries.any()
    assert torch.equal(make("cait").gamma, torch.full((512,), 1e-5))
    vjepa = make("vjepa")
    assert vjepa.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert vjepa.proj.weight.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert vjepa.mlp.fc2.weight.std().item() == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert not vjepa.mlp.fc1.bias.any()


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_is_torchs(affine):
    """Outputs, gradients, running statistics and state names are those of nn.BatchNorm1d."""
    generator = torch.Generator().manual_seed(0)
    ours = BatchNorm(5, eps=1e-3, affine=affine)
    theirs = torch.nn.BatchNorm1d(5, eps=1e-3, affine=affine)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }
    for _ in range(3):
        x = torch.randn(4, 3, 5, generator=generator) * 3 + 1
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = ours(mine), theirs(other.flatten(0, 1)).view_as(x)
        assert relative(a, b) < 1e-6
        weights = torch.randn(x.shape, generator=generator)
        (a * weights).sum().backward()
        (b * weights).sum().backward()
        assert relative(mine.grad, other.grad) < 1e-5
    ours.eval(), theirs.eval()
    assert all(
        torch.allclose(a, b)
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    assert relative(ours(x), theirs(x.flatten(0, 1)).view_as(x)) < 1e-6


def test_batch_norm_refuses_a_batch_of_one_value():
    """One value per feature has no variance to normalise by."""
    with pytest.raises(ConfigError, match="expected at least 2"):
        BatchNorm(3, eps=1e-6)(torch.zeros(1, 3))


@pytest.mark.parametrize("case", [c for c in SMALL if c[0] in ("aim", "delf", "cbam")], ids=ids)
def test_maps_leave_running_statistics_alone(case):
    """`attention` in training mode does not move the running statistics; `forward` does."""
    pooler, tokens = small(case)
    before = {k: v.clone() for k, v in pooler.named_buffers()}
    pooler.attention(tokens)
    assert all(torch.equal(v, before[k]) for k, v in pooler.named_buffers())
    pooler(tokens)
    assert all(not torch.equal(v, before[k]) for k, v in pooler.named_buffers())


@pytest.mark.parametrize("case", [c for c in SMALL if ids(c) not in ("cls", "gap")], ids=ids)
def test_a_stack_under_vmap_is_each_pooler_alone(case):
    """Outputs, gradients and running statistics of three stacked poolers are those of each."""
    poolers = [small(case, seed)[0] for seed in range(3)]
    tokens = small(case)[1]
    weights = torch.randn(3, 4, poolers[0].dim_out, dtype=torch.float64)
    params, buffers = stack_module_state(poolers)
    base = poolers[0]

    def loss(params, buffers, tokens, weights):
        state = {**params, **buffers}
        output = functional_call(base, state, (tokens,))
        return (output * weights).sum(), (output, {k: state[k] for k in buffers})

    step = vmap(grad(loss, has_aux=True), in_dims=(0, 0, None, 0))
    grads, (outputs, new_buffers) = step(params, buffers, tokens, weights)
    for i, pooler in enumerate(poolers):
        output = pooler(tokens)
        (output * weights[i]).sum().backward()
        assert relative(outputs[i], output) < 1e-12
        largest = max(p.grad.abs().max() for p in pooler.parameters())
        for name, parameter in pooler.named_parameters():
            difference = (grads[name][i] - parameter.grad).abs().max()
            assert difference < 1e-11 * largest, name
        for name, buffer in pooler.named_buffers():
            assert torch.allclose(new_buffers[name][i], buffer), name


def test_variance_is_torchs_also_far_from_zero():
    """Two plain passes agree with torch's variance for a mean 1000 times the deviation."""
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) + 1000
    mean, variance = mean_and_variance(x, (-1,))
    assert relative(variance, x.var(-1, correction=0)) < 1e-4
    assert relative(mean, x.mean(-1)) < 1e-6
    half = x.to(torch.bfloat16)
    assert torch.equal(mean_and_variance(half, (0,))[1], mean_and_variance(half.float(), (0,))[1])
