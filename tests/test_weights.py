"""weights.py, checkpoint.py, repairs.py: any container of the right weights loads, and no other."""

import argparse
import copy
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from epcache.architectures.timm_models import build_timm, seeded, timm_filter
from epcache.backbone import load_backbone
from epcache.errors import WeightsError
from epcache.weights.checkpoint import read_checkpoint, state_dicts
from epcache.weights.fit import LoadReport, digest_weights, load_weights, needed_keys

NAME, SIZE = "test_vit", 64  # timm's 16-pixel-patch test model: a 4 x 4 grid, six small blocks
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def source() -> nn.Module:
    """A network that stands for a published one."""
    return network(seed=7)


@pytest.fixture
def state(source: nn.Module) -> State:
    return {key: value.clone() for key, value in source.state_dict().items()}


def network(seed: int, size: int = SIZE, name: str = NAME, **kwargs: object) -> nn.Module:
    with seeded(seed):
        return build_timm(name, size, kwargs)


def save(path: Path, content: object) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def fill(model: nn.Module, path: Path, name: str = NAME) -> LoadReport:
    return load_weights(
        model, path, name=name, needed=needed_keys(model), convert=timm_filter(name)
    )


def digest(model: nn.Module) -> str:
    return digest_weights(model, needed_keys(model))


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


CONTAINERS = {
    "plain.safetensors": lambda s: s,
    "prefix.safetensors": lambda s: prefixed("backbone.", s),
    "plain.pth": lambda s: s,
    "model.pth": lambda s: {"model": s, "epoch": 3},
    "state_dict.bin": lambda s: {"state_dict": prefixed("module.", s), "optimizer": {"state": {}}},
    "twice.pth": lambda s: {"model": {"state_dict": prefixed("encoder.", s)}},
    "teacher.pt": lambda s: {"teacher": prefixed("module.backbone.", s)},
    "visual.pth": lambda s: {**prefixed("visual.trunk.", s), "text.bias": torch.zeros(3)},
    "base.pth": lambda s: {"module": prefixed("base_model.", s)},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, source: nn.Module, state: State, tmp_path: Path) -> None:
    """Nesting, prefix and file format change neither the weights nor their digest."""
    model = network(seed=1)
    assert digest(model) != digest(source)
    report = fill(model, save(tmp_path / name, CONTAINERS[name](state)))
    assert digest(model) == digest(source)
    assert report.loaded == len(state)
    assert report.missing == ()
    assert report.resized == ()


@given(prefix=st.lists(st.sampled_from(["module", "a", "encoder", "x_y", "0"]), max_size=4))
@settings(max_examples=15, deadline=None)
def test_any_prefix(
    source: nn.Module, tmp_path_factory: pytest.TempPathFactory, prefix: list[str]
) -> None:
    """A prefix that nobody listed is found too, and reported."""
    where = "".join(f"{part}." for part in prefix)
    path = save(tmp_path_factory.mktemp("w") / "w.pth", prefixed(where, source.state_dict()))
    model = network(seed=1)
    assert fill(model, path).found_at == where
    assert digest(model) == digest(source)


def test_teacher_before_student(source: nn.Module, state: State, tmp_path: Path) -> None:
    """Of two networks in one file, the one that its authors evaluate is loaded."""
    student = network(seed=2).state_dict()
    content = {"student": prefixed("backbone.", student), "teacher": prefixed("backbone.", state)}
    model = network(seed=1)
    assert fill(model, save(tmp_path / "both.pth", content)).found_at == "teacher.backbone."
    assert digest(model) == digest(source)
    flat = {**prefixed("momentum_encoder.", student), **prefixed("base_encoder.", state)}
    assert fill(model, save(tmp_path / "flat.pth", flat)).found_at == "base_encoder."
    assert digest(model) == digest(source)


