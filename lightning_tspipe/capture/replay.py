"""Running a captured step again: its beginning (the prologue), and all of it on the loss rank.

- The **prologue** is the step up to its last call of a pipelined block. It gives the calls their
  real inputs on the data rank, and has the effects that the user wrote there (an EMA of
  parameters) on every rank. Where trained networks read what forward-only ones give, it runs once
  more when that is there.
- The **replay** is the whole step on the loss rank, with the real outputs of the networks.
- An EMA behind the last call happens in a run of the whole step without values, on every rank.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.capture.held import Generators
from lightning_tspipe.capture.plan import (
    Input,
    Inputs,
    Interception,
    StepPlan,
    TensorSpec,
    ValueRef,
)
from lightning_tspipe.capture.provenance import MOVES, name_of
from lightning_tspipe.capture.purity import Fingerprint, Fingerprints, fingerprints
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.capture.watching import unwritten
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.hooks import hand_over, own_hooks
from lightning_tspipe.networks.location import (
    current_line,
    explained,
    line_of,
    line_of_function,
)

Outputs = Callable[[int, ValueRef], Tensor]

_DEVICE: Any = Tensor.device
_REMEDY = (
    "The calls of a step must not depend on the batch or on how far the training is. Make all of "
    "them in each step, and multiply a loss that begins later by 0 until then"
)
_UNREAD = (
    "{} made of something that the step did not read when it was traced, of a network's output or "
    "of the batch, and has not been sent here. Read it in each step, and multiply a loss that "
    "begins later by 0 until then"
)


class _PrologueDoneError(BaseException):
    """Leaves the step after its last call; users' ``except Exception`` do not catch it."""


class _DiffersError(BaseException):
    """Leaves a step that gives a call other inputs than went into the pipeline.

    Args:
        call: Which call.
    """

    def __init__(self, call: int) -> None:
        super().__init__(call)
        self.call = call


