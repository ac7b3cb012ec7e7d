"""The stream is naive indexing in the documented order, wherever tokens lie."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probekit import learnable_store

import epcache
from epcache.averaging import averaged_layers
from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.order import epoch_order
from epcache.stream import PooledSource, TokenSource, TokenStream


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "store"
    return epcache.open_store(learnable_store(path, num_train=70, num_views=2))


def source_of(store, *, tokens="patch", norm=True, rows=None):
    split = store["train"]
    return TokenSource(
        split=split,
        layer=-1,
        tokens=tokens,
        norm=FinalNorm.load(store.final_norm_path) if norm else None,
        rows=np.flatnonzero(split.valid) if rows is None else np.array(rows),
    )


def naive(store, source, view):
    """All finished tokens by plain indexing."""
    layer = store["train"].layer(-1, view=view)
    patch, prefix = torch.from_numpy(layer.patch[:]), torch.from_numpy(layer.prefix[:])
    whole = {"patch": patch, "all": torch.cat([prefix, patch], 1), "cls": prefix}[source.tokens]
    whole = whole[torch.from_numpy(source.rows)]
    return source.norm(whole) if source.norm else whole.float()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    tokens=st.sampled_from(["patch", "all", "cls"]),
    norm=st.booleans(),
    batch_size=st.integers(1, 80),
    resident=st.booleans(),
    drop_last=st.booleans(),
)
def test_an_epoch_is_naive_indexing(store, data, tokens, norm, batch_size, resident, drop_last):
    """Batches are slices of the epoch's permutation; the view is the epoch's."""
    rows = sorted(data.draw(st.sets(st.integers(0, 69), min_size=1)))
    source = source_of(store, tokens=tokens, norm=norm, rows=rows)
    stream = TokenStream(
        source,
        batch_size=batch_size,
        budget_bytes=10**9 if resident else -1,
        order_seed=3,
        num_views=2,
    )
    assert stream.resident == resident
    for epoch in (0, 1, 5):
        expected = naive(store, source, epoch % 2)
        order = epoch_order(len(rows), seed=3, epoch=epoch, block_rows=32, window_blocks=32)
        batches = list(stream.epoch(epoch, drop_last=drop_last))
        assert len(batches) == stream.num_steps(drop_last=drop_last)
        got = torch.cat([tokens for tokens, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
        seen = order[: len(got)]
        whole = len(rows) // batch_size * batch_size
        assert len(got) == (whole if drop_last and whole else len(rows))
        torch.testing.assert_close(got, expected[seen])
        assert labels.tolist() == store["train"].labels[source.rows[seen]].tolist()
    everything = torch.cat([tokens for tokens, _ in stream.in_order()])
    torch.testing.assert_close(everything, naive(store, source, 0))


def test_pooled_once_is_the_mean_of_the_tokens(store):
    """In the same order as the stream it stands for, view by view."""
    source = source_of(store)
    pooled = PooledSource.of(source, num_views=2)
    assert (len(pooled), pooled.num_tokens, pooled.dim) == (len(source), 1, 16)
    streams = [
        TokenStream(s, batch_size=16, budget_bytes=b, num_views=2)
        for s, b in ((source, -1), (pooled, 10**9))
    ]
    for epoch in (0, 1):
        plain, once = (list(s.epoch(epoch, drop_last=True)) for s in streams)
        for (tokens, labels), (vectors, same) in zip(plain, once, strict=True):
            torch.testing.assert_close(vectors, tokens.mean(1, keepdim=True))
            assert torch.equal(labels, same)
    part = np.array([3, 1, 8])
    few = pooled.subset(part)
    assert torch.equal(few.read(np.arange(3), view=1), pooled.read(part, view=1))
    assert torch.equal(few.labels, pooled.labels[torch.from_numpy(part)])


def test_leaving_an_epoch_early_stops_the_reader(store):
    """No thread is left behind when a loop breaks."""
    before = threading.active_count()
    stream = TokenStream(source_of(store), batch_size=4, budget_bytes=-1)
    batches = stream.epoch(0, drop_last=True)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_what_goes_wrong_while_reading_ahead_is_raised(store, monkeypatch):
    """In the loop that asked for the batch, with its own type."""

    def read(self, positions, *, view=0):
        raise OSError("the disk is gone")

    monkeypatch.setattr(TokenSource, "read", read)
    with pytest.raises(OSError, match="the disk is gone"):
        list(TokenStream(source_of(store), batch_size=4, budget_bytes=-1).in_order())


def test_wrong_questions_are_refused(store):
    """Unknown tokens and empty batches."""
    with pytest.raises(ConfigError, match="expected one of patch, all, cls"):
        source_of(store, tokens="some")
    with pytest.raises(ConfigError, match="--batch-size 0"):
        TokenStream(source_of(store), batch_size=0)


def test_released_pages_are_read_again(store):
    """Arrays taken before a release stay valid after it."""
    patch = store["train"].layer(-1).patch
    view, copy = patch[0:10], patch[0:10].copy()
    store.release()
    np.testing.assert_array_equal(view, copy)
    np.testing.assert_array_equal(patch[0:10], copy)


MEASURE = """
import sys
import numpy as np, torch
import epcache
from epcache.stream import TokenSource, TokenStream

