"""Poolers: reference values, plain references, attention maps, known special cases."""

import json
import os
from pathlib import Path

import numpy as np
import pooler_references
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pooler_cases import ATTENTIVE, FIXED_MASS, GRID, SETS, SMALL, ids, relative, small
from torch.func import functional_call

from epcache.errors import ConfigError
from epcache.poolers import POOLERS, make_pooler

GOLDEN = Path(os.environ.get("EPCACHE_GOLDEN", Path(__file__).parent / "golden"))
NOT_POOLERS = ("recipe_", "localization")
CASES = sorted(p.stem for p in GOLDEN.glob("*.npz") if not p.stem.startswith(NOT_POOLERS))


def golden(case):
    data = np.load(GOLDEN / f"{case}.npz")
    options = json.loads(str(data["options"]))
    pooler = make_pooler(options.pop("pooler"), **options)
    expected = {k[6:]: torch.tensor(data[k]) for k in data.files if k.startswith("param/")}
    named = dict(pooler.named_parameters())
    assert {k: v.shape for k, v in named.items()} == {k: v.shape for k, v in expected.items()}
    pooler.load_state_dict({**pooler.state_dict(), **expected})
    return pooler, {k: torch.tensor(data[k]) for k in data.files if k != "options"}


def test_golden_files_cover_every_pooler():
    """Every pooler with something to learn has reference values."""
    assert {case.split("-")[0] for case in CASES} == set(POOLERS) - {"cls", "gap"}


