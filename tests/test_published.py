"""EP heads in the published key layout: out, in, and what is refused."""

import pytest
import torch

from epcache.errors import ConfigError, WeightsError
from epcache.poolers import make_pooler
from epcache.probe import Probe
from epcache.published import from_published, load_published, save_published, to_published


def trained(num_queries=4, dim=12, dim_out=8, num_classes=5):
    """An EP probe whose every tensor differs from its initial value."""
    options = {"num_queries": num_queries, "dim_out": dim_out}
    probe = Probe(make_pooler("ep", dim=dim, **options), num_classes)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.5)
    for _ in range(2):
        probe(torch.randn(6, 7, dim)).square().sum().backward()
        optimizer.step()
    return probe.eval()


def test_round_trip_is_exact(tmp_path):
    """A saved probe loads with the same bits and the same logits, without touching the RNG."""
    probe, path = trained(), tmp_path / "head.pth"
    save_published(probe, path)
    state = torch.get_rng_state()
    loaded = load_published(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert not loaded.training
    for key, tensor in probe.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    tokens = torch.randn(3, 7, 12)
    assert torch.equal(loaded(tokens), probe(tokens))
    assert [p.name for p in tmp_path.iterdir()] == ["head.pth"]


def test_file_has_the_published_layout(tmp_path):
    """The file is a dict with `state_dict`, its keys and shapes the published ones."""
    save_published(trained(), tmp_path / "head.pth")
    content = torch.load(tmp_path / "head.pth", weights_only=True)
    assert set(content) == {"state_dict"}
    assert {key: tuple(value.shape) for key, value in content["state_dict"].items()} == {
        "0.cls_token": (1, 4, 12),
        "0.v.weight": (8, 12),
        "1.running_mean": (8,),
        "1.running_var": (8,),
        "1.num_batches_tracked": (),
        "2.weight": (5, 8),
        "2.bias": (5,),
    }


def test_published_state_gives_the_published_formula():
    """A state written by hand classifies as the formula says, with or without the counter."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    state = {
        "0.cls_token": draw(1, 2, 6),
        "0.v.weight": draw(4, 6),
        "1.running_mean": draw(4),
        "1.running_var": draw(4).square() + 0.1,
        "2.weight": draw(3, 4),
        "2.bias": draw(3),
    }
    tokens = draw(5, 7, 6)
    maps = (state["0.cls_token"] @ tokens.transpose(1, 2) * 6**-0.5).softmax(-1)
    values = tokens @ state["0.v.weight"].T
    pooled = torch.cat([maps[:, :1] @ values[..., :2], maps[:, 1:] @ values[..., 2:]], -1)[:, 0]
    normal = (pooled - state["1.running_mean"]) / (state["1.running_var"] + 1e-6).sqrt()
    expected = normal @ state["2.weight"].T + state["2.bias"]
    counted = {**state, "1.num_batches_tracked": torch.tensor(9)}
    assert torch.allclose(from_published(state)(tokens), expected, atol=1e-5)
    assert from_published(counted).norm.num_batches_tracked == 9


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("0.v.weight", None, r"missing \['0.v.weight'\]"),
        ("3.weight", torch.zeros(1), r"unexpected \['3.weight'\]"),
        ("2.weight", torch.zeros(5, 9), r"shape \(5, 9\), expected \(C, 8\)"),
        ("0.cls_token", torch.zeros(2, 4, 12), r"shape \(2, 4, 12\), expected \(1, M, D\)"),
        ("1.running_mean", torch.zeros(1, 8), r"shape \(1, 8\), expected \(8\)"),
        ("0.cls_token", torch.zeros(1, 3, 12), "num_queries=3 does not divide dim_out=8"),
        ("2.bias", torch.full((5,), float("nan")), "2.bias is not a tensor of finite numbers"),
        ("2.bias", "text", "2.bias is not a tensor"),
    ],
)
def test_states_that_are_no_ep_head_are_refused(key, value, message):
    """A missing, unexpected, misshapen or non-finite entry is named."""
    state = to_published(trained())
    if value is None:
        del state[key]
    else:
        state[key] = value
    with pytest.raises(WeightsError, match=message) as caught:
        from_published(state)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_ep_head_are_refused(tmp_path):
    """A missing file, foreign bytes, pickled code and a bare state are one-line errors."""
    with pytest.raises(WeightsError, match="does not exist"):
        load_published(tmp_path / "missing.pth")
    (tmp_path / "text.pth").write_text("not a torch file")
    (tmp_path / "rubbish.pth").write_bytes(b"rubbish")
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save(trained(), tmp_path / "module.pth")
    for name in ("text.pth", "rubbish.pth", "empty.pth", "module.pth"):
        with pytest.raises(
            WeightsError, match=r"neither a safetensors|more than tensors"
        ) as caught:
            load_published(tmp_path / name)
        assert "\n" not in str(caught.value)
    torch.save(to_published(trained()), tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="has no 'state_dict'"):
        load_published(tmp_path / "bare.pth")
    torch.save({"state_dict": {"2.bias": torch.zeros(2)}}, tmp_path / "partial.pth")
    with pytest.raises(WeightsError, match=r"partial.pth: not a published EP head"):
        load_published(tmp_path / "partial.pth")


@pytest.mark.parametrize(("name", "options"), [("gap", {}), ("ep", {"value": False})])
def test_only_ep_has_a_published_layout(name, options):
    """Other poolers cannot be written in it."""
    with pytest.raises(ConfigError, match="has no published layout"):
        to_published(Probe(make_pooler(name, dim=32, **options), 3))
