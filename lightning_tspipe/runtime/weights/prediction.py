"""How the next updates will change a parameter: by its optimizer, or as an average of others.

An optimizer keeps a smoothed gradient, which changes slowly: the next step will be about what that
alone gives. So the weights after s more steps are about ``W - s * update`` (Chen et al., SpecTrain,
2018; Guan et al., *PipeOptim*, 2023). With the learning rate in force, g the last gradient, v the
momentum buffer, m and n Adam's averages, corrected for the steps that were completed:

==========================  =====================================
SGD, also with Nesterov     lr * v
SGD without momentum        lr * (g + decay * W)
Adam                        lr * m / (sqrt(n) + eps)
AdamW                       lr * (m / (sqrt(n) + eps) + decay * W)
RMSprop                     lr * v, or lr * g / (sqrt(n) + eps)
LARS (lightly's)            lr * v
==========================  =====================================

A last gradient is none that an optimizer keeps; :func:`remember_gradients` puts it into its state,
where checkpoints find it.

A teacher that runs ahead reads the weights that it is expected to have one update later. An average
moves slowly and smoothly: its next move is about its last one. With ξ(n) the teacher that step n
would read if it didn't run ahead::

    T(n+1), in step n, reads   ξ(n) + (ξ(n) - ξ(n-1))    for the ξ(n+1) that it can't know yet

That needs no word about how the average is made, in the step or in a hook, and two copies of
the teacher. The first forward that runs ahead reads ξ(n) as it is; where a run was resumed, a
checkpoint tells of ξ(n-1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.stages.stage import Versions
from lightning_tspipe.runtime.weights.saved_tensors import Slot, replaced

_LAST = "last_gradient"

Group = Mapping[str, Any]
State = Mapping[str, Any]
Rule = Callable[[Tensor, State, Group], Tensor | None]


@runtime_checkable
class PredictsUpdate(Protocol):
    """What an optimizer of your own has, so that its weights can be predicted.

    Example:
        >>> class Signed(torch.optim.SGD):
        ...     def predict_update(self, parameter, group):
        ...         state = self.state.get(parameter)
        ...         return None if not state else group["lr"] * state["momentum_buffer"].sign()
        >>> issubclass(Signed, PredictsUpdate)
        True
    """

    def predict_update(self, parameter: Tensor, group: Group) -> Tensor | None:
        """What the next ``step`` is expected to subtract, as far as the state tells.

        Args:
            parameter: One of the optimizer's.
            group: Its group.

        Returns:
            A tensor of the parameter's shape; None before the first step.
        """


def check_predictable(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers whose updates nobody can predict.

    Raises:
        ConfigurationError: Says how to teach it.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, PredictsUpdate) and _rule_of(optimizer) is None:
            raise ConfigurationError(
                f"{type(optimizer).__name__}: it is not known how to predict its updates. Give it "
                "a method predict_update(parameter, group) (see lightning_tspipe.PredictsUpdate), "
                "or use weights='pipedream' or '2bw', which predict nothing"
            )


def check_momentum(optimizers: Iterable[Optimizer]) -> None:
    """Refuse all but SGD with momentum, for which alone SpecTrain is defined.

    Raises:
        ConfigurationError: Another one.
    """
    for optimizer in optimizers:
        if type(optimizer) is not SGD or not all(g["momentum"] for g in optimizer.param_groups):
            raise ConfigurationError(
                f"weights='spectrain' predicts by the momentum of SGD, and this is "
                f"{type(optimizer).__name__}. Use torch.optim.SGD(..., momentum=...), or "
                "weights='pipeoptim', which knows other optimizers"
            )


def predicted_update(optimizer: Optimizer, parameter: Tensor, group: Group) -> Tensor | None:
    """What the next step of an optimizer is expected to subtract from a parameter.

    Returns:
        None before the first step.
    """
    if isinstance(optimizer, PredictsUpdate):
        return optimizer.predict_update(parameter, group)
    rule, state = _rule_of(optimizer), optimizer.state.get(parameter)
    assert rule is not None, "check_predictable comes first"
    return rule(parameter.detach(), state, group) if state else None


def remember_gradients(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """After a step: keep the gradients, if predicting the optimizer's next step needs them."""
    if type(optimizer) not in {SGD, RMSprop}:
        return
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters:
        group = groups.get(id(parameter))
        if group is not None and not group["momentum"] and parameter.grad is not None:
            optimizer.state[parameter][_LAST] = parameter.grad.detach().clone()


def _rule_of(optimizer: Optimizer) -> Rule | None:
    kind = type(optimizer)
    if kind.__name__ == "LARS" and kind.__module__.startswith("lightly."):
        return _momentum if all(g["momentum"] for g in optimizer.param_groups) else None
    return _RULES.get(kind)


