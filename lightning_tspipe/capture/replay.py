"""Running a captured step again: its beginning (the prologue), and all of it on the loss rank.

- The **prologue** is the step up to its last call of a pipelined block. It gives the calls their
  real inputs on the data rank, and has the effects that the user wrote there (an EMA of
  parameters) on every rank.
- The **replay** is the whole step on the loss rank, with the real outputs of the networks.
- An EMA behind the last call happens in a run of the whole step without values, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.location import explained
from lightning_tspipe.capture.plan import Interception, StepPlan, TensorSpec, ValueRef
from lightning_tspipe.capture.provenance import MOVES, name_of, writes_in_place
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments, tensors_of
from lightning_tspipe.networks.random_states import RandomStates

Outputs = Callable[[int, ValueRef], Tensor]

_REMEDY = "The calls of a step must not depend on the batch or on how far the training is"


class _PrologueDoneError(BaseException):
    """Leaves the step after its last call; users' ``except Exception`` do not catch it."""


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
        # Of a network that is called in part, the parts are blocks, and it is not.
        called = {interception.block for interception in plan.interceptions}
        whole = {name for name in names if not any(c.startswith(f"{name}.") for c in called)}
        self._blocks = {name: module.get_submodule(name) for name in whole | called}
        names += networks.local
        apart = {m for name in names for m in module.get_submodule(name).modules()}
        self._rest = [m for m in module.modules() if m not in apart]
        self._replaying: tuple[_Answers, ExitStack, MetaWins | None] | None = None
        self._hide_pipelined = swap.TensorSwap(self._inside, swap.meta_like)
        self._hide_rest = swap.TensorSwap(self._rest, swap.meta_like)

    def inputs(self, step: Step, batch: Any, seed: int, *, effects: bool) -> tuple[Tensor, ...]:
        """The calls' inputs, from the prologue on a real batch.

        Args:
            step: The step, a function of the batch.
            batch: The batch.
            seed: Seed of the step's random stream.
            effects: Whether the prologue's changes of the pipelined parameters happen; without,
                nothing at all changes.

        Raises:
            CaptureError: The step went another way than when it was traced.
        """
        with ExitStack() as stack:
            if not effects or not self._plan.has_effects:
                stack.enter_context(self._hide_pipelined())
            if not effects or self._is_loss_rank:
                stack.enter_context(swap.attributes_restored(self._rest, tensors=True))
            stack.enter_context(self._beginning())
            prologue = _Prologue(self._plan, real=True)
            self._run_prologue(prologue, step, batch, seed)
        return tuple(prologue.inputs)

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
            MetaWins(),
            failed,
        ):
            step(pytree.tree_map_only(Tensor, swap.meta_like, batch))

    def _run_prologue(self, prologue: _Prologue, step: Step, batch: Any, seed: int) -> None:
        failed = explained(
            "the part of the step before its last call failed on a rank without data,",
            "There the batch has shapes but no values: keep only the EMA before the calls, or use "
            "lightning_tspipe.MomentumEMA",
        )
        with self._answered(prologue, seed) as answers, torch.enable_grad():
            try:
                with nullcontext() if prologue.real else failed:
                    step(batch)
            except _PrologueDoneError:
                return
        answers.check_count()

    @contextmanager
    def _answered(self, prologue: _Prologue, seed: int) -> Iterator[_Answers]:
        """While inside, blocks answer without meaning, and nothing is logged: the replay does."""
        answers = _Answers(self._plan, prologue.reply)
        with swap.random_stream(seed), self._stubs(answers), swap.silenced(self._module):
            yield answers

    def replay(self, step: Step, batch: Any, seed: int, outputs: Outputs) -> Any:
        """The whole step, with the networks' outputs.

        Args:
            step: The step, a function of the batch.
            batch: The batch; leaves that the step doesn't read may be meta tensors.
            seed: Seed of the step's random stream.
            outputs: Gives the value ``ref`` of a call.

        Returns:
            What the step returns.

        Raises:
            CaptureError: The step went another way than when it was traced.
        """
        player = _Answers(self._plan, partial(self._returned, outputs))
        mode = self._meta_mode()
        with ExitStack() as inside:
            self._enter_replay(player, inside, seed)
            self._replaying = player, inside, mode if isinstance(mode, MetaWins) else None
            try:
                with mode:
                    result = step(batch)
            finally:
                self._replaying = None
        player.check_count()
        return result

    def _returned(
        self, outputs: Outputs, interception: Interception, _tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        """What a block really returned in a call."""
        call, used = interception.call, self._plan.used[self._plan.calls[interception.call].network]

        def output(slot: int, spec: TensorSpec) -> Tensor:
            ref = ValueRef(interception.position, slot)
            return outputs(call, ref) if ref in used else spec.empty("meta")

        return output

    def _enter_replay(self, player: _Answers, inside: ExitStack, seed: int | None) -> None:
        inside.enter_context(swap.random_stream(seed))
        inside.enter_context(self._hide_pipelined())
        inside.enter_context(self._stubs(player))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While inside, a replay that is under way is not: the networks are real and at hand."""
        replaying, self._replaying = self._replaying, None
        if replaying is None:
            yield
            return
        player, inside, mode = replaying
        state = RandomStates.now(numpy=False)
        inside.close()
        if mode is not None:
            mode.is_on = False
        try:
            yield
        finally:
            if mode is not None:
                mode.is_on = True
            self._enter_replay(player, inside, None)
            state.restore()
            self._replaying = replaying

    def _meta_mode(self) -> AbstractContextManager[Any]:
        return MetaWins() if self._plan.mixes else nullcontext()

    def _stubs(self, answers: _Answers) -> AbstractContextManager[None]:
        blocks = self._blocks.items()
        return swap.forwards_replaced({block: partial(answers, name) for name, block in blocks})


class _Answers:
    """Answers the calls of blocks in the order of the plan.

    Args:
        plan: The plan.
        reply: Gives, of a call with some tensors, those that the block would return: by slot, and
            what was there at the trace.
    """

    def __init__(
        self,
        plan: StepPlan,
        reply: Callable[[Interception, list[Tensor]], Callable[[int, TensorSpec], Tensor]],
    ) -> None:
        self._plan = plan
        self._reply = reply
        self._count = 0

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._count >= len(self._plan.interceptions):
            raise CaptureError(
                f"the step calls {name!r} once more than when it was traced. {_REMEDY}"
            )
        interception = self._plan.interceptions[self._count]
        if interception.block != name:
            raise CaptureError(
                f"the step calls {name!r} where it called {interception.block!r} when it was "
                f"traced. {_REMEDY}"
            )
        arguments = Arguments.of(args, kwargs)
        if not interception.arguments.takes(arguments):
            raise CaptureError(
                f"the step calls {name!r} with other arguments, {arguments}, than when it was "
                "traced. What is no tensor must be the same in each call"
            )
        self._count += 1
        value = self._reply(interception, tensors_of(args, kwargs))
        leaves = [
            value(slot, leaf) if isinstance(leaf, TensorSpec) else leaf
            for slot, leaf in enumerate(interception.leaves)
        ]
        return pytree.tree_unflatten(leaves, interception.output)

    def check_count(self) -> None:
        """Refuse a step that has made fewer calls than when it was traced."""
        if self._count != len(self._plan.interceptions):
            raise CaptureError(
                f"the step made {self._count} calls of pipelined blocks, but "
                f"{len(self._plan.interceptions)} when it was traced. {_REMEDY}"
            )


class _Prologue:
    """Answers without meaning, for what the step computes between its calls."""

    def __init__(self, plan: StepPlan, *, real: bool, ends_early: bool = True) -> None:
        self._plan = plan
        self.real = real
        self._ends_early = ends_early
        self.inputs: list[Tensor] = []
        self._sizes: dict[int, int] = {}

    def reply(
        self, interception: Interception, tensors: list[Tensor]
    ) -> Callable[[int, TensorSpec], Tensor]:
        traced = self._plan.calls[interception.call].input.shape[:1]
        if interception.position == 0:
            self.inputs.append(interception.arguments.pack(tensors).detach())
            self._sizes[interception.call] = tensors[0].shape[0] if traced else 0
        if self._ends_early and interception is self._plan.interceptions[-1]:
            raise _PrologueDoneError
        device = tensors[0].device if self.real else torch.device("meta")
        size = self._sizes[interception.call]

        def stand_in(_: int, spec: TensorSpec) -> Tensor:
            shape = (size, *spec.shape[1:]) if traced and spec.shape[:1] == traced else spec.shape
            return torch.zeros((), dtype=spec.dtype, device=device).expand(shape)

        return stand_in


class MetaWins(TorchFunctionMode):
    """What is computed from a meta tensor is one, whatever else it is computed from.

    Steps normalise their views with constants, add noise to them, move them to a device. On a rank
    without data, where views are meta tensors, such operations would fail. What is written in place
    is left alone: parameters of this rank must really change, those of others are meta tensors.

    Attributes:
        is_on: Whether it does anything; off for a while where real parameters are worked on.

    Example:
        >>> with MetaWins():
        ...     (torch.ones(2, device="meta").to("cpu") + torch.ones(2)).device
        device(type='meta')
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if self.is_on and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            if func in MOVES:
                return _moved(func, args, kwargs)
            target_is_meta = isinstance(args[0], Tensor) and args[0].is_meta if args else False
            if target_is_meta or not writes_in_place(name_of(func)):
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A move takes a new type on, but no device."""
    tensor: Tensor = args[0]
    if func is not Tensor.to:
        return tensor
    wanted = [*args[1:], *kwargs.values()]
    like = [leaf.dtype for leaf in wanted if isinstance(leaf, Tensor)]
    dtypes = [leaf for leaf in wanted if isinstance(leaf, torch.dtype)]
    return tensor.to("meta", dtype=(dtypes or like or [tensor.dtype])[0])
