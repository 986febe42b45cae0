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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import Late
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.runtime.stages.stage import Versions
from lightning_tspipe.runtime.weights.policies import WeightPolicy
from lightning_tspipe.runtime.weights.prediction import Group, predicted_update, remember_gradients
from lightning_tspipe.runtime.weights.saved_tensors import (
    Held,
    Saved,
    Slot,
    Token,
    reading,
    recording,
    repeating,
)

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


@dataclass
class _InFlight:
    """A batch between its forward and its backward.

    Attributes:
        version: What its forward read, before any prediction.
        due: Updates until its backward, when its forward ran.
        calls: For each forward, the random states that it began with, and what autograd saved.
    """

    version: int
    due: int
    calls: list[tuple[RandomStates, Saved]] = field(default_factory=list)


@dataclass
class WeightChecks:
    """Refuses weights that something else than their optimizer's step changes, or that are lost.

    What a device says of values is looked at later, so that the host doesn't wait for it.

    Args:
        parameters: The parameters, by name.
        sees_values: Whether changes that leave no other trace (through ``.data``) are looked for.
        takes_sparse: Whether gradients may be sparse.
        buffers: Others that are not to be written to, by name.
    """

    parameters: Mapping[str, nn.Parameter]
    sees_values: bool
    takes_sparse: bool = False
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    _seen: list[tuple[int, int]] = field(default_factory=list)
    _sums: Tensor | None = None
    _verdicts: list[tuple[Late, Callable[[Any], None]]] = field(default_factory=list)

    def updated(self) -> None:
        """An optimizer has changed the weights, as it may."""
        self._seen, self._sums = self._marks(), self._values()

    def forget(self) -> None:
        """From now on they may be anything."""
        self._seen, self._sums = [], None

    def later(self, verdict: Late, judge: Callable[[Any], None]) -> None:
        """Have something judged that the device will have said until :meth:`look`."""
        self._verdicts.append((verdict, judge))

    def look(self) -> None:
        """What the device has said of the checks so far.

        Raises:
            ConfigurationError: One has failed.
        """
        verdicts, self._verdicts = self._verdicts, []
        for verdict, judge in verdicts:
            judge(verdict.tolist())

    def unchanged(self) -> None:
        """The weights are as the last update left them, as far as the host can see.

        Raises:
            ConfigurationError: Names one that is not.
        """
        if not self._seen:
            self.updated()
        self._refuse_changed([a != b for a, b in zip(self._seen, self._marks(), strict=True)])

    def before_update(self) -> None:
        """They are so, their values too (:meth:`look` tells), and their gradients predictable.

        Raises:
            ConfigurationError: Names one that was changed, or whose gradient is sparse.
        """
        self.unchanged()
        self.look()
        values = self._values()
        if self._sums is not None and values is not None:
            self.later(Late(self._sums != values), self._refuse_changed)
        for name, parameter in self.parameters.items():
            gradient = None if self.takes_sparse else parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise ConfigurationError(
                    f"{name!r} has a sparse gradient, and updates by sparse gradients can't be "
                    "predicted. Use nn.Embedding(sparse=False)"
                )

    def finite(self, predicted: Sequence[Tensor], steps: int) -> None:
        """Values that were predicted by so many updates are numbers; :meth:`look` tells."""
        if predicted:
            sums = sums_of(predicted), sums_of(self.parameters.values())
            found = torch.stack(sums).isfinite()
            self.later(Late(~found), partial(self._refuse_lost, steps))

    def _refuse_changed(self, are_changed: Sequence[bool]) -> None:
        names = (*self.parameters, *self.buffers)  # of values, only those of parameters are known
        for name, is_changed in zip(names, are_changed, strict=False):
            if is_changed:
                raise ConfigurationError(
                    f"{name!r} was changed between two updates, after forwards of batches in "
                    "flight have read it. There only optimizer.step may change what is trained, "
                    "and in windows of accumulated batches a network may be changed behind an "
                    "update only, where a window ends. To average a teacher there, use "
                    "MomentumEMA; else use schedule='gpipe', or change it at the start of an epoch"
                )

    def _refuse_lost(self, steps: int, are_lost: Sequence[Sequence[bool]]) -> None:
        for name, is_lost, was_lost in zip(self.parameters, *are_lost, strict=True):
            if is_lost:
                whose = "the parameter itself is not" if was_lost else (
                    "its optimizer's state is not, or the learning rate is too high"
                )  # fmt: skip
                raise ConfigurationError(
                    f"the prediction of {name!r} by {steps} updates is not finite: {whose}"
                )

    def _marks(self) -> list[tuple[int, int]]:
        """What differs when a parameter was written to, or replaced."""
        watched = (*self.parameters.values(), *self.buffers.values())
        return [(tensor._version, tensor.data_ptr()) for tensor in watched]  # noqa: SLF001

    def _values(self) -> Tensor | None:
        """A number for each parameter that other values would hardly have."""
        if not self.sees_values or not self.parameters:
            return None
        return sums_of(self.parameters.values()).nan_to_num(nan=0.0)


