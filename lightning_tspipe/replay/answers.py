"""What stands for the networks while a step runs: it answers their calls in the plan's order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.plan import (
    Entry,
    Input,
    Inputs,
    Interception,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.hooks import hand_over
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.modules import is_torchs
from lightning_tspipe.replacing import Settings, settings_of
from lightning_tspipe.replay.lineage import Lineage, check, inputs_in
from lightning_tspipe.replay.purity import Fingerprint, Fingerprints, fingerprints

Outputs = Callable[[int, ValueRef], Tensor]

MAY_CHANGE = (
    "may change where an epoch begins, and within one by self.global_step or batch_idx, which all "
    "ranks know (in windows of accumulated batches: where a window begins; with asynchronous "
    "weights: never)"
)
"""When a step may become another one."""
_REMEDY = (
    f"What calls a step makes {MAY_CHANGE}: in a condition, or as a key of a dict (a list's index "
    "is not seen). Else make all of them in each step, and multiply what is not wanted by 0"
)


Flags = tuple[bool, bool]
"""Whether a network is in training mode, and whether its first parameter is trained."""


def flags_of(network: nn.Module) -> Flags:
    """What steps set of a network as a whole, and may set for a single call."""
    first = next(network.parameters(), None)
    return network.training, first is not None and first.requires_grad


def _are_expected(network: nn.Module, entry: Entry, begun: Flags) -> bool:
    """Whether flags are those of the step's beginning, but for what was set when it was traced."""
    now = flags_of(network)
    for part, name, value in entry.settings:
        module = network.get_submodule(part.removeprefix(entry.name).strip("."))
        parameter = module._parameters.get(name)  # noqa: SLF001
        if value != (vars(module).get(name) if parameter is None else parameter.requires_grad):
            return False
    own = {name: value for part, name, value in entry.settings if part == entry.name}
    is_trained = now[1] if any(name != "training" for _, name, _ in entry.settings) else begun[1]
    return now == (own.get("training", begun[0]), is_trained)


class Compared:
    """What is set of a network and of its parts, compared with what it was when the step began.

    Args:
        network: The network.
        reads: As what guards read; torch's own modules read all that they have.
    """

    def __init__(self, network: nn.Module, reads: Collection[tuple[int, str]]) -> None:
        self._network, self._reads = network, reads
        self._expected = self._now()

    def _now(self) -> Settings:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - stand-ins and modes would see it
            found = settings_of(self._network.modules())
        return {key: value for key, value in found.items() if self._is_read(*key)}

    def _is_read(self, module: nn.Module, name: str) -> bool:
        is_known = name == "training" or name in module._parameters  # noqa: SLF001
        return is_known or (id(vars(module)), name) in self._reads or is_torchs(module)

    def is_as_traced(self, entry: Entry) -> bool:
        """Whether it is as then, but for what was set for this call when the step was traced."""
        own = {
            (self._network.get_submodule(part.removeprefix(entry.name).strip(".")), name): value
            for part, name, value in entry.settings
        }
        own = {key: value for key, value in own.items() if self._is_read(*key)}
        return self._now() == {**self._expected, **own}

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While inside, what is set stays so: by hooks of the network, say."""
        before = self._now()
        yield
        now = self._now()
        self._expected |= {key: now[key] for key in now if now[key] != before.get(key)}


class PrologueDoneError(BaseException):
    """Leaves the step after its last call; users' ``except Exception`` do not catch it."""


class DiffersError(BaseException):
    """Leaves a step that gives a call other inputs than went into the pipeline.

    Args:
        call: Which call.
    """

    def __init__(self, call: int) -> None:
        super().__init__(call)
        self.call = call


