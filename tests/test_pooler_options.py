"""What can be asked of `make_pooler`, what is refused, and what it costs."""

import pooler_references
import pytest
import torch
from pooler_cases import SETS, SMALL, ids, small
from torch.utils.flop_counter import FlopCounterMode

from epcache.errors import ConfigError
from epcache.poolers import POOLERS, describe_poolers, make_pooler, pooler_options

PARAMS = [
    (768, "cls", {}, 769_000),
    (768, "gap", {}, 769_000),
    (768, "mhca", {}, 1_949_416),
    (768, "mhca", {"num_heads": 8}, 1_949_416),
    (768, "aim", {}, 1_949_416),
    (768, "ep", {"num_queries": 8}, 1_364_968),
    (768, "ep", {"num_queries": 12}, 1_368_040),
    (768, "ep", {"num_queries": 32}, 1_383_400),
    (768, "ep", {}, 1_383_400),
    (768, "ep", {"num_queries": 64}, 1_407_976),
    (768, "ep", {"num_queries": 32, "dim_out": 384}, 704_488),
    (768, "ep", {"num_queries": 32, "dim_out": 96}, 195_304),
    (768, "ep", {"num_queries": 48, "dim_out": 96}, 207_592),
    (768, "abmilp", {"depth": 1}, 769_769),
    (768, "abmilp", {"depth": 2}, 1_360_361),
    (768, "abmilp", {"depth": 2, "self_attention": "both"}, 3_720_425),
    (768, "simpool", {}, 1_950_184),
    (768, "simpool", {"linear": False}, 770_536),
    (768, "delf", {}, 1_361_897),
    (768, "cae", {}, 3_134_440),
    (768, "vjepa", {}, 7_857_640),
    (768, "siglip", {}, 7_854_568),
    (768, "vit_block", {}, 7_854_568),
    (768, "clip", {}, 3_284_200),
    (768, "cait", {}, 7_860_712),
    (768, "coca", {}, 1_805_032),
    (768, "cbam", {}, 842_828),
    (1024, "cls", {}, 1_025_000),
    (1024, "gap", {}, 1_025_000),
    (1024, "ep", {"num_queries": 32}, 2_106_344),
    (1024, "aim", {}, 3_123_176),
    (384, "ep", {"num_queries": 32}, 544_744),
]


@pytest.mark.parametrize(("dim", "name", "options", "expected"), PARAMS)
def test_parameters_are_the_published_counts(dim, name, options, expected):
    """Trainable parameters of pooler and 1000-class classifier are exactly the published ones."""
    rows = {row["name"]: row for row in describe_poolers(dim, 1000, 14, options={name: options})}
    assert rows[name]["num_params"] == expected
    with torch.device("meta"):
        pooler = make_pooler(name, dim=dim, grid=(14, 14), **options)
    counted = sum(p.numel() for p in pooler.parameters())
    assert counted + pooler.dim_out * 1000 + 1000 == expected


def test_multiply_adds_are_the_published_figures():
    """EP 121.3 M to 11.0 M and MHCA 232 M to 5.6 M at N=196, D=768, C=1000."""
    rows = {row["name"]: row for row in describe_poolers(768, 1000, (14, 14))}
    assert [row["name"] for row in rows.values()] == list(POOLERS)
    assert all(
        set(row) == {"name", "num_params", "macs", "macs_published"} for row in rows.values()
    )
    assert round(rows["ep"]["macs_published"] / 1e6, 1) == 121.3
    assert round(rows["ep"]["macs"] / 1e6, 1) == 11.0
    assert round(rows["mhca"]["macs_published"] / 1e6) == 232
    assert round(rows["mhca"]["macs"] / 1e6, 1) == 5.6


def measured_macs(function):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_multiply_adds_are_what_runs(case):
    """`macs` is what torch counts in forward, `macs_published` what it counts in the reference."""
    grid, dim = (8, 9), 48
    pooler, tokens = small(case, dim=dim, grid=grid)
    pooler.eval().requires_grad_(False)
    params = dict(pooler.named_parameters())
    ours = measured_macs(lambda: pooler(tokens[:1]))
    plain = measured_macs(lambda: pooler_references.run(*case, params, tokens[:1], grid=grid))
    assert ours == pytest.approx(pooler.macs(72), rel=0.01)
    assert plain == pytest.approx(pooler.macs_published(72), rel=0.01)
    assert pooler.macs(72) <= pooler.macs_published(72)


def test_sizes_of_a_width_that_a_default_cannot_serve():
    """A pooler that does not fit the width keeps its row and says why; the others are sized."""
    rows = {row["name"]: row for row in describe_poolers(100, 10)}
    assert rows["aim"]["num_params"] is None
    assert "num_heads=16 does not divide dim=100" in rows["aim"]["problem"]
    assert rows["gap"]["num_params"] == 1010
    with pytest.raises(ConfigError, match="num_heads=3 does not divide"):
        describe_poolers(100, 10, options={"aim": {"num_heads": 3}})