def _momentum(parameter: Tensor, state: State, group: Group) -> Tensor | None:  # noqa: ARG001
    buffer = state.get("momentum_buffer")
    return None if buffer is None else group["lr"] * buffer


def _adam(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    # No number of the host's, wherever the counter is: nobody waits for it.
    step = torch.as_tensor(state["step"]).double().clamp(min=1)
    beta1, beta2 = group["betas"]
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    mean = state["exp_avg"] / (1 - beta1**step)
    update = mean / ((squares / (1 - beta2**step)).sqrt() + group["eps"])
    if group.get("decoupled_weight_decay"):
        update = update + group["weight_decay"] * parameter
    return group["lr"] * update  # type: ignore[no-any-return]


def _by_last_gradient(parameter: Tensor, state: State, group: Group) -> Tensor | None:
    """Of SGD and RMSprop, which have a momentum buffer only if they are told to."""
    if group["momentum"]:
        return _momentum(parameter, state, group)
    update = state.get(_LAST)
    if update is None:
        return None
    # Averages hold gradients of which maximize has taken the sign already; this one is as it came.
    update = -update if group.get("maximize") else update
    update = update + group["weight_decay"] * parameter
    if "square_avg" in state:
        squares = state["square_avg"]
        if group["centered"]:
            squares = squares - state["grad_avg"].square()
        update = update / (squares.sqrt() + group["eps"])
    return group["lr"] * update  # type: ignore[no-any-return]


_RULES: dict[type[Optimizer], Rule] = {
    SGD: _by_last_gradient, Adam: _adam, AdamW: _adam, RMSprop: _by_last_gradient
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TeacherDistance:
    """How far this rank's part of a teacher was from the one that was meant, squared.

    Attributes:
        step: The step that it was meant for.
        squares: Of the teacher of one update before, and of the one that was read; shape (2,), on
            the device: nobody waits for it before it is logged.
    """

    step: int
    squares: Tensor


class TeacherPrediction(Versions):
    """Predicts this rank's part of the teacher.

    Args:
        blocks: Of the teacher, by name; parameters of other ranks are on the meta device.
        state: What :meth:`state` gave on all ranks of the run that is resumed.

    Attributes:
        distances: Of the steps so far; take them and clear the list.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], state: Mapping[str, Any] | None = None
    ) -> None:
        self._slots: dict[str, Slot] = {
            f"{block}.{path}.{name}": (module, name)
            for block, whole in blocks.items()
            for path, module in whole.named_modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if not parameter.is_meta
        }
        self._step = -1
        self._before: dict[str, Tensor] = {}
        self._moves: dict[str, Tensor] = {}
        self.distances: list[TeacherDistance] = []
        if state is not None and self._slots.keys() <= state["before"].keys():
            self._step = state["step"]
            self._before, self._moves = (
                {key: state[kind][key].to(now) for key, now in self._now().items()}
                for kind in ("before", "moves")
            )

    def state(self) -> dict[str, Any]:
        """What another run needs to predict its first step, by the names of parameters."""
        return {"step": self._step, "before": self._before, "moves": self._moves}

    def _now(self) -> dict[str, Tensor]:
        slots = self._slots.items()
        return {key: module.get_parameter(name).detach() for key, (module, name) in slots}

    @override
    def forward(self, batch: int, offset: int) -> AbstractContextManager[None]:
        return self.reading(batch - offset) if offset else nullcontext()

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Around a forward that runs ahead, in a step: the modules hold predicted parameters."""
        if step != self._step:
            self._begin(step)
        predicted = [now + self._moves[key] for key, now in self._before.items()]
        with replaced(zip(self._slots.values(), predicted, strict=True)):
            yield

    @torch.no_grad()
    def _begin(self, step: int) -> None:
        now = {key: tensor.clone() for key, tensor in self._now().items()}
        if self._before:
            # Several updates, where the pipeline was empty in between.
            num_updates = step - self._step
            moves = {key: (new - self._before[key]) / num_updates for key, new in now.items()}
            if num_updates == 1:
                moved = list(moves.values())
                errors = torch._foreach_sub(moved, list(self._moves.values()))  # noqa: SLF001
                squares = torch.stack([_square_of(moved), _square_of(errors)])
                self.distances.append(TeacherDistance(step, squares))
        else:
            moves = {key: torch.zeros_like(tensor) for key, tensor in now.items()}
        self._step, self._before, self._moves = step, now, moves


def _square_of(tensors: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(tensors))  # noqa: SLF001
    return torch.stack(norms).double().square().sum()
