"""A probe's numbers do not depend on its company: bank = separate probes, step by step."""

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from epcache.bank import ProbeBank, Trainee
from epcache.optim import learning_rate, make_optimizer
from epcache.poolers import POOLERS
from epcache.pooling import attention_pool
from epcache.train import Fit, Schedule, evaluate

DIM, GRID, CLASSES = 16, (3, 4), 5
OPTIONS = {
    "ep": {"num_queries": 4},
    "mhca": {"num_heads": 2},
    "aim": {"num_heads": 4},
    "vjepa": {"num_heads": 4},
    "coca": {"num_queries": 6},
}


class ListStream:
    """Batches from tensors in memory."""

    def __init__(self, tokens, labels, batch_size):
        self.tokens, self.labels, self.batch_size = tokens, labels, batch_size

    def __len__(self):
        return len(self.tokens)

    def num_steps(self, *, drop_last):
        return len(self.tokens) // self.batch_size if drop_last else len(list(self.in_order()))

    def epoch(self, epoch, *, drop_last):
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(self.batch_size):
            if len(part) == self.batch_size or not drop_last:
                yield self.tokens[part], self.labels[part]

    def in_order(self):
        yield from zip(
            self.tokens.split(self.batch_size), self.labels.split(self.batch_size), strict=True
        )


def data(number=40, num_tokens=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    centres = torch.randn(CLASSES, DIM, generator=generator)
    noise = torch.randn(number, num_tokens, DIM, generator=generator)
    return noise + centres[labels][:, None], labels


def bank_of(*trainees):
    return ProbeBank(trainees, dim=DIM, grid=GRID, num_classes=CLASSES)


def train_alone(trainee, stream, schedule):
    """The plain reference: one ``Probe``, torch's own optimizer, a loop."""
    probe = trainee.build(dim=DIM, grid=GRID, num_classes=CLASSES)
    parameters = [p for p in probe.parameters() if p.requires_grad]
    kind = {
        "adamw": lambda: torch.optim.AdamW(parameters, weight_decay=trainee.weight_decay),
        "sgd": lambda: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, weight_decay=trainee.weight_decay
        ),
    }
    optimizer = kind[trainee.optimizer]()
    steps, losses = stream.num_steps(drop_last=True), []
    for epoch in range(schedule.epochs):
        probe.train()
        total = 0.0
        for number, (tokens, labels) in enumerate(stream.epoch(epoch, drop_last=True)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    epoch * steps + number,
                    steps_per_epoch=steps,
                    epochs=schedule.epochs,
                    warmup_epochs=schedule.warmup_epochs,
                    peak=trainee.lr,
                )
            loss = cross_entropy(probe(tokens), labels, label_smoothing=schedule.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / steps)
    return probe, losses


def assert_states_equal(state, probe, tolerance=2e-4):
    expected = probe.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1e-2, float(value.abs().max()))  # below that all is rounding
        assert float((state[name] - value).abs().max()) <= tolerance * scale, name


def needs(pooler):
    return OPTIONS.get(pooler, {})


# Where a gradient is zero but for rounding (a key's bias), Adam divides noise by its own size, so
# two correct programs part there; SGD shows every pooler's arithmetic as it is.
ADAM_POOLERS = ("cls", "gap", "ep", "mhca")


@pytest.mark.parametrize(
    ("pooler", "optimizer"),
    [*((name, "sgd") for name in POOLERS), *((name, "adamw") for name in ADAM_POOLERS)],
)
def test_a_probe_in_company_equals_the_probe_alone(pooler, optimizer):
    """Loss curve and final weights of every pooler, among others of other rates and seeds."""
    stream = ListStream(*data(), batch_size=10)
    schedule = Schedule(epochs=3, warmup_epochs=1, label_smoothing=0.1)
    trainees = [
        Trainee(pooler="ep", options={"num_queries": 4}, optimizer="adamw", lr=3e-2),
        *(
            Trainee(
                pooler=pooler,
                options=needs(pooler),
                optimizer=optimizer,
                lr=lr,
                weight_decay=decay,
                seed=seed,
            )
            for lr, decay, seed in ((1e-2, 0.0, 0), (3e-3, 1e-2, 0), (1e-2, 1e-2, 3))
        ),
        Trainee(pooler="gap", optimizer="sgd", lr=1e-1),
    ]
    outcomes = Fit(bank_of(*trainees), stream, stream, schedule).run()
    for trainee, outcome in zip(trainees, outcomes, strict=True):
        probe, losses = train_alone(trainee, stream, schedule)
        assert outcome.train_loss == pytest.approx(losses, rel=1e-4)
        assert_states_equal(outcome.last_state, probe, 1e-3 if pooler == "cait" else 2e-4)
        probe.eval()
        with torch.no_grad():
            right = (probe(stream.tokens).argmax(1) == stream.labels).float().mean().item()
        assert outcome.top1[-1] == pytest.approx(right, abs=0.026)


def test_bank_of_many_equals_banks_of_one():
    """Thirty efficient probes of mixed M and O at once end where each ends in a bank of its own."""
    stream = ListStream(*data(), batch_size=8)
    schedule = Schedule(epochs=2)
    shapes = [(1, 16), (2, 16), (4, 8), (8, 32), (4, 16)]
    trainees = [
        Trainee(
            pooler="ep",
            options={"num_queries": shapes[i % 5][0], "dim_out": shapes[i % 5][1]},
            lr=10 ** -(1 + i % 3),
            seed=i // 5,
            optimizer=("adamw", "lars")[i % 2],
        )
        for i in range(30)
    ]
    together = Fit(bank_of(*trainees), stream, stream, schedule).run()
    for trainee, outcome in zip(trainees, together, strict=True):
        (alone,) = Fit(bank_of(trainee), stream, stream, schedule).run()
        assert outcome.train_loss == pytest.approx(alone.train_loss, rel=1e-4)
        for name, value in alone.last_state.items():
            torch.testing.assert_close(outcome.last_state[name], value, rtol=1e-3, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 9),
    queries=st.integers(1, 12),
    tokens=st.integers(1, 20),
    dim=st.integers(1, 24),
    tile=st.sampled_from([1, 50, 10**6]),
    cut=st.integers(0, 8),
)
def test_pooling_equals_autograd(images, queries, tokens, dim, tile, cut):
    """The hand-written pooling has the values and gradients of the plain formula.

    In any tiling, and with the queries in one group or two.
    """
    import epcache.pooling

    generator = torch.Generator().manual_seed(images * 1000 + queries)
    x = torch.randn(images, tokens, dim, generator=generator)
    q = torch.randn(queries, dim, generator=generator, requires_grad=True)
    weight = torch.randn(images, queries, dim, generator=generator)
    plain = torch.einsum("bqn,bnd->bqd", torch.einsum("qd,bnd->bqn", q, x).softmax(-1), x)
    (expected,) = torch.autograd.grad((plain * weight).sum(), q)
    before, epcache.pooling.TILE_SCORES = epcache.pooling.TILE_SCORES, tile
    try:
        groups = [q] if cut >= queries else [q[:cut], q[cut:]]
        ours = torch.cat(attention_pool([part for part in groups if len(part)], x), dim=1)
        (gradient,) = torch.autograd.grad((ours * weight).sum(), q)
    finally:
        epcache.pooling.TILE_SCORES = before
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def test_bfloat16_pooling_stays_close():
    """In bfloat16 values and gradients agree with float32 to a percent or two."""
    tokens, _ = data(8)
    q = (torch.randn(6, DIM, generator=torch.Generator().manual_seed(0)) * 0.3).requires_grad_()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        (pooled,) = attention_pool([q], tokens.to(dtype))
        (gradient,) = torch.autograd.grad(pooled.square().sum(), q)
        results.append((pooled.detach(), gradient))
    for exact, half in zip(*results, strict=True):
        assert float((exact - half).norm() / exact.norm()) < 0.03


def test_a_diverging_probe_leaves_and_the_rest_go_on():
    """An absurd rate is reported and dropped; its neighbour ends as if it had been alone."""
    stream = ListStream(*data(), batch_size=10)
    schedule = Schedule(epochs=3)
    good = Trainee(pooler="ep", options={"num_queries": 4}, lr=1e-2, optimizer="sgd")
    bad = Trainee(pooler="ep", options={"num_queries": 4}, lr=1e30, optimizer="sgd")
    lost, kept = Fit(bank_of(bad, good), stream, stream, schedule).run()
    (alone,) = Fit(bank_of(good), stream, stream, schedule).run()
    assert "diverged in epoch 0" in lost.problem
    assert "1e+30" in lost.problem
    assert kept.problem is None
    assert kept.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
    for name, value in alone.last_state.items():
        torch.testing.assert_close(kept.last_state[name], value, rtol=1e-4, atol=1e-5)


def test_a_bank_where_all_diverge_ends():
    """Nothing left to train: every outcome has its problem, nothing is raised."""
    stream = ListStream(*data(), batch_size=10)
    outcomes = Fit(
        bank_of(Trainee(pooler="gap", lr=1e38, optimizer="sgd")), stream, stream, Schedule(epochs=4)
    ).run()
    assert outcomes[0].problem


def test_early_stopping_freezes_one_and_changes_no_other():
    """Patience leaves a frozen probe's weights as they were; its neighbour is untouched by it."""
    stream = ListStream(*data(), batch_size=10)
    still = Trainee(pooler="ep", options={"num_queries": 4}, lr=0.0)
    moving = Trainee(pooler="ep", options={"num_queries": 4}, lr=1e-2, seed=1)
    both = Fit(bank_of(still, moving), stream, stream, Schedule(epochs=6, patience=1)).run()
    (alone,) = Fit(bank_of(moving), stream, stream, Schedule(epochs=6, patience=1)).run()
    assert both[1].train_loss == pytest.approx(alone.train_loss, rel=1e-5)
    assert both[0].best_epoch is not None


class Stop(Exception):
    """A crash."""


@pytest.mark.parametrize("crash_after", [1, 3])
def test_a_crashed_run_goes_on_from_its_last_epoch(tmp_path, crash_after):
    """Curves and weights after a crash and a restart equal an undisturbed run, to the bit."""
    stream = ListStream(*data(), batch_size=10)
    schedule = Schedule(epochs=5, warmup_epochs=1)
    trainees = [
        Trainee(pooler="ep", options={"num_queries": 4}, lr=1e-2),
        Trainee(pooler="ep", options={"num_queries": 4}, lr=1e30, optimizer="sgd"),
        Trainee(pooler="mhca", options={"num_heads": 2}, lr=1e-2, optimizer="lars"),
    ]
    plain = Fit(bank_of(*trainees), stream, stream, schedule).run()

    def crash(fit):
        if fit.epoch == crash_after:
            raise Stop

    path = tmp_path / "fit.safetensors"
    with pytest.raises(Stop):
        Fit(bank_of(*trainees), stream, stream, schedule, checkpoint=path).run(crash)
    seen = []
    resumed = Fit(bank_of(*trainees), stream, stream, schedule, checkpoint=path).run(
        lambda fit: seen.append(fit.epoch)
    )
    assert seen == list(range(crash_after + 1, 6))
    for one, other in zip(plain, resumed, strict=True):
        assert str(one.train_loss) == str(other.train_loss)  # NaN where it diverged
        assert (one.top1, one.top5, one.best_epoch) == (other.top1, other.top5, other.best_epoch)
        assert one.problem == other.problem
        for state in ("best_state", "last_state"):
            ours, theirs = getattr(one, state), getattr(other, state)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_another_pass_is_ignored(tmp_path):
    """A file from other probes or another schedule never leaks into a run."""
    stream = ListStream(*data(), batch_size=10)
    path = tmp_path / "fit.safetensors"
    first = Trainee(pooler="gap", lr=1e-2)
    Fit(bank_of(first), stream, stream, Schedule(epochs=2), checkpoint=path).run()
    epochs = []
    Fit(bank_of(first), stream, stream, Schedule(epochs=3), checkpoint=path).run(
        lambda fit: epochs.append(fit.epoch)
    )
    assert epochs == [1, 2, 3]


def test_evaluation_counts_every_row():
    """Top-1 and top-5 equal a count by hand, with a last batch that is not full."""
    tokens, labels = data(23)
    bank = bank_of(Trainee(pooler="ep", options={"num_queries": 2}), Trainee(pooler="gap"))
    top1, top5 = evaluate(bank, ListStream(tokens, labels, 10))
    for member, trainee in enumerate(bank.trainees):
        probe = copy.deepcopy(trainee.build(dim=DIM, grid=GRID, num_classes=CLASSES)).eval()
        with torch.no_grad():
            ranked = probe(tokens).argsort(1, descending=True)
        assert top1[member] == pytest.approx((ranked[:, 0] == labels).float().mean().item())
        assert top5[member] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_the_fast_path_reproduces_the_published_recipe(name):
    """A bank of three, the middle one the reference, follows the golden trajectory step by step."""
    folder = Path(os.environ.get("EPCACHE_GOLDEN", Path(__file__).parent / "golden"))
    golden = np.load(folder / f"recipe_{name}.npz")
    options = json.loads(str(golden["options"]))
    pooler = {
        "num_queries": options["num_queries"],
        "dim_out": golden["init/value.weight"].shape[0],
    }
    rates = [options["lr"] / 3, options["lr"], options["lr"] * 2]
    trainees = [
        Trainee(pooler="ep", options=pooler, seed=seed, optimizer=name, lr=lr)
        for seed, lr in enumerate(rates)
    ]
    bank = ProbeBank(trainees, dim=options["dim"], grid=None, num_classes=options["num_classes"])
    (stack,) = bank.stacks
    for key in golden.files:
        if key.startswith("init/"):
            place = key.removeprefix("init/")
            place = place if place.startswith(("norm.", "head.")) else f"pooler.{place}"
            target = stack.params.get(place, stack.buffers.get(place))
            with torch.no_grad():
                target[1] = torch.from_numpy(golden[key])
    decay = torch.full((3,), float(options["weight_decay"]))
    momentum = {"momentum": options["momentum"]} if name == "lars" else {}
    momentum = {"momentum": 0.0} if name == "sgd" else momentum
    optimizer = make_optimizer(name, stack.params, decay, **momentum)
    tokens, labels = torch.from_numpy(golden["x"]).float(), torch.from_numpy(golden["y"])
    peak = torch.tensor(rates, dtype=torch.float64)
    for step, rows in enumerate(golden["batches"]):
        losses, gradients = bank.loss_and_gradients(tokens[rows], labels[rows])
        expected = golden["loss"][step]
        assert losses[0][1].item() == pytest.approx(expected, rel=1e-5 if step < 20 else 1e-4)
        optimizer.step(gradients[0], peak * float(golden["lr"][step]) / options["lr"])
    with torch.no_grad():
        logits = bank.logits(tokens, training=False)[0][1].numpy()
    assert np.abs(logits - golden["logits"]).max() <= 1e-4 * np.abs(golden["logits"]).max()
    for key in golden.files:
        if key.startswith("final/"):
            place = key.removeprefix("final/")
            place = place if place.startswith(("norm.", "head.")) else f"pooler.{place}"
            ours = stack.state(1)[place].numpy()
            assert np.abs(ours - golden[key]).max() <= 1e-4 * np.abs(golden[key]).max(), place


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    steady=st.booleans(),
)
def test_the_chosen_epoch_is_what_the_whole_curve_says(counts, steady):
    """Epoch by epoch: the first best one, or the last within a standard error of the best."""
    stream = ListStream(*data(30), batch_size=10)
    fit = Fit(bank_of(Trainee(pooler="gap")), stream, stream, Schedule(epochs=12), steady=steady)
    top1 = [count / 30 for count in counts]
    found = [epoch for epoch in range(len(top1)) if fit._is_better(top1[: epoch + 1])][-1]
    best = max(top1)
    slack = (best * (1 - best) / 30) ** 0.5 if steady else 0.0
    near = [epoch for epoch, value in enumerate(top1) if value >= best - slack]
    assert found == (near[-1] if steady else near[0])
