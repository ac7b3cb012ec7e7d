"""From a sealed store to rows: select on held-out training data, refit, score once."""

import json

import numpy as np
import pytest
import torch
from probekit import BAD_ROW, Recorder, curves, learnable_store, numbers

import epcache
from epcache.convergence import best_convergence
from epcache.errors import ConfigError
from epcache.norm import FinalNorm
from epcache.probing import STREAM_FIELDS, ProbeConfig, fit_probes, group_by_stream
from epcache.results import read_rows, run_name
from epcache.selection import EVALUATION_ROWS, GroupFit
from epcache.stream import TokenSource, TokenStream
from epcache.trials import GroupPlan

QUICK = {"epochs": 4, "batch_size": 10}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return epcache.open_store(learnable_store(tmp_path_factory.mktemp("probing") / "store"))


def ep(**changes):
    return ProbeConfig(**{"pooler": "ep", "num_queries": 4, "lr": 0.01, **QUICK, **changes})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pooler": "epp"}, "did you mean ep"),
        ({"num_queries": 0}, r"num_queries=0: expected a whole number of 1 or more"),
        ({"pooler": "gap", "num_queries": 4}, "pooler gap has none; leave it out"),
        ({"options": {"heads": 2}}, "pooler ep has no 'heads'; it takes num_queries"),
        ({"options": {"num_queries": 2}}, "give num_queries="),
        ({"lr": 0.0}, "lr=0: expected more than 0"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: expected a finite number, 0 or more"),
        ({"optimizer": "adam"}, "optimizer='adam': expected one of lars, sgd, adamw"),
        ({"tokens": "patches"}, "tokens='patches': expected one of patch, all, cls"),
        ({"norm": "last"}, "norm='last': expected one of auto, final, none"),
        ({"recipe": "big"}, "recipe='big': expected one of paper, small"),
        ({"batch_size": 1}, "batch statistics of one image are none"),
        ({"epochs": 0}, "epochs=0: expected a whole number of 1 or more"),
        ({"holdout": 1.0}, "holdout=1.0: expected a share of train"),
        ({"seed": -1}, "seed=-1: expected a whole number of 0 or more"),
        ({"layer": "last"}, "layer='last': expected a block index"),
        ({"average_layers": 0}, "average_layers=0: expected a whole number of 1 or more"),
        ({"share": 0.0}, "share=0.0: expected a share of each class"),
        ({"share": "1%"}, "share='1%': expected a number"),
        ({"share": 0.1, "shots": 1}, "shots=1 and share=0.1: give one of the two"),
    ],
)
def test_wrong_values_are_refused_at_once(wrong, message):
    """The message has the field, the value and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        ProbeConfig(**wrong)


def test_configs_are_grouped_by_what_a_pass_shares():
    """Two configs train together if and only if no stream field differs; order is kept."""
    base = ep()
    own = [ep(lr=0.1), ep(seed=3), ep(num_queries=2), ep(weight_decay=0.1), ep(optimizer="sgd")]
    assert group_by_stream([base, *own, ProbeConfig(pooler="gap", **QUICK)]) == [[*range(7)]]
    other = {
        "layer": 0, "average_layers": 2, "tokens": "all", "norm": "none", "views": 1, "shots": 5,
        "share": 0.1, "recipe": "paper", "batch_size": 12, "epochs": 3, "warmup_epochs": 1.0,
        "label_smoothing": 0.1, "order_seed": 1, "holdout": 0.2,
    }  # fmt: skip
    assert tuple(other) == STREAM_FIELDS
    for name, value in other.items():
        assert group_by_stream([base, ep(**{name: value}), base]) == [[0, 2], [1]], name


def test_rows_say_what_was_chosen_and_what_it_scored(store, tmp_path):
    """The best rate of each family is scored; the others keep their held-out accuracy alone."""
    rates = (0.0001, 0.01, 0.03)
    configs = [ep(lr=lr, num_queries=m) for m in (1, 4) for lr in rates]
    rows = fit_probes(store, configs, results_dir=tmp_path, device="cpu")
    assert [(row.num_queries, row.lr) for row in rows] == [(m, lr) for m in (1, 4) for lr in rates]
    for family in (rows[:3], rows[3:]):
        scored = [row for row in family if row.test_top1 is not None]
        assert len(scored) == 1
        assert scored[0].val_top1 == max(row.val_top1 for row in family)
    assert read_rows(tmp_path) == rows
    for row in rows:
        assert row.train_images == 60  # one of 61 is undecodable
        assert (row.norm, row.layer, row.views, row.tokens) == ("final", 3, 1, "patch")
        assert row.num_params == 16 * 16 + 16 * row.num_queries + 16 * 3 + 3
        curve = curves(tmp_path, row.run)
        assert row.val_top1 == max(curve["select"]["val_top1"])
        if row.test_top1 is None:
            assert row.test_top1_best is row.test_top1_last is row.test_top5 is None
            assert curve["final"] is None
            continue
        test = curve["final"]["test_top1"]
        assert row.best_epoch == steady(curve["select"]["val_top1"])
        assert row.val_top1 == curve["select"]["val_top1"][row.best_epoch]
        assert (row.test_top1, row.test_top1_last) == (test[row.best_epoch], test[-1])
        assert row.test_top1_best == max(test)
        assert row.test_top5 == curve["final"]["test_top5"][row.best_epoch]
    assert max(row.test_top1 or 0 for row in rows) > 0.6  # a third is chance


def steady(values, num_rows=6):
    """Position of the last within a standard error of the highest; 2 a class are held out."""
    best = max(values)
    slack = (best * (1 - best) / num_rows) ** 0.5
    return max(n for n, value in enumerate(values) if value >= best - slack)


def test_selection_never_reads_the_evaluation_split(store, tmp_path, monkeypatch):
    """Until the choice is made only training samples are read, each for one purpose."""
    seen = {}
    phase = Recorder()
    original = TokenSource.read

    def read(self, positions, *, view=0):
        key = (phase.phases[-1].split()[0], self.split.name)
        samples = self.split.samples()
        seen.setdefault(key, set()).update(samples[r].path for r in self.rows[positions])
        return original(self, positions, view=view)

    monkeypatch.setattr(TokenSource, "read", read)
    fit_probes(store, [ep()], results_dir=tmp_path, progress=phase, device="cpu")
    assert set(seen) == {("select", "train"), ("refit", "train"), ("refit", "val")}
    every = {s.path for s in store["train"].samples()} - {f"train/{BAD_ROW}.png"}
    assert seen["select", "train"] == seen["refit", "train"] == every
    assert seen["refit", "val"] == {s.path for s in store["val"].samples()}
    assert not seen["refit", "val"] & every


def test_held_out_images_are_not_learnt_from(store):
    """Selection trains on nine tenths and judges by the other tenth of each class."""
    fit = plan_of(store, [ep()])
    learn, held = fit.held_out
    assert sorted([*learn, *held]) == fit.rows.tolist()
    assert sorted({*range(61)} - {BAD_ROW}) == fit.rows.tolist()
    assert np.bincount(store["train"].labels[held]).tolist() == [2, 2, 2]


def plan_of(store, configs):
    return GroupPlan(store, configs, precision="float32", say=lambda text: None)


def test_without_held_out_data_nothing_is_chosen(store, tmp_path):
    """holdout=0 trains all on all of train and leaves val_top1 and test_top1 null."""
    configs = [ep(lr=lr, holdout=0.0) for lr in (0.001, 0.01)]
    rows = fit_probes(store, configs, results_dir=tmp_path, device="cpu")
    assert len(rows) == 2
    for row in rows:
        assert row.val_top1 is None
        assert row.test_top1 is None
        curve = curves(tmp_path, row.run)
        assert curve["select"] is None
        assert row.test_top1_best == max(curve["final"]["test_top1"])
        assert row.test_top1_last == curve["final"]["test_top1"][-1]
        assert row.best_epoch == curve["final"]["test_top1"].index(row.test_top1_best)


def test_a_share_that_holds_out_nothing_is_refused(store, tmp_path):
    """A hundredth of twenty images a class is none: said before anything is trained."""
    recorder = Recorder()
    configs = [ep(), ep(holdout=0.01)]
    with pytest.raises(ConfigError, match="holds out none; use 0"):
        fit_probes(store, configs, results_dir=tmp_path, progress=recorder)
    assert recorder.phases == []


def test_streamed_and_resident_give_the_same_rows(store, tmp_path):
    """The memory budget decides where tokens lie, never what comes out."""
    configs = [ep(), ProbeConfig(pooler="gap", lr=0.01, **QUICK)]
    phases = []
    rows = []
    for budget in (0, 10**9):
        recorder = Recorder()
        folder = tmp_path / str(budget)
        rows.append(
            fit_probes(store, configs, memory_budget=budget, results_dir=folder, progress=recorder)
        )
        phases.append(recorder.phases)
    assert "streamed" in phases[0][0]
    assert "in memory" in phases[1][0]
    assert numbers(rows[0]) == numbers(rows[1])
    for one, other in zip(*rows, strict=True):
        assert curves(tmp_path / "0", one.run) == curves(tmp_path / str(10**9), other.run)


@pytest.mark.parametrize("pooler", ["gap", "cls"])
def test_pooled_once_is_the_same_training(store, tmp_path, pooler, monkeypatch):
    """Pooling before the first epoch gives the curve of pooling in every step."""
    config = ProbeConfig(pooler=pooler, lr=0.03, **QUICK)
    (fast,) = fit_probes(store, [config], results_dir=tmp_path / "fast")
    monkeypatch.setattr(ProbeConfig, "is_free", property(lambda self: False))
    (slow,) = fit_probes(store, [config], results_dir=tmp_path / "slow")
    assert fast.tokens == {"gap": "patch", "cls": "cls"}[pooler]
    one, other = curves(tmp_path / "fast", fast.run), curves(tmp_path / "slow", slow.run)
    for part in ("select", "final"):
        for name in one[part]:
            assert one[part][name] == pytest.approx(other[part][name], abs=1e-4), (part, name)


def test_a_free_pooler_reads_the_store_once(store, tmp_path, monkeypatch):
    """Ten learning rates and two trainings cost one reading of each split."""
    read_rows_, original = [], TokenSource.read

    def read(self, positions, *, view=0):
        read_rows_.append(len(positions))
        return original(self, positions, view=view)

    monkeypatch.setattr(TokenSource, "read", read)
    configs = [ProbeConfig(pooler="gap", lr=0.001 * n, **QUICK) for n in range(1, 11)]
    rows = fit_probes(store, configs, results_dir=tmp_path)
    assert len(rows) == 10
    assert sum(read_rows_) == 60 + 24


def test_company_does_not_matter(store, tmp_path):
    """A probe has the same row alone as among others."""
    others = [ep(num_queries=2, lr=0.003), ProbeConfig(pooler="mhca", lr=0.01, **QUICK)]
    (alone,) = fit_probes(store, [ep()], results_dir=tmp_path / "alone")
    among = fit_probes(store, [others[0], ep(), others[1]], results_dir=tmp_path / "among")
    assert among[1].run == alone.run
    assert numbers([among[1]]) == numbers([alone])


def test_the_grid_of_a_recipe_becomes_rows(store, tmp_path):
    """lr=None tries the recipe's rates and decays, and each pair keeps a row."""
    from epcache.recipes import SMALL_LEARNING_RATES, SMALL_WEIGHT_DECAYS

    rows = fit_probes(store, [ep(lr=None, epochs=2)], results_dir=tmp_path)
    found = [(row.lr, row.weight_decay) for row in rows]
    assert found == [(lr, wd) for lr in SMALL_LEARNING_RATES for wd in SMALL_WEIGHT_DECAYS]
    assert sum(row.test_top1 is not None for row in rows) == 1