def resident():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024

store = epcache.open_store(sys.argv[1])
split = store["train"]
source = TokenSource(split=split, layer=-1, rows=np.flatnonzero(split.valid))
stream = TokenStream(source, batch_size=64, budget_bytes=0)
assert not stream.resident
few = TokenStream(source.subset(np.arange(300)), batch_size=64, budget_bytes=0)
list(few.epoch(0, drop_last=True))  # loads the code that is about to run
start, peaks = resident(), []
for epoch in range(3):
    peaks.append(max(resident() for tokens, _ in stream.epoch(epoch, drop_last=True)))
print(source.num_bytes / 2**20, peaks[0] - start, peaks[2] - peaks[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_streaming_a_large_store_takes_little_memory(tmp_path):
    """Resident memory, mapped files counted, stays far below the store's size."""
    path = learnable_store(tmp_path / "large", num_train=5000, dim=256, grid=(4, 6))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    size, used, growth = map(float, done.stdout.split())
    assert size > 110
    assert used < size / 2
    assert growth < size / 10


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep") / "store"
    return epcache.open_store(learnable_store(path, layers=(0, 1, 2, 3)))


@pytest.mark.parametrize("tokens", ["patch", "all", "cls"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_layers_are_averaged_after_the_norm_of_each(deep, tokens, norm, number):
    """The mean of the finished tokens of the last layers, as numpy has it."""
    source = source_of(deep, tokens=tokens, norm=norm, rows=[2, 7, 30])
    layers = [
        replace(source, layer=layer).read(np.arange(3)).double().numpy()
        for layer in range(4 - number, 4)
    ]
    found = replace(source, average_layers=number).read(np.arange(3))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), np.mean(layers, axis=0), rtol=1e-5, atol=1e-6)
    pooled = PooledSource.of(replace(source, average_layers=number), num_views=1)
    torch.testing.assert_close(pooled.features[0], found.mean(1, keepdim=True))


def test_layers_that_cannot_be_averaged_are_told(store, deep, tmp_path):
    """One that is not cached, more than there are, and tokens of another grid."""
    with pytest.raises(ConfigError, match=r"layer 2 of 2 to 3 is not in store .*has 0,3"):
        averaged_layers(store, -1, 2)
    with pytest.raises(ConfigError, match="there are 4 layers up to layer 3; average 4 or fewer"):
        averaged_layers(deep, -1, 5)
    assert averaged_layers(deep, 2, 2) == (1, 2)
    shapes = dict(deep.spec.layers)
    shapes[2] = replace(shapes[2], grid=(3, 2))
    other = SimpleNamespace(
        path="store", spec=replace(deep.spec, layers=shapes), resolve_layer=deep.resolve_layer
    )
    with pytest.raises(ConfigError, match="tokens of layer 2 have another shape than those of"):
        averaged_layers(other, 3, 2)