ERRORS = [
    ("epp", {}, "unknown pooler 'epp'; did you mean ep"),
    ("nothing_like_it", {}, "it is one of cls, gap, ep"),
    ("ep", {"num_heads": 4}, "has no option 'num_heads'; it takes num_queries, dim_out, value"),
    ("cls", {"value": True}, "it takes no options"),
    (
        "ep",
        {"num_queries": 12},
        "nearest valid num_queries: 8 or 16, nearest valid dim_out: 60 or 72",
    ),
    ("ep", {"num_queries": 100}, "nearest valid num_queries: 64, nearest valid dim_out: 100"),
    ("ep", {"num_queries": 12, "value": False}, "nearest valid num_queries: 8 or 16$"),
    ("ep", {"num_queries": 0}, "num_queries must be a positive integer, got 0"),
    ("ep", {"num_queries": True}, "num_queries must be a positive integer, got True"),
    ("ep", {"num_queries": "8"}, "num_queries must be a positive integer, got '8'"),
    ("ep", {"dim_out": -4}, "dim_out must be a positive integer, got -4"),
    ("ep", {"value": False, "dim_out": 32}, "the only valid dim_out is 64"),
    ("ep", {"value": "no"}, "value must be true or false, got 'no'"),
    ("gap", {"dim_out": 32}, "which needs value=True"),
    ("mhca", {"num_heads": 12}, "does not divide dim=64; nearest valid num_heads: 8 or 16"),
    ("mhca", {"key": "none"}, "key must be one of 'linear', 'identity', got 'none'"),
    ("abmilp", {"depth": 3}, "depth must be one of 1, 2, got 3"),
    ("abmilp", {"self_attention": "values"}, "must be one of 'none', 'score', 'both'"),
    ("cae", {"num_heads": 65}, "nearest valid num_heads: 64"),
    ("clip", {"grid": None}, "pooler clip needs the token grid"),
    ("cbam", {"grid": None}, "pooler cbam needs the token grid"),
    ("clip", {"grid": (2, 2, 2)}, "grid must be \\(height, width\\) or one int"),
    ("gap", {"grid": (0, 2)}, "grid must be a positive integer, got 0"),
    ("gap", {"grid": "4x4"}, "grid must be a positive integer, got '4x4'"),
    ("gap", {"dim": 0}, "dim must be a positive integer, got 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), ERRORS)
def test_bad_options_are_refused_with_the_remedy(name, options, message):
    """Every bad option is one ConfigError that gives the reason and the nearest valid values."""
    with pytest.raises(ConfigError, match=message) as caught:
        make_pooler(name, **{"dim": 64, "grid": (4, 4), **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["clip", "cbam"])
def test_poolers_on_a_grid_refuse_other_tokens(name):
    """[CLS] beside the patches is refused where each token needs its place."""
    pooler = make_pooler(name, dim=16, grid=(2, 3))
    with pytest.raises(ConfigError, match="got 7 tokens; its 2x3 grid has 6"):
        pooler(torch.zeros(2, 7, 16))
    with pytest.raises(ConfigError, match="got 7 tokens"):
        pooler.attention(torch.zeros(2, 7, 16))


@pytest.mark.parametrize("case", [c for c in SETS if c[0] != "cls"], ids=ids)
def test_poolers_of_sets_take_any_number_of_tokens(case):
    """Without a grid, [CLS] may come in front as one more token."""
    pooler, tokens = small(case)
    more = torch.cat([tokens.mean(1, keepdim=True), tokens], 1)
    assert pooler.eval()(more).shape == (4, pooler.dim_out)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 15), (1, 2, 6, 16)])
def test_tokens_of_another_shape_are_refused(shape):
    """Tokens must be (B, N, D) with the pooler's width."""
    with pytest.raises(ConfigError, match=r"expected \(images, tokens, 16\)"):
        make_pooler("ep", dim=16, num_queries=4)(torch.zeros(shape))


def test_options_are_listed_with_their_defaults():
    """The options of a pooler are its own, without dim, grid and generator."""
    assert pooler_options("ep") == {"num_queries": 32, "dim_out": None, "value": True}
    assert pooler_options("cls") == {}
    assert all(POOLERS[name].name == name for name in POOLERS)


def test_default_heads_are_as_wide_as_the_backbones():
    """Without num_heads a head has 64 channels, or as near as the width allows."""
    heads = [make_pooler("mhca", dim=dim).num_heads for dim in (768, 1024, 384, 64, 100)]
    assert heads == [12, 16, 6, 1, 1]
