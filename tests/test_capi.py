"""capi.py: registers and patches of every block, with positions."""

import pytest
import torch

from epcache.architectures.capi import CapiEncoder
from epcache.architectures.timm_models import seeded
from epcache.backbone import has_cls, list_backbones
from epcache.norm import final_norm_from

ENTRIES = {entry.alias: entry for entry in list_backbones()}


def test_capi_tokens() -> None:
    """Our CAPI encoder gives registers and patches a block, and starts from the published size."""
    with torch.device("meta"):
        published = CapiEncoder(dim=1024, depth=24, num_heads=16)
    entry = ENTRIES["capi_vitl14"]
    assert sum(p.numel() for p in published.parameters()) / 1e6 == pytest.approx(
        entry.params, abs=0.05
    )
    with seeded(0):
        model = CapiEncoder(dim=32, depth=3, num_heads=2).eval()
    layers = model(torch.rand(2, 3, 42, 28))
    assert [(r.shape, p.shape) for r, p in layers] == [((2, 16, 32), (2, 6, 32))] * 3
    assert not has_cls(model)
    norm = final_norm_from(model.final_norm)
    assert norm is not None
    assert (norm.kind, norm.bias) == ("rmsnorm", None)


def test_capi_positions() -> None:
    """Attention sees where a token is: equal patches at other places give other tokens."""
    with seeded(0):
        model = CapiEncoder(dim=32, depth=1, num_heads=2).eval()
    image = torch.zeros(1, 3, 28, 28)
    image[:, :, :14, :14] = 1
    ((_, patch),) = model(image)
    ((_, moved),) = model(image.flip(-1))
    assert not torch.allclose(patch[0, 0], moved[0, 1], atol=1e-5)
    with torch.no_grad():
        model.encoder.blocks[0].residual1.fn.rope.freqs.zero_()
    ((_, patch),) = model(image)
    ((_, moved),) = model(image.flip(-1))
    assert torch.allclose(patch[0, 0], moved[0, 1], atol=1e-6)
