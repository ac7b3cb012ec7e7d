"""Optimizers on stacked parameters, and the schedule.

A parameter of P probes is one tensor (P, *shape); learning rate and weight decay are (P,), one per
probe. A step of P stacked probes does the arithmetic of P separate steps, so on a CPU the numbers
are the same to the last bit. Two habits keep that true:

* norms are taken per probe, over everything but the first axis;
* all else is made of sums, products, quotients and roots of elements, whose rounding is fixed
  wherever in a tensor an element lies, or of torch's fused kernels, called for each probe alone.

The fused kernels exist because a step is bound by memory: they read a parameter and its moments
once, where a dozen tensor operations read and write them a dozen times. For biases and
on other devices than the CPU, where a call costs more than it moves, the operations are used; both
are tested as equal.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from epcache.errors import ConfigError

Rate = TypeVar("Rate", float, Tensor)

FUSED_NUMEL = 2048
"""Elements a probe from which its own kernel call is cheaper than its share of the operations."""


def learning_rate(
    step: int, *, steps_per_epoch: int, epochs: int, warmup_epochs: float, peak: Rate
) -> Rate:
    """Learning rate of one step: a linear warm-up from 0, then half a cosine to 0.

    Args:
        step: Steps taken before this one, 0 to `steps_per_epoch * epochs`. The first step of a
            warm-up has rate 0.
        steps_per_epoch: Steps in an epoch.
        epochs: Length of the whole schedule.
        warmup_epochs: Length of the warm-up, less than `epochs`; 0 starts at the peak.
        peak: Rate at the end of the warm-up: a number, or (P,) for P probes.

    Returns:
        What `peak` is: a float, or (P,).

    Source: the published recipe of "Attention, Please! Revisiting Attentive Probing Through the
    Lens of Efficiency" (ICLR 2026).
    """
    assert 0 <= step <= steps_per_epoch * epochs, f"step {step} is outside the schedule"
    epoch = step / steps_per_epoch
    if epoch < warmup_epochs:
        return peak * (epoch / warmup_epochs)
    progress = (epoch - warmup_epochs) / (epochs - warmup_epochs)
    return peak * (0.5 * (1 + math.cos(math.pi * progress)))


class StackedOptimizer(ABC):
    """What all optimizers on stacked parameters share.

    Args:
        params: Name to tensor (P, *shape), float32 or float64. The dict itself is kept: `step`
            changes its tensors in place and `keep` replaces them by smaller ones.
        weight_decay: (P,), 0 or more.

    Raises:
        ConfigError: If shapes disagree or a value is out of range.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the running averages, each of a parameter's shape and starting at 0."""

    def __init__(self, params: dict[str, Tensor], weight_decay: Tensor) -> None:
        num_probes = _count_probes(params)
        if weight_decay.shape != (num_probes,):
            raise ConfigError(
                f"weight_decay has shape {tuple(weight_decay.shape)}; expected one value for each "
                f"of {num_probes} probes"
            )
        if not bool((weight_decay >= 0).all() & weight_decay.isfinite().all()):
            raise ConfigError(
                f"weight_decay must be finite and 0 or more, got {weight_decay.tolist()}"
            )
        device = next(iter(params.values())).device
        self.params = params
        self.state = {
            name: {moment: torch.zeros_like(param.detach()) for moment in self.moments}
            for name, param in params.items()
        }
        # float64: 1 - beta2 ** t of the first steps has no digits to spare in float32
        self.scalars = {"weight_decay": weight_decay.detach().to(device, torch.float64, copy=True)}

    @property
    def num_probes(self) -> int:
        """Number of probes P that are still in the stack."""
        return len(self.scalars["weight_decay"])

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], lr: Tensor, active: Tensor | None = None) -> None:
        """Change the parameters in place.

        Args:
            grads: A gradient for every parameter, of its shape; left as they are.
            lr: (P,), the learning rate of each probe at this step.
            active: (P,) bool; None is all. A probe that is not active is not touched: parameters
                and state stay as they are, whatever its gradients hold. Best on the CPU: on another
                device its values are waited for.
        """
        assert grads.keys() == self.params.keys(), "one gradient for each parameter"
        assert lr.shape == (self.num_probes,), f"lr has shape {tuple(lr.shape)}, not one a probe"
        rows = self._rows(active)
        scalars = {key: _take(value, rows) for key, value in self.scalars.items()}
        self._advance(scalars)
        _put(self.scalars, rows, scalars)
        scalars["lr"] = _take(lr.to(self.scalars["weight_decay"]), rows)
        for name, param in self.params.items():
            whole = {"param": param, **self.state[name]}
            part = {key: _take(value, rows) for key, value in whole.items()}
            is_large = param.numel() >= FUSED_NUMEL * len(param)
            fused = is_large and param.device.type == "cpu"
            update = self._update_each if fused else self._update
            update(part, _take(grads[name], rows).to(param.dtype), scalars)
            _put(whole, rows, part)

    def keep(self, indices: Tensor | Sequence[int]) -> None:
        """Drop all probes but these, in this order.

        Args:
            indices: (K,) integers in [0, P), not a mask.
        """
        assert getattr(indices, "dtype", None) != torch.bool, "indices, not a mask"
        rows = torch.as_tensor(
            indices, dtype=torch.int64, device=self.scalars["weight_decay"].device
        )
        self.scalars = {key: value[rows] for key, value in self.scalars.items()}
        for name, param in self.params.items():
            self.params[name] = param.detach()[rows].requires_grad_(param.requires_grad)
            self.state[name] = {key: value[rows] for key, value in self.state[name].items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a run needs to go on exactly, but the parameters: tensors only, not copied."""
        moments = {
            f"{moment}/{name}": value
            for name, values in self.state.items()
            for moment, value in values.items()
        }
        return {**self.scalars, **moments}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy in what `state_dict` gave, from any device.

        Raises:
            ConfigError: If the state is that of another optimizer or of other parameters.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ConfigError(
                f"optimizer state has {', '.join(sorted(state))}; expected "
                f"{', '.join(sorted(own))}: load it into the optimizer that it was saved from"
            )
        for key, value in own.items():
            if state[key].shape != value.shape or state[key].dtype != value.dtype:
                raise ConfigError(
                    f"optimizer state {key} is {state[key].dtype} {tuple(state[key].shape)}; "
                    f"expected {value.dtype} {tuple(value.shape)}: stack the probes that were saved"
                )
        for key, value in own.items():
            value.copy_(state[key])

    def _rows(self, active: Tensor | None) -> Tensor | None:
        """The indices of active probes; None where all are, which saves the copies."""
        if active is None:
            return None
        assert active.shape == (self.num_probes,), f"active has shape {tuple(active.shape)}"
        assert active.dtype == torch.bool, f"active is {active.dtype}, not bool"
        rows = active.nonzero()[:, 0].to(self.scalars["weight_decay"].device)
        return None if len(rows) == self.num_probes else rows

    def _advance(self, scalars: dict[str, Tensor]) -> None:  # noqa: B027  most have nothing to do
        """Change in place what every probe has one of, before the parameters are updated."""

    @abstractmethod
    def _update(self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]) -> None:
        """Change one parameter, ``stacks["param"]``, and its moments in place, but not `grad`."""

    def _update_each(
        self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]
    ) -> None:
        """The same, probe by probe with a fused kernel where there is one."""
        self._update(stacks, grad, scalars)


class Lars(StackedOptimizer):
    """SGD whose every layer moves by a fraction of its own norm.

    Args:
        params: As for `StackedOptimizer`.
        weight_decay: As for `StackedOptimizer`; like the trust ratio, only for parameters with
            more than one dimension (P not counted).
        momentum: Share of the last move that is kept.
        trust_coefficient: Norm of a step at rate 1 over the norm of the parameter.

    Source: "Large Batch Training of Convolutional Networks" (2017), algorithm 1, with the norm of
    the decayed gradient in the ratio as public probing code has it.
    """

    moments = ("momentum",)

    def __init__(
        self,
        params: dict[str, Tensor],
        weight_decay: Tensor,
        *,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
    ) -> None:
        super().__init__(params, weight_decay)
        self.momentum = _below_one("momentum", momentum)
        self.trust_coefficient = _positive("trust_coefficient", trust_coefficient)

    def _update(self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]) -> None:
        param = stacks["param"]
        if param.ndim > 2:  # (P, rows, columns)
            grad = grad + _column(scalars["weight_decay"], param) * param
            grad = grad * _column(self._trust_ratio(param, grad), param)
        velocity = stacks["momentum"].mul_(self.momentum).add_(grad)
        param.sub_(_column(scalars["lr"], param) * velocity)

    def _trust_ratio(self, param: Tensor, grad: Tensor) -> Tensor:
        """(P,): how far each probe trusts its gradient; 1 where a norm is 0."""
        param_norm = torch.linalg.vector_norm(param.flatten(1), dim=1)
        grad_norm = torch.linalg.vector_norm(grad.flatten(1), dim=1)
        ratio = self.trust_coefficient * param_norm / grad_norm
        return torch.where((param_norm > 0) & (grad_norm > 0), ratio, 1.0)


class Sgd(StackedOptimizer):
    """Stochastic gradient descent with momentum and weight decay in the gradient.

    Args:
        params: As for `StackedOptimizer`.
        weight_decay: As for `StackedOptimizer`; for every parameter, biases too.
        momentum: Share of the last move that is kept; 0 is plain descent.

    Source: `torch.optim.SGD` (no dampening, no Nesterov step).
    """

    moments = ("momentum",)

    def __init__(
        self, params: dict[str, Tensor], weight_decay: Tensor, *, momentum: float = 0.9
    ) -> None:
        super().__init__(params, weight_decay)
        self.momentum = _below_one("momentum", momentum)

    def _update(self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]) -> None:
        param = stacks["param"]
        grad = grad + _column(scalars["weight_decay"], param) * param
        velocity = stacks["momentum"].mul_(self.momentum).add_(grad)
        param.sub_(_column(scalars["lr"], param) * velocity)

    def _update_each(
        self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]
    ) -> None:
        rates, decays = scalars["lr"].tolist(), scalars["weight_decay"].tolist()
        slices = zip(stacks["param"], grad.contiguous(), stacks["momentum"], strict=True)
        for (param, own_grad, velocity), lr, decay in zip(slices, rates, decays, strict=True):
            torch._fused_sgd_(
                [param], [own_grad], [velocity] if self.momentum else [], lr=lr,
                momentum=self.momentum, weight_decay=decay, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False,
            )  # fmt: skip


class AdamW(StackedOptimizer):
    """Adam with decoupled weight decay.

    Args:
        params: As for `StackedOptimizer`.
        weight_decay: As for `StackedOptimizer`; for every parameter, biases too.
        betas: Decay of the mean and of the mean square of gradients.
        eps: Added to the root of the mean square.

    Source: "Decoupled Weight Decay Regularization" (ICLR 2019), algorithm 2, as in
    `torch.optim.AdamW`: the decay is multiplied by the learning rate.
    """

    moments = ("mean", "square")

    def __init__(
        self,
        params: dict[str, Tensor],
        weight_decay: Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, weight_decay)
        self.betas = _below_one("betas", betas[0]), _below_one("betas", betas[1])
        self.eps = _positive("eps", eps)
        self.scalars["steps"] = torch.zeros_like(self.scalars["weight_decay"])

    def _advance(self, scalars: dict[str, Tensor]) -> None:
        scalars["steps"].add_(1)

    def _update(self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]) -> None:
        param = stacks["param"]
        mean_beta, square_beta = self.betas
        mean = stacks["mean"].mul_(mean_beta).add_(grad * (1 - mean_beta))
        square = stacks["square"].mul_(square_beta).add_(grad.square().mul_(1 - square_beta))
        decay = 1 - scalars["lr"] * scalars["weight_decay"]
        size = scalars["lr"] / (1 - mean_beta ** scalars["steps"])
        root = square.sqrt().div_(_column((1 - square_beta ** scalars["steps"]).sqrt(), param))
        move = mean.div(root.add_(self.eps)).mul_(_column(size, param))
        param.mul_(_column(decay, param)).sub_(move)

    def _update_each(
        self, stacks: dict[str, Tensor], grad: Tensor, scalars: dict[str, Tensor]
    ) -> None:
        rates, decays = scalars["lr"].tolist(), scalars["weight_decay"].tolist()
        steps = scalars["steps"].float()  # the kernel's own type for them
        slices = zip(
            stacks["param"], grad.contiguous(), stacks["mean"], stacks["square"], steps, strict=True
        )
        for (param, own_grad, mean, square, step), lr, decay in zip(
            slices, rates, decays, strict=True
        ):
            torch._fused_adamw_(
                [param], [own_grad], [mean], [square], [], [step], lr=lr, weight_decay=decay,
                beta1=self.betas[0], beta2=self.betas[1], eps=self.eps, amsgrad=False,
                maximize=False,
            )  # fmt: skip


OPTIMIZERS: dict[str, type[StackedOptimizer]] = {"lars": Lars, "sgd": Sgd, "adamw": AdamW}
"""Every optimizer by name."""


def make_optimizer(
    name: str, params: dict[str, Tensor], weight_decay: Tensor, **options: Any
) -> StackedOptimizer:
    """Build an optimizer.

    Args:
        name: A key of `OPTIMIZERS`.
        params: Name to tensor (P, *shape); see `StackedOptimizer`.
        weight_decay: (P,).
        **options: The optimizer's own options; see its class.

    Raises:
        ConfigError: If the name or an option is unknown or a value cannot work.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    allowed = [*inspect.signature(OPTIMIZERS[name]).parameters][2:]
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"optimizer {name} has no option {option!r}; it takes {', '.join(allowed)}"
            )
    return OPTIMIZERS[name](params, weight_decay, **options)


def _count_probes(params: dict[str, Tensor]) -> int:
    """The P that all parameters share."""
    sizes = {name: tuple(param.shape[:1]) for name, param in params.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ConfigError(f"parameters must share their first axis, one slice a probe; got {sizes}")
    for name, param in params.items():
        if param.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"parameter {name} is {param.dtype}; expected float32 or float64: cast in the "
                f"forward pass, small steps are lost in half precision"
            )
    return next(iter(sizes.values()))[0]


def _column(values_P: Tensor, like: Tensor) -> Tensor:
    """(P,) as (P, 1, ...), to multiply a stacked tensor of the same type."""
    return values_P.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


def _take(stacked: Tensor, rows: Tensor | None) -> Tensor:
    """A copy of some probes' slices; all of them are the tensor itself."""
    return stacked if rows is None else stacked[rows]


def _put(stacked: dict[str, Tensor], rows: Tensor | None, changed: dict[str, Tensor]) -> None:
    """Put changed copies of slices back; where all were taken, they were changed in place."""
    if rows is not None:
        for key, value in changed.items():
            stacked[key][rows] = value


def _below_one(option: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} must be at least 0 and below 1, got {value!r}")
    return value


def _positive(option: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{option} must be a positive number, got {value!r}")
    return value
