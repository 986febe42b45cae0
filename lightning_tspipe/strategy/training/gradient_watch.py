"""Gradients, of which each rank has a part: a number that is computed from them would be wrong.

Hooks and optimizers run on every rank. There, gradients are those of the rank's own parameters, and
a norm over all that are at hand would be another one on each rank. What decides about one parameter
by its own gradient, and then updates it, is the same wherever that parameter lies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.location import current_line, is_own

_WATCHES = str(Path(__file__).with_name("gradient_")), str(Path(__file__).with_name("weight_"))
_NEITHER = (str(Path(torch.__file__).parent), *_WATCHES)
_GRADIENT: Any = Tensor.grad


def is_own_code() -> bool:
    """Whether it is code of this package that runs an operation; it knows what it does."""
    frame = sys._getframe(1)  # noqa: SLF001 - a stack with its texts takes a hundred times as long
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NEITHER):
        frame = frame.f_back
    return is_own(frame.f_code.co_filename)


def enter(mode: TorchFunctionMode) -> None:
    """Put a mode under all others, but for torch's own of a default device, which must be lowest.

    So a hook may enter one and another hook leave it, while this one comes and goes.
    """
    above: list[TorchFunctionMode] = []
    while (top := overrides._get_current_function_mode()) is not None:  # noqa: SLF001 - no public way
        if isinstance(top, DeviceContext):
            break
        above.append(overrides._pop_mode())  # noqa: SLF001
    for each in (mode, *reversed(above)):
        overrides._push_mode(each)  # noqa: SLF001


def leave(mode: TorchFunctionMode) -> None:
    """Take a mode away from under others."""
    above: list[TorchFunctionMode] = []
    if mode in overrides._get_current_function_mode_stack():  # noqa: SLF001 - no public way
        while (top := overrides._pop_mode()) is not mode:  # noqa: SLF001
            above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)  # noqa: SLF001


def _is_in(made: Tensor, parameter: Tensor) -> bool:
    """Whether what an operation has made lies in a parameter's memory: it has updated it."""
    return made.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


class GradientWatch(TorchFunctionMode):
    """While on, refuses a number that is computed from the gradients of several parameters.

    Args:
        parameters: Those that are spread over the ranks.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._spread = {id(parameter): parameter for parameter in parameters}
        self._sources: Any = {}  # which travels to workers, with the strategy
        self._forget()
        self.is_on = self._are_partial = False

    def start(self, *, are_partial: bool = False) -> None:
        """From now on.

        Args:
            are_partial: Whether gradients lack parts, so that nobody may read them at all.
        """
        self._are_partial = are_partial
        if not self.is_on:
            self.is_on, self._sources = True, WeakIdKeyDictionary()
            enter(self)

    def stop(self) -> None:
        """Until now."""
        if self.is_on:
            self.is_on = False
            leave(self)
            self._forget()

    def _forget(self) -> None:
        self._sources = {}
        self._numbers: frozenset[int] = frozenset()
        self._decisions: frozenset[int] = frozenset()

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__self__", None) is _GRADIENT:
            if isinstance(result, Tensor) and id(args[0]) in self._spread:
                self._sources[result] = frozenset({id(args[0])})
                self._refuse_partial()
        else:
            self._follow(func, args, kwargs, result)
        return result

    def _of(self, value: Any) -> frozenset[int]:
        """The parameters whose gradients a tensor, or several, were computed from."""
        leaves = pytree.tree_leaves(value)
        found = (self._sources.get(leaf, ()) for leaf in leaves if isinstance(leaf, Tensor))
        return frozenset().union(*found)

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        given = [*args, *kwargs.values()]
        sources = self._of(given)
        if not sources or is_own_code():
            return
        made = args[0] if result is None and args else result  # written in place
        if isinstance(made, Tensor):
            self._note(made, sources)
        elif isinstance(made, (list, tuple)):
            # One after the other: what is computed of one parameter stays with it.
            lists = [v for v in given if isinstance(v, (list, tuple)) and len(v) == len(made)]
            others = self._of([v for v in given if not isinstance(v, (list, tuple))])
            for place, tensor in enumerate(made):
                self._note(tensor, self._of([each[place] for each in lists]) | others)
        elif sources - self._numbers and swap.needs_values(func, args, kwargs):
            # Numbers can be added up; a decision is over with the update that it was about.
            if isinstance(result, bool):
                self._decisions |= sources
            else:
                self._numbers |= sources
            self._refuse_several(self._numbers | self._decisions)

    def _note(self, tensor: Any, sources: frozenset[int]) -> None:
        if isinstance(tensor, Tensor) and sources:
            self._sources[tensor] = sources
            self._decisions -= {s for s in sources if _is_in(tensor, self._spread[s])}
            if tensor.numel() == 1:
                self._refuse_several(sources)

    def _refuse_partial(self) -> None:
        if self._are_partial and not is_own_code():
            raise ConfigurationError(
                f"a gradient is read in the middle of a window, at {current_line()}. With this "
                "schedule a backward may end in the steps behind its own: gradients are complete "
                "where the window ends, in on_before_optimizer_step. Read them there, call "
                "self.trainer.strategy.grad_norm() on all ranks, or use schedule='1f1b' with "
                "weights='synchronous', where each step has its backward"
            )

    @staticmethod
    def _refuse_several(sources: frozenset[int]) -> None:
        if len(sources) > 1:
            raise ConfigurationError(
                f"a number is computed from the gradients of several parameters, at "
                f"{current_line()}, and each rank has gradients of its own parameters only: it "
                "would be another number on each rank. The norm over all ranks is "
                "self.trainer.strategy.grad_norm(), which every rank calls; clip with the "
                "Trainer's gradient_clip_val or self.clip_gradients(...). An optimizer that "
                "computes with a norm over all gradients cannot be used"
            )
