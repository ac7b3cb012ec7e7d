"""Many probes in one pass: what they share is computed once, what differs is stacked.

Probes of one structure (pooler, options, classes) keep their parameters in one tensor each, with
the probe as first axis. A step computes every probe's loss on the same batch, sums them and
differentiates once: a probe's gradient cannot contain another's, so each trains as it would alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from epcache.poolers import make_pooler
from epcache.pooling import attention_pool
from epcache.probe import Probe

State = dict[str, Tensor]
"""Parameters or buffers by name, each stacked (P, ...)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What one probe of a bank is: everything but how it is trained."""

    pooler: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The pooler's own (``epcache.poolers.pooler_options``)."""
    seed: int = 0
    """Of the initial values."""

    @property
    def structure(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Heads with equal structures have parameters of equal shapes."""
        return self.pooler, tuple(sorted(self.options.items()))

    def build(self, *, dim: int, grid: tuple[int, int] | None, num_classes: int) -> Probe:
        """The probe with its initial values, a pure function of the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        pooler = make_pooler(self.pooler, dim=dim, grid=grid, generator=generator, **self.options)
        return Probe(pooler, num_classes, generator)


class Stack:
    """Probes of one structure. Any pooler: the module itself, mapped over stacked parameters."""

    def __init__(self, probes: Sequence[Probe], device: torch.device) -> None:
        parameters, buffers = stack_module_state(list(probes))
        self.params: State = {
            name: value.detach().to(device).requires_grad_() for name, value in parameters.items()
        }
        self.buffers: State = {name: value.to(device) for name, value in buffers.items()}
        self.template = probes[0].to(device)
        self._skeleton = _without_values(probes[0])

    def __len__(self) -> int:
        """Number of probes P."""
        return len(next(iter(self.params.values())))

    def logits(self, tokens_BND: Tensor, *, training: bool) -> Tensor:
        """Class scores of every probe, (P, B, C) float32; in training, updates the statistics."""
        self._skeleton.train(training)

        def one(params: State, buffers: State) -> tuple[Tensor, State]:
            state = {**params, **buffers}
            logits = functional_call(self._skeleton, state, (tokens_BND,))
            return logits.float(), {name: state[name] for name in buffers}

        logits_PBC, buffers = cast(tuple[Tensor, State], vmap(one)(self.params, self.buffers))
        if training:
            self.buffers = {name: value.detach() for name, value in buffers.items()}
        return logits_PBC

    def keep(self, index: Tensor) -> None:
        """Drop all probes but these."""
        self.params = {
            name: value.detach()[index].requires_grad_() for name, value in self.params.items()
        }
        self.buffers = {name: value[index] for name, value in self.buffers.items()}

    def state(self, probe: int) -> State:
        """One probe's ``state_dict``, copied."""
        both = {**self.params, **self.buffers}
        return {name: value[probe].detach().clone() for name, value in both.items()}


class EpStack(Stack):
    """Efficient probes: pooled together with every other probe of the bank, then projected."""

    def __init__(self, probes: Sequence[Probe], device: torch.device) -> None:
        super().__init__(probes, device)
        pooler = probes[0].pooler
        self.scale = pooler.dim**-0.5
        self.eps, self.momentum = probes[0].norm.eps, probes[0].norm.momentum

    @property
    def queries_PMD(self) -> Tensor:
        """Queries as they score: scaled."""
        return self.params["pooler.queries"] * self.scale

    def logits_of(self, pooled_BPMD: Tensor, *, training: bool) -> Tensor:
        """Class scores (P, B, C) from pooled tokens."""
        num_queries = pooled_BPMD.shape[2]
        value_POD = self.params["pooler.value.weight"]
        value_PMoD = value_POD.view(len(value_POD), num_queries, -1, value_POD.shape[2])
        y_PBO = torch.einsum("bpmd,pmod->pbmo", pooled_BPMD, value_PMoD).flatten(2)
        y_PBO = self._normalise(y_PBO, training=training)
        return torch.baddbmm(
            self.params["head.bias"][:, None],
            y_PBO,
            self.params["head.weight"].transpose(1, 2),
        )

    def _normalise(self, y_PBO: Tensor, *, training: bool) -> Tensor:
        """``BatchNorm`` of every probe; the same arithmetic as in ``poolers.layers``."""
        if not training:
            mean, var = self.buffers["norm.running_mean"], self.buffers["norm.running_var"]
        else:
            mean = y_PBO.mean(1)
            var = (y_PBO - mean[:, None]).square().mean(1)
            count, new = y_PBO.shape[1], self.momentum
            for name, value in (("mean", mean), ("var", var * (count / (count - 1)))):
                running = self.buffers[f"norm.running_{name}"]
                self.buffers[f"norm.running_{name}"] = (1 - new) * running + new * value.detach()
            tracked = self.buffers["norm.num_batches_tracked"]
            self.buffers["norm.num_batches_tracked"] = tracked + 1
        return (y_PBO - mean[:, None]) * (var[:, None] + self.eps).rsqrt()


class ProbeBank:
    """Probes that see the same tokens in the same order.

    Args:
        heads: The probes.
        dim: Token width D.
        grid: Token grid (height, width); None for tokens that are no grid.
        num_classes: Number of classes C.
        device: Where the parameters live.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        *,
        dim: int,
        grid: tuple[int, int] | None,
        num_classes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.heads = list(heads)
        self.num_classes = num_classes
        by_structure: dict[Any, list[int]] = {}
        for position, head in enumerate(heads):
            by_structure.setdefault(head.structure, []).append(position)
        self.stacks: list[Stack] = []
        self.members: list[list[int]] = list(by_structure.values())
        """For each stack the positions of its probes in ``heads``."""
        for positions in self.members:
            probes = [
                heads[i].build(dim=dim, grid=grid, num_classes=num_classes) for i in positions
            ]
            head = heads[positions[0]]
            fast = head.pooler == "ep" and head.options.get("value", True)
            self.stacks.append((EpStack if fast else Stack)(probes, self.device))

    def __len__(self) -> int:
        """Number of probes."""
        return sum(map(len, self.members))

    def logits(self, tokens_BND: Tensor, *, training: bool) -> list[Tensor]:
        """Class scores (P, B, C) of each stack on one batch.

        All efficient probes, of whatever M, are scored and pooled in one go.
        """
        pooled = iter(self._pool(tokens_BND))
        return [
            stack.logits_of(next(pooled), training=training)
            if isinstance(stack, EpStack)
            else stack.logits(tokens_BND, training=training)
            for stack in self.stacks
        ]

    def _pool(self, tokens_BND: Tensor) -> Iterator[Tensor]:
        queries = [stack.queries_PMD for stack in self.stacks if isinstance(stack, EpStack)]
        if not queries:
            return
        pooled_BQD = attention_pool(torch.cat([q.flatten(0, 1) for q in queries]), tokens_BND)
        sizes = [q.shape[0] * q.shape[1] for q in queries]
        for part, q in zip(torch.split(pooled_BQD, sizes, dim=1), queries, strict=True):
            yield part.reshape(len(part), *q.shape)

    def loss_and_gradients(
        self, tokens_BND: Tensor, labels_B: Tensor, *, label_smoothing: float = 0.0
    ) -> tuple[list[Tensor], list[State]]:
        """Every probe's mean cross-entropy, (P,) for each stack, and its gradients."""
        losses = [
            cross_entropy(logits, labels_B, label_smoothing=label_smoothing)
            for logits in self.logits(tokens_BND, training=True)
        ]
        params = [stack.params for stack in self.stacks]
        flat = torch.autograd.grad(
            torch.stack([loss.sum() for loss in losses]).sum(),
            [value for state in params for value in state.values()],
        )
        grads = iter(flat)
        return (
            [loss.detach() for loss in losses],
            [{name: next(grads) for name in state} for state in params],
        )


def cross_entropy(logits_PBC: Tensor, labels_B: Tensor, *, label_smoothing: float) -> Tensor:
    """Mean over the batch for each probe, (P,)."""
    num_probes, num_images, num_classes = logits_PBC.shape
    losses = nn.functional.cross_entropy(
        logits_PBC.reshape(-1, num_classes),
        labels_B.repeat(num_probes),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(num_probes, num_images).mean(1)


def _without_values(probe: Probe) -> Probe:
    """The module's structure alone, for ``functional_call``."""
    import copy

    return copy.deepcopy(probe).to("meta")
