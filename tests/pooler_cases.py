"""Small poolers of every kind, and tokens for them."""

import torch

from epcache.poolers import make_pooler

# One small instance of everything that can be built: name, options at D=24 on a 2 x 3 grid.
SMALL = [
    ("cls", {}),
    ("gap", {}),
    ("gap", {"value": True, "dim_out": 10}),
    ("ep", {"num_queries": 3}),
    ("ep", {"num_queries": 4, "dim_out": 12}),
    ("ep", {"num_queries": 6, "value": False}),
    ("mhca", {"num_heads": 3}),
    ("mhca", {"num_heads": 4, "key": "identity"}),
    ("aim", {"num_heads": 4}),
    ("abmilp", {"depth": 1}),
    ("abmilp", {"depth": 2}),
    ("abmilp", {"depth": 1, "self_attention": "score"}),
    ("abmilp", {"depth": 2, "self_attention": "both"}),
    ("simpool", {}),
    ("simpool", {"num_heads": 3}),
    ("simpool", {"linear": False, "num_heads": 4}),
    ("delf", {}),
    ("cae", {"num_heads": 3}),
    ("vjepa", {"num_heads": 4}),
    ("vit_block", {"num_heads": 3}),
    ("siglip", {"num_heads": 2}),
    ("clip", {"num_heads": 4}),
    ("cait", {"num_heads": 3}),
    ("coca", {"num_heads": 2, "num_queries": 5}),
    ("cbam", {}),
    ("cbam", {"reduction": 4}),
]
ATTENTIVE = [case for case in SMALL if case[0] not in ("cls", "gap")]
FIXED_MASS = [c for c in ATTENTIVE if c[0] not in ("delf", "vit_block", "clip", "cait", "cbam")]
SETS = [c for c in SMALL if c[0] not in ("cls", "clip", "cbam")]
GRID = (2, 3)


def ids(case):
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


def small(case, seed=0, dim=24, grid=GRID):
    """A float64 pooler with every parameter moved off its initial value, and matching tokens."""
    generator = torch.Generator().manual_seed(seed)
    pooler = make_pooler(case[0], dim=dim, grid=grid, generator=generator, **case[1]).double()
    with torch.no_grad():
        for parameter in pooler.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise)
    shape = (4, grid[0] * grid[1], dim)
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64)
    return pooler, tokens + 2 * torch.randn(dim, generator=generator, dtype=torch.float64)


def relative(actual, expected):
    """Largest difference relative to the largest absolute value expected."""
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
