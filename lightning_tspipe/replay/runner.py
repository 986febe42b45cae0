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
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.held import generators_of
from lightning_tspipe.capture.plan import (
    Inputs,
    StepPlan,
)
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.hooks import own_hooks
from lightning_tspipe.networks.location import (
    explained,
    line_of,
    line_of_function,
)
from lightning_tspipe.replacing import TensorSwap, attributes_replaced
from lightning_tspipe.replay.answers import (
    MAY_CHANGE,
    Answers,
    Compared,
    DiffersError,
    Outputs,
    Prologue,
    PrologueDoneError,
    Replay,
    flags_of,
)
from lightning_tspipe.replay.meta import MetaWins
from lightning_tspipe.replay.purity import Fingerprint, Fingerprints, fingerprints
from lightning_tspipe.replay.still import StillParameters
from lightning_tspipe.replay.watching import unwritten

_CHECKED = 3
"""In so many steps it is looked whether weights are changed by what has no values."""
_UNREAD = (
    "{} made of something that the step did not read when it was traced, of a network's output or "
    f"of the batch, and has not been sent here. That {MAY_CHANGE}. Else multiply a loss that "
    "begins later by 0 until then"
)


class StepRunner:
    """Runs one captured step on one rank.

    Args:
        module: The LightningModule.
        networks: The declared submodules.
        plan: What the trace found.
        is_loss_rank: Whether this rank replays; there the prologue leaves the rest alone.
        beginning: Around a prologue.

    Attributes:
        reads: What the networks' forwards read, as guards name it.
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
        self.reads: Collection[tuple[int, str]] = ()
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
        self._generators = generators_of(self._rest)
        self._replaying: tuple[Replay, ExitStack, MetaWins | None] | None = None
        self._num_effects = 0
        self._read = [module.get_parameter(name) for name in plan.parameters]
        read = set(map(id, self._read))
        trained = tuple(f"{name}." for name in networks.student)
        self._still = StillParameters(
            {n: module.get_parameter(n) for n in plan.parameters if not n.startswith(trained)}
        )
        self._hide_pipelined = hidden = TensorSwap(
            self._inside, lambda tensor: tensor if id(tensor) in read else swap.meta_like(tensor)
        )
        watched = unwritten(self._inside, self._read)
        # What stands for parameters up to the last call, and behind it, where none are changed.
        self._unchanged = [
            hidden if changes else watched for changes in (plan.has_effects, plan.has_late_effects)
        ]
        self._hide_rest = TensorSwap(self._rest, swap.meta_like)

    @property
    def has_other_hooks(self) -> bool:
        """Whether a hook within the networks came or went since the step was traced."""
        return self._other_hooks() != self._hooks

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
            prologue = Prologue(self._plan, real=True, outputs=outputs)
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
        runs = [self._told(step, batch, seed) for _ in range(2)]
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
        return CaptureError(
            f"{self._name_of(call, runs[0])}, was given other values than went into "
            f"the pipeline for the same batch: call {call} of the step. {cause}"
        )

    def name_of(self, call: int, step: Step, batch: Any, seed: int) -> str:
        """What a call is called, and where the step makes it.

        Args:
            call: The call.
            step: The step, a function of the batch.
            batch: The batch.
            seed: Seed of the step's random stream.
        """
        return self._name_of(call, self._told(step, batch, seed))

    def _name_of(self, call: int, told: Prologue) -> str:
        name = next(each.entry.title for each in self._plan.interceptions if each.call == call)
        return f"self.{name}(...), at {told.lines[call]}"

    def _told(self, step: Step, batch: Any, seed: int) -> Prologue:
        """The prologue once more, with the lines of its calls."""
        run = Prologue(self._plan, real=True, tells_lines=True)
        with self._hide_pipelined(), swap.attributes_restored(self._rest, tensors=True):
            self._run_prologue(run, step, batch, seed)
        return run

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
        self._num_effects += 1
        is_checked = self._num_effects <= _CHECKED
        mode = MetaWins(self._plan.device, self._weights()) if is_checked else self._meta_mode()
        with (
            self._hide_rest(),
            restored if self._is_loss_rank else nullcontext(),
            mode,
        ):
            self._run_prologue(Prologue(self._plan, real=False), step, batch, seed)

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
        whole = Prologue(self._plan, real=False, ends_early=False)
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
            MetaWins(self._plan.device, () if rehearsal else self._weights()),
            failed,
        ):
            step(pytree.tree_map_only(Tensor, swap.meta_like, batch))

    def _run_prologue(self, prologue: Prologue, step: Step, batch: Any, seed: int) -> None:
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
            except PrologueDoneError:
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
    def _answered(self, prologue: Prologue, seed: int) -> Iterator[None]:
        """While inside, blocks answer without meaning, and nothing is logged: the replay does."""
        stream = self._generators.stream(seed)
        silenced = swap.silenced(self._module)
        with stream, self._stubs(prologue), silenced, prologue.following, ExitStack() as undo:
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
        if self.has_other_hooks:
            raise CaptureError(
                "a forward hook on a part of a pipelined network came or went after the step was "
                "traced. Register it before the training, or in on_train_epoch_start; or let it do "
                "something only when it is to"
            )
        self._still.check()
        player = Replay(self._plan, outputs, prints)
        kept = self._own(batch) if prints else None
        mode = self._meta_mode()
        with ExitStack() as inside:
            self._enter_replay(player, inside, seed)
            if self._unchanged[0] is not self._unchanged[1]:
                player.ended = lambda: inside.enter_context(self._unchanged[1]())
            self._replaying = player, inside, mode if isinstance(mode, MetaWins) else None
            try:
                with mode, player.following, self._seen(whole=bool(prints)):
                    result = step(batch)
                if any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves(result)):
                    raise CaptureError(_UNREAD.format("what the step returns is"))
            except DiffersError as error:
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
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - stand-ins and modes would see it
            flags = [p is not None and p.requires_grad for table in tables for p in table]
        flags += [module.training for module in self._inside]
        versions = [parameter._version for parameter in self._read]  # noqa: SLF001
        if not getattr(self._module, "automatic_optimization", True):
            versions.clear()  # the step updates them
        read = ((m, n) for m in self._inside if whole for n in getattr(m, "__constants__", ()))
        return flags, versions, [getattr(module, name, None) for module, name in read]

    def begins_to_train(self, call: int) -> CaptureError:
        """The error of a network that had nothing to be trained when the step was captured."""
        names = " and ".join(repr(entry.title) for entry in self._plan.route(call).entries)
        return CaptureError(
            f"{names}, called by the step at {self._line}, had nothing to be trained when the step "
            "was captured, and has now (requires_grad): no backward runs there. Let that begin in "
            "on_train_epoch_start, where a step is captured again, or in the step itself, by "
            "self.global_step"
        )

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

    def _enter_replay(self, player: Replay, inside: ExitStack, seed: int | None) -> None:
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

    def _weights(self) -> list[Tensor]:
        tables = ((m._parameters, m._buffers) for m in self._inside)  # noqa: SLF001
        return [t for both in tables for table in both for t in table.values() if t is not None]

    def _stubs(self, answers: Answers) -> AbstractContextManager[None]:
        of = self._module.get_submodule
        found = [(of(name), method, title) for name, method, title in self._entries]
        if isinstance(answers, Replay):
            answers.flags = {title: flags_of(network) for network, _, title in found}
            if answers.compares:
                reads = self.reads
                answers.settings = {title: Compared(each, reads) for each, _, title in found}
        stubs = ((own, method, swap.Stub(answers, own, title)) for own, method, title in found)
        return attributes_replaced(stubs)


def _own_leaf(leaf: Any) -> Any:
    """A tensor or a number is not changed; what else a batch may have is the run's own."""
    is_fixed = isinstance(leaf, (Tensor, str, bytes, int, float, type(None)))
    return leaf if is_fixed else copy.deepcopy(leaf)