def test_half_precision_files(state: State, tmp_path: Path) -> None:
    """bfloat16 and float16 files load into float32, with the file's own rounding."""
    for dtype in (torch.bfloat16, torch.float16):
        half = {key: value.to(dtype) for key, value in state.items()}
        model = network(seed=1)
        fill(model, save(tmp_path / "half.safetensors", half))
        for key, value in model.state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, half[key].float()), key


def test_extras_are_explained(state: State, tmp_path: Path) -> None:
    """Heads, decoders and mask tokens in the file are left out, each with its reason."""
    extras = {
        "head.weight": "head",
        "decoder_blocks.0.attn.qkv.weight": "decoder",
        "decoder_pos_embed": "decoder",
        "dino_head.mlp.0.weight": "projection",
        "masked_embed": "mask token",
        "temperature": "not part",
    }
    content = {**state, **{key: torch.ones(2) for key in extras}}
    report = fill(network(seed=1), save(tmp_path / "e.pth", content))
    reasons = dict(report.unused)
    assert set(reasons) == set(extras)
    for key, word in extras.items():
        assert word in reasons[key]


def test_missing_key_is_named(state: State, tmp_path: Path) -> None:
    """A backbone tensor that the file lacks stops the load and is named."""
    del state["blocks.2.attn.proj.weight"]
    with pytest.raises(WeightsError, match=r"lacks 1 of .*blocks\.2\.attn\.proj\.weight"):
        fill(network(seed=1), save(tmp_path / "m.pth", state))


def test_wrong_shape_is_named(state: State, tmp_path: Path) -> None:
    """A tensor of another shape stops the load, with both shapes."""
    state["blocks.1.norm1.weight"] = torch.ones(7)
    with pytest.raises(WeightsError, match=r"blocks\.1\.norm1\.weight .*\(7,\)"):
        fill(network(seed=1), save(tmp_path / "s.pth", state))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_named(value: float, state: State, tmp_path: Path) -> None:
    """One NaN or infinity in a needed tensor stops the load."""
    state["blocks.0.mlp.fc1.bias"][3] = value
    with pytest.raises(WeightsError, match=r"blocks\.0\.mlp\.fc1\.bias .*NaN or infinity"):
        fill(network(seed=1), save(tmp_path / "n.safetensors", state))


