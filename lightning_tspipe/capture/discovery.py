"""Which submodules a step calls, and which of them can be pipelined, found by running it once.

What it calls without gradients, or frozen, is forward-only; what it calls with gradients is
trained, and may read what is forward-only. What can't go through a pipeline stays beside the loss:
whatever reads several calls, masks of their outputs or labels, returns no row per sample, learns
from detached features, or has fewer layers than there are ranks. A module that holds both a network
and a frozen one is looked into: its own methods are a part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_tspipe.capture.plan import Entry
from lightning_tspipe.capture.provenance import Value
from lightning_tspipe.capture.record import Call
from lightning_tspipe.capture.trace import Networks, Step, Tracer, outputs_in
from lightning_tspipe.errors import CaptureError, SpoiledError
from lightning_tspipe.networks.modules import outermost

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(eq=False)
class _Node:
    """A call of a submodule.

    Attributes:
        name: Of the submodule.
        values: The tensors that it gets.
        outputs: What it returns.
        used: Of that, what the step goes on with.
        call: The first of the calls that it goes on with; itself, if it begins one.
    """

    name: str
    values: list[Value]
    outputs: list[Tensor] = field(default_factory=list)
    used: list[Tensor] = field(default_factory=list)
    call: int = 0

    @property
    def has_gradients(self) -> bool:
        """Whether gradients flow through it."""
        return any(tensor.requires_grad for tensor in self.outputs)

    def is_batched(self, given: Sequence[Value]) -> bool:
        """Whether all that goes in from the step and comes out has a row per sample.

        Constants need not.
        """
        made = [value for value in given or self.values if value.sources()] or given or self.values
        shapes = [tuple(value.tensor.shape[:1]) for value in made]
        own = [tuple(tensor.shape[:1]) for tensor in self.used]
        own = [shape for shape in own if shape] or own  # a loss of its own, beside rows
        return bool(shapes) and bool(shapes[0]) and {*shapes, *own} == {shapes[0]}


class Finder(Tracer):
    """Finds the networks of a module by its step.

    Args:
        module: The LightningModule.
        device: Where the batches are.
        apart: Submodules that run as the step calls them.
        num_ranks: Over how many what is trained is to be divided.
        opened: Submodules whose parts are looked at instead.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        apart: Collection[str] = (),
        num_ranks: int = 1,
        opened: Collection[str] = (),
    ) -> None:
        names = (name for name in _parts_of(module, opened) if name not in apart)
        self._names = tuple(names)
        super().__init__(module, Networks(self._names), device)
        self._apart, self._num_ranks, self._opened = apart, num_ranks, opened
        self._nodes: list[_Node] = []
        self._beside: set[str] = set()
        self._failed = ""

    def find(self, step: Step, batch: Any, seed: int) -> Networks:
        """The networks that ``step(batch)`` calls, in the order in which the module has them.

        Args:
            step: The step, a function of the batch.
            batch: A real batch.
            seed: Seed of the step's random stream.

        Raises:
            CaptureError: The step fails.
        """
        try:
            self.run(step, batch, seed)
        except CaptureError as error:
            if (found := self._without(error, step, batch, seed)) is None:
                raise
            return found
        self._gather()
        if opened := self._holding():
            with suppress(CaptureError):  # it is one network, then
                return self._other(opened={*self._opened, *opened}).find(step, batch, seed)
        order = {name: place for place, (name, _) in enumerate(self._module.named_modules())}
        names = sorted(outermost(node.name for node in self._nodes), key=order.__getitem__)
        for node in self._nodes:
            node.name = next(n for n in names if f"{node.name}.".startswith(f"{n}."))
        while moved := next(self._unfit(), ""):
            self._beside.add(moved)
        kept = [name for name in names if name not in self._beside]
        student = tuple(name for name in kept if self._is_trained(name))
        teacher = tuple(name for name in kept if name not in student)
        if not student or (teacher and self._is_small(student, teacher)):
            return Networks(teacher)  # what is trained lies beside the loss
        return self._paired(student, (*teacher, *self._uncalled(student)))

    def _other(
        self, apart: Collection[str] | None = None, opened: Collection[str] | None = None
    ) -> Finder:
        """One that looks elsewhere."""
        apart = self._apart if apart is None else apart
        opened = self._opened if opened is None else opened
        return Finder(self._module, self._device, apart, self._num_ranks, opened)

    def _holding(self) -> set[str]:
        """Called modules that hold a trained network and a frozen one, and what these lie in."""
        holding = {node.name for node in self._nodes if self._holds_both(node.name)}
        paths = [name.split(".") for name in holding]
        return {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}

    def _holds_both(self, name: str) -> bool:
        """Whether one part is trained and another, frozen, is its average or has calls apart."""
        parts = _parts_of(self._module, (), within=name)
        kinds = [{p for p in parts if self._has_trained(p) is trains} for trains in (True, False)]
        if not all(kinds) or [*self._module.get_submodule(name).parameters(recurse=False)]:
            return False
        trained, frozen = (set(map(self._signature, kind)) for kind in kinds)
        with_gradients = {node.has_gradients for node in self._nodes if node.name == name}
        return len(with_gradients) > 1 or not trained.isdisjoint(frozen)

    def _is_average(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name.rpartition(".")[0]), AveragedModel)

    def _has_trained(self, name: str) -> bool:
        return any(p.requires_grad for p in self._module.get_submodule(name).parameters())

    def _gather(self) -> None:
        """Make nodes of the calls that were recorded."""
        for call in self._record.calls:
            self._nodes.append(_Node(call.entries[0].name, [*call.inputs.values()]))
        for value in self._record.outputs:
            if value.is_used or not value.source.of_hook:
                node = self._nodes[value.source.call]
                node.outputs.append(value.tensor)
                if value.consumers or value.read or value.feeds_block:
                    node.used.append(value.tensor)

    @override
    def _called(
        self, name: str, method: str, block: nn.Module, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return super()._called(name, method, block, function, *args, **kwargs)
        except CaptureError:
            raise
        except Exception:
            self._failed = self._owner(name)
            raise  # it needs values

    def _without(self, error: CaptureError, *args: Any) -> Networks | None:
        """The networks of a step if what fails in it, or spoils something, lies beside them."""
        if not isinstance(error, SpoiledError):
            failed = {*self._apart, self._failed}
            return self._other(apart=failed).find(*args) if self._failed else None
        with suppress(CaptureError):
            found = self._other(apart={*self._apart, self._owner(error.network)}).find(*args)
            return found if found.student else None
        return None

    def _owner(self, name: str) -> str:
        return next(n for n in self._names if f"{name}.".startswith(f"{n}."))

    @override
    def _place(self, entry: Entry, values: list[Value]) -> tuple[int, Entry]:
        call = Call("student", entries=[entry])
        for value in values:
            call.input(value)
        self._record.calls.append(call)
        return len(self._record.calls) - 1, entry

    def _is_trained(self, name: str) -> bool:
        if torch.is_grad_enabled():
            return any(node.has_gradients for node in self._nodes if node.name == name)
        return self._has_trained(name)

    def _unfit(self) -> Iterator[str]:
        """Submodules that have to stay beside the loss, or before the calls."""
        for index, node in enumerate(self._nodes):
            node.call = index
            if node.name not in self._beside and (moved := self._moved(node)):
                yield moved
        kept = {node.name for node in self._nodes} - self._beside
        for name in kept:
            # Both halves of an average lie together.
            alike = partial(self._are_alike, name)
            if any(map(alike, self._beside)) and not any(map(alike, kept)):
                yield name

    def _moved(self, node: _Node) -> str:
        """What can't be pipelined of a call and of what it reads; "" if all can."""
        read = (v.source for value in node.values for v in outputs_in(value))
        made: list[_Node] = [self._nodes[source.call] for source in read]
        before = [each for each in made if each.name not in self._beside or each.has_gradients]
        trains = self._is_trained(node.name)
        if trains:  # what forward-only ones give is an input
            before = [each for each in before if self._is_trained(each.name)]
        calls = {each.call for each in before}

        def goes_on(value: Value) -> bool:
            return any(self._nodes[v.source.call] in before for v in outputs_in(value))

        given = [value for value in node.values if not goes_on(value)]
        is_detached = bool(before) and not any(v.tensor.requires_grad for v in node.values)
        is_fit = (
            node.is_batched(given)
            and all(map(_is_clean, given))
            and all(self._is_trained(each.name) == trains for each in before)
            and (len(calls) < 2 or _have_rows(node, before))
            and not (trains and is_detached)
            and not any(each.name in self._beside for each in before)
            and all(_is_glue(value, goes_on) for value in node.values if value not in given)
        )
        if is_fit and calls:
            node.call = min(calls)
            for other in self._nodes:  # one call, as it turns out
                other.call = node.call if other.call in calls else other.call
        return "" if is_fit else node.name

    def _is_small(self, student: Sequence[str], teacher: Sequence[str]) -> bool:
        """Whether what is trained, a linear head say, has fewer layers than there are ranks."""
        modules = (part for name in student for part in self._module.get_submodule(name).modules())
        num_layers = sum(not [*part.children()] for part in modules)
        is_averaged = any(self._are_alike(one, other) for one in student for other in teacher)
        return num_layers < self._num_ranks and not is_averaged

    def _signature(self, name: str) -> Signature:
        parameters = self._module.get_submodule(name).named_parameters()
        return tuple((path, tuple(parameter.shape)) for path, parameter in parameters)

    def _are_alike(self, name: str, other: str) -> bool:
        """Whether one of two may be the average of the other."""
        is_other = self._is_trained(name) != self._is_trained(other)
        return is_other and self._signature(name) == self._signature(other)

    def _uncalled(self, student: Sequence[str]) -> list[str]:
        """Frozen copies of what is trained, which the step does not call: averages."""
        called = {node.name for node in self._nodes}
        known = [self._signature(name) for name in student]
        return [
            name
            for name in self._names
            if not any(f"{name}.".startswith(f"{c}.") or c.startswith(f"{name}.") for c in called)
            and (self._is_average(name) or not self._has_trained(name))
            and self._signature(name) in known
        ]

    def _paired(self, student: tuple[str, ...], teacher: tuple[str, ...]) -> Networks:
        """The networks, and what each of the teacher's follows, if something is built like it."""
        free, pairs = list(student), dict[str, str]()
        for name in teacher:
            alike = [other for other in free if self._signature(other) == self._signature(name)]
            if alike:  # the one that lies with it, or the first
                pairs[name] = max(
                    alike, key=lambda n: n.rpartition(".")[0] == name.rpartition(".")[0]
                )
                free.remove(pairs[name])
        return Networks(student, teacher, averages=pairs, is_found=True)


def _parts_of(module: nn.Module, opened: Collection[str], within: str = "") -> list[str]:
    """The submodules with parameters, those of the opened ones instead of these."""
    found: list[str] = []
    for child, part in module.get_submodule(within).named_children():
        name = f"{within}.{child}".lstrip(".")
        if name in opened or isinstance(part, AveragedModel):
            found += _parts_of(module, opened, name)
        elif [*part.parameters()]:
            found.append(name)
    return found


def _have_rows(node: _Node, before: Sequence[_Node]) -> bool:
    """Whether a call and those that it reads have the same rows: none lie one behind the other."""
    tensors = [value.tensor for value in node.values]
    tensors += [tensor for each in before for tensor in each.outputs]
    return len({tensor.shape[:1] for tensor in tensors}) == 1


def _is_clean(value: Value) -> bool:
    """Whether it depends on nothing that is trained."""
    return not (value.tensor.requires_grad or any(each.is_parameter for each in value.sources()))


def _is_glue(value: Value, goes_on: Callable[[Value], bool]) -> bool:
    """Whether a value can be computed from outputs that a call goes on with, and clean numbers.

    Not by a mask or indices, which choose rows.
    """
    if not goes_on(value):
        return _is_clean(value) and value.tensor.is_floating_point()
    return value.source is not None or (
        value.operation is not None and all(_is_glue(parent, goes_on) for parent in value.parents)
    )
