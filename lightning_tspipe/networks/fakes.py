"""Tensors without values: shapes, types and devices are found on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from typing_extensions import override


class Fakes(FakeTensorMode):
    """Makes them, also of real tensors that they meet.

    torch asks at each operation whether there is a GPU, which takes as long as the operation, and
    where there is none a process that asks cannot be forked any more; here it asks once, and only
    for a GPU.

    Args:
        device: Where they are to be.
        sizes: Knows what was asked about sizes that are no numbers. Without, only those that
            depend on values, as those of ``nonzero``, are none.
    """

    def __init__(self, device: torch.device, sizes: ShapeEnv | None = None) -> None:
        self._device = device
        self._uses_gpu = device.type == "cuda" and torch.cuda.is_available()
        env = ShapeEnv() if sizes is None else sizes
        static = True if sizes is None else None
        super().__init__(shape_env=env, static_shapes=static, allow_non_fake_inputs=True)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor without values, in the same order in memory, that lies where these are to be."""
        size, strides = tensor.shape, tensor.stride()
        with self:
            made = torch.empty_strided(size, strides, dtype=tensor.dtype, device=self._device)
        made._is_param = isinstance(tensor, nn.Parameter)  # noqa: SLF001 - it needs no copy then
        return made.requires_grad_(tensor.requires_grad and made._is_param)  # noqa: SLF001

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.native_batch_norm.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        # torch computes it from a dozen operations, which takes 50 ms where sizes are no numbers.
        given, *_, trains, _, _ = args
        with self:
            kept = given.new_empty(given.shape[1] if trains else 0, dtype=_statistics(given.dtype))
            return torch.empty_like(given), kept, torch.empty_like(kept)

    @property
    @override
    def avoid_device_init(self) -> bool:
        return not self._uses_gpu


def _statistics(dtype: torch.dtype) -> torch.dtype:
    """The type in which a batch normalisation keeps means."""
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype
