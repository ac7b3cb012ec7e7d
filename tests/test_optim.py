"""Optimizers on stacked parameters: reference trajectories, torch's own optimizers, the stack."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from epcache.errors import ConfigError
from epcache.optim import OPTIMIZERS, learning_rate, make_optimizer
from epcache.poolers import make_pooler
from epcache.probe import Probe

GOLDEN = Path(os.environ.get("EPCACHE_GOLDEN", Path(__file__).parent / "golden"))
NAMES = list(OPTIMIZERS)
MODULE_NAMES = {"queries": "pooler.queries", "value.weight": "pooler.value.weight"}
few = settings(max_examples=30, deadline=None)


# --- reference trajectories ---


def golden(name):
    data = np.load(GOLDEN / f"recipe_{name}.npz")
    return json.loads(str(data["options"])), data


def golden_state(data, when):
    """The reference's state, by the names of `Probe`."""
    found = {k.split("/", 1)[1]: torch.tensor(data[k]) for k in data if k.startswith(when)}
    return {MODULE_NAMES.get(key, key): value for key, value in found.items()}


def relative(value, expected):
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return np.abs(value - expected).max() / np.abs(expected).max()


def train_stacked(name, company):
    """Train the reference's probe with the stacked optimizer, beside others.

    Args:
        name: The optimizer.
        company: The factor of each probe's learning rate and of its initial parameters; the probe
            with factor 1 is the reference's.

    Returns:
        Losses (steps, P), learning rates (steps,) of the recipe, final parameters, the modules that
        hold each probe's running statistics, and the logits (P, n, C).
    """
    options, data = golden(name)
    state = golden_state(data, "init")
    tokens, labels = torch.tensor(data["x"]).float(), torch.tensor(data["y"])
    sizes = {"num_queries": options["num_queries"], "dim_out": len(state["norm.running_mean"])}
    modules = [
        Probe(make_pooler("ep", dim=options["dim"], **sizes), options["num_classes"])
        for _ in company
    ]
    trained = [key for key, _ in modules[0].named_parameters()]
    params = {key: torch.stack([state[key] * factor for factor in company]) for key in trained}
    momentum = {"sgd": {"momentum": 0.0}}  # the SGD trajectory has none
    decay = torch.full((len(company),), options["weight_decay"])
    optimizer = make_optimizer(name, params, decay, **momentum.get(name, {}))
    peaks, losses, rates = options["lr"] * torch.tensor(company, dtype=torch.float64), [], []
    schedule = {
        "steps_per_epoch": len(labels) // options["batch_size"],
        "epochs": options["epochs"],
        "warmup_epochs": options["warmup_epochs"],
    }
    for step, rows in enumerate(data["batches"]):
        slices = [
            {key: value[i].clone().requires_grad_() for key, value in params.items()}
            for i in range(len(company))
        ]
        loss_P = torch.stack(
            [
                torch.nn.functional.cross_entropy(
                    functional_call(module, part, (tokens[rows],)), labels[rows]
                )
                for module, part in zip(modules, slices, strict=True)
            ]
        )
        loss_P.sum().backward()
        grads = {key: torch.stack([part[key].grad for part in slices]) for key in params}
        optimizer.step(grads, learning_rate(step, peak=peaks, **schedule))
        losses.append(loss_P.detach().numpy())
        rates.append(learning_rate(step, peak=options["lr"], **schedule))
    logits = [
        functional_call(module.eval(), {key: value[i] for key, value in params.items()}, (tokens,))
        for i, module in enumerate(modules)
    ]
    return np.array(losses), np.array(rates), params, modules, torch.stack(logits)


@pytest.mark.parametrize("company", [(1.0,), (0.3, 1.0, 2.5)], ids=["alone", "among_others"])
@pytest.mark.parametrize("name", NAMES)
def test_reference_trajectory(name, company):
    """Every rate, every loss, the final state and the logits are the reference's, alone or not."""
    losses, rates, params, modules, logits = train_stacked(name, company)
    _, data = golden(name)
    place = company.index(1.0)
    assert relative(rates, data["lr"]) < 1e-12
    scale = np.abs(data["loss"]).max()
    difference = np.abs(losses[:, place] - data["loss"]) / scale
    assert difference[:20].max() < 1e-5
    assert difference[20:].max() < 1e-4
    final = golden_state(data, "final")
    assert set(final) == {*params, "norm.running_mean", "norm.running_var"}
    for key, expected in final.items():
        value = params[key][place] if key in params else modules[place].state_dict()[key]
        assert relative(value, expected) < 1e-4, key
    assert relative(logits[place], data["logits"]) < 1e-4
    if len(company) > 1:
        assert relative(losses[:, 0], data["loss"]) > 1e-2  # the neighbours do live their own lives


