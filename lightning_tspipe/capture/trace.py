"""Tracing a step once: which calls it makes, and what it needs of them.

The step runs as it stands, with three replacements: the declared submodules answer with random
*stand-ins* of the right shape (found on fake tensors), the pipelined parameters are fake, and
``self.log`` does nothing. Afterwards everything is as before.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.held import generators_of, iterators_refused
from lightning_tspipe.capture.numbers import Glued, Numbers, doubled, has_numbers
from lightning_tspipe.capture.plan import (
    Entry,
    Expression,
    Glue,
    Interception,
    NetworkName,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.capture.provenance import (
    BatchLeaf,
    BlockOutput,
    NetworkParameter,
    Value,
    reached,
)
from lightning_tspipe.capture.record import Call, StepRecord
from lightning_tspipe.errors import CaptureError, FedByTrainedError, TrainedTeacherError
from lightning_tspipe.moving import move
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.fakes import Fakes
from lightning_tspipe.networks.hooks import Notes, hand_over, keeps, noted
from lightning_tspipe.networks.location import current_line, explained
from lightning_tspipe.networks.modules import methods_of
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.pytrees import registered
from lightning_tspipe.replacing import (
    Settings,
    TensorSwap,
    attributes_replaced,
    set_one,
    settings_of,
)

Step = Callable[[Any], Any]
_SILENCED = ("log", "log_dict", "print", "manual_backward", "toggle_optimizer")


@dataclass(frozen=True)
class Networks:
    """The declared submodules of the LightningModule: dotted names, in the order of the chain.

    Attributes:
        student: Those of the student.
        teacher: Those of the teacher.
        local: Those that run where the losses are, as the step calls them: heads.
        averages: Of the teacher's, the one of the student's that each is known to average.
        is_found: Whether a step has told them, and not the user.
    """

    student: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    averages: Mapping[str, str] = field(default_factory=dict)
    is_found: bool = False

    @property
    def pairs(self) -> dict[str, str]:
        """What of the student each submodule of the teacher follows: in order, or as known."""
        in_order = () if self.is_found else zip(self.teacher, self.student, strict=False)
        return {**dict(in_order), **self.averages}

    def items(self) -> Iterator[tuple[NetworkName, str]]:
        """All (network, block name)."""
        yield from (("student", name) for name in self.student)
        yield from (("teacher", name) for name in self.teacher)


class _ChangesError(BaseException):
    """Leaves a step that has a forward hook which changes what a part returns.

    Args:
        part: The part.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__(part)
        self.part = part