class Answers(ABC):
    """Answers the calls of blocks in the order of the plan, and notes what they are given.

    Args:
        plan: The plan.
        follows: Whether it is to follow what the step computes between its calls.
        notes_grad: Whether gradients are enabled there where they were when it was traced.

    Attributes:
        flags: What :func:`flags_of` gives for networks by their titles, as the step begins, if
            that is to be compared.
        settings: All else that is set of them then, by their titles too; in few steps.
        undo: Gets what takes back what hooks keep, if that is to be forgotten.
        following: To be entered as well while the step runs, after all else that sees operations.
    """

    undo: ExitStack | None = None

    def __init__(self, plan: StepPlan, *, follows: bool, notes_grad: bool = False) -> None:
        self._plan = plan
        self._lineage = Lineage(notes_grad=notes_grad) if follows else None
        self.following: AbstractContextManager[Any] = self._lineage or nullcontext()
        self.flags: dict[str, Flags] = {}
        self.settings: dict[str, Compared] = {}
        self._count = 0
        self._given: list[dict[int, Tensor]] = [{} for _ in plan.calls]
        self._began: dict[int, dict[int, Tensor]] = {}  # what calls got where they began

    @property
    def is_through(self) -> bool:
        """Whether the step has made its last call."""
        return self._count == len(self._plan.interceptions)

    @abstractmethod
    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        """Gives the tensors that a block returns, by slot, and what was there at the trace.

        Args:
            interception: The call of the block.
            tensors: What it gets.
        """

    def __call__(self, network: nn.Module, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of a network by what it has returned."""
        if self._count >= len(self._plan.interceptions):
            raise CaptureError(
                f"the step calls {name!r} once more than when it was traced, at {current_line()}. "
                f"{_REMEDY}"
            )
        interception = self._plan.interceptions[self._count]
        traced = interception.entry
        if traced.title != name:
            raise CaptureError(
                f"the step calls {name!r} where it called {traced.title!r} when it was traced, at "
                f"{current_line()}. {_REMEDY}"
            )
        tensors = traced.arguments.match(args, kwargs)
        if tensors is None:
            raise CaptureError(
                f"the step calls {name!r} with other arguments, {Arguments.of(args, kwargs)}, than "
                f"when it was traced, at {current_line()}. What is no tensor must be the same in "
                "each call"
            )
        settings = self.settings.get(name)
        if (self.flags and not _are_expected(network, traced, self.flags[name])) or (
            settings is not None and not settings.is_as_traced(traced)
        ):
            raise CaptureError(
                f"the step has set the mode of {name!r}, what of it is trained, or another "
                f"attribute of it, for its call at {current_line()}, otherwise than when it was "
                "traced. The call runs on other ranks, which don't see that. Set it in a hook "
                "(on_train_batch_start, say), and give forward what changes from call to call as "
                "an argument"
            )
        if self.flags and torch.is_grad_enabled() != traced.grad:
            was, now = ("with", "without") if traced.grad else ("without", "with")
            raise CaptureError(
                f"the step calls {name!r} {now} gradients, at {current_line()}, and did {was} them "
                f"when it was traced. That {MAY_CHANGE}"
            )
        self._count += 1
        self._look_at(interception, tensors)
        value = self.reply(interception, tensors)
        leaves = [
            value(slot, leaf) if isinstance(leaf, TensorSpec) else leaf
            for slot, leaf in enumerate(interception.leaves)
        ]
        self._follow(interception.position, leaves)
        output, given = pytree.tree_unflatten(leaves, interception.output)
        with ExitStack() as changing:
            for each in self.settings.values():
                changing.enter_context(each.changing())
            part = hand_over(network, traced.hooked, given, self.undo)
        if part:
            raise CaptureError(
                f"a forward hook on {name}.{part} changes what it returns, and did not when the "
                "step was traced. Let it return None, or the same each time"
            )
        return output

    def _look_at(self, interception: Interception, tensors: Sequence[Tensor]) -> None:
        """Note what a call begins with, and that what it goes on with is computed as ever."""
        entry, call = interception.entry, interception.call
        if interception.position == 0:
            self._began[call] = self._inputs_in(interception, tensors)
            if self._plan.sized_at:
                self._check_sizes(entry.title, call)
        elif self._lineage is not None:
            for value, tensor in zip(entry.values, tensors, strict=True):
                check(value, self._lineage.of(tensor), self._rows_of(call), entry.title)

    def _check_sizes(self, title: str, call: int) -> None:
        """Refuse other sizes than at the trace: nobody knows yet which ones outputs will have."""
        kinds = self._plan.route(call).arguments.tensors
        for place, tensor in self._began[call].items():
            traced, now = kinds[place].shape, tuple(tensor.shape)
            if now[1:] != traced[1:] or (kinds[place].is_whole and now != traced):
                raise CaptureError(
                    f"{title!r} gets a tensor of {now}, of {traced} when the step was traced, and "
                    "the step asks for the sizes of an output before its last call to a pipelined "
                    f"network, at {self._plan.sized_at}: there they are not known yet. Put that "
                    "line into forward of the network that comes behind it, ask for the sizes of "
                    "the batch, or pad all batches to one length"
                )

    def _follow(self, position: int, returned: Sequence[Any]) -> None:
        if self._lineage is not None:
            self._lineage.begins_with(returned, position)
            if self.is_through:
                self._lineage.ends()

    def check_count(self) -> None:
        """Refuse a step that has made fewer calls than when it was traced."""
        if self._count != len(self._plan.interceptions):
            raise CaptureError(
                f"the step made {self._count} calls of pipelined blocks, but "
                f"{len(self._plan.interceptions)} when it was traced: it did not call "
                f"{self._plan.interceptions[self._count].entry.title!r}. {_REMEDY}"
            )

    def note(self, interception: Interception, tensors: Sequence[Tensor]) -> bool:
        """Note what an entry gets; whether its call has all of its inputs with that."""
        given = self._given[interception.call]
        new = self._inputs_in(interception, tensors)
        if self._plan.writes_inputs:
            new = {place: tensor.clone() for place, tensor in new.items()}
        is_more = bool(new.keys() - given.keys())
        given.update(new)
        return is_more and len(given) == len(self._plan.calls[interception.call].inputs)

    def returned(
        self, interception: Interception, outputs: Outputs
    ) -> Callable[[int, TensorSpec], Tensor]:
        """Gives what a block has really returned; without values where nothing reads it."""
        plan, call = self._plan, interception.call

        def output(slot: int, spec: TensorSpec) -> Tensor:
            ref = ValueRef(interception.position, slot)
            if ref not in plan.route(call).used:
                return replace(spec, shape=self._shape_of(call, spec)).empty("meta")
            value = outputs(call, ref)
            return value.clone() if plan.writes_outputs else value

        return output

    def _rows_of(self, call: int) -> int:
        """The number of samples that a call has begun with."""
        return self._plan.route(call).arguments.rows(self._began[call])

    def _shape_of(self, call: int, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of an output for the samples of this step."""
        traced, rows = self._plan.calls[call].inputs[0].shape[:1], self._rows_of(call)
        is_batched = traced and rows and spec.shape[:1] == traced
        return (rows, *spec.shape[1:]) if is_batched else spec.shape

    def _inputs_in(
        self, interception: Interception, tensors: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """What an entry is given by the step, by the places among the inputs of its call."""
        values = zip(interception.entry.values, tensors, strict=True)
        if self._lineage is not None:
            of = self._lineage.of
            return dict(pair for value, tensor in values for pair in inputs_in(value, of(tensor)))
        return {value.place: tensor for value, tensor in values if isinstance(value, Input)}

    @property
    def inputs(self) -> Inputs:
        """What each call gets."""
        return tuple(map(self.inputs_of, range(len(self._given))))

    def inputs_of(self, call: int) -> tuple[Tensor, ...]:
        """What a call gets, with a row for each sample."""
        given = self._given[call]
        tensors = [given[place].detach() for place in sorted(given)]
        return self._plan.route(call).arguments.spread(tensors)


class Prologue(Answers):
    """Answers without meaning, for what the step computes between its calls.

    Forward-only calls are answered with their outputs, where these are given.

    Attributes:
        lines: The user's lines that make the calls, if it is to tell.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        real: bool,
        ends_early: bool = True,
        tells_lines: bool = False,
        outputs: Outputs | None = None,
    ) -> None:
        super().__init__(plan, follows=plan.joins)
        self._tells_lines, self._outputs = tells_lines, outputs
        self.real = real
        self._ends_early = ends_early
        self.lines: list[str] = []

    @override
    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        call = self._plan.calls[interception.call]
        self.note(interception, tensors)
        if interception.position == 0 and self._tells_lines:  # which takes long
            self.lines.append(current_line())
        if self._ends_early and interception is self._plan.interceptions[-1]:
            raise PrologueDoneError
        if self._outputs is not None and call.network == "teacher":
            return self.returned(interception, self._outputs)
        device = tensors[0].device if self.real else torch.device("meta")

        def stand_in(_: int, spec: TensorSpec) -> Tensor:
            shape = self._shape_of(interception.call, spec)
            # Of ones: what is computed of it shows what else it is computed from.
            one = int(spec.dtype.is_floating_point)
            made = torch.full((), one, dtype=spec.dtype, device=device).expand(shape)
            return made.clone() if self._plan.writes_outputs else made

        return stand_in


class Replay(Answers):
    """Answers with what the networks really returned.

    Args:
        plan: The plan.
        outputs: Gives the value ``ref`` of a call.
        prints: Of what went into the pipeline; none if it isn't compared.

    Attributes:
        compares: Whether all that is set of networks is compared in this step.
        ended: Called with the last call.
    """

    def __init__(self, plan: StepPlan, outputs: Outputs, prints: Fingerprints) -> None:
        follows = any(each.position for each in plan.interceptions)
        super().__init__(plan, follows=follows, notes_grad=True)
        self._outputs, self._prints = outputs, prints
        self.compares = bool(prints)
        self.ended: Callable[[], object] = nullcontext

    @override
    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        call = interception.call
        if self._prints and self.note(interception, tensors):
            own = fingerprints((self.inputs_of(call),))[0]
            if not all(map(Fingerprint.agrees, own, self._prints[call])):
                raise DiffersError(call)
        if self.is_through:
            self.ended()
        return self.returned(interception, self._outputs)
