"""What functions of torch do, as their names tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

# Looking at the type of a tensor does not read its values.
HARMLESS = frozenset(
    f"torch.Tensor.{name}"
    for name in (
        "size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "__len__",
        "is_contiguous", "is_floating_point", "is_complex", "storage_offset", "get_device",
        "shape.__get__", "dtype.__get__", "device.__get__", "ndim.__get__", "layout.__get__",
        "requires_grad.__get__", "requires_grad.__set__", "requires_grad_", "is_leaf.__get__",
        "is_cuda.__get__", "is_meta.__get__", "is_sparse.__get__", "is_quantized.__get__",
        "grad_fn.__get__", "grad.__get__", "_version.__get__", "is_nested.__get__",
        "is_cpu.__get__", "is_mps.__get__", "is_xpu.__get__", "itemsize.__get__",
        "nbytes.__get__", "names.__get__", "retains_grad.__get__", "register_hook",
        "is_inference", "is_signed", "is_conj", "is_neg", "__hash__", "data_ptr",
    )
)  # fmt: skip
MOVES = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.pin_memory})
_GRADIENT = "grad.__set__"
_IN_PLACE_NAMES = frozenset({"copy_", "__setitem__", "set_", "data.__set__", _GRADIENT})


def name_of(func: Callable[..., Any]) -> str:
    """Such as ``torch.Tensor.add_``."""
    return str(resolve_name(func) or getattr(func, "__name__", repr(func)))


def writes_in_place(name: str) -> bool:
    """Whether a function changes its first argument."""
    last = name.rsplit("Tensor.", 1)[-1].rsplit("torch.", 1)[-1].rsplit(".", 1)[-1]
    full = name.rsplit("Tensor.", 1)[-1]
    return (
        full in _IN_PLACE_NAMES
        or (last.endswith("_") and not last.endswith("__") and last != "requires_grad_")
        or (last.startswith("__i") and last.endswith("__"))
    )


def writes_gradient(name: str) -> bool:
    """Whether a function gives its first argument another gradient."""
    return name.rsplit("Tensor.", 1)[-1] == _GRADIENT