class StepRunner:
    """Runs one captured step on one rank.

    Args:
        module: The LightningModule.
        networks: The declared submodules.
        plan: What the trace found.
        is_loss_rank: Whether this rank replays; there the prologue leaves the rest alone.
        beginning: Around a prologue.
    """

    def __init__(
        self,
        module: nn.Module,
        networks: Networks,
        plan: StepPlan,
        *,
        is_loss_rank: bool,
        beginning: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module = module
        self._plan = plan
        self._is_loss_rank = is_loss_rank
        self._beginning = beginning
        names = [name for _, name in networks.items()]
        self._inside = [m for name in names for m in module.get_submodule(name).modules()]
        called = {
            (entry.name, entry.method, entry.title)
            for routes in plan.routes.values()
            for route in routes
            for entry in route.entries
        }
        self._entries = called | {(name, "forward", name) for name in names}
        ours = {module.get_submodule(n) for each in plan.interceptions for n in each.entry.heard}
        self._tables = [m._forward_hooks for m in self._inside if m not in ours]  # noqa: SLF001
        self._hooks = self._other_hooks()
        names += networks.local
        apart = {m for name in names for m in module.get_submodule(name).modules()}
        self._rest = [m for m in module.modules() if m not in apart]
        self._generators = Generators(self._rest)
        self._replaying: tuple[_Replay, ExitStack, MetaWins | None] | None = None
        self._hide_pipelined = hidden = swap.TensorSwap(self._inside, swap.meta_like)
        watched = unwritten(self._inside)
        # What stands for parameters up to the last call, and behind it, where none are changed.
        self._unchanged = [
            hidden if changes else watched for changes in (plan.has_effects, plan.has_late_effects)
        ]
        self._hide_rest = swap.TensorSwap(self._rest, swap.meta_like)

    def _other_hooks(self) -> dict[int, Any]:
        """The hooks within the networks that the step does not run."""
        return own_hooks(ChainMap(*filter(None, self._tables)))

    def inputs(
        self,
        step: Step,
        batch: Any,
        seed: int,
        *,
        effects: bool,
        outputs: Outputs | None = None,
    ) -> Inputs:
        """The calls' inputs, from the prologue on a real batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            seed: Seed of the step's random stream.
            effects: Whether the prologue's changes of the pipelined parameters happen; without,
                nothing at all changes.
            outputs: Gives what forward-only calls returned, the second time; then parameters have
                changed. Without, what is made of them has no meaning but its shape.

        Raises:
            CaptureError: The step went another way than when it was traced.
        """
        is_first = outputs is None
        runs_again = self._is_loss_rank or (is_first and bool(self._plan.fed_at))
        with ExitStack() as stack:
            if not (effects and is_first and self._plan.has_effects):
                stack.enter_context(self._unchanged[0]())
            if not effects or runs_again:
                stack.enter_context(swap.attributes_restored(self._rest, tensors=True))
            stack.enter_context(self._beginning())
            prologue = _Prologue(self._plan, real=True, outputs=outputs)
            self._run_prologue(prologue, step, batch, seed)
        return prologue.inputs

    def impure(self, step: Step, batch: Any, seed: int, call: int) -> CaptureError:
        """What to say of a call that got other inputs than before, for the same batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            seed: Seed of the step's random stream.
            call: The call.
        """
        runs = [_Prologue(self._plan, real=True, tells_lines=True) for _ in range(2)]
        for run in runs:
            with self._hide_pipelined(), swap.attributes_restored(self._rest, tensors=True):
                self._run_prologue(run, step, batch, seed)
        one, other = (fingerprints(run.inputs)[call] for run in runs)
        if not all(map(Fingerprint.agrees, one, other)):
            cause = (
                "It differs each time: it draws from a random generator that nobody seeds "
                "(numpy.random.default_rng() without a seed), or reads a clock, a file or an "
                "iterator. Draw with torch, random or numpy.random, whose global generators are "
                "seeded for each step, or give the module the generator (self.generator = ...)"
            )
        else:
            cause = (
                "It depends on something that a step or a hook changes, and that was another one "
                "a step earlier or on another rank: self.trainer.global_step, an attribute, a "
                "buffer. Compute it from the batch and batch_idx, let the loader add it to the "
                "batch, or change it in on_train_epoch_start only. What hooks change between steps "
                "is in time with TSPipeStrategy(schedule='gpipe'), which does nothing a step early"
            )
        name = next(each.entry.title for each in self._plan.interceptions if each.call == call)
        return CaptureError(
            f"self.{name}(...), at {runs[0].lines[call]}, was given other values than went into "
            f"the pipeline for the same batch: call {call} of the step. {cause}"
        )

    def _own(self, batch: Any) -> Any:
        """A batch for one run of the step, which may write into it."""
        if self._plan.writes_batch:
            return copy.deepcopy(batch)
        return pytree.tree_map(_own_leaf, batch)

    def effects(self, step: Step, batch: Any, seed: int) -> None:
        """The prologue on a batch of meta tensors, for what it does to this rank's parameters."""
        if not self._plan.has_effects:
            return
        restored = swap.attributes_restored(self._rest, tensors=False)
        with (
            self._hide_rest(),
            restored if self._is_loss_rank else nullcontext(),
            self._meta_mode(),
        ):
            self._run_prologue(_Prologue(self._plan, real=False), step, batch, seed)

    def late_effects(self, step: Step, batch: Any, seed: int, *, rehearsal: bool = False) -> None:
        """What the step does to this rank's parameters after its last call.

        Args:
            step: The step, a function of the batch.
            batch: The batch; its values are not looked at.
            seed: Seed of the step's random stream.
            rehearsal: Change nothing; just see whether the step runs without values.

        Raises:
            CaptureError: It doesn't.
        """
        if not self._plan.has_late_effects:
            return
        whole = _Prologue(self._plan, real=False, ends_early=False)
        failed = explained(
            "the step changes a teacher's parameter after its last call, so that all of it runs "
            "without values on each rank to do the same there, which failed",
            "Move the change before the calls or into on_train_batch_end",
        )
        with (
            self._hide_rest(),
            self._hide_pipelined() if rehearsal else nullcontext(),
            swap.attributes_restored(self._rest, tensors=False),
            self._answered(whole, seed),
            MetaWins(self._plan.device),
            failed,
        ):
            step(pytree.tree_map_only(Tensor, swap.meta_like, batch))

    def _run_prologue(self, prologue: _Prologue, step: Step, batch: Any, seed: int) -> None:
        failed = explained(
            "the part of the step before its last call failed on a rank without data,",
            "There the batch has shapes but no values. It is run there for what it does to "
            "parameters: move that (an EMA) into on_train_batch_end, or use "
            "lightning_tspipe.MomentumEMA",
        )
        with self._answered(prologue, seed), torch.enable_grad():
            own = self._own(batch)
            leaves = [leaf for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor)]
            before = [leaf._version for leaf in leaves if not leaf.is_inference()]  # noqa: SLF001
            try:
                with nullcontext() if prologue.real else failed:
                    step(own)
            except _PrologueDoneError:
                pass
            else:
                prologue.check_count()
        now = [leaf._version for leaf in leaves if not leaf.is_inference()]  # noqa: SLF001
        if now != before and not self._plan.writes_batch:
            raise CaptureError(
                f"the step, at {self._line}, writes into its batch, which it has not when it was "
                "traced, and runs more than once. Make a new tensor, as in x = x.clone(), and "
                "write into that"
            )

    @contextmanager
    def _answered(self, prologue: _Prologue, seed: int) -> Iterator[None]:
        """While inside, blocks answer without meaning, and nothing is logged: the replay does."""
        stream = self._generators.stream(seed)
        with stream, self._stubs(prologue), swap.silenced(self._module), ExitStack() as undo:
            prologue.undo = undo
            yield

    def replay(
        self,
        step: Step,
        batch: Any,
        seed: int,
        outputs: Outputs,
        prints: Fingerprints = (),
    ) -> Any:
        """The whole step, with the networks' outputs.

        Args:
            step: The step, a function of the batch.
            batch: The batch; leaves that the step doesn't read may be meta tensors.
            seed: Seed of the step's random stream.
            outputs: Gives the value ``ref`` of a call.
            prints: Of what went into the pipeline, if it is to be compared; then all of the batch
                has to be here.

        Returns:
            What the step returns.

        Raises:
            CaptureError: The step went another way than when it was traced, or gives a call other
                inputs than went into the pipeline.
        """
        if self._other_hooks() != self._hooks:
            raise CaptureError(
                "a forward hook on a part of a pipelined network came or went after the step was "
                "traced. Register it before the training, and let it do something only when it is "
                "to"
            )
        player = _Replay(self._plan, outputs, prints)
        kept = self._own(batch) if prints else None
        mode = self._meta_mode()
        with ExitStack() as inside:
            self._enter_replay(player, inside, seed)
            if self._unchanged[0] is not self._unchanged[1]:
                player.ended = lambda: inside.enter_context(self._unchanged[1]())
            self._replaying = player, inside, mode if isinstance(mode, MetaWins) else None
            try:
                with mode, self._seen(whole=bool(prints)):
                    result = step(batch)
                if any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(result)):
                    raise CaptureError(_UNREAD.format("what the step returns is"))
            except _DiffersError as error:
                found = error.call
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error):
                    raise
                raise CaptureError(_UNREAD.format(f"{line_of(error)} asks for what is")) from error
            else:
                player.check_count()
                return result
            finally:
                self._replaying = None
        raise self.impure(step, kept, seed, found)

    @contextmanager
    def _seen(self, *, whole: bool) -> Iterator[None]:
        """While inside, a step must not set what others read of the networks; see `_settings`."""
        before = self._settings(whole=whole)
        yield
        if before != self._settings(whole=whole):
            raise self.changed()

    def _settings(self, *, whole: bool) -> object:
        """What a step must not set of the networks, beside what guards see.

        Args:
            whole: Whether to look at what torch's own modules read, too, which takes longer.
        """
        tables = (module._parameters.values() for module in self._inside)  # noqa: SLF001
        flags = [p is not None and p.requires_grad for table in tables for p in table]
        flags += [module.training for module in self._inside]
        read = ((m, n) for m in self._inside if whole for n in getattr(m, "__constants__", ()))
        return flags, [getattr(module, name, None) for module, name in read]

    def changed(self) -> CaptureError:
        """What to say of a step that has set something of a network on this rank."""
        return CaptureError(
            f"the step, at {self._line}, has changed an attribute of a pipelined network, such as "
            "its mode, or what of it is trained, which it has not when it was traced. Other ranks, "
            "where the network runs too, don't see that. Change it in a hook, such as "
            "on_train_batch_start"
        )

    @property
    def _line(self) -> str:
        """Where the module's step begins."""
        return line_of_function(self._module.training_step)

    def _enter_replay(self, player: _Replay, inside: ExitStack, seed: int | None) -> None:
        inside.enter_context(self._generators.stream(seed))
        inside.enter_context(self._unchanged[player.is_through]())
        inside.enter_context(self._stubs(player))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While inside, a replay that is under way is not: the networks are real and at hand."""
        replaying, self._replaying = self._replaying, None
        if replaying is None:
            yield
            return
        player, inside, mode = replaying
        state = self._generators.state()
        inside.close()
        if mode is not None:
            mode.is_on = False
        try:
            yield
        finally:
            if mode is not None:
                mode.is_on = True
            self._enter_replay(player, inside, None)
            self._generators.restore(state)
            self._replaying = replaying

    def _meta_mode(self) -> AbstractContextManager[Any]:
        return MetaWins(self._plan.device) if self._plan.mixes else nullcontext()

    def _stubs(self, answers: _Answers) -> AbstractContextManager[None]:
        return swap.attributes_replaced(
            (network, method, swap.Stub(answers, network, title))
            for name, method, title in self._entries
            for network in [self._module.get_submodule(name)]
        )


class _Answers(ABC):
    """Answers the calls of blocks in the order of the plan, and notes what they are given.

    Args:
        plan: The plan.

    Attributes:
        undo: Gets what takes back what hooks keep, if that is to be forgotten.
    """

    undo: ExitStack | None = None

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._count = 0
        self._given: list[dict[int, Tensor]] = [{} for _ in plan.calls]

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
        self._count += 1
        value = self.reply(interception, tensors)
        leaves = [
            value(slot, leaf) if isinstance(leaf, TensorSpec) else leaf
            for slot, leaf in enumerate(interception.leaves)
        ]
        output, given = pytree.tree_unflatten(leaves, interception.output)
        if part := hand_over(network, traced.hooked, given, self.undo):
            raise CaptureError(
                f"a forward hook on {name}.{part} changes what it returns, and did not when the "
                "step was traced. Let it return None, or the same each time"
            )
        return output

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
        if self._plan.writes_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        values = zip(interception.entry.values, tensors, strict=True)
        new = {value.place: tensor for value, tensor in values if isinstance(value, Input)}
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
                return spec.empty("meta")
            value = outputs(call, ref)
            return value.clone() if plan.writes_outputs else value

        return output

    @property
    def inputs(self) -> Inputs:
        """What each call gets."""
        return tuple(map(self.inputs_of, range(len(self._given))))

    def inputs_of(self, call: int) -> tuple[Tensor, ...]:
        """What a call gets, with a row for each sample."""
        given = self._given[call]
        tensors = [given[place].detach() for place in sorted(given)]
        return self._plan.route(call).arguments.spread(tensors)


def _own_leaf(leaf: Any) -> Any:
    """A tensor or a number is not changed; what else a batch may have is the run's own."""
    is_fixed = isinstance(leaf, (Tensor, str, bytes, int, float, type(None)))
    return leaf if is_fixed else copy.deepcopy(leaf)


