"""Stand-ins of parameters that may not be written into: what a step did not do when it was traced.

A step that copies its student into its teacher now and then may not have done so with its first
batch. Then no rank would do it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks.location import current_line
from lightning_tspipe.networks.swap import meta_like
from lightning_tspipe.networks.tape import memory_of
from lightning_tspipe.replacing import TensorSwap

_DATA: Any = Tensor.data


def unwritten(
    modules: Iterable[nn.Module], read: Iterable[Tensor] = ()
) -> Callable[[], AbstractContextManager[None]]:
    """What makes parameters and buffers of some modules ones without values, which nothing changes.

    Args:
        modules: The modules.
        read: What stays as it is.

    Returns:
        A context; while inside, a write is a CaptureError that names its line.
    """
    stay = set(map(id, read))
    swapped = TensorSwap(modules, lambda t: t if id(t) in stay else _Unwritten.like(t))

    @contextmanager
    def watched() -> Iterator[None]:
        with swapped():
            try:
                yield
            except _WrittenError as error:
                raise CaptureError(
                    f"the step changes a parameter of a pipelined network, at {error}, and did not "
                    "when it was traced, with its first batch: no rank would do it. Do it with the "
                    "first batch too, or in on_train_batch_end"
                ) from None

    return watched


class _WrittenError(BaseException):
    """A write at a line; ``load_state_dict`` would make something else of an Exception."""


class _Unwritten(Tensor):
    """A tensor without values that refuses to be written into, as its views do."""

    @classmethod
    def like(cls, tensor: Tensor) -> Self:
        """A stand-in of a tensor."""
        return meta_like(tensor).as_subclass(cls)

    @override
    def __deepcopy__(self, memo: Any) -> Tensor:
        made = meta_like(self).as_subclass(Tensor)
        return nn.Parameter(made) if isinstance(self, nn.Parameter) else made

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, cls)]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as Tensor's own does
            before = [tensor._version for tensor in found]  # noqa: SLF001
            result = func(*args, **kwargs)
            after = [tensor._version for tensor in found]  # noqa: SLF001
            if before != after or (func == _DATA.__set__ and isinstance(args[0], cls)):
                raise _WrittenError(current_line())
            memory = set(map(memory_of, found))

            def as_view(tensor: Tensor) -> Tensor:
                is_view = memory_of(tensor) in memory and not isinstance(tensor, cls)
                return tensor.as_subclass(cls) if is_view else tensor

            return pytree.tree_map_only(Tensor, as_view, result)