def test_a_diverging_probe_leaves_and_is_named(store, tmp_path):
    """The others go on as if it had not been there."""
    recorder = Recorder()
    configs = [ep(optimizer="sgd", lr=1e30), ep(optimizer="sgd", lr=0.1)]
    rows = fit_probes(store, configs, results_dir=tmp_path / "two", progress=recorder)
    (alone,) = fit_probes(store, configs[1:], results_dir=tmp_path / "one")
    assert numbers(rows) == numbers([alone])
    assert any("lr 1e+30" in m and "diverged in epoch 0" in m for m in recorder.messages)


@pytest.mark.parametrize(("phase", "stop_at"), [("select", 2), ("select", 4), ("refit", 3)])
def test_an_interrupted_run_goes_on(store, tmp_path, phase, stop_at):
    """Stopped at any epoch, the same call goes on from there and gives the same numbers."""
    configs = [ep(lr=lr) for lr in (0.003, 0.01)]
    plain = fit_probes(store, configs, results_dir=tmp_path / "plain")
    stopper = Recorder(stop_at, phase)
    with pytest.raises(KeyboardInterrupt):
        fit_probes(store, configs, results_dir=tmp_path / "cut", progress=stopper)
    assert not read_rows(tmp_path / "cut")
    recorder = Recorder()
    resumed = fit_probes(store, configs, results_dir=tmp_path / "cut", progress=recorder)
    whole = [("select", e) for e in range(1, 5)] + [("refit", e) for e in range(1, 5)]
    assert stopper.epochs + recorder.epochs == whole
    assert numbers(resumed) == numbers(plain)
    for row in resumed:
        assert curves(tmp_path / "cut", row.run) == curves(tmp_path / "plain", row.run)
    assert not list((tmp_path / "cut" / "checkpoints").iterdir())


