"""Host copies of sample ids that were moved to the device with their batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override


class OnHost:
    """Host copies of integer vectors that were moved to a device.

    Reading them from a GPU would block the host until all work launched before has run.

    >>> import torch
    >>> ids, on_host = torch.tensor([3, 4]), OnHost()
    >>> with on_host.noting():
    ...     moved = ids.to("meta")
    >>> on_host.of(moved)
    tensor([3, 4])
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return OnHost, ()  # another process has other tensors

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember what is moved inside of the context, while the moved tensor lives."""
        with _Noting(self._known):
            yield

    def of(self, moved: Tensor) -> Tensor:
        """The same values on the host; copied if they are unknown or have changed since."""
        if moved.device.type == "cpu":
            return moved
        values, version = self._known.get(moved, (None, None))
        return values if version == moved._version else moved.cpu()  # noqa: SLF001


class _Noting(TorchFunctionMode):
    def __init__(self, known: Any) -> None:
        super().__init__()
        self._known = known

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to or func is Tensor.cuda:
            before = args[0]
            is_moved = before.device.type == "cpu" and result.device.type != "cpu"
            if is_moved and before.dim() == 1 and not before.is_floating_point():
                # A copy, since the user may write into the loader's tensor.
                self._known[result] = before.to(result.dtype, copy=True), result._version  # noqa: SLF001
        return result
