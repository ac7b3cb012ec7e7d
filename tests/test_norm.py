"""norm.py: the last norm is the same function in the backbone, in a file and after loading."""

from pathlib import Path

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from epcache.errors import ConfigError, WeightsError
from epcache.norm import FinalNorm, final_norm_from, find_final_norm


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["layernorm", "rmsnorm"]),
    dim=st.integers(1, 9),
    bias=st.booleans(),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
)
def test_norm_round_trip(
    tmp_path_factory: pytest.TempPathFactory, kind: str, dim: int, bias: bool, eps: float
) -> None:
    """A saved norm is the same function when loaded, and equals torch's own."""
    weight = torch.randn(dim)
    module: nn.Module
    if kind == "layernorm":
        module = nn.LayerNorm(dim, eps=eps, bias=bias)
        if bias:
            nn.init.normal_(module.bias)
    else:
        module = nn.RMSNorm(dim, eps=eps)
    module.weight.data.copy_(weight)
    norm = final_norm_from(module)
    assert norm is not None
    path = tmp_path_factory.mktemp("n") / "final_norm.safetensors"
    norm.save(path)
    loaded = FinalNorm.load(path)
    tokens = torch.randn(2, 3, dim)
    assert (loaded.kind, loaded.eps, loaded.bias is None) == (kind, eps, norm.bias is None)
    assert torch.equal(loaded(tokens), norm(tokens))
    assert torch.allclose(norm(tokens), module(tokens), atol=1e-5)
    assert loaded(tokens.half()).dtype == torch.float32
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_norm_refusals(tmp_path: Path) -> None:
    """Another width, another kind and another file are refused."""
    norm = FinalNorm(kind="layernorm", weight=torch.ones(4), bias=None, eps=1e-6)
    with pytest.raises(ConfigError, match="width 4, these have width 5"):
        norm(torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="batchnorm"):
        FinalNorm(kind="batchnorm", weight=torch.ones(4), bias=None, eps=1e-6)
    with pytest.raises(ConfigError, match="same shape"):
        FinalNorm(kind="rmsnorm", weight=torch.ones(4), bias=torch.ones(3), eps=1e-6)
    path = tmp_path / "x.safetensors"
    with pytest.raises(WeightsError, match="holds no final norm"):
        FinalNorm.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="holds no final norm"):
        FinalNorm.load(path)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("aimv2_large_patch14_224", {"depth": 1}, ("rmsnorm", "norm")),
        ("eva02_tiny_patch14_224", {"depth": 1}, ("layernorm", "fc_norm")),
        ("test_convnext", {}, ("layernorm", "head.norm")),
        ("test_resnet", {}, None),
    ],
)
def test_norm_is_found(
    name: str, options: dict[str, int], expected: tuple[str, str] | None
) -> None:
    """The last norm is found before pooling, after pooling and in the head, or there is none."""
    model = timm.create_model(name, num_classes=0, **options)
    found = find_final_norm(model, model.num_features)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.kind == expected[0]
    assert torch.equal(found.weight, model.get_submodule(expected[1]).weight)
    assert find_final_norm(model, 7) is None
