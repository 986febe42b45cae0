"""Several heads on one frozen trunk: the student of fan-out transfer learning.

A module has a ``teacher`` (the trunk) and a ``student = StudentFanout(...)``. Its steps are written
as for one head; ``FanoutTraining`` runs them once for each, and the trunk once for all::

    training_step(batch)             heads        trunk
      self.teacher(x)        a, b, c: once each   once
      self.student(f)        the head whose turn it is
      self.log("loss", ...)  a/loss, b/loss, c/loss

On one device that is all of them, in a pipeline those whose parameters are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads.student import StudentFanout
from lightning_tspipe.late import Late, after_backward
from lightning_tspipe.networks import swap
from lightning_tspipe.random_states import RandomStates
from lightning_tspipe.replacing import attributes_replaced

STOPPED = "stopped_heads"
"""Where a checkpoint has them, with the reasons."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class HeadOptimizers(torch.optim.Optimizer):
    """Optimizers of any kinds, as one: each updates its own parameters.

    Args:
        optimizers: By the names of the heads.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        groups = [group for each in self.optimizers.values() for group in each.param_groups]
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Groups and state are the same objects in the parts and in the whole."""
        start = 0
        for each in self.optimizers.values():
            stop = start + len(each.param_groups)
            each.param_groups = self.param_groups[start:stop]
            each.state = self.state
            start = stop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all heads that have gradients."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for each in self.optimizers.values():
            each.step()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._share()


class FanoutTraining:
    """Runs the steps of a LightningModule once for each head of its ``student``.

    Derive from it first: ``class Tasks(FanoutTraining, LightningModule)``. In a step,
    ``self.teacher(x)`` gives the features, ``self.student(f)`` the output of the active head,
    ``self.head`` its name, and what is logged gets the name of the head in front. All heads give
    the trunk the same input, and it runs once.
    """

    student: StudentFanout
    teacher: nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _STEPS:
            if name in vars(cls):
                setattr(cls, name, _for_each_head(vars(cls)[name], name))

    @property
    def head(self) -> str:
        """The active head."""
        active = self.student.active
        if active is None:
            raise ConfigurationError("no head is active: self.head is only defined in a step")
        return active

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, under the name of the active head: ``animal/loss``."""
        active = self.student.active
        super().log(name if active is None else f"{active}/{name}", *args, **kwargs)  # type: ignore[misc]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint says which heads have stopped."""
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        checkpoint[STOPPED] = dict(self.student.stopped)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """They are trained no further by a run that goes on from it."""
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        trainer = getattr(self, "_trainer", None)
        if trainer is not None and trainer.state.fn == "fit":
            for name, reason in checkpoint.get(STOPPED, {}).items():
                self.student.stop(name, reason)

    def head_optimizer(
        self,
        name: str,
        parameters: list[nn.Parameter],  # noqa: ARG002 - for those who override it
    ) -> torch.optim.Optimizer:
        """The optimizer of one head; for ``configure_optimizers`` as it is here.

        Args:
            name: The head.
            parameters: What it trains.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has neither configure_optimizers nor head_optimizer({name!r}, "
            "parameters): one of them says how heads are trained"
        )

    def configure_optimizers(self) -> Any:
        """One optimizer for Lightning, of one for each head."""
        return HeadOptimizers(
            {
                name: self.head_optimizer(name, list(head.parameters()))
                for name, head in self.student.heads.items()
            }
        )

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 - as Lightning calls it
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each head by its own gradients, as if it were alone."""
        if not gradient_clip_val:
            return
        for head in self.student.heads.values():
            parameters = [p for p in head.parameters() if p.grad is not None]
            if gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(parameters, gradient_clip_val)
            else:
                nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


def refuse_trained_trunk(trunk: nn.Module) -> None:
    """Refuse a trunk that would be trained.

    Raises:
        ConfigurationError: Names its trainable parameters.
    """
    names = [name for name, parameter in trunk.named_parameters() if parameter.requires_grad]
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
        raise ConfigurationError(
            f"the trunk has parameters that require gradients: {shown}. A trunk is frozen: "
            "self.teacher.requires_grad_(False); put what is trained into a head"
        )


def _for_each_head(function: Callable[..., Any], step: str) -> Callable[..., Any]:
    trains = step == "training_step"

    @functools.wraps(function)
    def for_each_head(self: Any, *args: Any, **kwargs: Any) -> Any:
        student = self.student
        if student.active is not None:  # by a subclass's step
            return function(self, *args, **kwargs)
        if trains and not student.rehearses:
            refuse_trained_trunk(self.teacher)
        results: dict[str, Any] = {}
        shared = _SharedTrunk(self.teacher, compares=not student.rehearses)
        # Each head draws the random numbers that it would draw alone; what follows goes on where
        # the first one ended.
        before, after = RandomStates.now(), None
        with swap.forwards_replaced({self.teacher: shared.forward}):
            for name in student.trained if trains else student.here:
                if results:
                    after = after or RandomStates.now()
                    before.restore()
                with student.only(name), shared.turn(name):
                    results[name] = function(self, *args, **kwargs)
        if after is not None:
            after.restore()
        if trains and results:
            return _total(self, results, shared)
        shared.look()
        return torch.zeros((), device=self.device, requires_grad=True) if trains else results

    return for_each_head


