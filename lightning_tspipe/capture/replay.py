"""Running a captured step again: its beginning (the prologue), and all of it on the loss rank.

- The **prologue** is the step up to its last call of a pipelined block. It gives the calls their
  real inputs on the data rank, and has the effects that the user wrote there (an EMA of
  parameters) on every rank.
- The **replay** is the whole step on the loss rank, with the real outputs of the networks.
- An EMA behind the last call happens in a run of the whole step without values, on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture import swap
from lightning_tspipe.capture.location import line_of
from lightning_tspipe.capture.meta import MetaWins
from lightning_tspipe.capture.plan import Interception, StepPlan, ValueRef
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.arguments import Arguments, tensors_of

Outputs = Callable[[int, ValueRef], Tensor]


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
        self._blocks = {name: module.get_submodule(name) for _, name in networks.items()}
        inside = [m for block in self._blocks.values() for m in block.modules()]
        inside_ids = {id(m) for m in inside}
        self._inside = inside
        # Of a network that is called in part, the parts are blocks, and it is not.
        called = {i.block: module.get_submodule(i.block) for i in plan.interceptions}
        entered = {name for name in self._blocks if any(c.startswith(f"{name}.") for c in called)}
        self._blocks = {n: m for n, m in self._blocks.items() if n not in entered} | called
        heads = {id(m) for name in networks.local for m in module.get_submodule(name).modules()}
        self._rest = [m for m in module.modules() if id(m) not in inside_ids | heads]
        self._hide_pipelined = swap.TensorSwap(inside, swap.meta_like)
        self._hide_rest = swap.TensorSwap(self._rest, swap.meta_like)
        self._replaying: tuple[_Replay, ExitStack, MetaWins | None] | None = None

    def forget_tensors(self) -> None:
        """Parameters moved: make new stand-ins."""
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
        with ExitStack() as stack:
            stack.enter_context(self._hide_rest())
            if self._is_loss_rank:
                stack.enter_context(swap.attributes_restored(self._rest, tensors=False))
            stack.enter_context(self._meta_mode())
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
        with ExitStack() as stack:
            stack.enter_context(self._hide_rest())
            if rehearsal:
                stack.enter_context(self._hide_pipelined())
            stack.enter_context(swap.attributes_restored(self._rest, tensors=False))
            stack.enter_context(swap.random_stream(seed))
            stack.enter_context(swap.forwards_replaced(self._stubs(whole)))
            stack.enter_context(silenced(self._module))
            stack.enter_context(MetaWins())
            try:
                step(pytree.tree_map_only(Tensor, swap.meta_like, batch))
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(
                    "the step changes a teacher's parameter after its last call, so that all of it "
                    "runs without values on each rank to do the same there, which failed at "
                    f"{line_of(error)}: {error}. Move the change before the calls or into "
                    "on_train_batch_end"
                ) from error

    def _run_prologue(self, prologue: _Prologue, step: Step, batch: Any, seed: int) -> None:
        with (
            swap.random_stream(seed),
            swap.forwards_replaced(self._stubs(prologue)),
            silenced(self._module),
            torch.enable_grad(),
        ):
            try:
                step(batch)
            except _PrologueDoneError:
                return
            except CaptureError:
                raise
            except Exception as error:
                if prologue.real:
                    raise
                raise CaptureError(
                    f"the part of the step before its last call failed on a rank without data, at "
                    f"{line_of(error)}: {error}. There the batch has shapes but no values: keep "
                    "only the EMA before the calls, or use lightning_tspipe.MomentumEMA"
                ) from error
        raise CaptureError(
            f"the step made {prologue.count} calls of pipelined blocks, but "
            f"{len(self._plan.interceptions)} when it was traced. The calls of a step must not "
            "depend on the batch or on how far the training is"
        )

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
        player = _Replay(self._plan, outputs)
        mode = self._meta_mode()
        with ExitStack() as inside:
            self._enter_replay(player, inside, seed)
            self._replaying = player, inside, mode if isinstance(mode, MetaWins) else None
            try:
                with mode:
                    result = step(batch)
            finally:
                self._replaying = None
        if player.count != len(self._plan.interceptions):
            raise CaptureError(
                f"the step made {player.count} calls of pipelined blocks, but "
                f"{len(self._plan.interceptions)} when it was traced"
            )
        return result

    def _enter_replay(self, player: _Replay, inside: ExitStack, seed: int | None) -> None:
        inside.enter_context(swap.random_stream(seed))
        inside.enter_context(self._hide_pipelined())
        inside.enter_context(swap.forwards_replaced(self._stubs(player)))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While inside, a replay that is under way is not: the networks are real and at hand."""
        replaying, self._replaying = self._replaying, None
        if replaying is None:
            yield
            return
        player, inside, mode = replaying
        state = swap.random_state()
        inside.close()
        if mode is not None:
            mode.is_on = False
        try:
            yield
        finally:
            if mode is not None:
                mode.is_on = True
            self._enter_replay(player, inside, None)
            swap.set_random_state(state)
            self._replaying = replaying

    def _meta_mode(self) -> AbstractContextManager[Any]:
        return MetaWins() if self._plan.mixes else nullcontext()

    def _stubs(self, answers: _Answers) -> dict[nn.Module, Callable[..., Any]]:
        def stub(name: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: answers.answer(name, args, kwargs)

        return {block: stub(name) for name, block in self._blocks.items()}


class _Answers(ABC):
    """Answers the calls of blocks in the order of the plan."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.count = 0

    def answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.count >= len(self._plan.interceptions):
            raise CaptureError(
                f"the step calls {name!r} once more than when it was traced. The calls of a step "
                "must not depend on the batch or on how far the training is"
            )
        interception = self._plan.interceptions[self.count]
        if interception.block != name:
            raise CaptureError(
                f"the step calls {name!r} where it called {interception.block!r} when it was "
                "traced. The calls of a step must not depend on the batch"
            )
        arguments = Arguments.of(args, kwargs)
        if not _is_same(arguments, interception):
            raise CaptureError(
                f"the step calls {name!r} with other arguments, {arguments}, than when it was "
                "traced. What is no tensor must be the same in each call"
            )
        self.count += 1
        return self._reply(interception, tensors_of(args, kwargs))

    @abstractmethod
    def _reply(self, interception: Interception, tensors: list[Tensor]) -> Any:
        """What the block would return."""


class _Prologue(_Answers):
    def __init__(self, plan: StepPlan, *, real: bool, ends_early: bool = True) -> None:
        super().__init__(plan)
        self.real = real
        self._ends_early = ends_early
        self.inputs: list[Tensor] = []
        self._sizes: dict[int, tuple[int, int]] = {}

    def _reply(self, interception: Interception, tensors: list[Tensor]) -> Any:
        if interception.position == 0:
            known = interception.arguments
            value = tensors[0] if known is None else known.pack(tensors)
            self.inputs.append(value.detach())
            traced = self._plan.calls[interception.call].input.shape
            size = tensors[0].shape[0] if traced else 0
            self._sizes[interception.call] = (traced[0] if traced else 0), size
        if self._ends_early and self.count == len(self._plan.interceptions):
            raise _PrologueDoneError
        device = tensors[0].device if self.real else torch.device("meta")
        return _stand_ins(interception, device, self._sizes[interception.call])


class _Replay(_Answers):
    def __init__(self, plan: StepPlan, outputs: Outputs) -> None:
        super().__init__(plan)
        self._outputs = outputs
        self._used = {network: set(refs) for network, refs in plan.used.items()}

    def _reply(self, interception: Interception, tensors: list[Tensor]) -> Any:  # noqa: ARG002
        network = self._plan.calls[interception.call].network
        leaves = []
        for slot, spec in enumerate(interception.leaves):
            ref = ValueRef(interception.position, slot)
            if spec is None:
                leaves.append(interception.constants[slot])
            elif ref in self._used[network]:
                leaves.append(self._outputs(interception.call, ref))
            else:
                leaves.append(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        return pytree.tree_unflatten(leaves, interception.output)


def _is_same(arguments: Arguments, interception: Interception) -> bool:
    """Whether a call is made as when it was traced; lengths of sequences may differ."""
    known = interception.arguments
    if known is None:
        return arguments.is_plain
    return str(arguments) == str(known) and known.takes(arguments)


def _stand_ins(interception: Interception, device: torch.device, sizes: tuple[int, int]) -> Any:
    """Answers without meaning, for what the step computes between its calls.

    Args:
        interception: What is answered.
        device: Where.
        sizes: Samples of the call when it was traced, and now.
    """
    traced, size = sizes
    leaves: list[Any] = []
    for slot, spec in enumerate(interception.leaves):
        if spec is None:
            leaves.append(interception.constants[slot])
        else:
            shape = (size, *spec.shape[1:]) if spec.shape[:1] == (traced,) else spec.shape
            zeros = torch.zeros((), dtype=spec.dtype, device=device).expand(shape)
            leaves.append(zeros)
    return pytree.tree_unflatten(leaves, interception.output)


@contextmanager
def silenced(module: nn.Module) -> Iterator[None]:
    """The prologue logs nothing: the replay does."""
    names = [name for name in ("log", "log_dict", "print") if hasattr(module, name)]
    for name in names:
        module.__dict__[name] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)
