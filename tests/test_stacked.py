"""Stacked layers against torch's own, one probe at a time."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import nn

from epcache.stacked import stacked_linear, stacked_norm

small = settings(max_examples=30, deadline=None)
sizes = {
    "stacks": st.integers(1, 4),
    "images": st.integers(2, 9),
    "width": st.integers(1, 7),
    "seed": st.integers(0, 99),
}


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


@small
@given(**sizes, out=st.integers(1, 5), turned=st.booleans())
def test_linear_is_a_linear_layer_for_each_probe(stacks, images, width, seed, out, turned):
    """Values and both gradients, for inputs that lie as they are or transposed."""
    x = draw(images, stacks, width, seed=seed) if turned else draw(stacks, images, width, seed=seed)
    weight = draw(stacks, out, width, seed=seed + 1)
    upstream = draw(stacks, images, out, seed=seed + 2).detach()
    seen = x.transpose(0, 1) if turned else x
    ours = stacked_linear(seen, weight)
    plain = torch.stack([nn.functional.linear(a, b) for a, b in zip(seen, weight, strict=True)])
    torch.testing.assert_close(ours, plain)
    found = torch.autograd.grad(ours, (x, weight), upstream)
    expected = torch.autograd.grad(plain, (x, weight), upstream)
    torch.testing.assert_close(found, expected)
    assert found[1].is_contiguous(), "as an optimizer takes it"


@small
@given(**sizes)
def test_norm_is_batch_normalisation_for_each_probe(stacks, images, width, seed):
    """Values, the gradient and the statistics of ``BatchNorm1d`` without weight and bias."""
    x = draw(stacks, images, width, seed=seed)
    upstream = draw(stacks, images, width, seed=seed + 1).detach()
    ours, mean, var = stacked_norm(x, 1e-6)
    plain = torch.stack(
        [nn.functional.batch_norm(a, None, None, training=True, eps=1e-6) for a in x]
    )
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(mean, x.mean(1))
    torch.testing.assert_close(var, x.var(1, unbiased=False))
    (found,) = torch.autograd.grad(ours, x, upstream)
    (expected,) = torch.autograd.grad(plain, x, upstream)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