def sums_of(tensors: Iterable[Tensor]) -> Tensor:
    """Sums in float64, shape (tensors,); those of half precision would leave its range."""
    sums = [t.detach().sum(dtype=torch.float32 if t.itemsize < 4 else t.dtype) for t in tensors]
    return torch.stack([each.double() for each in sums])


@dataclass(eq=False)
class StageWeights(Versions):
    """The trained weights of one rank, which has been placed.

    Args:
        module: The LightningModule.
        still: What batches in flight read beside the trained weights.

    Attributes:
        policy: What reads which version.
        rank: This rank; rank 0 has the loss.
        num_ranks: In the pipeline.
        parameters: The trained ones of the rank's stage, as the optimizers hold them.
        slots: For each parameter, the modules and names under which the stage reads it.
        optimizers: Those that update them.
        version: Updates so far.
        batches_per_update: Batches whose gradients are added up before an update.
        position: Place of the current batch in its epoch, which decides when updates come.
        trace: What was read, if set to a list.
        last: What was read last.
        most_versions: The most copies of the weights that were alive at once.
    """

    policy: WeightPolicy
    rank: int
    num_ranks: int
    module: InitVar[nn.Module]
    parameters: Sequence[nn.Parameter]
    still: InitVar[Sequence[Tensor]] = ()
    optimizers: Sequence[Optimizer] = ()
    version: int = 0
    batches_per_update: int = 1
    position: int = 0
    trace: list[Read] | None = None
    last: Read | None = None
    most_versions: int = 1
    _base: int = 0
    _kept: dict[int, Values] = field(default_factory=dict)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _backward_values: Sequence[Tensor] = ()

    def __post_init__(self, module: nn.Module, still: Sequence[Tensor]) -> None:
        self.slots: dict[nn.Parameter, list[Slot]] = {own: [] for own in self.parameters}
        for owner in module.modules():
            for name, own in owner.named_parameters(recurse=False, remove_duplicate=False):
                if own in self.slots:
                    self.slots[own].append((owner, name))
        names = {parameter: name for name, parameter in module.named_parameters()}
        read = [own for own in still if isinstance(own, nn.Parameter)]
        named = {names[own]: own for own in (*self.parameters, *read)}
        others = {id(each) for each in still}
        buffers = {name: own for name, own in module.named_buffers() if id(own) in others}
        sparse = self.policy.is_synchronous
        self._checks = WeightChecks(
            named, sees_values=self.num_ranks > 1, takes_sparse=sparse, buffers=buffers
        )

    # What the executor asks for

    @override
    @contextmanager
    def forward(self, batch: int, offset: int) -> Iterator[None]:
        """Around a forward: the stage reads what the policy says.

        Args:
            batch: Number of the batch.
            offset: In how many steps its backward will come.
        """
        self._checks.unchanged()
        flight = self._in_flight.setdefault(batch, self._start(offset))
        ahead = flight.due + self._updates_after(offset) if self.policy.predicts_forward else 0
        values = self._values(Read(batch, forward=True, version=flight.version, predicted=ahead))
        if values is None and not offset and not self._predicts_backward:
            yield
            return
        flight.calls.append((RandomStates.now(), Saved()))
        pack = recording(self.parameters if values is None else values, flight.calls[-1][1])
        hooks = saved_tensors_hooks(pack, self._unpack)
        with reading(self.slots, values), hooks:
            yield

    @override
    @contextmanager
    def backward(self, batch: int) -> Iterator[None]:
        """Around a backward: tokens stand for what the policy says, and so do the modules."""
        self._checks.unchanged()
        flight = self._in_flight.get(batch)
        version = flight.version if flight is not None and self.policy.keeps else self.version
        ahead = self._updates_after(0) if self._predicts_backward else 0
        values = self._values(Read(batch, forward=False, version=version, predicted=ahead))
        self._backward_values = self.parameters if values is None else values
        with reading(self.slots, values):
            yield
        self._backward_values = ()

    def _values(self, read: Read) -> Sequence[Tensor] | None:
        """What is read in the place of the parameters; None: they are read themselves."""
        self.last = read
        if self.trace is not None:
            self.trace.append(read)
        self._count(transient=read.predicted > 0)
        if read.predicted:
            return self._predicted(read.predicted)
        return None if read.version == self.version else self._kept[read.version]

    @property
    def is_drained(self) -> bool:
        """Whether no batch is between its forward and its backward on this rank."""
        return not self._in_flight

    def trained(self, batch: int) -> None:
        """All backwards of a batch ran."""
        self._in_flight.pop(batch, None)

    # Between two steps

    def written(self) -> dict[str, Any]:
        """The versions and the batches in flight, as plain values and tensors.

        Raises:
            ConfigurationError: A check of the last steps has failed.
        """
        self._checks.look()
        flights = {
            batch: {
                "version": flight.version,
                "due": flight.due,
                "calls": [[random.written, saved.written()] for random, saved in flight.calls],
            }
            for batch, flight in self._in_flight.items()
        }
        kept = {v: [value.clone() for value in values] for v, values in self._kept.items()}
        return {"version": self.version, "base": self._base, "kept": kept, "flights": flights}

    def read_back(self, written: Mapping[str, Any]) -> None:
        """The versions of another run; its batches in flight come by :meth:`again`."""
        self.drain()
        self.version, self._base = written["version"], written["base"]
        self._kept = {
            version: [value.to(p.device) for value, p in zip(values, self.parameters, strict=True)]
            for version, values in written["kept"].items()
        }

    @contextmanager
    def again(self, batch: int, flight: Mapping[str, Any], call: int) -> Iterator[None]:
        """Around a forward that another run has done: autograd saves what it saved there.

        Args:
            batch: Number of the batch.
            flight: What :meth:`written` gave of it.
            call: Which of its forwards this is.

        Raises:
            ConfigurationError: The forward isn't the same.
        """
        made = self._in_flight.setdefault(batch, _InFlight(flight["version"], flight["due"]))
        random, written = flight["calls"][call]
        made.calls.append((RandomStates.read(random), Saved()))
        now = RandomStates.now()
        made.calls[-1][0].restore()
        with repeating(written, made.calls[-1][1]) as pack, saved_tensors_hooks(pack, self._unpack):
            yield
        now.restore()

    # What happens around updates

    def check_later(self, verdict: Late, judge: Callable[[Any], None]) -> None:
        """Have something judged, before the next update or where nothing is in flight any more.

        Args:
            verdict: What the device will have said.
            judge: Raises if that is not as it should be.
        """
        self._checks.later(verdict, judge)

    def keep(self) -> None:
        """Before an update: keep the current version if something will still read it.

        Raises:
            ConfigurationError: A check has failed; or batches are in flight that may not be.
        """
        if self.policy.is_synchronous and self._in_flight:
            raise ConfigurationError(
                f"an update comes while {len(self._in_flight)} batches are in flight: "
                "trainer.accumulate_grad_batches has changed since they began. Change it where a "
                "window ends, as GradientAccumulationScheduler does"
            )
        self._checks.before_update()
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
        if self.policy.is_synchronous:
            self._checks.forget()  # hooks may follow the update, and the next forward sees them
        else:
            self._checks.updated()

    def drain(self) -> None:
        """Nothing is in flight any more: what comes next reads the current version.

        Raises:
            ConfigurationError: A check of the last steps has failed.
        """
        self._checks.look()
        self._in_flight.clear()
        self._kept.clear()
        self._base = self.version
        self._checks.forget()

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
            optimizer, group = self._groups[id(parameter)]
            update = predicted_update(optimizer, parameter, group)
            value = parameter.detach()
            values.append(value.clone() if update is None else value - steps * update)
        self._checks.finite(values, steps)
        return values

    @cached_property
    def _groups(self) -> dict[int, tuple[Optimizer, Group]]:
        """Of each parameter, its optimizer and its group."""
        return {
            id(p): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def _count(self, *, transient: bool = False) -> None:
        """Note how many copies of the weights are alive: the current one is the first."""
        self.most_versions = max(self.most_versions, 1 + len(self._kept) + transient)

    def _unpack(self, saved: Token | Held) -> Tensor:
        return saved.tensor if isinstance(saved, Held) else saved.of(self._backward_values)
