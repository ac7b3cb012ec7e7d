"""The loop between backbone and disk: half precision, bounds, and errors on their way out."""

import threading
import time

import numpy as np
import pytest
import torch

from epcache.backbone import Tokens
from epcache.dataset import Batch
from epcache.errors import NumericError, SpaceError
from epcache.extraction import QUEUED_BATCHES, TokenSink, half_tokens, plan_steps
from epcache.store.spec import Geometry, LayerShape, ShardTask, SplitSpec, StoreSpec
from epcache.store.writer import StoreWriter

SHAPE = LayerShape(grid=(1, 2), num_patches=2, num_prefix=1, dim=4)


class FakeBackbone:
    """Gives ``values[precision]`` everywhere, and remembers the precisions it was asked for."""

    def __init__(self, **values):
        self.values = values
        self.asked = []

    def tokens(self, images, layers, precision):
        self.asked.append(precision)
        value = self.values[precision]
        return {
            layer: Tokens(
                patch=torch.full((len(images), 2, 4), value),
                prefix=torch.full((len(images), 1, 4), value / 2),
            )
            for layer in layers
        }


def batch(number=3, bad=()):
    return Batch(
        images=np.zeros((number, 3, 8, 8), np.uint8),
        sizes=[(8, 8)] * number,
        bad=dict.fromkeys(bad, "broken"),
    )


def test_tokens_become_float16():
    """What fits is stored as it is, patch and prefix tokens apart."""
    tokens = half_tokens(FakeBackbone(float32=1.5), batch(), (0, 3), "float32")
    assert sorted(tokens) == [(0, "patch"), (0, "prefix"), (3, "patch"), (3, "prefix")]
    assert all(values.dtype == np.float16 for values in tokens.values())
    assert (tokens[0, "patch"] == 1.5).all()
    assert (tokens[3, "prefix"] == 0.75).all()


def test_rows_that_could_not_be_decoded_are_zeros():
    """Whatever the backbone makes of an empty image is not stored."""
    tokens = half_tokens(FakeBackbone(float32=1.5), batch(bad=(1,)), (0,), "float32")
    assert not tokens[0, "patch"][1].any()
    assert (tokens[0, "patch"][[0, 2]] == 1.5).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf"), 1e5])
def test_autocast_overflow_is_run_again_in_float32(value):
    """A batch that autocast spoils is computed once more in float32."""
    backbone = FakeBackbone(bfloat16=value, float32=2.0)
    tokens = half_tokens(backbone, batch(), (0,), "bfloat16")
    assert backbone.asked == ["bfloat16", "float32"]
    assert (tokens[0, "patch"] == 2).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_does_not_fit_is_named(precision):
    """Too large for float16 in float32 too: layer, largest value and remedy, nothing stored."""
    backbone = FakeBackbone(float32=-70000.0, bfloat16=-70000.0)
    with pytest.raises(NumericError, match=r"layer 7 .*70000.*65504.*--layers"):
        half_tokens(backbone, batch(), (7,), precision)


def test_broken_weights_are_named():
    """NaN in float32 is the weights' fault and is said so."""
    with pytest.raises(NumericError, match=r"layer 2 .*not finite"):
        half_tokens(FakeBackbone(float32=float("nan")), batch(), (2,), "float32")


def test_a_bad_row_cannot_hide_or_cause_an_overflow():
    """Values of undecodable rows never count."""
    backbone = FakeBackbone(float32=70000.0)
    tokens = half_tokens(backbone, batch(2, bad=(0, 1)), (0,), "float32")
    assert not tokens[0, "patch"].any()


@pytest.mark.parametrize("value", [0.0, 1e-9])
def test_tokens_that_vanish_are_refused(value):
    """A layer that float16 would hold as zeros alone is an error that says how large it was."""
    with pytest.raises(NumericError, match=f"layer 4 .* is zero .*{value:.3g}"):
        half_tokens(FakeBackbone(float32=value), batch(), (4,), "float32")


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_steps_cover_each_task_once_and_never_cross(batch_size):
    """Batches are consecutive, stay inside their task and end with a mark."""
    tasks = [
        ShardTask(split="a", view=0, shard=0, rows=(0, 8)),
        ShardTask(split="a", view=0, shard=1, rows=(8, 13)),
    ]
    steps = list(plan_steps(tasks, batch_size))
    rows = [row for step in steps for row in range(*step.rows)]
    assert rows == list(range(13))
    for step in steps:
        assert step.task.rows[0] <= step.rows[0] < step.rows[1] <= step.task.rows[1]
        assert step.last == (step.rows[1] == step.task.rows[1])


def small_store(path, num_rows=64):
    return StoreWriter(
        path,
        StoreSpec(
            identity={"test": 1},
            layers={0: SHAPE},
            num_layers=1,
            splits={"train": SplitSpec(num_rows=num_rows)},
            geometry=Geometry(shard_rows=4),
        ),
    )


def feed(sink, store, count=None):
    """Hand over all batches of two rows; returns how many were taken."""
    taken = 0
    for step in plan_steps(store.tasks(), 2):
        number = step.rows[1] - step.rows[0]
        tokens = {
            (0, "patch"): np.ones((number, 2, 4), np.float16),
            (0, "prefix"): np.ones((number, 1, 4), np.float16),
        }
        sink.put(step, tokens, [(1, 1)] * number, [])
        taken += 1
        if taken == count:
            break
    return taken


def test_the_queue_is_bounded(tmp_path, monkeypatch):
    """A slow disk holds the backbone up instead of filling the memory."""
    gate = threading.Event()
    with small_store(tmp_path) as store:
        open_task = store.open_task
        monkeypatch.setattr(store, "open_task", lambda task: gate.wait() and open_task(task))
        taken = []
        with TokenSink(store) as sink:
            sink_put = sink.put
            sink.put = lambda *args: (sink_put(*args), taken.append(1))
            worker = threading.Thread(target=feed, args=(sink, store))
            worker.start()
            time.sleep(0.7)
            assert len(taken) <= QUEUED_BATCHES + 1
            gate.set()
            worker.join()
        assert not store.tasks()


def test_a_full_disk_reaches_the_caller(tmp_path, monkeypatch):
    """The writer thread's error stops the loop with its own words; earlier commits stay."""
    with small_store(tmp_path) as store:
        open_task = store.open_task

        def full(task):
            if task.shard == 3:
                raise SpaceError("the disk is full")
            return open_task(task)

        monkeypatch.setattr(store, "open_task", full)

        def run():
            with TokenSink(store) as sink:
                feed(sink, store)

        with pytest.raises(SpaceError, match="the disk is full"):
            run()
        assert {shard for _, _, shard in store.committed} <= {0, 1, 2}
        assert len(store.committed) >= 2
        assert threading.active_count() < 5


def test_an_interrupted_loop_leaves_only_whole_tasks(tmp_path):
    """An exception in the loop commits what is whole and leaves the open task out."""
    with small_store(tmp_path) as store:

        def run():
            with TokenSink(store) as sink:
                feed(sink, store, count=5)  # two tasks and a half
                time.sleep(0.5)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run()
        assert sorted(shard for _, _, shard in store.committed) == [0, 1]
        assert not list((tmp_path / ".partial").glob("*/train*"))
