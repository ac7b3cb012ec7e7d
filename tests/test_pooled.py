"""pooled.py: vectors of a store are what the poolers give on its tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import temporary_dir, write_store

from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.pooled import choose_norm, pool_split
from epcache.poolers import make_pooler
from epcache.store.reader import open_store
from epcache.stream import TokenSource

NORM = FinalNorm(
    kind="layernorm",
    weight=torch.tensor([1.0, -2.0, 0.5, 3.0]),
    bias=torch.tensor([0.1, 0.0, -1.0, 2.0]),
    eps=1e-6,
)


@pytest.fixture(scope="module")
def store():
    """Layer 0: 2 x 3 patches and [CLS] of width 4; layer 5: no prefix. Train row 3 is invalid."""
    with temporary_dir() as folder:
        write_store(folder / "store")
        yield open_store(folder / "store")


@settings(deadline=None, max_examples=30)
@given(
    pooler=st.sampled_from(["cls", "gap"]),
    norm=st.sampled_from([None, NORM]),
    chunk_rows=st.integers(1, 12),
)
def test_vectors_are_those_of_the_pooler(store, pooler, norm, chunk_rows):
    """Whatever the chunk, each valid row is the pooler's output on its own finished tokens."""
    split = store["train"]
    layer = split.layer(0)
    pooled = pool_split(split, layer=0, pooler=pooler, norm=norm, chunk_rows=chunk_rows)
    module = make_pooler(pooler, dim=4)
    for vector, row in zip(pooled.features, pooled.rows, strict=True):
        array = layer.prefix if pooler == "cls" else layer.patch
        tokens = torch.from_numpy(array[int(row)].astype(np.float32))[None]
        expected = module(tokens if norm is None else norm(tokens))[0]
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-6, atol=1e-6)
    assert pooled.features.dtype == np.float32


def test_only_valid_rows_with_their_own_labels(store):
    """An undecodable image gives no vector, and labels stay with their rows."""
    pooled = pool_split(store["train"], layer=0, pooler="gap", norm=None, chunk_rows=2)
    assert pooled.rows.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert pooled.labels.tolist() == [row % 3 for row in pooled.rows]
    assert len(pooled) == len(pooled.features) == 9


def test_the_last_layer_by_minus_one(store):
    """-1 is the backbone's last block, whose width may be another."""
    last = pool_split(store["val"], layer=-1, pooler="gap", norm=None)
    assert last.features.shape == (5, 8)
    fifth = pool_split(store["val"], layer=5, pooler="gap", norm=None)
    assert np.array_equal(last.features, fifth.features)


def test_progress_counts_every_byte(store):
    """The last report is of all bytes; none goes back."""
    seen = []
    pool_split(
        store["train"], layer=0, pooler="gap", norm=None, chunk_rows=4,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    total = 9 * 6 * 4 * 4
    assert seen == [(total * 4 // 9, total), (total * 8 // 9, total), (total, total)]


def test_a_layer_without_cls_says_so(store):
    """[CLS] of a backbone that has none is an error of one line, not some patch."""
    assert store.has_cls(0)
    assert not store.has_cls(-1)
    with pytest.raises(ConfigError, match=r"pooler cls: layer -1 .* has no \[CLS\] token; use gap"):
        pool_split(store["train"], layer=-1, pooler="cls", norm=None)


def test_registers_are_no_cls(store, monkeypatch):
    """Where the backbone has registers alone, the first of them is never taken for [CLS]."""
    monkeypatch.setitem(store.provenance, "backbone", {"name": "registered", "has_cls": False})
    assert not store.has_cls(0)
    with pytest.raises(ConfigError, match=r"pooler cls: .* has no \[CLS\] token; use gap"):
        pool_split(store["train"], layer=0, pooler="cls", norm=None)
    with pytest.raises(ConfigError, match="has no \\[CLS\\] token; use patch tokens"):
        TokenSource(split=store["train"], layer=0, tokens="all", rows=np.arange(3))


def test_poolers_with_parameters_are_refused(store):
    """They are trained, not computed."""
    with pytest.raises(ConfigError, match=r"'ep': expected one of cls, gap.*epcache probe"):
        pool_split(store["train"], layer=0, pooler="ep", norm=None)


class Stored:
    """A store as far as the choice of a norm looks at it."""

    def __init__(self, policy, path):
        self.provenance = {"backbone": {"norm_policy": policy}}
        self.final_norm_path, self.path = path, "somewhere"


@pytest.mark.parametrize("policy", ["final", "none"])
def test_auto_is_what_the_backbones_protocol_does(tmp_path, policy):
    """``auto`` follows the recorded policy; ``final`` and ``none`` overrule it."""
    NORM.save(tmp_path / "norm.safetensors")
    store = Stored(policy, tmp_path / "norm.safetensors")
    assert choose_norm(store, "auto")[0] == policy
    assert choose_norm(store, "none") == ("none", None)
    name, norm = choose_norm(store, "final")
    assert name == "final"
    assert torch.equal(norm.weight, NORM.weight)
    assert (choose_norm(store, "auto")[1] is None) == (policy == "none")


def test_a_norm_that_is_not_there_is_told():
    """No norm falls back to another silently."""
    for policy, asked in (("final", "auto"), ("none", "final")):
        with pytest.raises(ConfigError, match=f"--norm {asked}: .* use --norm none"):
            choose_norm(Stored(policy, None), asked)
    with pytest.raises(ConfigError, match="--norm last: expected one of auto, final, none"):
        choose_norm(Stored("final", None), "last")