def test_finished_rows_are_not_trained_again(store, tmp_path):
    """A second call only reads; a wider grid trains what is new; ``again`` trains all."""
    first = fit_probes(store, [ep(lr=0.01)], results_dir=tmp_path)
    recorder = Recorder()
    assert fit_probes(store, [ep(lr=0.01)], results_dir=tmp_path, progress=recorder) == first
    assert recorder.epochs == []
    assert "not trained again" in recorder.messages[0]
    recorder = Recorder()
    both = fit_probes(store, [ep(lr=0.01), ep(lr=1e-5)], results_dir=tmp_path, progress=recorder)
    assert both[0] == first[0]
    assert recorder.phases == ["select 1 probe (ep) on 54 images, in memory"]
    recorder = Recorder()
    redone = fit_probes(store, [ep(lr=0.01)], results_dir=tmp_path, progress=recorder, again=True)
    assert numbers(redone) == numbers(first)
    assert len(recorder.epochs) == 8


def test_a_probe_that_lost_may_win_later(store, tmp_path):
    """A rate that lost in a grid is scored, without new selection, when asked for alone."""
    configs = [ep(lr=0.01), ep(lr=1e-5)]
    _, lost = fit_probes(store, configs, results_dir=tmp_path / "a")
    assert lost.test_top1 is None
    recorder = Recorder()
    (scored,) = fit_probes(store, configs[1:], results_dir=tmp_path / "a", progress=recorder)
    (alone,) = fit_probes(store, configs[1:], results_dir=tmp_path / "b")
    assert [phase for phase, _ in recorder.epochs] == ["refit"] * 4
    assert numbers([scored]) == numbers([alone])
    with_it, without = (curves(tmp_path / n, scored.run)["select"] for n in ("a", "b"))
    assert with_it["val_top1"] == without["val_top1"]
    assert with_it["train_loss"] == pytest.approx(without["train_loss"], abs=1e-4)


