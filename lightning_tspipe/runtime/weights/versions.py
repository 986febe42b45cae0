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

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.weights.checks import WeightChecks
from lightning_tspipe.runtime.weights.policies import WeightPolicy
from lightning_tspipe.runtime.weights.prediction import (
    Group,
    predicted_update,
    remember_gradients,
)
from lightning_tspipe.runtime.weights.saved_tensors import (
    Held,
    Player,
    Recorder,
    Saved,
    Token,
    reading,
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
        last: What was read last.
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
    last: Read | None = None
    most_versions: int = 1
    _base: int = 0
    _kept: dict[int, Values] = field(default_factory=dict)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _groups: dict[int, tuple[Optimizer, Group]] = field(default_factory=dict)
    _backward_values: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        self._checks = WeightChecks(self.names, self.parameters, sees_values=self.num_ranks > 1)

    # What the executor asks for

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
        flight.calls.append((RandomStates.now(), Saved()))
        tokens = Recorder(self.parameters if values is None else values, flight.calls[-1][1])
        hooks = saved_tensors_hooks(tokens.pack, self._unpack)
        with reading(self.parameters, self.slots, values), hooks:
            yield

    @contextmanager
    def backward(self, batch: int) -> Iterator[None]:
        """Around a backward: tokens stand for what the policy says, and so do the modules."""
        self._checks.unchanged()
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
        with reading(self.parameters, self.slots, values):
            yield
        self._backward_values = ()

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
                "calls": [[random.to_dict(), saved.written()] for random, saved in flight.calls],
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
        made.calls.append((RandomStates.from_dict(random), Saved()))
        player = Player(written, made.calls[-1][1])
        now = RandomStates.now()
        made.calls[-1][0].restore()
        with saved_tensors_hooks(player.pack, self._unpack):
            yield
        player.check_done()
        now.restore()

    # What happens around updates

    def keep(self) -> None:
        """Before an update: keep the current version if something will still read it."""
        self._checks.unchanged()
        self._checks.look()
        self._checks.values_unchanged()
        self._checks.gradients()
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
            optimizer, group = self._group_of(parameter)
            update = predicted_update(optimizer, parameter, group)
            value = parameter.detach()
            values.append(value.clone() if update is None else value - steps * update)
        self._checks.finite(values, steps)
        return values

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
        self.last = Read(batch, forward, version, predicted)
        if self.trace is not None:
            self.trace.append(self.last)

    def _unpack(self, saved: Token | Held) -> Tensor:
        return saved.tensor if isinstance(saved, Held) else saved.of(self._backward_values)


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
