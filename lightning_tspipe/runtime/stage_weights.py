"""The versions of one rank's trained weights: which one each forward and each backward reads.

Parameters are never edited between a forward and its backward behind autograd's back. A forward
that reads other values than the current ones reads *copies*, through which gradients reach the
parameters; and autograd saves no weights at all, but *tokens* that say which weight is meant::

    forward    W or copy ──► layer ──► y      saved: the layer's input, a token for the weight
                                    update: W changes; a version with tokens to it is kept
    backward   token ──► W as it is now, or the kept version, or a prediction ──► input's gradient

So a version costs memory only while something still refers to it. What a layer computes from its
weights and then saves (a cast under autocast, weight_norm's product) stays what the forward saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.prediction import (
    Group,
    has_non_finite,
    predicted_update,
    remember_gradients,
)
from lightning_tspipe.runtime.weight_policies import WeightPolicy

Values = list[Tensor]


@dataclass(frozen=True, slots=True)
class Read:
    """One entry of the trace: what a forward or a backward read.

    Attributes:
        batch: Number of the batch.
        forward: Whether it was its forward.
        version: Updates that the rank had made to what was read.
        predicted: Updates that were predicted on top of them.
    """

    batch: int
    forward: bool
    version: int
    predicted: int


@dataclass(frozen=True, slots=True)
class _Token:
    """Stands for a weight, or a view of it, in what autograd saves."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass
class _InFlight:
    """A batch between its forward and its backward.

    Attributes:
        version: What its forward read, before any prediction.
        due: Updates until its backward, when its forward ran.
    """

    version: int
    due: int