class _SharedTrunk:
    """A trunk that runs in the first head's turn; the others get what it returned.

    Whether all heads give it the same is looked at later where a device computes it.

    Args:
        trunk: The trunk.
        compares: Whether values mean something.
    """

    def __init__(self, trunk: nn.Module, *, compares: bool) -> None:
        self._run = trunk.forward
        self._compares = compares
        self._calls: list[tuple[list[Any], Any, list[int]]] = []  # given, returned, versions
        self._reader, self._place = "", 0
        self._is_running = False
        self._verdicts: list[tuple[str, Late]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's, or what it returned at this place in the first head's turn."""
        if self._is_running:  # a trace runs it once more within its call
            return self._run(*args, **kwargs)
        place, self._place = self._place, self._place + 1
        given = pytree.tree_leaves((args, kwargs))
        if place == len(self._calls):
            with attributes_replaced([(self, "_is_running", True)]):
                result = self._run(*args, **kwargs)
            self._calls.append((given, result, _versions(result)))
        else:
            self._compare(given, self._calls[place][0])
        return self._calls[place][1]

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """While inside, it is the turn of this head."""
        self._reader, self._place = name, 0
        yield
        for _, result, versions in self._calls:
            if _versions(result) != versions:
                raise ConfigurationError(
                    f"head {name!r} changes the features in place, which the other heads read "
                    "too. Use inplace=False in its first layers"
                )

    def _compare(self, given: Sequence[Any], known: Sequence[Any]) -> None:
        """Note whether a head's inputs are those of the first one."""
        pairs = [(a, b) for a, b in zip(given, known, strict=False) if a is not b]
        if len(given) != len(known) or not all(starmap(_are_alike, pairs)):
            _refuse_input(self._reader)
        for a, b in pairs:
            if self._compares and isinstance(a, Tensor) and not a.is_meta:
                with torch._C.DisableTorchFunction():  # noqa: SLF001 - a look is no use of it
                    self._verdicts.append((self._reader, Late((a != b).any())))

    def look(self) -> None:
        """Refuse inputs that differ.

        Raises:
            ConfigurationError: Names the head.
        """
        for reader, differs in self._verdicts:
            if differs.tolist():
                _refuse_input(reader)


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two inputs are tensors of one kind, or equal values of another."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _refuse_input(reader: str) -> None:
    raise ConfigurationError(
        f"head {reader!r} gives the trunk a different input than the first head, but all heads "
        "share one pass. Compute the input in the dataset, or in on_after_batch_transfer"
    )


def _versions(result: Any) -> list[int]:
    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves]  # noqa: SLF001


def _total(module: Any, results: dict[str, Any], shared: _SharedTrunk) -> Tensor:
    """The sum of the losses: its gradients are those of each head's own loss."""
    losses = {
        name: result["loss"] if isinstance(result, Mapping) else result
        for name, result in results.items()
    }
    for name, loss in losses.items():
        if not isinstance(loss, Tensor):
            raise ConfigurationError(f"training_step returned no loss for head {name!r}")
    student = module.student
    if student.rehearses or any(loss.is_meta for loss in losses.values()):
        untold: Tensor = functools.reduce(torch.add, losses.values())
        return untold
    # Heads have nothing in common but a frozen trunk: one that has diverged spoils no other's
    # gradients, and loses its own before any optimizer sees them.
    late = Late(torch.stack([loss.detach().double().sum() for loss in losses.values()]))
    finite = (loss.where(loss.isfinite(), loss.new_zeros(())) for loss in losses.values())
    total: Tensor = functools.reduce(torch.add, finite)

    def look() -> None:
        shared.look()
        for name, value in zip(losses, late.tolist(), strict=True):
            student.judge(name, value)
            if name in student.stopped:
                _refuse_common(module, name)

    after_backward(total, look)
    return total


def _refuse_common(module: Any, name: str) -> None:
    """Refuse to go on without a head if it has spoilt the gradients of others."""
    own = {id(p) for p in module.student.parameters()}
    for other, parameter in module.named_parameters():
        if parameter.grad is not None and id(parameter) not in own:
            raise ConfigurationError(
                f"head {name!r}: {module.student.stopped[name]}, and {other!r} learns from it too. "
                "A head can stop alone only if it shares no trained parameters: give each head its "
                "own, or leave on_nan='stop' out"
            )