@pytest.mark.parametrize("case", CASES)
def test_golden_forward(case):
    """Parameter names, shapes and outputs in both modes are those of the reference."""
    pooler, data = golden(case)
    assert relative(pooler.eval()(data["x"]), data["y_eval"]) < 1e-5
    assert relative(pooler.train()(data["x"]), data["y_train"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_golden_gradients(case):
    """Gradients are those of the reference; those that vanish in exact arithmetic are tiny."""
    pooler, data = golden(case)
    (pooler.train()(data["x"]) * data["w"]).sum().backward()
    largest = max(v.abs().max() for k, v in data.items() if k.startswith("grad/"))
    for name, parameter in pooler.named_parameters():
        expected = data[f"grad/{name}"]
        if expected.abs().max() < 1e-6 * largest:  # key biases: softmax ignores them
            assert parameter.grad.abs().max() < 1e-6 * largest, name
        else:
            assert relative(parameter.grad, expected) < 1e-4, name


@pytest.mark.parametrize("case", SMALL, ids=ids)
@pytest.mark.parametrize("training", [False, True])
def test_equals_projecting_every_token(case, training):
    """Output, gradients and maps equal the plain formulation's, and all parameters get one."""
    pooler, tokens = small(case)
    pooler.train(training)
    weights = torch.randn(len(tokens), pooler.dim_out, dtype=torch.float64)
    copies = {k: p.detach().clone().requires_grad_() for k, p in pooler.named_parameters()}
    expected, maps = pooler_references.run(*case, copies, tokens, grid=GRID, training=training)
    if pooler.num_maps:
        assert relative(pooler.attention(tokens), maps) < 1e-12
    output = pooler(tokens)
    assert relative(output, expected) < 1e-12
    if not copies:
        return
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    largest = max(copy.grad.abs().max() for copy in copies.values())
    for name, parameter in pooler.named_parameters():
        assert (parameter.grad - copies[name].grad).abs().max() < 1e-11 * largest, name


@st.composite
def shaped_cases(draw):
    """A pooler that folds something, with random options, width, grid and seed."""
    heads, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    dim = heads * width
    with_heads = [("mhca", {}), ("mhca", {"key": "identity"}), ("aim", {}), ("simpool", {})]
    with_heads += [(name, {}) for name in ("cae", "vjepa", "siglip", "clip", "cait")]
    ep = {"num_queries": heads, "dim_out": heads * draw(st.integers(1, 5))}
    case = draw(
        st.sampled_from(
            [(name, {**options, "num_heads": heads}) for name, options in with_heads]
            + [("ep", ep), ("coca", {"num_heads": heads, "num_queries": draw(st.integers(1, 4))})]
        )
    )
    grid = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    return case, dim, grid, draw(st.integers(0, 2**16)), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(shaped_cases())
def test_pooling_first_equals_projecting_first(drawn):
    """Folding keys, values and norms is the same algebra for any width, heads and grid."""
    case, dim, grid, seed, training = drawn
    pooler, tokens = small(case, seed=seed, dim=dim, grid=grid)
    params = dict(pooler.train(training).named_parameters())
    with torch.no_grad():
        expected, maps = pooler_references.run(*case, params, tokens, grid=grid, training=training)
        assert (pooler(tokens) - expected).abs().max() < 1e-9 * max(1, expected.abs().max())
        assert (pooler.attention(tokens) - maps).abs().max() < 1e-9


@pytest.mark.parametrize("case", ATTENTIVE, ids=ids)
def test_maps_are_distributions(case):
    """Maps are (B, M, N), non-negative, and every row sums to 1."""
    pooler, tokens = small(case)
    maps = pooler.eval().attention(tokens)
    assert maps.shape == (4, pooler.num_maps, 6)
    assert (maps >= 0).all()
    assert (maps.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["cls", "gap"])
def test_linear_probes_have_no_maps(name):
    """A pooler without attention says so."""
    with pytest.raises(ConfigError, match=f"pooler {name} has no attention maps"):
        make_pooler(name, dim=8).attention(torch.zeros(1, 4, 8))


@pytest.mark.parametrize("case", FIXED_MASS, ids=ids)
@pytest.mark.parametrize("training", [False, True])
def test_pooling_with_own_maps_is_forward(case, training):
    """`pool` with the pooler's own maps is `forward`; with other maps it is not."""
    pooler, tokens = small(case)
    pooler.train(training)
    maps = pooler.attention(tokens)
    output = pooler(tokens)
    assert relative(pooler.pool(tokens, maps), output) < 1e-12
    assert relative(pooler.pool(tokens, torch.full_like(maps, 1 / 6)), output) > 1e-3


@pytest.mark.parametrize("name", ["cls", "gap", "delf", "vit_block", "clip", "cait", "cbam"])
def test_pooling_with_maps_is_refused_where_it_means_nothing(name):
    """Poolers whose output is not a function of their maps refuse foreign ones."""
    pooler = make_pooler(name, dim=16, grid=2)
    with pytest.raises(ConfigError, match="cannot pool with given attention maps"):
        pooler.pool(torch.zeros(1, 4, 16), torch.zeros(1, 1, 4))


@pytest.mark.parametrize("case", SETS, ids=ids)
def test_order_of_tokens_does_not_matter(case):
    """Permuting tokens leaves the output as it is and permutes the maps."""
    pooler, tokens = small(case)
    pooler.eval()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert relative(pooler(tokens[:, order]), pooler(tokens)) < 1e-12
    if pooler.num_maps:
        maps = pooler.attention(tokens)[..., order]
        assert relative(pooler.attention(tokens[:, order]), maps) < 1e-12


def test_a_common_shift_moves_ep_by_its_projection():
    """Adding one vector to all tokens leaves EP's maps alone and adds W_V times it."""
    pooler, tokens = small(("ep", {"num_queries": 3}))
    shift = torch.linspace(-3, 3, 24, dtype=torch.float64)
    assert relative(pooler.attention(tokens + shift), pooler.attention(tokens)) < 1e-10
    assert relative(pooler(tokens + shift) - pooler(tokens), pooler.value(shift)) < 1e-10


@pytest.mark.parametrize("name", ["simpool", "cae", "vjepa", "cait"])
def test_layer_norm_forgets_each_tokens_offset_and_scale(name):
    """Behind a LayerNorm on tokens, an offset and a scale of each token hardly matter."""
    options = {} if name == "simpool" else {"num_heads": 3}
    pooler, tokens = small((name, options))
    query_D = torch.linspace(-1, 1, 24, dtype=torch.float64)
    # SimPool's query is the mean of the raw tokens: offsets that cancel leave it alone.
    offsets = torch.tensor([2.0, -2, 7, -7, 1, -1], dtype=torch.float64)[None, :, None]
    assert relative(pooler(tokens + offsets), pooler(tokens)) < 1e-10
    if name != "simpool":
        assert relative(pooler(tokens * 3 + offsets), pooler(tokens)) < 1e-4
    assert relative(pooler(tokens + offsets * query_D), pooler(tokens)) > 1e-3


def test_aim_forgets_offset_and_scale_of_each_channel_in_training():
    """Batch statistics cancel a channel's offset and scale."""
    pooler, tokens = small(("aim", {"num_heads": 4}))
    scale = torch.linspace(1, 5, 24, dtype=torch.float64)
    assert relative(pooler(tokens * scale + 10 * scale), pooler(tokens)) < 1e-4
    assert relative(pooler.eval()(tokens * scale + 10 * scale), pooler(tokens)) > 1e-2


def test_ep_with_zero_queries_is_the_projected_mean():
    """Uniform attention makes EP the ablation GAP + W_V, and without W_V plain GAP."""
    ep, tokens = small(("ep", {"num_queries": 4}))
    bare, _ = small(("ep", {"num_queries": 4, "value": False}))
    gap, _ = small(("gap", {"value": True}))
    gap.value.weight.data = ep.value.weight.data
    ep.queries.data.zero_()
    bare.queries.data.zero_()
    assert relative(ep(tokens), gap(tokens)) < 1e-12
    assert relative(bare(tokens), tokens.mean(1)) < 1e-12


def test_ep_queries_are_mhca_queries_with_the_key_map_folded():
    """MHCA is EP whose queries are W_K[h]^T q_h, up to the scale."""
    mhca, tokens = small(("mhca", {"num_heads": 3}))
    ep, _ = small(("ep", {"num_queries": 3}))
    folded = torch.stack(
        [w.T @ q for w, q in zip(mhca.key.weight.chunk(3), mhca.queries[0].chunk(3), strict=True)]
    )
    ep.queries.data = folded.detach() * 3**0.5
    ep.value.weight.data = mhca.value.weight.data
    assert relative(ep.attention(tokens), mhca.attention(tokens)) < 1e-12
    assert relative(ep(tokens), mhca(tokens)) < 1e-12


def test_mhca_with_identity_keys_is_mhca_with_an_identity_matrix():
    """The ablation fixes W_K to the identity and has no such parameter."""
    fixed, tokens = small(("mhca", {"num_heads": 4, "key": "identity"}))
    learned, _ = small(("mhca", {"num_heads": 4}))
    learned.load_state_dict({**fixed.state_dict(), "key.weight": torch.eye(24)})
    assert set(fixed.state_dict()) == {"queries", "value.weight"}
    assert relative(fixed(tokens), learned(tokens)) < 1e-12


def test_ep_passes_gradcheck():
    """EP's gradients are the derivatives of its output, for parameters and tokens."""
    pooler, tokens = small(("ep", {"num_queries": 2, "dim_out": 4}), dim=6)
    params = {k: p.detach().requires_grad_() for k, p in pooler.named_parameters()}

    def output(queries, value, x):
        return functional_call(pooler, {"queries": queries, "value.weight": value}, (x,))

    inputs = (params["queries"], params["value.weight"], tokens[:2, :3].requires_grad_())
    assert torch.autograd.gradcheck(output, inputs)


def test_cls_takes_the_first_token():
    """The cls pooler reads token 0 and says that it needs it."""
    tokens = torch.arange(24.0).reshape(2, 3, 4)
    pooler = make_pooler("cls", dim=4)
    assert torch.equal(pooler(tokens), tokens[:, 0])
    assert [name for name in POOLERS if POOLERS[name].needs_prefix] == ["cls"]


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_a_batch_of_one_keeps_its_axis(case):
    """One image gives one row, the same as in a larger batch."""
    pooler, tokens = small(case)
    pooler.eval()
    assert pooler(tokens[:1]).shape == (1, pooler.dim_out)
    assert relative(pooler(tokens[:1]), pooler(tokens)[:1]) < 1e-12


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_runs_under_bfloat16_autocast(case):
    """Half-precision tokens under autocast give the float32 output within bfloat16's error."""
    pooler, tokens = small(case)
    pooler = pooler.float().eval()
    half = tokens.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        output = pooler(half)
    assert relative(output.float(), pooler(half.float())) < 0.05
