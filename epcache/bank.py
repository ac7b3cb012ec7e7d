"""Many probes in one pass: what they share is computed once, what differs is stacked.

Probes of one structure (pooler, options, optimizer) keep their parameters in one tensor each, with
the probe as first axis. A step computes every probe's loss on the same batch, sums them and
differentiates once: a probe's gradient cannot contain another's, so each trains as it would alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from epcache.poolers import make_pooler
from epcache.pooling import attention_pool
from epcache.probe import Probe
from epcache.stacked import stacked_linear, stacked_norm
from epcache.workspace import Workspace

State = dict[str, Tensor]
"""Parameters or buffers by name, each stacked (P, ...)."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """One probe of a bank: what it is and how it is trained."""

    pooler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The pooler's own (``epcache.poolers.pooler_options``)."""
    seed: int = 0
    """Of the initial values."""
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0

    @property
    def structure(self) -> tuple[Any, ...]:
        """Trainees with equal structures have parameters of equal shapes and one optimizer."""
        return self.pooler, tuple(sorted(self.options.items())), self.optimizer

    def build(self, *, dim: int, grid: tuple[int, int] | None, num_classes: int) -> Probe:
        """The probe with its initial values, a pure function of the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        pooler = make_pooler(self.pooler, dim=dim, grid=grid, generator=generator, **self.options)
        return Probe(pooler, num_classes, generator)


class Stack:
    """Probes of one structure. Any pooler: the module itself, mapped over stacked parameters.

    Args:
        probes: With their initial values.
        members: Their positions in the bank.
        device: Where the parameters live.
    """

    def __init__(
        self, probes: Sequence[Probe], members: Sequence[int], device: torch.device
    ) -> None:
        self.members = list(members)
        parameters, buffers = stack_module_state(list(probes))
        self.params: State = {
            name: value.detach().to(device).requires_grad_() for name, value in parameters.items()
        }
        self.buffers: State = {name: value.to(device) for name, value in buffers.items()}
        self._skeleton = copy.deepcopy(probes[0]).to("meta")

    def logits(self, tokens_BND: Tensor, *, training: bool) -> Tensor:
        """Class scores of every probe, (P, B, C) float32; in training, updates the statistics."""
        self._skeleton.train(training)

        def one(params: State, buffers: State) -> tuple[Tensor, State]:
            state = {**params, **buffers}
            logits = functional_call(self._skeleton, state, (tokens_BND,))
            return logits.float(), {name: state[name] for name in buffers}

        logits_PBC, buffers = vmap(one)(self.params, self.buffers)
        if training:
            self.buffers = {name: value.detach() for name, value in buffers.items()}
        return logits_PBC

    def keep(self, index: Sequence[int]) -> None:
        """Drop all probes but these; the optimizer drops their parameters."""
        self.members = [self.members[i] for i in index]
        rows = torch.tensor(
            index, dtype=torch.int64, device=next(iter(self.params.values())).device
        )
        self.buffers = {name: value[rows] for name, value in self.buffers.items()}

    def state(self, index: int) -> State:
        """One probe's ``state_dict``, copied to the CPU."""
        both = {**self.params, **self.buffers}
        return {name: value[index].detach().cpu().clone() for name, value in both.items()}


