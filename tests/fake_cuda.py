"""Ranks as threads whose tensors claim to be on a GPU, on a machine that has none.

The step is captured on the CPU. From where stages are placed, everything runs on fake tensors of
``cuda:0``, which have no values: an operation that mixes devices raises, so does every look at a
value (``item``, ``bool``, ``tolist``), and copies to the host are counted. What needs a driver is
left out: a backward gives every leaf of its graph a gradient, and events say nothing. The steps
whose call inputs are compared read sums of them, which is meant: those sums are left out too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_tspipe.late import Late
from lightning_tspipe.networks.swap import meta_like
from lightning_tspipe.replay.purity import Fingerprint
from lightning_tspipe.runtime.execution.engine import Engine, Rank
from lightning_tspipe.runtime.execution.pipeline_engine import PipelineEngine
from lightning_tspipe.runtime.modes.relay.engine import RelayEngine
from lightning_tspipe.runtime.weights.ownership import Shards
from tests import device, strict

CUDA = torch.device("cuda:0")
META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies that the host would wait for, by operation.

    All those from the device, and those of the package to the device that are not said to be
    ``non_blocking``.
    """

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(t.device.type == "cpu" for t in made) and any(
            t.device.type == "cuda" and t.numel() for t in leaves
        ):
            self._found[str(func)] += 1
        is_copy = func in {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
        if (
            is_copy
            and any(t.device.type == "cuda" for t in made)
            and any(t.device.type == "cpu" and t.numel() for t in leaves)
            and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2])
        ):
            place = _place_in_package()
            if place:
                self._found[f"{func} in {place}"] += 1
        return result


def _place_in_package() -> str:
    """The file and line that called, if torch's own and the package's code alone lie between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or "/lightning_tspipe/" not in frame.f_code.co_filename:
        return ""
    return f"{frame.f_code.co_filename.rpartition('/lightning_tspipe/')[2]}:{frame.f_lineno}"


class _Event:
    """In the place of an event of a stream."""

    def record(self, *_: Any) -> None:
        """There is no stream."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def install(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have whatever is placed from now on run on fake tensors.

    Returns:
        Copies to the host, by operation, of all threads.
    """
    copies: Counter[str] = Counter()
    make, forward, begin = Engine.__init__, PipelineEngine.forward, RelayEngine.begin

    def make_on_fakes(self: Engine, here: Rank, captured: Any, *args: Any, **kw: Any) -> None:
        for network in captured.networks.values():
            network.device = CUDA
        for heads in captured.beside.values():
            heads.device = CUDA
        # Of this thread, which ends with the test.
        FakeTensorMode(allow_non_fake_inputs=True).__enter__()
        Copies(copies).__enter__()  # type: ignore[no-untyped-call]
        make(self, replace(here, device=CUDA), captured, *args, **kw)

    def forward_on_fakes(
        self: PipelineEngine, step: Any, batch: Any, ahead: Any = (), **kw: Any
    ) -> Any:
        ahead = [(_moved(each), its_step) for each, its_step in ahead]
        return forward(self, step, _moved(batch), ahead, **kw)

    def begin_on_fakes(self: RelayEngine, batch: Any, make_inputs: Any) -> Any:
        return begin(self, _moved(batch), make_inputs)

    # Fake tensors can't be of another class.
    monkeypatch.setattr("lightning_tspipe.replay.watching._Unwritten.like", staticmethod(meta_like))
    monkeypatch.setattr(Engine, "__init__", make_on_fakes)
    monkeypatch.setattr(PipelineEngine, "forward", forward_on_fakes)
    monkeypatch.setattr(RelayEngine, "begin", begin_on_fakes)
    monkeypatch.setattr(Shards, "place", _place)
    monkeypatch.setattr(Shards, "state_dict", lambda *_: {})
    monkeypatch.setattr(Late, "__init__", _begin_late)
    monkeypatch.setattr(Late, "tolist", lambda self: self._copy.tolist())
    monkeypatch.setattr(Fingerprint, "of", _print_of_shape)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.autograd, "backward", _backward)
    monkeypatch.setattr(Tensor, "backward", lambda loss, *_, **__: _backward(loss))
    monkeypatch.setattr(strict, "DEVICE", CUDA)
    monkeypatch.setattr(device, "HOST", CUDA)  # the tests compare nothing, and copy nothing
    monkeypatch.setattr(strict, "_bits", lambda _: b"")
    return copies


def _moved(batch: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(CUDA), batch)


def _print_of_shape(tensor: Tensor) -> Fingerprint:
    return Fingerprint(tuple(tensor.shape), 0.0, (), 0.0)


def _begin_late(late: Any, value: Tensor) -> None:
    """What is looked at late is never wrong."""
    assert value.device == CUDA, "a value that is on the host need not be looked at late"
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: PLC0415

    with unset_fake_temporarily():
        late._copy = torch.zeros(value.shape, dtype=value.dtype)


def _place(shards: Any, rank: int, device: torch.device) -> None:
    """Fake tensors can't be swapped with real ones: modules get new ones."""
    module = shards._module
    names = {id(p): name for name, p in module.named_parameters()}
    new: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, own in part._parameters.items():
            if own is not None:
                if id(own) not in new:
                    where = device if shards.holds(names[id(own)], rank) else META
                    made = torch.empty(own.shape, dtype=own.dtype, device=where)
                    new[id(own)] = nn.Parameter(made, requires_grad=own.requires_grad)
                part._parameters[key] = new[id(own)]
        for key, buffer in part._buffers.items():
            if buffer is not None:
                where = device if shards.holds(f"{prefix}.{key}".strip("."), rank) else META
                part._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=where)


def _backward(tensors: Any, gradients: Any = None, *_: Any, inputs: Any = None, **__: Any) -> None:
    """Every leaf that a backward would reach gets a gradient, or one more."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    wanted = None if inputs is None else {id(tensor) for tensor in inputs}
    for root, gradient in zip(roots, gradients or roots, strict=True):
        assert gradient is None or gradient.device == root.device
    seen: set[Any] = set()
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves = [root for root in roots if root.is_leaf and root.requires_grad]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and (wanted is None or id(variable) in wanted):
            leaves.append(variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    for leaf in leaves:
        gradient = torch.empty_like(leaf)
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