def test_views_alternate_by_epoch(tmp_path):
    """With two cached views even epochs read the first and odd ones the second."""
    store = epcache.open_store(learnable_store(tmp_path / "store", num_views=2))
    (two,) = fit_probes(store, [ep()], results_dir=tmp_path / "two")
    (one,) = fit_probes(store, [ep(views=1)], results_dir=tmp_path / "one")
    assert (two.views, one.views) == (2, 1)
    losses = [
        curves(tmp_path / name, row.run)["select"]["train_loss"]
        for name, row in (("two", two), ("one", one))
    ]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    with pytest.raises(ConfigError, match=r"views=3: store .* has 2. Run: epcache extract"):
        fit_probes(store, [ep(views=3)], results_dir=tmp_path)


def test_shots_take_so_many_of_each_class(store, tmp_path):
    """The row counts them; seeds of the order take others."""
    (row,) = fit_probes(store, [ep(shots=10)], results_dir=tmp_path)
    assert (row.shots, row.train_images) == (10, 30)
    one, other = (plan_of(store, [ep(shots=10, order_seed=s)]).rows for s in (0, 1))
    assert one.tolist() != other.tolist()


def test_names_of_runs_of_earlier_versions_stay(store):
    """What came later is in a name only where it is not the default."""
    before = {
        "command": "probe", "digest": store.digest, "precision": "float32", "pooler": "ep",
        "num_queries": 4, "dim_out": None, "options": {}, "optimizer": "adamw", "lr": 0.01,
        "weight_decay": 0.0, "seed": 0, "layer": 3, "tokens": "patch", "norm": "final", "views": 1,
        "shots": None, "recipe": "small", "batch_size": 10, "epochs": 4, "warmup_epochs": 0.4,
        "label_smoothing": 0.0, "order_seed": 0, "holdout": 0.1,
    }  # fmt: skip

    def name(**changed):
        config = ep(weight_decay=0.0, warmup_epochs=0.4, **changed)
        return plan_of(store, [config]).trials[0].run

    assert name() == run_name(before)
    unchosen = {"shots": 4, "holdout": 0.0}
    assert name(**unchosen) == run_name({**before, **unchosen})
    # few shots were once chosen by some of themselves: those rows are of other runs
    assert name(shots=4) != run_name({**before, "shots": 4})


