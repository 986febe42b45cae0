"""Tracing a step once: which calls it makes, and what it needs of them.

The step runs as it stands, with three replacements: the declared submodules answer with random
*stand-ins* of the right shape (found on fake tensors), the pipelined parameters are fake, and
``self.log`` does nothing. Afterwards everything is as before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from lightning_tspipe.capture.held import Generators, iterators_refused
from lightning_tspipe.capture.location import current_line, explained
from lightning_tspipe.capture.plan import (
    Block,
    Glue,
    Interception,
    NetworkName,
    StepPlan,
    TensorSpec,
)
from lightning_tspipe.capture.provenance import BatchLeaf, BlockOutput, NetworkParameter, Value
from lightning_tspipe.capture.record import Call, StepRecord
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.networks import swap
from lightning_tspipe.networks.arguments import Arguments, tensors_of

Step = Callable[[Any], Any]
_SILENCED = ("log", "log_dict", "print", "manual_backward", "toggle_optimizer")


@dataclass(frozen=True)
class Networks:
    """The declared submodules of the LightningModule: dotted names, in the order of the chain.

    Attributes:
        student: Those of the student.
        teacher: Those of the teacher.
        local: Those that run where the losses are, as the step calls them: heads.
        averages: Of the teacher's, the one of the student's that each is known to average.
    """

    student: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    averages: Mapping[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> dict[str, str]:
        """What of the student each submodule of the teacher follows: in order, or as known."""
        return {**dict(zip(self.teacher, self.student, strict=False)), **self.averages}

    def items(self) -> Iterator[tuple[NetworkName, str]]:
        """All (network, block name)."""
        yield from (("student", name) for name in self.student)
        yield from (("teacher", name) for name in self.teacher)


class Tracer:
    """Traces steps of one module.

    Args:
        module: The LightningModule (or any module).
        networks: Which submodules are pipelined.
        device: Where the batches are.
        parts: Whether the step may also call parts of them, or hang forward hooks on parts: such a
            network is entered, and its parts are called. A step with a backward may not.
    """

    def __init__(
        self, module: nn.Module, networks: Networks, device: torch.device, *, parts: bool = False
    ) -> None:
        self._module = module
        self._device = device
        self._parts = parts
        self._network_of: dict[str, NetworkName] = {name: net for net, name in networks.items()}
        self._blocks = {name: module.get_submodule(name) for name in self._network_of}
        self._inside = [m for block in self._blocks.values() for m in block.modules()]
        inside = set(self._inside)
        self._rest = [m for m in module.modules() if m not in inside]
        self._running_block = False

    def trace(self, step: Step, batch: Any, seed: int) -> StepPlan:
        """Run ``step(batch)`` once, without consequences.

        Args:
            step: The step, a function of the batch.
            batch: A real batch.
            seed: Seed of the step's random stream.

        Raises:
            CaptureError: The step can't be captured; says where and what to do.
        """
        is_automatic = bool(getattr(self._module, "automatic_optimization", True))
        self._record = StepRecord(tuple(self._blocks), is_automatic)
        mode = self._record.mode
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._old_hooks = {key for inner in self._inside for key in inner._forward_hooks}  # noqa: SLF001
        self._track_parameters()  # those that optimizers hold
        failed = explained(
            "the step failed while it was traced,",
            f"Pipelined networks ({', '.join(self._blocks)}) may only be called; their "
            "parameters are not at hand inside the step",
        )
        with (
            swap.attributes_restored(self._rest, tensors=True),
            swap.attributes_restored(self._inside, tensors=False),
            swap.TensorSwap(self._inside, self._fake_like)(),
            swap.forwards_replaced(self._stubs()),
            swap.silenced(self._module, self._silence, _SILENCED),
            iterators_refused(self._rest),
            Generators(self._rest).stream(seed),
            warnings.catch_warnings(),
        ):
            # Of what networks returned, where a step computes with it and with a parameter.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            batch = copy.deepcopy(batch)
            leaves, structure = pytree.tree_flatten(batch)
            fields = [
                mode.track(leaf, BatchLeaf()) if isinstance(leaf, Tensor) else None
                for leaf in leaves
            ]
            parameters = self._track_parameters()
            with failed, mode, mode.draws:
                result = step(batch)
            mode.mark_read(result)
            # What the step keeps is read later, by a hook.
            mode.mark_read([vars(module) for module in self._rest])
        return self._record.plan(fields, structure, parameters)

    def _silence(self, *args: Any, **kwargs: Any) -> None:
        self._record.mode.mark_read((args, kwargs))

    def _fake_like(self, tensor: Tensor) -> Tensor:
        with self._fake:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            return fake.requires_grad_(tensor.requires_grad)

    def _stubs(self) -> dict[nn.Module, Callable[..., Any]]:
        stubs: dict[nn.Module, Callable[..., Any]] = {}
        for name, block in self._blocks.items():
            for path, child in block.named_modules():
                full = f"{name}.{path}" if path else name
                if full in self._blocks or child not in stubs:
                    if self._parts:
                        self._network_of.setdefault(full, self._network_of[name])
                    stubs[child] = partial(self._called, full, child, child.forward)
        return stubs

    def _called(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands for the forward of a block, or of a part of one."""
        if self._running_block or self._is_entered(block):
            return forward(*args, **kwargs)
        if name not in self._network_of:
            whole = next(each for each in self._blocks if name.startswith(f"{each}."))
            raise CaptureError(
                f"the step calls {name!r}, a part of the pipelined network {whole!r}, past its "
                f"forward, at {current_line()}. Call self.{whole}(...) as a whole, or declare the "
                f"parts in their order: TSPipeStrategy({self._network_of[whole]}=[{name!r}, ...])"
            )
        tensors = tensors_of(args, kwargs)
        if not tensors:
            raise CaptureError(
                f"{name!r} is called without a tensor, at {current_line()}. Pipelined networks "
                "take tensors, with the batch as their first dimension"
            )
        link = Block(name, torch.is_grad_enabled(), Arguments.of(args, kwargs))
        call, position = self._place(link, tensors)
        return self._answer(link, call, position, self._run_on_fakes(block, args, kwargs))

    def _is_entered(self, block: nn.Module) -> bool:
        inner = (module for module in block.modules() if module is not block)
        return self._parts and any(m._forward_hooks.keys() - self._old_hooks for m in inner)  # noqa: SLF001

    def _place(self, block: Block, tensors: list[Tensor]) -> tuple[int, int]:
        """The call that this block belongs to (a new one, or one that goes on), and its place."""
        name = block.name
        network = self._network_of[name]
        value = self._packed(block, tensors)
        known = self._record.mode.lookup(value) or Value(value)
        known.feeds_block = True
        sources = known.sources()
        previous = [v for v in sources if isinstance(v.source, BlockOutput)]
        if not previous:
            self._check_input(name, value, sources)
            self._record.calls.append(Call(network, value, [block]))
            return len(self._record.calls) - 1, 0
        chain = known.glue_from_source()
        index = previous[0].source.call
        call = self._record.calls[index]
        if chain is None or call.network != network:
            raise CaptureError(
                f"the input of {name!r} is computed from the output of "
                f"{self._describe(previous[0])}, at {current_line()}. Between two pipelined blocks "
                "only operations on that one tensor are possible; put the computation into a "
                "module of the network"
            )
        source, glue = chain
        if source.source.position != len(call.links) - 1 or source.source.slot != 0:
            raise CaptureError(
                f"{name!r} branches off the middle of the network, at {current_line()}: "
                f"{self._describe(source)} already feeds {call.links[-1]}. Make one module of the "
                "branches, which returns a tuple"
            )
        call.links += [Glue(v.label, v.function) for v in glue if v.function is not None]
        call.links.append(block)
        return index, len(call.links) - 1

    def _packed(self, block: Block, tensors: list[Tensor]) -> Tensor:
        """The one tensor that travels; its provenance is that of all of them."""
        if len(tensors) == 1:
            return tensors[0]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
            raise CaptureError(
                f"{block.name!r} is called with tensors of shapes {shapes}, at {current_line()}: "
                "the first dimension of each must be the batch. Make the others in the network"
            )
        if any(tensor.requires_grad for tensor in tensors):
            raise CaptureError(
                f"{block.name!r} is called with several tensors, of which one requires gradients, "
                f"at {current_line()}. Make what computes it a part of the network"
            )
        return block.arguments.pack(tensors)

    def _describe(self, value: Value) -> str:
        return repr(str(self._record.calls[value.source.call].links[value.source.position]))

    def _check_input(self, name: str, value: Tensor, sources: list[Value]) -> None:
        if value.requires_grad and not any(isinstance(x, nn.Parameter) for x in _leaves(value)):
            raise CaptureError(
                f"the input of {name!r} requires gradients itself, at {current_line()}, as for "
                "adversarial examples or gradient penalties. A pipeline takes no gradients with "
                "respect to its inputs, and the second call would have to wait for them. Detach "
                "it, or compute such examples apart, with a network that is not pipelined"
            )
        if value.requires_grad or any(v.is_parameter for v in sources):
            raise CaptureError(
                f"the input of {name!r} depends on trained parameters outside of the pipelined "
                f"networks, at {current_line()}. Make that module the first block: "
                f"TSPipeStrategy({self._network_of[name]}=['...', {name!r}, ...])"
            )

    def _run_on_fakes(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        # The step's own hooks get the answer.
        hooks = block._forward_hooks  # noqa: SLF001
        new = {key: hooks.pop(key) for key in hooks.keys() - self._old_hooks}
        self._running_block = True
        self._record.mode.is_paused = True
        try:
            with self._fake:
                args, kwargs = pytree.tree_map_only(Tensor, self._fake_like, (args, kwargs))
                return block(*args, **kwargs)
        finally:
            hooks.update(new)
            self._running_block = False
            self._record.mode.is_paused = False

    def _answer(self, block: Block, call: int, position: int, output: Any) -> Any:
        fakes, structure = pytree.tree_flatten(output)
        specs = tuple(TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in fakes)
        self._record.interceptions.append(
            Interception(block.name, call, position, structure, specs, block.arguments)
        )
        answers = []
        for slot, spec in enumerate(specs):
            answer = spec
            if isinstance(spec, TensorSpec):
                self._record.mode.is_paused = True  # the step draws none of this
                answer = spec.random(self._generator, self._device)
                answer = answer.requires_grad_(spec.requires_grad).clone()  # may be written into
                self._record.mode.is_paused = False
                value = self._record.mode.track(answer, BlockOutput(call, position, slot))
                self._record.outputs.append(value)
            answers.append(answer)
        self._record.mode.num_blocks += 1
        return pytree.tree_unflatten(answers, structure)

    def _track_parameters(self) -> list[Value]:
        return [
            self._record.mode.track(
                parameter, NetworkParameter(f"{name}.{path}", self._network_of[name])
            )
            for name, block in self._blocks.items()
            for path, parameter in (*block.named_parameters(), *block.named_buffers())
        ]


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """The tensors with gradients of their own that a tensor was computed from."""
    if value.grad_fn is None:
        yield value
        return
    todo: list[Any] = [value.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable
