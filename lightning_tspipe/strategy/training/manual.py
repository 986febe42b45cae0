"""Optimization by hand: backward, clipping, steps and schedulers in the user's own order.

The loss rank alone runs the user's ``training_step`` with real outputs (the replay). What it asks
of optimizers happens there at once, and is told to the other ranks, which do the same with the
parameters that they own::

    loss rank                                   other ranks
    p = self.student(x)
    opt.zero_grad()
    self.manual_backward(f(p))    loss ─► p
    opt.step()                    1 ──────────► zero_grad, p ─► parameters      (all ranks)
                                  2 ──────────► the step, on their parameters
    the end of the step           3 ──────────► on to the next batch

1 is sent when gradients of the networks are needed for the first time: by a step or by clipping,
by clearing them after a backward, or by the end of the step. Before that, several backwards add up
at the networks' outputs. A batch goes through the pipeline once, there and back, so that no network
can be called after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import GroupMember

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.transport.replicas import default_group
from lightning_tspipe.runtime.weights.state_sharding import StateSharding
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.training.data import on_cpu
from lightning_tspipe.strategy.training.optimizers import (
    hyperparameters,
    parameters_of,
    plain_optimizer,
    set_hyperparameters,
)

Command = tuple[Any, ...]
"""The name of a method below, which every rank carries out on what it owns, and its arguments."""

END = "end"
"""What the last command of a step says, with the shape of the loss if the step returned one."""

_Method = Callable[..., Any]
_Mode = Literal["outside", "live", "silent"]
"""The step that runs: none, the one with real outputs, one without effects on optimizers."""


class ManualOptimization:
    """One rank's part in optimization by hand.

    Args:
        run: The run.
        sharding: Divides what optimizers keep among replicas.

    Attributes:
        student: The parameters of the pipelined networks that are trained, also those of others.
        waiting: The optimizers that made no step since the last backward: gradients may add up.
    """

    def __init__(self, run: Run, sharding: StateSharding) -> None:
        self._run, self._sharding = run, sharding
        self.student: list[nn.Parameter] = []
        self.waiting: set[int] = set()
        self._mode: _Mode = "outside"
        self._begin()

    def _begin(self) -> None:
        """Forget the batch before."""
        self._told: list[Command] = []
        self._num_backwards = 0
        self._is_used = False
        self._is_pending = False
        self._used: list[Tensor] = []
        self._toggled: int | None = None
        self._called_under: set[int | None] = set()
        self._backward_under: set[int | None] = set()
        self._num_calls = 0
        self._world: Any = GroupMember.WORLD

    def attach(self) -> None:
        """The stages have their places."""
        self.waiting = set()
        blocks = [self._run.module.get_submodule(name) for name in self.engine.names.student]
        self.student = [parameter for block in blocks for parameter in block.parameters()]
        shards = self.engine.shards
        tied = () if self._run.module.automatic_optimization else shards.tied.keys() & shards.beside
        refuse({
            f"{name!r} is a network's parameter and one of the loss's, and is optimized by hand: "
            "its gradients can't be told apart. Use automatic optimization, or untie it": True
            for name in tied
        })  # fmt: skip

    @property
    def engine(self) -> PipelineEngine:
        """The pipeline; a relay's engine has no commands to follow."""
        return cast("PipelineEngine", self._run.engine)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers as the user gets them: they count steps and run hooks."""
        optimizers: list[Any] = self._run._lightning_optimizers  # noqa: SLF001
        return optimizers

    # The user's step, in its two ways

    def run(self, mode: _Mode, step: Step, batch: Any) -> Any:
        """Run a step; what it asks of optimizers comes here.

        Args:
            mode: ``live`` on the loss rank, with the networks' outputs; ``silent``, which leaves
                optimizers and schedulers alone, for the trace and the prologue.
            step: The step, a function of the batch.
            batch: The batch.
        """
        if mode == "live":
            self._begin()
        kept = [hyperparameters(optimizer) for optimizer in self.optimizers]
        replacements: list[tuple[Any, str, Any]] = [
            (owner, name, self._passing(getattr(owner, name), instead, silent))
            for owner, name, instead, silent in self._asked()
        ]
        with attributes_replaced([*replacements, (self, "_mode", mode)]):
            try:
                return step(batch)
            finally:
                if mode == "silent":
                    for optimizer, groups in zip(self.optimizers, kept, strict=True):
                        set_hyperparameters(optimizer, groups)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Out of the user's step for a while, so that what is called is what was meant."""
        outside = attributes_replaced([(self, "_mode", "outside")])
        with outside, self.engine.losses.runner.suspended(), default_group(self._world):
            yield

    def _asked(self) -> Iterator[tuple[Any, str, _Method, _Method]]:
        """Whose methods a step may call, their names, and what each does if it is live or not."""
        for index, optimizer in enumerate(self.optimizers):
            clear = partial(self._zero_grad, index)
            for owner in (optimizer, plain_optimizer(optimizer)):
                step = partial(self._step, index, owner is not optimizer)
                yield owner, "step", step, _check_closure
                yield owner, "zero_grad", clear, _nothing
        for index, config in enumerate(self._run.lr_scheduler_configs):
            yield config.scheduler, "step", partial(self._schedule, index), _nothing
        module = self._run.module
        yield module, "zero_grad", partial(self._zero_grad, None), _nothing
        yield module, "clip_gradients", self._clip, _nothing
        yield module, "toggle_optimizer", self._toggle, _nothing
        yield module, "untoggle_optimizer", self._untoggle, _nothing
        yield module, "manual_backward", module.manual_backward, _nothing
        yield Tensor, "backward", self._raw_backward, _nothing

    def _passing(self, original: _Method, live: _Method, silent: _Method) -> _Method:
        """Another method in each way of running a step."""
        ways: dict[_Mode, _Method] = {"outside": original, "live": live, "silent": silent}

        @wraps(original)  # schedulers look at marks that they left there
        def call(*args: Any, **kwargs: Any) -> Any:
            return ways[self._mode](*args, **kwargs)

        return call

    # What the user's step may ask for, on the loss rank

    def backward_of(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``manual_backward``: from the loss to the networks' outputs, and to what else is here.

        Raises:
            ConfigurationError: It comes too late, or from elsewhere than the step.
        """
        refuse({
            "manual_backward outside of training_step: the graph of a batch is gone when its step "
            "is over. Call it in training_step": self._mode != "live"
        })  # fmt: skip
        module, plugin = self._run.module, self._run.precision_plugin
        self._told.append(("before_backward",))
        with self._outside():
            self._run.pre_backward(loss)
            loss = plugin.pre_backward(loss, module)
        with self._noted(), self._outside(), self._run.replicas.as_world():
            plugin.backward(loss, module, None, *args, **kwargs)
        if self._is_used:
            self._do("after_backward")
        else:
            self._num_backwards += 1
        return loss.detach()

    def _raw_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward()``: past Lightning, without its hooks and scaling."""
        with self._noted(), self._outside(), self._run.replicas.as_world():
            loss.backward(*args, **kwargs)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """A backward runs inside: note what it reaches, and refuse what it must not reach."""
        refuse({
            "a backward after an optimizer used gradients: several replicas average the "
            "gradients of a batch only once. Call manual_backward for all losses first, then the "
            "optimizers, or update one network per batch":
            self._is_used and self._run.num_replicas > 1
        })  # fmt: skip
        self._note_calls()
        before = self._versions()
        yield
        self._is_pending = True
        if self._versions() != before:
            self._backward_under.add(self._toggled)
        self._refuse_late()

    def _step(
        self, index: int, raw: bool, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        _check_closure(closure)
        optimizer = self.optimizers[index]
        self._use_gradients([optimizer])
        return self._do("step", index, raw, kwargs, hyperparameters(optimizer), now=True)

    def _zero_grad(self, index: int | None, *args: Any, **kwargs: Any) -> None:
        averaged = self._is_pending and self._run.num_replicas > 1
        if averaged or self._has_gradients():
            self._use_gradients(self.optimizers if index is None else [self.optimizers[index]])
        self._do("zero_grad", index, args, kwargs)

    def _clip(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        index = self._index_of(optimizer)
        self._use_gradients([optimizer])
        self._do("clip", index, args, kwargs, now=True)

    def _schedule(self, index: int, *args: Any, **kwargs: Any) -> None:
        self._do("schedule", index, on_cpu(args), on_cpu(kwargs))

    def _toggle(self, optimizer: Any) -> None:
        self._note_calls()
        index = self._index_of(optimizer)
        with self._outside():
            self._run.module.toggle_optimizer(optimizer)
            # The networks have run already: which gradients they keep is decided afterwards.
            wanted: Any = self._run.module._param_requires_grad_state  # noqa: SLF001 - no public way
            for parameter in self.student:
                if parameter in wanted:
                    parameter.requires_grad_(wanted[parameter])
        self._toggled = index

    def _untoggle(self, optimizer: Any) -> None:
        self._note_calls()
        with self._outside():
            self._run.module.untoggle_optimizer(optimizer)
        self._toggled = None

    def _index_of(self, optimizer: Any) -> int:
        for index, known in enumerate(self.optimizers):
            if plain_optimizer(known) is plain_optimizer(optimizer):
                return index
        raise ConfigurationError(
            f"{type(optimizer).__name__} is not one of the optimizers that configure_optimizers "
            "returned. Return all of them there, in a list"
        )

    # From what the user asks to what all ranks do

    def _versions(self) -> list[tuple[int, int] | None]:
        """One for each output of the networks; another one when gradients were added there."""
        gradients = [output.grad for output in self.engine.outputs]
        return [None if g is None else (id(g), g._version) for g in gradients]  # noqa: SLF001

    def _has_gradients(self) -> bool:
        return any(output.grad is not None for output in self.engine.outputs)

    def _note_calls(self) -> None:
        """Networks may have been called under the optimizer that is toggled."""
        number = len(self.engine.outputs)
        if number > self._num_calls:
            self._called_under.add(self._toggled)
        self._num_calls = number

    def _use_gradients(self, optimizers: Iterable[Any]) -> None:
        """These optimizers' gradients are needed now; if some are the networks', fetch them."""
        student = set(map(id, self.student))
        together = self._run.num_replicas > 1  # all gradients of a rank are averaged at once
        if together or any(id(p) in student for each in optimizers for p in parameters_of(each)):
            self._finish_backward()

    def _finish_backward(self) -> None:
        """The backward through the pipeline, once per batch."""
        if self._is_used:
            return
        replicas = self._run.replicas
        reached = not replicas.all_say(not self._has_gradients())
        toggled = self._toggled_for_networks() if reached else None
        self._is_used, self._is_pending = True, False
        self._used = self.engine.outputs
        self._do("backward", reached, toggled, self._run.reduces, self._num_backwards, now=True)
        for output in self._used:
            output.grad = None

    def _toggled_for_networks(self) -> int | None:
        """The one optimizer whose parameters are to have gradients; None: all."""
        self._note_calls()
        called, backward = self._called_under, self._backward_under or {self._toggled}
        either = (called | backward) - {None}
        refuse({
            "several toggled optimizers in one training_step call the pipelined networks, but the "
            "gradients of a batch are computed in one go. Toggle one optimizer per batch, as in "
            "`opt = self.optimizers()[batch_idx % 2]`, or none":
            max(len(called), len(backward), len(either)) > 1
        })  # fmt: skip
        return next(iter(either), None)

    def _refuse_late(self) -> None:
        refuse({
            "a backward reaches the pipelined networks after an optimizer used their "
            "gradients (step, clip_gradients or zero_grad). Call manual_backward for all losses "
            "first, or for their sum, then the optimizers":
            any(output.grad is not None for output in self._used)
        })  # fmt: skip

    def finish(self, result: Any) -> Any:
        """The user's step is over on the loss rank: what is left to do, on all ranks.

        Args:
            result: What it returned there.

        Returns:
            The same; on other ranks what stands for its loss until that is told, if it has one.
        """
        if not self.engine.is_loss_rank:
            shape = self.follow()
            return None if shape is None else torch.zeros(shape, device=self._run.root_device)
        self._finish_backward()
        self._refuse_late()
        loss = result.get("loss") if isinstance(result, Mapping) else result
        self._told.append((END, None if loss is None else tuple(loss.shape)))
        self._tell()
        self._used = []
        return result

    def _do(self, *command: Any, now: bool = False) -> Any:
        """Carry out a command here, and have the others do so: now, or with the next one."""
        self._told.append(command)
        if now:
            self._tell()
        with self._outside():
            return self._carry_out(command)

    def _tell(self) -> None:
        self._run.transport.broadcast_object(self._told, LOSS_RANK)
        self._told = []

    # What all ranks do

    def follow(self) -> tuple[int, ...] | None:
        """On the other ranks: do what the loss rank tells, until its step is over.

        Returns:
            The shape of the loss that it has returned; None if it has returned none.
        """
        recorder = self._run.recorder
        while True:
            started = time.perf_counter()
            commands = self._run.transport.broadcast_object(None, LOSS_RANK)
            recorder.paused("receive", started)
            for command in commands:
                if command[0] == END:
                    return cast("tuple[int, ...] | None", command[1])
                self._carry_out(command)

    def _carry_out(self, command: Command) -> Any:
        """Do it, on this rank."""
        name, *args = command
        return getattr(self, name)(*args)

    def before_backward(self) -> None:
        """A backward begins on the loss rank."""
        loss = torch.zeros((), device=self._run.root_device)
        self._run.pre_backward(loss)
        self._run.precision_plugin.pre_backward(loss, self._run.module)

    def backward(
        self, reached: bool, toggled: int | None, reduce: bool, num_backwards: int
    ) -> None:
        """Through the pipeline, from the networks' outputs to their parameters.

        Args:
            reached: Whether there are gradients at the outputs; if not, parameters have none
                afterwards either (and not zeros, by which an optimizer would take a step).
            toggled: The optimizer whose parameters alone are to have gradients; None: all.
            reduce: Whether the gradients become the means over the replicas.
            num_backwards: How many backwards of the user added up.
        """
        with (
            attributes_replaced((p, "grad", None) for p in self._untouched(reached, toggled)),
            torch.enable_grad(),
            self._run.precision_plugin.forward_context(),
        ):
            self.engine.backward(lambda: None, reduce=reduce)
        self.after_backward(num_backwards)

    def after_backward(self, num_backwards: int = 1) -> None:
        """Gradients are there."""
        self.waiting = set(range(len(self.optimizers)))
        loss = torch.zeros((), device=self._run.root_device)
        for _ in range(num_backwards):
            self._run.precision_plugin.post_backward(loss, self._run.module)
            self._run.post_backward(loss)

    def _untouched(self, reached: bool, toggled: int | None) -> list[nn.Parameter]:
        """The parameters of this rank whose gradients stay what they are."""
        here = [parameter for parameter in self.student if not parameter.is_meta]
        if not reached:
            return here
        if toggled is None:
            return []
        known = {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}
        off = known - set(map(id, parameters_of(self.optimizers[toggled])))
        return [parameter for parameter in here if id(parameter) in off]

    def step(
        self, index: int, raw: bool, kwargs: dict[str, Any], groups: list[dict[str, Any]]
    ) -> Any:
        """An optimizer's step.

        Args:
            index: Which optimizer.
            raw: Whether past Lightning's wrapper, without hooks and counters.
            kwargs: What the user gave to ``step``.
            groups: The hyperparameters on the loss rank, where the user may have changed them.
        """
        self.waiting.discard(index)
        optimizer = self.optimizers[index]
        plain = plain_optimizer(optimizer)
        set_hyperparameters(plain, groups)
        if not raw:
            return optimizer.step(**kwargs)
        with self._sharding.stepping(plain):
            return plain.step(**kwargs)

    def zero_grad(self, index: int | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Of an optimizer, or of the module."""
        owner = self._run.module if index is None else self.optimizers[index]
        owner.zero_grad(*args, **kwargs)

    def clip(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """``clip_gradients`` of the module."""
        self._run.module.clip_gradients(plain_optimizer(self.optimizers[index]), *args, **kwargs)

    def schedule(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A step of a scheduler."""
        self._run.lr_scheduler_configs[index].scheduler.step(*args, **kwargs)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Replaces methods of an optimizer where nothing is to happen."""


def _check_closure(closure: Any = None, **_kwargs: Any) -> None:
    refuse({
        "optimizer.step(closure) runs a part of the step when the optimizer decides to. "
        "Move the closure's lines before it: the loss, self.manual_backward(loss), then "
        "optimizer.step()": closure is not None
    })  # fmt: skip