class EpStack(Stack):
    """Efficient probes: pooled together with every other one of the bank, then projected."""

    def __init__(
        self, probes: Sequence[Probe], members: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(probes, members, device)
        self.scale: float = probes[0].pooler.dim ** -0.5
        self.eps, self.momentum = probes[0].norm.eps, probes[0].norm.momentum
        self._workspace = Workspace()

    @property
    def queries_PMD(self) -> Tensor:
        """Queries as they score: scaled."""
        return self.params["pooler.queries"] * self.scale

    def logits_of(self, pooled_BPMD: Tensor, *, training: bool) -> Tensor:
        """Class scores (P, B, C) from pooled tokens."""
        num_images, num_probes, num_queries, dim = pooled_BPMD.shape
        # One batched product over S = (probe, query): the batch is the rows
        value_SoD = self.params["pooler.value.weight"].view(num_probes * num_queries, -1, dim)
        pooled_SBD = pooled_BPMD.flatten(1, 2).transpose(0, 1)
        y_SBo = stacked_linear(pooled_SBD, value_SoD, self._workspace)
        y_PMBo = y_SBo.view(num_probes, num_queries, num_images, -1)
        y_PBO = y_PMBo.transpose(1, 2).reshape(num_probes, num_images, -1)
        y_PBO = self._normalise(y_PBO, training=training)
        return stacked_linear(y_PBO, self.params["head.weight"]) + self.params["head.bias"][:, None]

    def _normalise(self, y_PBO: Tensor, *, training: bool) -> Tensor:
        """``BatchNorm`` of every probe; the same arithmetic as in ``poolers.layers``."""
        if not training:
            mean, var = self.buffers["norm.running_mean"], self.buffers["norm.running_var"]
            return (y_PBO - mean[:, None]) * (var[:, None] + self.eps).rsqrt()
        normal_PBO, mean, var = stacked_norm(y_PBO, self.eps)
        count, new = y_PBO.shape[1], self.momentum
        for name, value in (("mean", mean), ("var", var * (count / (count - 1)))):
            running = self.buffers[f"norm.running_{name}"]
            self.buffers[f"norm.running_{name}"] = (1 - new) * running + new * value
        self.buffers["norm.num_batches_tracked"] = self.buffers["norm.num_batches_tracked"] + 1
        return normal_PBO


class LinearStack(Stack):
    """Linear probes without parameters in the pooler: pooled and normalised once for all of them.

    Their batch statistics are those of the same vectors, so they are taken once and one matrix
    product scores every probe.
    """

    def logits(self, tokens_BND: Tensor, *, training: bool) -> Tensor:
        """Class scores of every probe, (P, B, C) float32; in training, updates the statistics."""
        self._skeleton.train(training)
        weight_PCO, bias_PC = self.params["head.weight"], self.params["head.bias"]
        state = {name: value[0] for name, value in self.buffers.items()}
        norm = {name.removeprefix("norm."): value for name, value in state.items()}
        pooled_BO = self._skeleton.pooler(tokens_BND)
        normal_BO = functional_call(self._skeleton.norm, norm, (pooled_BO,))
        if training:
            self.buffers = {
                f"norm.{name}": value.expand(len(self.members), *value.shape)
                for name, value in norm.items()
            }
        weight, bias = weight_PCO.flatten(0, 1), bias_PC.flatten()
        logits_BPC = nn.functional.linear(normal_BO, weight, bias).view(-1, *bias_PC.shape)
        return logits_BPC.transpose(0, 1)


class ProbeBank:
    """Probes that see the same tokens in the same order.

    Args:
        trainees: The probes.
        dim: Token width D.
        grid: Token grid (height, width); None for tokens that are no grid.
        num_classes: Number of classes C.
        device: Where the parameters live.
    """

    def __init__(
        self,
        trainees: Sequence[Trainee],
        *,
        dim: int,
        grid: tuple[int, int] | None,
        num_classes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.trainees = list(trainees)
        self._workspace = Workspace()
        members: dict[Any, list[int]] = {}
        for position, trainee in enumerate(trainees):
            members.setdefault(trainee.structure, []).append(position)
        self.stacks: list[Stack] = []
        for positions in members.values():
            probes = [
                trainees[i].build(dim=dim, grid=grid, num_classes=num_classes) for i in positions
            ]
            kind = stack_kind(trainees[positions[0]])
            self.stacks.append(kind(probes, positions, self.device))

    def logits(self, tokens_BND: Tensor, *, training: bool) -> list[Tensor]:
        """Class scores (P, B, C) of each stack on one batch.

        All efficient probes, of whatever M, are scored and pooled in one go.
        """
        pooled = self._pool(tokens_BND)
        return [
            stack.logits_of(next(pooled), training=training)
            if isinstance(stack, EpStack)
            else stack.logits(tokens_BND.float(), training=training)
            for stack in self.stacks
        ]

    def _pool(self, tokens_BND: Tensor) -> Iterator[Tensor]:
        """For each efficient stack its pooled tokens (B, P, M, D)."""
        queries = [stack.queries_PMD for stack in self.stacks if isinstance(stack, EpStack)]
        if not queries:
            return
        groups = [q.flatten(0, 1) for q in queries]
        parts = attention_pool(groups, tokens_BND, self._workspace)
        for pooled_BQD, q in zip(parts, queries, strict=True):
            yield pooled_BQD.view(len(tokens_BND), *q.shape)

    def loss_and_gradients(
        self, tokens_BND: Tensor, labels_B: Tensor, *, label_smoothing: float = 0.0
    ) -> tuple[list[Tensor], list[State]]:
        """Every probe's mean cross-entropy, (P,) for each stack, and its gradients."""
        losses = [
            cross_entropy(logits, labels_B, label_smoothing=label_smoothing)
            for logits in self.logits(tokens_BND, training=True)
        ]
        flat = iter(
            torch.autograd.grad(
                torch.stack([loss.sum() for loss in losses]).sum(),
                [value for stack in self.stacks for value in stack.params.values()],
            )
        )
        gradients = [{name: next(flat) for name in stack.params} for stack in self.stacks]
        return [loss.detach() for loss in losses], gradients


def stack_kind(trainee: Trainee) -> type[Stack]:
    """The fast path of a probe's structure, or the general one."""
    if trainee.pooler == "ep" and trainee.options.get("value", True):
        return EpStack
    if trainee.pooler == "cls" or (trainee.pooler == "gap" and not trainee.options.get("value")):
        return LinearStack
    return Stack


def cross_entropy(logits_PBC: Tensor, labels_B: Tensor, *, label_smoothing: float) -> Tensor:
    """Mean over the batch for each probe, (P,)."""
    # Rows are (image, probe), as linear probes lie already: of those nothing is copied
    num_probes, num_images, num_classes = logits_PBC.shape
    losses = nn.functional.cross_entropy(
        logits_PBC.transpose(0, 1).reshape(-1, num_classes),
        labels_B.repeat_interleave(num_probes),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(num_images, num_probes).mean(0)