class _Prologue(_Answers):
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
        super().__init__(plan)
        self._tells_lines, self._outputs = tells_lines, outputs
        self.real = real
        self._ends_early = ends_early
        self.lines: list[str] = []

    @override
    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        call = self._plan.calls[interception.call]
        traced = call.inputs[0].shape[:1]
        self.note(interception, tensors)
        if interception.position == 0 and self._tells_lines:  # which takes long
            self.lines.append(current_line())
        if self._ends_early and interception is self._plan.interceptions[-1]:
            raise _PrologueDoneError
        if self._outputs is not None and call.network == "teacher":
            return self.returned(interception, self._outputs)
        device = tensors[0].device if self.real else torch.device("meta")
        arguments = self._plan.route(interception.call).arguments
        size = arguments.rows(self._given[interception.call]) if traced else 0

        def stand_in(_: int, spec: TensorSpec) -> Tensor:
            shape = (size, *spec.shape[1:]) if traced and spec.shape[:1] == traced else spec.shape
            # Of ones: what is computed of it shows what else it is computed from.
            one = int(spec.dtype.is_floating_point)
            made = torch.full((), one, dtype=spec.dtype, device=device).expand(shape)
            return made.clone() if self._plan.writes_outputs else made

        return stand_in


class _Replay(_Answers):
    """Answers with what the networks really returned.

    Args:
        plan: The plan.
        outputs: Gives the value ``ref`` of a call.
        prints: Of what went into the pipeline; none if it isn't compared.

    Attributes:
        ended: Called with the last call.
    """

    def __init__(self, plan: StepPlan, outputs: Outputs, prints: Fingerprints) -> None:
        super().__init__(plan)
        self._outputs, self._prints = outputs, prints
        self.ended: Callable[[], object] = nullcontext

    @override
    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        call = interception.call
        if self._prints and self.note(interception, tensors):
            own = fingerprints((self.inputs_of(call),))[0]
            if not all(map(Fingerprint.agrees, own, self._prints[call])):
                raise _DiffersError(call)
        if self.is_through:
            self.ended()
        return self.returned(interception, self._outputs)