@pytest.mark.parametrize("asked", [{"shots": 1}, {"shots": 5}, {"share": 0.1}])
@pytest.mark.parametrize("pooler", ["gap", "ep"])
def test_few_shots_are_chosen_by_other_training_images(store, tmp_path, monkeypatch, asked, pooler):
    """What is learnt from, chosen by and scored share no image: the ids of all that is read."""
    seen = {}
    recorder = Recorder()
    original = TokenStream._read

    def read(self, batches, *, view):
        phase = recorder.phases[-1].split()[0]
        role = "judge" if self.batch_size == EVALUATION_ROWS else "learn"
        for positions, batch in zip(batches, original(self, batches, view=view), strict=True):
            split, rows = rows_of(self.source, batch[0])
            ids = [split.samples()[row].path for row in rows]
            assert len(ids) == len(positions)
            seen.setdefault((phase, role), set()).update(ids)
            yield batch

    def rows_of(source, tokens):
        """The rows of a store whose finished tokens these are, found by their values."""
        for name in store.splits:
            split = store[name]
            rows = np.flatnonzero(split.valid)
            whole = TokenSource(
                split=split, layer=3, norm=FinalNorm.load(store.final_norm_path), rows=rows
            ).read(np.arange(len(rows)))
            if pooler == "gap":
                whole = whole.mean(1, keepdim=True)
            same = (tokens[:, None] - whole[None]).abs().amax((2, 3)) < 1e-6
            if same.any():
                assert same.sum(1).tolist() == [1] * len(tokens)
                return split, rows[same.int().argmax(1).numpy()]
        raise AssertionError

    monkeypatch.setattr(TokenStream, "_read", read)
    sized = {"num_queries": 4} if pooler == "ep" else {}
    config = ProbeConfig(pooler=pooler, lr=0.01, epochs=2, batch_size=3, **sized, **asked)
    (row,) = fit_probes(store, [config], results_dir=tmp_path, progress=recorder, device="cpu")
    assert set(seen) == {(p, r) for p in ("select", "refit") for r in ("learn", "judge")}
    subset, held = seen["select", "learn"], seen["select", "judge"]
    evaluation = {sample.path for sample in store["val"].samples()}
    assert seen["refit", "learn"] == subset
    assert seen["refit", "judge"] == evaluation
    assert not subset & held
    assert not (subset | held) & evaluation
    assert len(subset) == row.train_images == {1: 3, 5: 15, None: 6}[row.shots]
    assert len(held) == {1: 3, 5: 12, None: 6}[row.shots]
    assert row.test_top1 is not None


def test_two_images_are_enough_to_train(tmp_path):
    """One shot of two classes: a batch of two, chosen by two others."""
    path = learnable_store(tmp_path / "store", num_train=5, num_val=3)
    two = epcache.open_store(path)
    recorder = Recorder()
    configs = [ProbeConfig(pooler="gap", shots=1, lr=0.01, epochs=2)]
    (row,) = fit_probes(two, configs, results_dir=tmp_path, progress=recorder)
    assert (row.train_images, row.batch_size) == (3, 3)
    assert "1 of 3 classes have no training image outside the subset" in recorder.messages[0]


def test_what_fails_is_noted_and_the_rest_goes_on(store, tmp_path):
    """Configs that do not fit and probes that diverge, each with its reason."""
    failures = []
    configs = [
        ep(num_queries=5), ep(), ep(num_queries=5, lr=0.1), ep(layer=2), ep(layer=0),
        ep(optimizer="sgd", lr=1e30),
    ]  # fmt: skip
    rows = fit_probes(store, configs, results_dir=tmp_path, failures=failures)
    assert [(row.layer, row.lr) for row in rows] == [(3, 0.01), (0, 0.01)]
    assert [(f.what, f.reason.split(";")[0]) for f in failures] == [
        ("ep M=5, layer -1", "pooler ep: num_queries=5 does not divide dim_out=16"),
        ("ep M=4, layer 2", f"layer 2 is not in store {store.path} (has 0,3 of 0-3). Run: epcache "
         f"extract --layers 2 ..."),
        ("ep M=4, lr 1e+30, seed 0, layer 3", "diverged in epoch 0 (lr 1e+30)"),
    ]  # fmt: skip