# --- random shapes against torch and a plain LARS ---


def plain_lars(params, decay, momentum=0.9, trust=0.001):
    """LARS on one probe, line by line; returns a function of (grads, lr)."""
    velocity = {key: torch.zeros_like(value) for key, value in params.items()}

    def step(grads, lr):
        for key, param in params.items():
            move = grads[key]
            if param.ndim > 1:
                move = move + decay * param
                norms = param.norm().item(), move.norm().item()
                if norms[0] > 0 and norms[1] > 0:
                    move = move * (trust * norms[0] / norms[1])
            velocity[key] = momentum * velocity[key] + move
            param -= lr * velocity[key]

    return step


def torch_optimizer(build, params, decay):
    """One of torch's optimizers on one probe, as a function of (grads, lr)."""
    leaves = {key: value.requires_grad_() for key, value in params.items()}
    optimizer = build(list(leaves.values()), lr=0.1, weight_decay=decay)

    def step(grads, lr):
        for key, leaf in leaves.items():
            leaf.grad = grads[key].clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    return step


def reference(name, params, decay):
    if name == "lars":
        return plain_lars(params, decay)
    if name == "sgd":
        return torch_optimizer(
            lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.9), params, decay
        )
    return torch_optimizer(torch.optim.AdamW, params, decay)


SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def problems(draw, dtype=torch.float64, num_probes=None):
    """Stacked parameters with a few steps' gradients, learning rates and weight decays."""
    num_probes = num_probes or draw(st.integers(1, 5))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def stacks():
        return {f"w.{i}": normal(num_probes, *shape) for i, shape in enumerate(shapes)}

    params, grads = stacks(), [stacks() for _ in range(draw(st.integers(1, 4)))]
    rates = [normal(num_probes).abs().double() for _ in grads]
    decay = normal(num_probes).abs().double()
    if draw(st.booleans()):  # zero norms: a layer that starts at 0, a layer without gradient
        params["w.0"][0] = 0
        grads[0]["w.0"][-1] = 0
        decay[-1] = 0
    return params, grads, rates, decay


def copied(params):
    return {key: value.clone() for key, value in params.items()}


def slice_of(stacks, i):
    return {key: value[i].clone() for key, value in stacks.items()}


def run(name, problem, **options):
    """Take the problem's steps; the optimizer afterwards."""
    params, grads, rates, decay = problem
    optimizer = make_optimizer(name, copied(params), decay, **options)
    for grad, lr in zip(grads, rates, strict=True):
        optimizer.step(grad, lr)
    return optimizer


def one_probe(problem, i):
    """Probe i of a problem, alone in its stack."""
    params, grads, rates, decay = problem
    cut = [{key: value[i : i + 1] for key, value in stack.items()} for stack in (params, *grads)]
    return cut[0], cut[1:], [lr[i : i + 1] for lr in rates], decay[i : i + 1]