class MetaWins(TorchFunctionMode):
    """What is computed from a meta tensor is one, whatever else it is computed from.

    Steps normalise their views with constants, add noise to them, move them to a device, or make
    masks where they are. On a rank without data, where views are meta tensors, such operations
    would fail, so these say that they are on its device. What is written in place is left alone:
    parameters of this rank must really change, those of others are meta tensors.

    Args:
        device: Where this rank computes.

    Attributes:
        is_on: Whether it does anything; off for a while where real parameters are worked on.

    Example:
        >>> with MetaWins(torch.device("cpu")):
        ...     made = torch.ones(2, device="meta").to("cpu") + torch.ones(2)
        ...     made.device
        device(type='cpu')
        >>> made.device
        device(type='meta')
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if self.is_on and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            if func == _DEVICE.__get__:
                return self._device
            if func in MOVES:
                return _moved(func, args, kwargs)
            target_is_meta = isinstance(args[0], Tensor) and args[0].is_meta if args else False
            if target_is_meta or not _is_in_place(name_of(func)):
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _is_in_place(name: str) -> bool:
    """Whether a function will change its first argument."""
    last = name.rpartition(".")[2]
    if last.endswith("__"):
        return last == "__setitem__" or last.startswith("__i") or last == "__set__"
    return last.endswith("_")


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A move takes a new type on, but no device."""
    tensor: Tensor = args[0]
    if func is not Tensor.to:
        return tensor
    wanted = [*args[1:], *kwargs.values()]
    like = [leaf.dtype for leaf in wanted if isinstance(leaf, Tensor)]
    dtypes = [leaf for leaf in wanted if isinstance(leaf, torch.dtype)]
    return tensor.to("meta", dtype=(dtypes or like or [tensor.dtype])[0])