def test_deeper_file_is_refused(state: State, tmp_path: Path) -> None:
    """A file with more blocks is another backbone, though every tensor asked for is there."""
    state["blocks.99.norm1.weight"] = torch.ones(64)
    with pytest.raises(WeightsError, match=r"blocks\.99\.norm1\.weight"):
        fill(network(seed=1), save(tmp_path / "d.pth", state))


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    """A file of another architecture is refused with what it starts with."""
    path = save(tmp_path / "f.pth", {"layer1.conv.weight": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"lacks .*layer1\.conv\.weight"):
        fill(network(seed=1), path)
    with pytest.raises(WeightsError, match="no named tensors"):
        fill(network(seed=1), save(tmp_path / "g.pth", {"epoch": 1}))


class Payload:
    """Writes a file when unpickled, if anything lets it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_pickles_never_run(state: State, tmp_path: Path) -> None:
    """A pickle that needs code is a clear error, and its code does not run."""
    trap = tmp_path / "trap"
    path = save(tmp_path / "evil.pth", {"model": state, "x": Payload(trap)})
    with pytest.raises(WeightsError, match=r"mkdir.*could run code") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not trap.exists()
    with pytest.raises(WeightsError, match=r"argparse\.Namespace"):
        read_checkpoint(save(tmp_path / "args.pth", {"args": argparse.Namespace(lr=1)}))


def test_unreadable_files(state: State, tmp_path: Path) -> None:
    """Absent, foreign and cut files are one-line errors with the path."""
    cut = save(tmp_path / "cut.safetensors", state)
    cut.write_bytes(cut.read_bytes()[:5000])
    torn = save(tmp_path / "torn.pth", state)
    torn.write_bytes(torn.read_bytes()[:5000])
    text = tmp_path / "text.pth"
    text.write_text("hello")
    empty = tmp_path / "empty.pth"
    empty.touch()
    for path in (tmp_path / "absent.pth", cut, torn, text, empty, tmp_path):
        with pytest.raises(WeightsError) as caught:
            read_checkpoint(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_position_embedding_is_resized(source: nn.Module, state: State, tmp_path: Path) -> None:
    """At another image size the grid is resampled as timm does, and the report says so."""
    model = network(seed=1, size=96)
    report = fill(model, save(tmp_path / "p.pth", state))
    expected = copy.deepcopy(source)
    expected.set_input_size((96, 96))
    assert torch.allclose(model.pos_embed, expected.pos_embed, atol=1e-6)
    num_prefix = state["pos_embed"].shape[1] - 16
    assert report.resized == (f"pos_embed 1x{16 + num_prefix}x64 -> 1x{36 + num_prefix}x64",)


@pytest.mark.parametrize("in_model", [True, False])
def test_class_token_position(in_model: bool, tmp_path: Path) -> None:
    """A [CLS] entry in the embedding that only file or only model has leaves the tokens equal."""
    name = "vit_tiny_patch16_224"
    ours = network(1, 32, name, depth=1, embed_dim=12, no_embed_class=not in_model)
    theirs = network(2, 32, name, depth=1, embed_dim=12, no_embed_class=in_model)
    fill(ours, save(tmp_path / "c.pth", theirs.state_dict()), name)
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(ours.forward_features(images), theirs.forward_features(images), atol=1e-6)


def test_shared_position_bias(tmp_path: Path) -> None:
    """The one bias table of a BEiT or SimMIM pre-training serves every block."""
    name, small = "beit_base_patch16_224", {"depth": 2, "embed_dim": 24, "num_heads": 2}
    theirs = network(
        2,
        32,
        name,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=True,
        global_pool="token",
        **small,
    )
    nn.init.normal_(theirs.rel_pos_bias.relative_position_bias_table)
    ours = network(1, 32, name, global_pool="token", **small)
    content = {**prefixed("encoder.", theirs.state_dict()), "decoder.0.weight": torch.ones(2)}
    report = fill(ours, save(tmp_path / "simmim.pth", {"model": content}), name)
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(ours.forward_features(images), theirs.forward_features(images), atol=1e-5)
    assert ("decoder.0.weight", "decoder of pre-training") in report.unused
    assert any("copied to 2 blocks" in note for note in report.resized)


def test_norm_on_either_side_of_pooling(state: State, source: nn.Module, tmp_path: Path) -> None:
    """A file's last norm is found whether its model pooled before or after."""
    renamed = {
        key.replace("norm.", "fc_norm.", key.startswith("norm.")): v for key, v in state.items()
    }
    assert "fc_norm.weight" in renamed
    model = network(seed=1)
    fill(model, save(tmp_path / "fc.pth", renamed))
    assert digest(model) == digest(source)


def test_openai_clip_names(tmp_path: Path) -> None:
    """A checkpoint in CLIP's own names is read by timm's filter; its text tower stays out."""
    name = "vit_base_patch16_clip_quickgelu_224"
    model = network(1, 32, name, depth=1, embed_dim=16, num_heads=2)
    wanted = network(2, 32, name, depth=1, embed_dim=16, num_heads=2)
    swaps = (
        ("patch_embed.proj", "conv1"), ("blocks.", "transformer.resblocks."),
        ("norm_pre", "ln_pre"), (".norm", ".ln_"), ("qkv.", "in_proj_"),
        ("attn.proj", "attn.out_proj"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"),
    )  # fmt: skip
    content = {"transformer.resblocks.0.ln_1.weight": torch.ones(5), "logit_scale": torch.ones(())}
    for key, value in wanted.state_dict().items():
        new = "ln_post" + key.removeprefix("norm") if key.startswith("norm.") else key
        for ours, theirs in swaps:
            new = new.replace(ours, theirs)
        new = {"cls_token": "class_embedding", "pos_embed": "positional_embedding"}.get(new, new)
        content[f"visual.{new}"] = (
            value[0, 0] if key == "cls_token" else value[0] if key == "pos_embed" else value
        )
    report = fill(model, save(tmp_path / "clip.pth", content), name)
    assert digest(model) == digest(wanted)
    assert "logit_scale" in dict(report.unused)


def test_zero_attention_biases_only(tmp_path: Path) -> None:
    """DINOv3's biases are dropped where they are zero; others would change the tokens."""
    name = "vit_small_patch16_dinov3"
    model = network(1, 32, name, depth=1, embed_dim=24, num_heads=2)
    content = {
        key.replace("gamma_1", "ls1.gamma")
        .replace("gamma_2", "ls2.gamma")
        .replace("reg_token", "storage_tokens"): v
        for key, v in network(2, 32, name, depth=1, embed_dim=24, num_heads=2).state_dict().items()
    }
    content["blocks.0.attn.qkv.bias"] = torch.zeros(72)
    content["mask_token"] = torch.zeros(1, 24)
    report = fill(model, save(tmp_path / "z.pth", content), name)
    assert dict(report.unused)["mask_token"] == "mask token of pre-training"
    content["blocks.0.attn.qkv.bias"][1] = 0.5
    with pytest.raises(WeightsError, match="has attention biases"):
        fill(model, save(tmp_path / "b.pth", content), name)


def test_batch_norm_counters_are_optional(tmp_path: Path) -> None:
    """num_batches_tracked decides no token: neither its absence nor its value matters."""
    model, source = network(1, 64, "test_resnet"), network(2, 64, "test_resnet")
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    report = fill(model, save(tmp_path / "r.safetensors", state), "test_resnet")
    assert digest(model) == digest(source)
    assert report.missing
    state = {k: v for k, v in state.items() if not k.endswith("running_var")}
    path = save(tmp_path / "r2.safetensors", state)
    with pytest.raises(WeightsError, match="running_var"):
        fill(model, path, "test_resnet")


def test_digest_sees_every_value(source: nn.Module) -> None:
    """The digest changes with one value and with one name, and not from run to run."""
    first = digest(source)
    assert digest(source) == first
    other = copy.deepcopy(source)
    with torch.no_grad():
        other.blocks[1].mlp.fc2.bias[0] += 1e-3
    assert digest(other) != first


def test_state_dicts_at_every_depth() -> None:
    """Only mappings with tensors count, and each says where it is."""
    tensor = torch.zeros(1)
    checkpoint = {"a": {"b": {"w": tensor}, "n": 3}, "t": tensor, "opt": {"lr": 1}}
    assert [(where, list(found)) for where, found in state_dicts(checkpoint)] == [
        ("", ["t"]),
        ("a.b", ["w"]),
    ]


def test_label_is_the_file_name(state: State, tmp_path: Path) -> None:
    """A backbone from a file is recorded under that file's name, with its digest."""
    path = save(tmp_path / "mine.pth", {"model": state})
    backbone = load_backbone(NAME, weights=path, image_size=SIZE)
    again = load_backbone(NAME, weights=save(tmp_path / "m.safetensors", state), image_size=SIZE)
    assert backbone.weights == "mine.pth"
    assert backbone.weights_digest == again.weights_digest
    assert len(backbone.weights_digest) == 64


@pytest.mark.parametrize("kind", ["int32", "complex64", "sparse", "meta"])
def test_values_that_are_no_plain_numbers_are_refused(kind, tmp_path):
    """Quantised, complex, sparse and empty tensors are named, never truncated to something else."""
    state = load_backbone("test_vit", weights="random", image_size=32)._model.state_dict()
    key = "blocks.0.attn.qkv.weight"
    state[key] = {
        "int32": lambda value: value.to(torch.int32),
        "complex64": lambda value: value.to(torch.complex64),
        "sparse": lambda value: value.to_sparse(),
        "meta": lambda value: value.to("meta"),
    }[kind](state[key])
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match="the file holds a"):
        load_backbone("test_vit", weights=tmp_path / "weights.pt", image_size=32)