def everything(optimizer):
    return {**{f"param/{k}": v for k, v in optimizer.params.items()}, **optimizer.state_dict()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", NAMES)
@few
@given(problem=problems())
def test_stack_is_the_plain_optimizer_of_each_probe(name, problem):
    """Each slice moves as torch's SGD and AdamW, or a plain LARS, move that probe alone.

    And gradients are left as they are.
    """
    params, grads, rates, decay = problem
    given_grads = [copied(grad) for grad in grads]
    optimizer = run(name, problem)
    for grad, same in zip(grads, given_grads, strict=True):
        assert_same(grad, same)
    for i in range(len(decay)):
        alone = slice_of(params, i)
        step = reference(name, alone, decay[i].item())
        for grad, lr in zip(grads, rates, strict=True):
            step(slice_of(grad, i), lr[i].item())
        for key, value in alone.items():
            found = optimizer.params[key][i]
            assert torch.allclose(found, value, rtol=1e-10, atol=1e-12), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_company_changes_no_bit(name, dtype, data):
    """P stacked probes are P stacks of one probe, to the last bit of parameters and state."""
    problem = data.draw(problems(dtype))
    stacked = everything(run(name, problem))
    for i in range(len(problem[-1])):
        alone = everything(run(name, one_probe(problem, i)))
        assert_same({key: value[i : i + 1] for key, value in stacked.items()}, alone)


@pytest.mark.parametrize("name", NAMES)
def test_company_changes_no_bit_of_a_real_sized_layer(name):
    """The same for widths where vectorised code has a body and a remainder."""
    generator = torch.Generator().manual_seed(0)

    def stacks():
        return {"w": torch.randn(3, 131, 257, generator=generator)}

    rates = [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.01, 1.0])]
    problem = stacks(), [stacks(), stacks()], rates, torch.tensor([0.0, 0.1, 1e-3])
    stacked = everything(run(name, problem))
    for i in range(3):
        alone = everything(run(name, one_probe(problem, i)))
        assert_same({key: value[i : i + 1] for key, value in stacked.items()}, alone)


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_fused_kernels_do_what_the_operations_do(name, data):
    """The way of other devices gives the numbers of the CPU's own."""
    problem = data.draw(problems())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epcache.optim.FUSED_NUMEL", 0)
        fused = everything(run(name, problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epcache.optim.FUSED_NUMEL", math.inf)
        plain = everything(run(name, problem))
    for key, value in fused.items():
        assert torch.allclose(value, plain[key], rtol=1e-10, atol=1e-12), key


# --- active, keep, resume ---


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_probes_that_are_not_active_are_not_touched(name, data):
    """They keep every bit, even under gradients of nan; the others move as without a mask."""
    params, grads, rates, decay = data.draw(problems())
    masks = st.lists(st.booleans(), min_size=len(decay), max_size=len(decay))
    active = torch.tensor(data.draw(masks))
    optimizer, free = (run(name, (copied(params), grads, rates, decay)) for _ in range(2))
    before = copied(everything(optimizer))
    free.step(grads[0], rates[0])
    for value in grads[0].values():
        value[~active] = math.nan
    optimizer.step(grads[0], rates[0], active)
    for key, value in everything(optimizer).items():
        assert torch.equal(value[~active], before[key][~active]), key
        assert torch.equal(value[active], everything(free)[key][active]), key


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_probe_goes_on_where_it_stopped(name):
    """Steps that a probe sits out do not count as its steps."""
    generator = torch.Generator().manual_seed(0)
    stacks = [{"w": torch.randn(2, 3, 4, generator=generator)} for _ in range(3)]
    rates, decay = torch.tensor([0.1, 0.2]), torch.zeros(2)
    optimizer = make_optimizer(name, copied(stacks[0]), decay)
    optimizer.step(stacks[1], rates)
    optimizer.step(stacks[2], rates, torch.tensor([True, False]))
    optimizer.step(stacks[2], rates, torch.tensor([False, True]))
    assert_same(
        everything(optimizer), everything(run(name, (*stacks[:1], stacks[1:], [rates] * 2, decay)))
    )


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_keep_is_as_if_the_others_had_never_been(name, data):
    """Probes that are kept go on as in a stack of their own, in the order asked for."""
    params, grads, rates, decay = problem = data.draw(problems(num_probes=4))
    indices = data.draw(st.lists(st.integers(0, 3), unique=True))
    optimizer = run(name, problem)
    shared = optimizer.params
    optimizer.keep(indices)
    assert optimizer.num_probes == len(indices)
    assert optimizer.params is shared
    optimizer.step({k: v[indices] for k, v in grads[0].items()}, rates[0][indices])
    whole = everything(run(name, (params, [*grads, grads[0]], [*rates, rates[0]], decay)))
    assert_same(everything(optimizer), {key: value[indices] for key, value in whole.items()})


def test_keep_leaves_a_leaf_that_wants_gradients():
    """Parameters that autograd follows are so after `keep` too, and a step needs no ceremony."""
    params = {"w": torch.ones(3, 2, 2, requires_grad=True)}
    optimizer = make_optimizer("adamw", params, torch.zeros(3))
    optimizer.keep(torch.tensor([2, 0]))
    (params["w"] ** 2).sum().backward()
    assert params["w"].is_leaf
    assert params["w"].grad.shape == (2, 2, 2)
    optimizer.step({"w": params["w"].grad}, torch.tensor([0.1, 0.1]))
    assert params["w"].requires_grad
    assert (params["w"] < 1).all()


@pytest.mark.parametrize("name", NAMES)
@few
@given(problem=problems())
def test_a_run_resumes_exactly(name, problem):
    """Parameters and state taken through a file end where the run that went on ends."""
    params, grads, rates, decay = problem
    first = make_optimizer(name, copied(params), decay)
    first.step(grads[0], rates[0])
    saved = copied(first.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    second = make_optimizer(name, copied(first.params), torch.zeros_like(decay))
    second.load_state_dict(saved)
    for optimizer in (first, second):
        for grad, lr in zip(grads, rates, strict=True):
            optimizer.step(grad, lr)
    assert_same(everything(second), everything(first))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gradients_move_float32_parameters(name):
    """A bfloat16 gradient is its float32 value; parameters and state stay in float32."""
    grad = torch.randn(2, 3, 3).bfloat16()
    ends = []
    for value in (grad, grad.float()):
        params = {"w": torch.ones(2, 3, 3)}
        optimizer = make_optimizer(name, params, torch.zeros(2))
        optimizer.step({"w": value}, torch.tensor([0.1, 1.0]))
        ends.append(everything(optimizer))
    assert_same(*ends)
    assert all(ends[0][key].dtype == torch.float32 for key in ends[0] if key.endswith("/w"))


# --- schedule ---


@few
@given(
    steps=st.integers(1, 20), epochs=st.integers(1, 30), data=st.data(), peak=st.floats(1e-6, 1e3)
)
def test_schedule_rises_then_falls(steps, epochs, data, peak):
    """From 0 in equal steps to the peak, then down to 0, and never above the peak."""
    warmup = data.draw(st.integers(0, epochs - 1))
    size = {"steps_per_epoch": steps, "epochs": epochs, "warmup_epochs": warmup, "peak": peak}
    rates = np.array([learning_rate(step, **size) for step in range(steps * epochs + 1)])
    top = steps * warmup
    assert rates[top] == peak
    assert rates[-1] == 0
    assert np.allclose(np.diff(rates[: top + 1]), peak / max(top, 1), rtol=1e-9)
    assert (np.diff(rates[top:]) < 0).all()
    middle = (rates[top:] + rates[top:][::-1]) / 2
    assert np.allclose(middle, peak / 2)  # half a cosine is odd about its middle


def test_schedule_of_many_peaks():
    """A tensor of peaks gives the tensor of what each peak gives."""
    size = {"steps_per_epoch": 3, "epochs": 4, "warmup_epochs": 1.5}
    peaks = torch.tensor([0.1, 2.0, 30.0], dtype=torch.float64)
    for step in range(13):
        each = [learning_rate(step, peak=peak, **size) for peak in peaks.tolist()]
        assert learning_rate(step, peak=peaks, **size).tolist() == each


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adam", {}, "unknown optimizer 'adam'; expected one of lars, sgd, adamw"),
        ("sgd", {"nesterov": True}, "sgd has no option 'nesterov'; it takes momentum"),
        ("lars", {"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ("lars", {"trust_coefficient": 0.0}, "trust_coefficient must be a positive number"),
        ("adamw", {"betas": (0.9, -1.0)}, "betas must be at least 0 and below 1, got -1.0"),
        ("adamw", {"eps": math.inf}, "eps must be a positive number, got inf"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    """A name, an option or a value that cannot work is named with what can."""
    with pytest.raises(ConfigError, match=message):
        make_optimizer(name, {"w": torch.ones(2, 3)}, torch.zeros(2), **options)


@pytest.mark.parametrize(
    ("params", "decay", "message"),
    [
        ({"a": (2, 3), "b": (3,)}, [0.0, 0.0], "must share their first axis"),
        ({"a": ()}, [0.0], "must share their first axis"),
        ({}, [0.0], "must share their first axis"),
        ({"a": (2, 3)}, [0.0], "one value for each of 2 probes"),
        ({"a": (2, 3)}, [0.0, -1.0], "finite and 0 or more"),
        ({"a": (2, 3)}, [0.0, math.nan], "finite and 0 or more"),
    ],
)
def test_bad_stacks_are_refused(params, decay, message):
    """Every parameter has a slice for each probe, and every probe a weight decay."""
    stacks = {key: torch.ones(shape) for key, shape in params.items()}
    with pytest.raises(ConfigError, match=message):
        make_optimizer("sgd", stacks, torch.tensor(decay))


def test_half_precision_parameters_are_refused():
    """Small steps would be lost in them."""
    with pytest.raises(ConfigError, match=r"parameter w is torch\.float16; expected float32"):
        make_optimizer("sgd", {"w": torch.ones(2, 3).half()}, torch.zeros(2))


def test_state_of_others_is_refused():
    """State of another optimizer or of another number of probes changes nothing."""
    optimizer = make_optimizer("sgd", {"w": torch.ones(2, 3)}, torch.zeros(2))
    before = copied(everything(optimizer))
    other = make_optimizer("adamw", {"w": torch.ones(2, 3)}, torch.zeros(2))
    with pytest.raises(ConfigError, match="expected momentum/w, weight_decay"):
        optimizer.load_state_dict(other.state_dict())
    other = make_optimizer("sgd", {"w": torch.ones(1, 3)}, torch.ones(1))
    with pytest.raises(ConfigError, match="stack the probes that were saved"):
        optimizer.load_state_dict(other.state_dict())
    assert_same(everything(optimizer), before)