@dataclass
class StageWeights:
    """The trained weights of one rank.

    Args:
        policy: What reads which version.
        rank: Of this rank; rank 0 has the loss.
        num_ranks: In the pipeline.
        names: Of the parameters.
        parameters: The parameters, as the optimizers hold them.
        slots: For each parameter, the modules and names under which the stage reads it.
        optimizers: Those that update them.

    Attributes:
        version: Updates so far.
        batches_per_update: Batches whose gradients are added up before an update.
        position: Place of the current batch in its epoch, which decides when updates come.
        trace: What was read, if set to a list.
        most_versions: The most copies of the weights that were alive at once.
    """

    policy: WeightPolicy
    rank: int
    num_ranks: int
    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    slots: Sequence[Sequence[tuple[nn.Module, str]]]
    optimizers: Sequence[Optimizer] = ()
    version: int = 0
    batches_per_update: int = 1
    position: int = 0
    trace: list[Read] | None = None
    most_versions: int = 1
    _base: int = 0
    _kept: dict[int, Values] = field(default_factory=dict)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _groups: dict[int, tuple[Optimizer, Group]] = field(default_factory=dict)
    _backward_values: Sequence[Tensor] = ()

    # What the executor asks for

    @contextmanager
    def forward(self, batch: int, offset: int) -> Iterator[None]:
        """Around a forward: the stage reads what the policy says.

        Args:
            batch: Number of the batch.
            offset: In how many steps its backward will come.
        """
        self._check_unchanged()
        flight = self._in_flight.setdefault(batch, self._start(offset))
        ahead = flight.due + self._updates_after(offset) if self.policy.predicts_forward else 0
        self._note(batch, forward=True, version=flight.version, predicted=ahead)
        values: Sequence[Tensor] | None = None
        if ahead:
            values = self._predicted(ahead)
        elif flight.version != self.version:
            values = self._kept[flight.version]
        if values is None and not offset and not self._predicts_backward:
            yield
            return
        self._count(transient=ahead > 0)
        with self._reading(values), self._tokens(self.parameters if values is None else values):
            yield

    @contextmanager
    def backward(self, batch: int) -> Iterator[None]:
        """Around a backward: tokens stand for what the policy says, and so do the modules."""
        self._check_unchanged()
        flight = self._in_flight.get(batch)
        version = flight.version if flight is not None and self.policy.keeps else self.version
        ahead = self._updates_after(0) if self._predicts_backward else 0
        self._note(batch, forward=False, version=version, predicted=ahead)
        values: Sequence[Tensor] | None = None
        if ahead:
            values = self._predicted(ahead)
        elif version != self.version:
            values = self._kept[version]
        self._backward_values = self.parameters if values is None else values
        self._count(transient=ahead > 0)
        with self._reading(values):
            yield
        self._backward_values = ()

    def trained(self, batch: int) -> None:
        """All backwards of a batch ran."""
        self._in_flight.pop(batch, None)

    # What happens around updates

    def keep(self) -> None:
        """Before an update: keep the current version if something will still read it."""
        self._check_unchanged()
        self._check_gradients()
        read = {flight.version for flight in self._in_flight.values()}
        self._kept = {version: kept for version, kept in self._kept.items() if version in read}
        if self.policy.keeps and (self.version in read or self._delay):
            self._kept[self.version] = [p.detach().clone() for p in self.parameters]
            self._count()

    def updated(self) -> None:
        """After an update."""
        self.version += 1
        if self.policy.predicts:
            for optimizer in self.optimizers:
                remember_gradients(optimizer, self.parameters)
        self._seen = self._marks()

    def drain(self) -> None:
        """Nothing is in flight any more: what comes next reads the current version."""
        self._in_flight.clear()
        self._kept.clear()
        self._base = self.version
        self._seen = []

    # Versions

    @property
    def _delay(self) -> int:
        return self.policy.delay or 0 if self.num_ranks > 1 else 0

    @property
    def _predicts_backward(self) -> bool:
        return self.policy.predicts_backward and self._updates_after(0) > 0

    def _start(self, offset: int) -> _InFlight:
        """What a forward reads whose backward comes in so many steps."""
        due = self._updates(0, offset)
        version = self.version
        if self._delay:
            version = max(self._base, version + due - self._delay)
        return _InFlight(version, due)

    def _updates(self, first: int, last: int) -> int:
        """Updates at the ends of the steps from ``first`` up to ``last``, from the current one."""
        every = self.batches_per_update
        return (self.position + last) // every - (self.position + first) // every

    def _updates_after(self, offset: int) -> int:
        """Updates between a batch's backward at this stage and its end at the first one.

        Stage d is d ranks away from it, and makes an update in every second of the steps between
        (SpecTrain, section 3.2: floor(d / 2)).
        """
        if not self.policy.predicts_backward:
            return 0
        stage = self.num_ranks - 1 - self.rank
        return self._updates(offset, offset + stage // 2)

    def _predicted(self, steps: int) -> Sequence[Tensor]:
        values = []
        for parameter in self.parameters:
            optimizer, group = self._group_of(parameter)
            update = predicted_update(optimizer, parameter, group)
            value = parameter.detach()
            values.append(value.clone() if update is None else value - steps * update)
        if has_non_finite(values):
            self._fail_non_finite(values, steps)
        return values

    def _fail_non_finite(self, values: Sequence[Tensor], steps: int) -> None:
        for name, parameter, value in zip(self.names, self.parameters, values, strict=True):
            if not bool(value.isfinite().all()):
                whose = "it holds one itself" if not bool(parameter.isfinite().all()) else (
                    "its optimizer's state holds one, or the learning rate is too high"
                )  # fmt: skip
                raise ConfigurationError(
                    f"the prediction of {name!r} by {steps} updates is not finite: {whose}"
                )

    def _group_of(self, parameter: Tensor) -> tuple[Optimizer, Group]:
        if not self._groups:
            self._groups = {
                id(p): (optimizer, group)
                for optimizer in self.optimizers
                for group in optimizer.param_groups
                for p in group["params"]
            }
        return self._groups[id(parameter)]

    def _count(self, *, transient: bool = False) -> None:
        """Note how many copies of the weights are alive: the current one is the first."""
        self.most_versions = max(self.most_versions, 1 + len(self._kept) + transient)

    def _note(self, batch: int, *, forward: bool, version: int, predicted: int) -> None:
        if self.trace is not None:
            self.trace.append(Read(batch, forward, version, predicted))

    # Reading

    @contextmanager
    def _reading(self, values: Sequence[Tensor] | None) -> Iterator[None]:
        """While inside, the modules hold copies through which gradients reach the parameters."""
        if values is None:
            yield
            return
        with torch.enable_grad():
            copies = [
                _Through.apply(parameter, value) if parameter.requires_grad else value
                for parameter, value in zip(self.parameters, values, strict=True)
            ]
        places = [
            (module, name, copy)
            for slots, copy in zip(self.slots, copies, strict=True)
            for module, name in slots
        ]
        tables = [(module._parameters, name) for module, name, _ in places]  # noqa: SLF001
        before = [table[name] for table, name in tables]
        for module, name, copy in places:
            _put(module, name, copy)
        try:
            yield
        finally:
            for (module, name, _), original in zip(places, before, strict=True):
                _put(module, name, original)

    def _tokens(self, values: Sequence[Tensor]) -> Any:
        """While inside, autograd saves tokens in place of these."""
        index_of = {value.untyped_storage().data_ptr(): index for index, value in enumerate(values)}
        starts = [value.storage_offset() for value in values]

        def pack(tensor: Tensor) -> Tensor | _Token:
            index = index_of.get(tensor.untyped_storage().data_ptr())
            if index is None or not tensor.numel():
                return tensor
            offset = tensor.storage_offset() - starts[index]
            return _Token(index, tensor.shape, tensor.stride(), offset)

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, saved: Tensor | _Token) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        value = self._backward_values[saved.index].detach()
        start = value.storage_offset()
        return value.as_strided(saved.shape, saved.stride, start + saved.offset)

    # Checks

    def _check_unchanged(self) -> None:
        """Refuse parameters that something else than their optimizer's step has changed.

        Raises:
            ConfigurationError: Names one.
        """
        now = self._marks()
        self._seen = self._seen or now
        for name, before, after in zip(self.names, self._seen, now, strict=True):
            if before != after:
                raise ConfigurationError(
                    f"{name!r} was changed between two updates, while forwards of later batches "
                    "are under way that have read it. With schedule='1f1b' only optimizer.step may "
                    "change what is trained; use schedule='gpipe', or do it where an epoch begins"
                )

    def _marks(self) -> list[tuple[int, int]]:
        """What differs when a parameter was written to, or replaced."""
        return [(p._version, p.data_ptr()) for p in self.parameters]  # noqa: SLF001

    def _check_gradients(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigurationError(
                    f"{name!r} has a sparse gradient, and updates by sparse gradients can't be "
                    "predicted. Use nn.Embedding(sparse=False)"
                )


class _Through(torch.autograd.Function):
    """Other values in the place of a parameter, which gets the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


def _put(module: nn.Module, name: str, value: Any) -> None:
    # nn.LSTM, which holds its weights a second time, notices at its next call.
    module._parameters[name] = value  # noqa: SLF001


def stage_weights(
    policy: WeightPolicy, rank: int, num_ranks: int, module: nn.Module, names: Iterable[str]
) -> StageWeights:
    """The weights of a rank that has been placed.

    Args:
        policy: What reads which version.
        rank: This rank.
        num_ranks: In the pipeline.
        module: The LightningModule.
        names: The trained parameters of the rank's stage.
    """
    wanted = {id(module.get_parameter(name)): name for name in names}
    slots: dict[int, list[tuple[nn.Module, str]]] = {key: [] for key in wanted}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():  # noqa: SLF001
            if parameter is not None and id(parameter) in slots:
                slots[id(parameter)].append((owner, name))
    parameters: Mapping[int, nn.Parameter] = {
        id(p): p for p in module.parameters() if id(p) in wanted
    }
    return StageWeights(
        policy, rank, num_ranks, list(wanted.values()),
        [parameters[key] for key in wanted], list(slots.values()),
    )  # fmt: skip