class _JoinsError(BaseException):
    """Leaves a step in which the outputs of several calls go into one.

    Args:
        numbers: Of those calls, by when they began.
    """

    def __init__(self, numbers: set[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers


class Tracer:
    """Traces steps of one module.

    Args:
        module: The LightningModule (or any module).
        networks: Which submodules are pipelined.
        device: Where the batches are. What the step computes with beside the networks moves there.
    """

    def __init__(self, module: nn.Module, networks: Networks, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._changing: set[nn.Module] = set()
        self._joined: dict[int, int] = {}  # calls that go on with an earlier one, as it turned out
        self._network_of: dict[str, NetworkName] = {name: net for net, name in networks.items()}
        self._blocks = {name: module.get_submodule(name) for name in self._network_of}
        self._inside = [m for block in self._blocks.values() for m in block.modules()]
        inside = set(self._inside)
        paths = {path for path, part in module.named_modules() if part not in inside}
        move(module, device, lambda name: device if name.rpartition(".")[0] in paths else None)
        self._rest = [m for m in module.modules() if m not in inside]
        self._running_block = False

    def trace(self, step: Step, batch: Any, seed: int) -> StepPlan:
        """Run ``step(batch)`` once, without consequences.

        Args:
            step: The step, a function of the batch.
            batch: A real batch.
            seed: Seed of the step's random stream.

        Raises:
            CaptureError: The step can't be captured; says where and what to do.
        """
        record = self.run(step, batch, seed)
        self._keep_settings(record)
        values = (value for each in record.interceptions for value in each.entry.values)
        if any(map(has_numbers, values)) or any(call.may_have_constants for call in record.calls):
            self._tell_numbers(record, step, batch, seed)
        return record.plan()

    def _tell_numbers(self, record: StepRecord, step: Step, batch: Any, seed: int) -> None:
        """Tell what belongs to the samples from constants: numbers between calls, and tensors."""
        lines, glued = [line for line, _ in self._at_calls], self._glued
        made = others = record.interceptions
        with suppress(Exception):  # of a batch that can't be doubled: each step is compared
            twice = self.run(step, doubled(batch), seed)
            if [e.entry.title for e in made] == [e.entry.title for e in twice.interceptions]:
                others = twice.interceptions
                for call, another in zip(record.calls, twice.calls, strict=True):
                    call.find_constants(another)
        for place, (one, two) in enumerate(zip(made, others, strict=True)):
            call = record.calls[one.call]
            samples = call.arguments.rows(dict(enumerate(call.tensors)))
            numbers = Numbers(samples, glued, f"{one.entry.title!r}, at {lines[place]},")
            pairs = zip(one.entry.values, two.entry.values, strict=True)
            entry = replace(one.entry, values=tuple(numbers.told(*pair) for pair in pairs))
            made[place], call.entries[one.position] = replace(one, entry=entry), entry

    def run(self, step: Step, batch: Any, seed: int) -> StepRecord:
        """The same, whatever the step does."""
        while True:
            try:
                self._run(step, batch, seed)
            except _ChangesError as error:  # its hooks run within the network, then
                self._changing.add(error.part)
            except _JoinsError as error:  # then they are one call
                self._joined |= dict.fromkeys(error.numbers, min(error.numbers))
            else:
                return self._record

    def _run(self, step: Step, batch: Any, seed: int) -> None:
        is_automatic = bool(getattr(self._module, "automatic_optimization", True))
        self._record = record = StepRecord(tuple(self._blocks), is_automatic, self._device)
        mode = record.mode
        self._fake = Fakes(self._device)
        self._generator = torch.Generator().manual_seed(seed)
        self._track_parameters()  # those that optimizers hold
        self._before, self._autocast = settings_of(self._inside), self._present_autocast()
        self._at_calls: list[tuple[str, Settings]] = []
        self._begun: list[int] = []  # calls, in the order in which they began
        self._glued: Glued = {}
        self._drawn: list[tuple[Value, str, str]] = []
        self._by_networks: set[tuple[nn.Module, str]] = set()
        failed = explained(
            "the step failed while it was traced,",
            f"Pipelined networks ({', '.join(self._blocks)}) may only be called; their "
            "parameters are not at hand inside the step. What reads their values, as torch's "
            "AveragedModel does, belongs into a hook such as on_train_batch_end",
        )
        with (
            swap.attributes_restored(self._rest, tensors=True) as changed,
            swap.attributes_restored(self._inside, tensors=False),
            TensorSwap(self._inside, self._fake_like)(),
            attributes_replaced(self._stubs()),
            swap.silenced(self._module, self._silence, _SILENCED),
            iterators_refused(self._rest),
            generators_of(self._rest).stream(seed),
            warnings.catch_warnings(),
            ExitStack() as self._undo,
        ):
            # Of what networks returned, where a step computes with it and with a parameter.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            batch = copy.deepcopy(batch)
            leaves, record.batch = pytree.tree_flatten(batch)
            record.fields = {
                place: mode.track(leaf, BatchLeaf())
                for place, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor)
            }
            record.parameters = self._track_parameters()
            buffers = [b.detach() for m in self._rest for b in m.buffers(recurse=False)]
            mode.kept = {memory_of(buffer): buffer for buffer in buffers}
            with failed, mode, mode.draws:
                result = step(batch)
            self._after = settings_of(self._inside)
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if is_automatic and isinstance(loss, Tensor) and loss.requires_grad:
                record.leaves = set(map(id, _leaves(loss)))
            mode.mark_read(result)
            # What the step keeps is read later, by a hook.
            mode.mark_read([vars(module) for module in self._rest])
        self._check_draws()
        record.sets = any(not hasattr(module, "update_called") for module in changed)
        differing = _differing(self._before, self._after)
        record.sets_networks = not self._by_networks.issuperset(differing)

    def _present_autocast(self) -> tuple[str, torch.dtype, bool]:
        kind = self._device.type
        return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def _keep_settings(self, record: StepRecord) -> None:
        """Every rank's networks get what the step has set; a call what was set for it alone."""
        for place, (line, settings) in enumerate(self._at_calls):
            own = self._set_for(record.interceptions[place].entry.name, settings)
            for module, name in _differing(settings, self._after):
                stays = self._before.get((module, name)) != self._after.get((module, name))
                if stays and (module, name) not in self._by_networks:
                    raise CaptureError(
                        f"the step sets `{name}` of a {type(module).__name__} in a network behind "
                        f"its call at {line}, and leaves it so: calls run later, on other ranks. "
                        "Set it before the calls, or in a hook"
                    )
            entry = replace(record.interceptions[place].entry, settings=own)
            record.interceptions[place] = made = replace(record.interceptions[place], entry=entry)
            entries = record.calls[made.call].entries
            for other in entries[: made.position]:
                if other.settings != self._set_for(other.name, settings):
                    raise CaptureError(
                        f"the step sets an attribute of {other.title!r} or of {entry.title!r}, "
                        f"such as its mode, between the two, at {line}: they are one call, which "
                        "runs later, on other ranks. Set it before the first of them, or give "
                        "forward what changes as an argument"
                    )
            entries[made.position] = entry
        for module, name in _differing(self._before, self._after):
            if (module, name) not in self._by_networks or name in module._parameters:  # noqa: SLF001
                set_one(module, name, self._after.get((module, name)))

    def _set_for(self, name: str, settings: Settings) -> tuple[tuple[str, str, Any], ...]:
        """What of a submodule and its parts was otherwise than it is when the step has ended."""
        paths = {module: path for path, module in self._module.get_submodule(name).named_modules()}
        found = [key for key in _differing(settings, self._after) if key[0] in paths]
        return tuple(
            (f"{name}.{paths[module]}".rstrip("."), what, settings.get((module, what)))
            for module, what in found
            if (module, what) not in self._by_networks
        )

    def _silence(self, *args: Any, **kwargs: Any) -> None:
        self._record.mode.mark_read((args, kwargs))

    def _fake_like(self, tensor: Tensor) -> Tensor:
        return self._fake.like(tensor).requires_grad_(tensor.requires_grad)

    def _stubs(self) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        """For each method of networks and their parts, what stands for it."""
        seen: set[nn.Module] = set()
        for name, block in sorted(self._blocks.items(), key=lambda item: item[0].count(".")):
            for path, child in block.named_modules():
                if child not in seen:
                    seen.add(child)
                    full = f"{name}.{path}".rstrip(".")
                    self._network_of.setdefault(full, self._network_of[name])
                    for method in ("forward", *methods_of(child)):
                        own = getattr(child, method)
                        stub = swap.Stub(self._called, full, method, child, own)
                        yield child, method, update_wrapper(stub, own)  # some look at signatures

    def _called(
        self,
        name: str,
        method: str,
        block: nn.Module,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stands for a method of a network, or of a part of one."""
        if self._running_block:
            return swap.or_on_zeros(block, function, *args, **kwargs)
        tensors = tensors_in((args, kwargs))
        values = [self._record.mode.lookup(tensor) or Value(tensor) for tensor in tensors]
        if method != "forward" and (not values or any(v.is_parameter for v in values)):
            return function(*args, **kwargs)
        for value in values:
            value.feeds_block = True
        parts = {*block.modules()} - self._changing - ({block} if method == "forward" else set())
        autocast = self._present_autocast()
        entry = Entry(
            name, method, torch.is_grad_enabled(), Arguments.of(args, kwargs), (),
            autocast=None if autocast == self._autocast else autocast,
        )  # fmt: skip
        call, entry = self._place(entry, values)
        settings = settings_of(self._inside)
        self._at_calls.append((current_line(), settings))
        with noted(part for part in parts if keeps(part, block)) as notes:
            output = self._run_on_fakes(function, args, kwargs)
        self._check_numbers(entry, output, partial(self._run_on_fakes, function, args, kwargs))
        paths = {part: path for path, part in block.named_modules()}
        entry = replace(entry, hooked=tuple(paths[part] for part in notes.modules))
        self._record.calls[call].entries[-1] = entry
        output, given = self._answer(call, entry, output, notes)
        try:
            changing = hand_over(block, entry.hooked, given, self._undo)
        except CaptureError:
            raise
        except BaseException as error:
            if not block.training:
                raise
            raise CaptureError(
                f"a forward hook in {entry.title!r} fails, or leaves the network, at "
                f"{current_line()}: what follows there would run all the same. Let it only keep "
                "what it gets"
            ) from error
        self._by_networks |= set(_differing(settings, settings_of(self._inside)))  # and their hooks
        if changing:
            raise _ChangesError(block.get_submodule(changing))
        return output

    @staticmethod
    def _check_numbers(entry: Entry, output: Any, run: Callable[..., Any]) -> None:
        numbers = _numbers(output)
        if numbers and numbers != _numbers(run(times=2)):
            raise CaptureError(
                f"{entry.title!r} returns a number that depends on the number of samples, at "
                f"{current_line()}. Compute it in the step, from the batch: len(x)"
            )

    def _place(self, entry: Entry, values: list[Value]) -> tuple[int, Entry]:
        """The call that an entry belongs to (a new one, or one that goes on), and its arguments."""
        if not values:
            raise CaptureError(
                f"{entry.name!r} is called without a tensor, at {current_line()}. Pipelined "
                "networks take tensors, with the batch as their first dimension"
            )
        for value in values:
            value.check()
        record, network = self._record, self._network_of[entry.name]
        before = [v for value in values for v in self._gone_on_from(value, network)]
        index = before[0].source.call if before else self._begin_call(network)
        call = record.calls[index]
        if any(record.calls[v.source.call].network != network for v in before):
            raise CaptureError(
                f"{entry.title!r} belongs to the teacher, and gets what is computed from the "
                f"output of {self._describe(before[0])}, at {current_line()}: teachers come first. "
                "Leave it out of TSPipeStrategy(teacher=...), and it lies beside the loss"
            )
        if len(calls := {v.source.call for v in before}) > 1:
            raise _JoinsError({n for n, begun in enumerate(self._begun) if begun in calls})
        entry = replace(entry, values=tuple(self._expression(entry, call, v) for v in values))
        call.entries.append(entry)
        return index, entry

    def _begin_call(self, network: NetworkName) -> int:
        calls, joined = self._record.calls, self._joined.get(len(self._begun), len(self._begun))
        if joined == len(self._begun):
            calls.append(Call(network))
        self._begun.append(self._begun[joined] if joined < len(self._begun) else len(calls) - 1)
        return self._begun[-1]

    def _gone_on_from(self, value: Value, network: NetworkName) -> list[Value]:
        """The outputs with which a call of a network goes on.

        What forward-only ones give is an input of a trained one, made by the step as others are.
        """
        calls, is_teacher = self._record.calls, network == "teacher"
        return [
            v for v in outputs_in(value) if is_teacher or calls[v.source.call].network == network
        ]

    def _expression(self, entry: Entry, call: Call, value: Value) -> Expression:
        """Where an argument comes from: earlier entries of the call, or the step."""
        before = partial(self._gone_on_from, network=call.network)
        if not before(value):
            self._check_input(entry.name, value.tensor, value.sources())
            for given in outputs_in(value):
                given.read = True
                self._record.fed_at = current_line()
            return call.input(value)
        if isinstance(value.source, BlockOutput):
            return value.source.ref
        if value.operation is None:
            self._refuse_glue(entry, outputs_in(value))
        values = tuple(self._expression(entry, call, parent) for parent in value.parents)
        if value.draws:
            self._drawn.append((value, entry.title, current_line()))
        glue = Glue(value.operation, value.grad, values)
        self._glued[id(glue)] = glue, [(p.tensor, bool(p.sources())) for p in value.parents]
        return glue

    def _refuse_glue(self, entry: Entry, before: Sequence[Value]) -> NoReturn:
        raise CaptureError(
            f"the input of {entry.title!r} is computed from the output of "
            f"{' and of '.join(dict.fromkeys(map(self._describe, before)))}, at {current_line()}. "
            "Between two calls of a pipelined network only operations on its outputs are possible. "
            "Give forward what else it needs as an argument, or put the computation into a module "
            "of the network"
        )

    def _check_draws(self) -> None:
        """Refuse what is drawn between networks, by numbers of theirs, and used once more."""
        drawn = Counter(value for value, _, _ in self._drawn)
        for value, title, line in self._drawn:
            if drawn[value] > 1 or value.is_used:
                raise CaptureError(
                    f"what {title!r} is given, at {line}, is drawn from an output of another "
                    "network (by dropout, say), and used once more, by the step or by another "
                    "call: the pipeline would draw other numbers there. Draw with "
                    "torch.rand_like(h) and compute with that, or draw within a network that "
                    "returns what it has drawn"
                )

    def _describe(self, value: Value) -> str:
        source = value.source
        return repr(self._record.calls[source.call].entries[source.ref.position].title)

    def _check_input(self, name: str, value: Tensor, sources: list[Value]) -> None:
        leaves = set(_leaves(value)) if value.requires_grad else set()
        if leaves and not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            made = [v.source.call for v in sources if isinstance(v.source, BlockOutput)]
            if any(self._record.calls[call].network == "teacher" for call in made):
                raise TrainedTeacherError
            raise CaptureError(
                f"the input of {name!r} requires gradients itself, at {current_line()}, as for "
                "adversarial examples or gradient penalties. A pipeline takes no gradients with "
                "respect to its inputs, and the second call would have to wait for them. Detach "
                "it, or compute such examples apart, with a network that is not pipelined"
            )
        if leaves or any(v.is_parameter for v in sources):
            named, network = self._module.named_parameters(), self._network_of[name]
            first = next((path for path, p in named if p in leaves), "")
            before = first.partition(".")[0] if "." in first else ""
            remedy = (
                f"Make that module the first block: TSPipeStrategy({network}=[{before!r}, "
                f"{name!r}, ...])"
                if before
                else f"Give the parameter to the network that reads it: self.{name}.{first}"
            )
            raise FedByTrainedError(
                f"the input of {name!r} depends on trained parameters outside of the pipelined "
                f"networks, at {current_line()}. {remedy}",
                network, before,
            )  # fmt: skip

    def _run_on_fakes(
        self, function: Callable[..., Any], args: Any, kwargs: Any, times: int = 1
    ) -> Any:
        """What a network returns, for as many samples, or several times as many."""
        fakes: list[tuple[Tensor, Tensor]] = []

        def fake(tensor: Tensor) -> Tensor:
            given = tensor if times == 1 else torch.cat([tensor.detach()] * times)
            made = self._fake_like(given)
            made = made if given.is_leaf else made.clone()  # which may be written into
            fakes.append((tensor, made))
            return made

        self._running_block = self._record.mode.is_paused = True
        flops = self._record.mode.draws.flops
        try:
            with self._fake:
                args, kwargs = pytree.tree_map_only(Tensor, fake, (args, kwargs))
                return registered(function(*args, **kwargs))
        finally:
            self._running_block = self._record.mode.is_paused = False
            self._record.mode.draws.flops = flops  # without those of networks
            self._written = [tensor for tensor, made in fakes if made._version]  # noqa: SLF001

    def _answer(self, call: int, entry: Entry, output: Any, notes: Notes) -> Any:
        for tensor in self._written:
            self._record.mode.spoil(tensor, entry.name)
        num_own = len(pytree.tree_leaves(output))
        fakes, structure = pytree.tree_flatten((output, notes.given))
        specs = tuple(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in fakes)
        position = len(self._record.calls[call].entries) - 1
        self._record.interceptions.append(Interception(entry, call, position, structure, specs))
        answers = []
        for slot, spec in enumerate(specs):
            answer = spec
            if isinstance(spec, TensorSpec):
                self._record.mode.is_paused = True  # the step draws none of this
                root = spec.random(self._generator, self._device)
                answer = root.requires_grad_(spec.requires_grad).clone()  # may be written into
                source = BlockOutput(call, ValueRef(position, slot), slot >= num_own)
                value = self._record.mode.track(answer, source)
                value.root = root
                self._record.mode.is_paused = False
                value.feeds_block = source.of_hook  # whoever looks at it
                if source.of_hook and notes.is_written(fakes[slot]):
                    self._record.rewritten.append((value, entry.title, current_line()))
                self._record.outputs.append(value)
            answers.append(answer)
        self._record.mode.num_blocks += 1
        return pytree.tree_unflatten(answers, structure)

    def _track_parameters(self) -> list[Value]:
        return [
            self._record.mode.track(
                tensor, NetworkParameter(f"{name}.{path}", self._network_of[name], bool(is_buffer))
            )
            for name, block in self._blocks.items()
            for is_buffer, named in enumerate((block.named_parameters, block.named_buffers))
            for path, tensor in named()
        ]


def _numbers(output: Any) -> list[float]:
    return [leaf for leaf in pytree.tree_leaves(output) if type(leaf) in {int, float}]


def _differing(one: Settings, other: Settings) -> list[tuple[nn.Module, str]]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def outputs_in(value: Value) -> list[Value]:
    """What of the networks' outputs a value was computed from."""
    return [found for found in value.sources() if isinstance(found.source, BlockOutput)]


def _leaves(value: Tensor) -> list[Tensor]:
    """The tensors with gradients of their own that a tensor was computed from."""
    if value.grad_fn is None:
        return [value]
    nodes = reached(value.grad_fn, lambda node: (n for n, _ in node.next_functions if n))
    return [node.variable for node in nodes if hasattr(node, "variable")]