def test_a_pass_that_breaks_does_not_stop_the_others(store, tmp_path, monkeypatch):
    """Such as one that needs more memory than there is."""
    original = GroupFit.run

    def run(self, **options):
        if self.plan.layer == 0:
            raise RuntimeError("out of memory\nand a long trace")
        return original(self, **options)

    monkeypatch.setattr(GroupFit, "run", run)
    failures = []
    rows = fit_probes(store, [ep(layer=0), ep()], results_dir=tmp_path, failures=failures)
    assert [row.layer for row in rows] == [3]
    assert [(f.what, f.reason) for f in failures] == [
        ("ep M=4, lr 0.01, seed 0, layer 0", "out of memory")
    ]
    with pytest.raises(RuntimeError, match="out of memory"):
        fit_probes(store, [ep(layer=0)], results_dir=tmp_path)


def test_what_does_not_fit_the_store_is_refused_before_training(store, tmp_path):
    """One wrong config among many stops the call at once."""
    good = ep()
    for wrong, message in (
        (ep(layer=2), "layer 2 is not in store"),
        (ep(num_queries=5), "num_queries=5 does not divide"),
        (ProbeConfig(pooler="cbam", tokens="all", **QUICK), "needs the grid of patch tokens"),
    ):
        recorder = Recorder()
        with pytest.raises(ConfigError, match=message):
            fit_probes(store, [good, wrong], results_dir=tmp_path, progress=recorder)
        assert recorder.phases == []


@pytest.mark.parametrize("pooler", ["ep", "mhca", "gap"])
def test_bfloat16_trains_too(store, tmp_path, pooler):
    """Matrix products in bfloat16 learn about as well as in float32."""
    config = ProbeConfig(pooler=pooler, lr=0.01, num_queries=4 if pooler == "ep" else None, **QUICK)
    plain, half = (
        fit_probes(store, [config], results_dir=tmp_path / name, precision=name)[0]
        for name in ("float32", "bfloat16")
    )
    assert half.precision == ("float32" if pooler == "gap" else "bfloat16")
    assert half.test_top1 == pytest.approx(plain.test_top1, abs=0.15)


def test_torch_random_state_is_left_alone(store, tmp_path):
    """Training draws from generators of its own."""
    before = torch.random.get_rng_state()
    fit_probes(store, [ep(epochs=1)], results_dir=tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("damage", [b"", b"rubbish", "half"])
def test_a_damaged_checkpoint_starts_the_pass_anew(store, tmp_path, damage):
    """It is said, and the rows are those of a run that was never stopped."""
    configs = [ep(lr=0.01)]
    plain = fit_probes(store, configs, results_dir=tmp_path / "plain")
    with pytest.raises(KeyboardInterrupt):
        fit_probes(store, configs, results_dir=tmp_path / "cut", progress=Recorder(stop_at=2))
    (checkpoint,) = (tmp_path / "cut" / "checkpoints").glob("*.safetensors")
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2] if damage == "half" else damage)
    recorder = Recorder()
    again = fit_probes(store, configs, results_dir=tmp_path / "cut", progress=recorder)
    assert numbers(again) == numbers(plain)
    assert "select starts anew: its file is damaged" in recorder.messages


@pytest.mark.parametrize("text", ["", "[]", '{"final": 5}', "x"])
def test_a_damaged_curve_stops_nothing(store, tmp_path, text):
    """A run whose curve is damaged can be told of and trained again."""
    (row,) = fit_probes(store, [ep(lr=0.01)], results_dir=tmp_path)
    curve = tmp_path / "runs" / row.run / "curve.json"
    whole = json.loads(curve.read_text())
    curve.write_text(text)
    assert best_convergence([row], tmp_path) == []
    fit_probes(store, [ep(lr=0.01)], results_dir=tmp_path, again=True)
    assert json.loads(curve.read_text()) == whole


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"seed": 10**20}, "seed=.*at most"), ({"dim_out": 10**12}, "dim_out=.*at most")],
)
def test_absurd_sizes_are_refused(asked, message):
    """Before a generator or the memory gives up on them."""
    with pytest.raises(ConfigError, match=message):
        ProbeConfig(**asked)
