"""Who owns which parameters and buffers, and how they come together again.

Every rank keeps the module's skeleton: what others own moves to the meta device in place, keeping
identity, name and shape. So optimizers and EMA loops run unmodified and touch only what is real.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.runtime.stages.captured import Held
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.reduction import REST


class Shards:
    """The owner of each parameter and buffer of a module.

    Args:
        module: The LightningModule, still whole.
        networks: The pipelined networks.
        cuts: Their cuts.
        ranks: The rank of each of their stages.
        holders: For each of their stages all ranks that hold it, where that may be several.

    Attributes:
        stays_spread: Whether no rank may hold the whole module, after the training neither.
    """

    def __init__(
        self,
        module: nn.Module,
        networks: Mapping[NetworkName, Held],
        cuts: Mapping[NetworkName, tuple[int, ...]],
        ranks: Mapping[NetworkName, tuple[int, ...]],
        holders: Mapping[NetworkName, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self._module = module
        self._followed: Mapping[str, str] = {}
        self._networks = networks
        self._cuts = cuts
        self.stays_spread = False
        # Whatever no stage reads (the rest of the module, unused parameters) is the loss rank's.
        self._owners: dict[str, int] = {}
        self._holders: dict[str, Sequence[int]] = {}
        self._inside: set[str] = set()
        for name, network in networks.items():
            for stage, rank in enumerate(ranks[name]):
                for atom in network.atoms[cuts[name][stage] : cuts[name][stage + 1]]:
                    for tensor in (*atom.parameter_names, *atom.buffer_names):
                        self._owners[tensor] = rank
                        if holders is not None and holders.get(name):
                            self._holders[tensor] = holders[name][stage]
            for block in network.block_names:
                for tensor in module.get_submodule(block).state_dict(keep_vars=True):
                    self._inside.add(f"{block}.{tensor}")

    def follow(self, followed: Mapping[str, str]) -> None:
        """Have tensors of no network of the step lie with others, by names; see ``averages``."""
        self._followed = followed
        for tensor, original in followed.items():
            if original in self._owners:
                self._owners[tensor] = self._owners[original]
            if original in self._holders:
                self._holders[tensor] = self._holders[original]

    def owner(self, name: str) -> int:
        """The rank that holds a parameter or buffer, by its name."""
        return self._owners.get(name, LOSS_RANK)

    def is_pipelined(self, name: str) -> bool:
        """Whether a parameter or buffer belongs to a pipelined network."""
        return name in self._owners or name in self._inside

    def names(self, rank: int) -> set[str]:
        """The parameters of a rank."""
        return {name for name, _ in self._module.named_parameters() if self.owner(name) == rank}

    def by_stage(self, rank: int) -> dict[int, list[nn.Parameter]]:
        """What a rank may train, by the stage of the student; ``REST`` for what no stage reads."""
        student, teacher = self._networks.get("student"), self._networks.get("teacher")
        stages = {
            name: stage
            for stage, (start, stop) in enumerate(pairwise(self._cuts["student"]))
            for atom in (student.atoms[start:stop] if student is not None else ())
            for name in atom.parameter_names
        }
        forward_only: tuple[str, ...] = ()
        frozen: set[str] = set()
        if teacher is not None and student is not None:
            if teacher.block_names == student.block_names:  # the student's own frozen part
                atoms = teacher.atoms[: self._cuts["teacher"][-1]]
                frozen = {name for atom in atoms for name in atom.parameter_names}
            else:
                forward_only = tuple(f"{b}." for b in teacher.block_names)
        found: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self._module.named_parameters():
            is_trained = not name.startswith(forward_only) and name not in self._followed
            is_trained &= name not in frozen
            if self.owner(name) == rank and is_trained:
                found[stages.get(name, REST)].append(parameter)
        return dict(found)

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank holds a parameter or buffer; what is not pipelined, all of them do."""
        holders = self._holders.get(name, (self.owner(name),))
        return rank in holders or not self.is_pipelined(name)

    def place(self, rank: int, device: torch.device) -> None:
        """Move this rank's own tensors to the device, and foreign ones to the meta device."""
        forget_graphs(self._module)
        recurrent = [m for m in self._module.modules() if isinstance(m, nn.RNNBase)]
        for module in recurrent:
            # Weak references to its weights, as torch's own moves drop them: they forbid swapping.
            module._flat_weight_refs = []  # noqa: SLF001
        for name, parameter in self._module.named_parameters():
            here = self.holds(name, rank)
            _move(parameter, device if here else torch.device("meta"))
        for module in recurrent:
            module._init_flat_weights()  # noqa: SLF001
        for prefix, module in self._module.named_modules():
            if hasattr(module, "metric_state"):  # torchmetrics keeps states beside the buffers
                module.to(device)
            for key, buffer in module._buffers.items():  # noqa: SLF001 - no public way
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None:
                    here = self.holds(name, rank)
                    target = device if here else torch.device("meta")
                    module._buffers[key] = buffer.to(target)  # noqa: SLF001

    def forget_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop what an optimizer restored for parameters of other ranks."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_meta:
                    optimizer.state.pop(parameter, None)

    def state_dict(self, rank: int, transport: Transport) -> dict[str, Any]:
        """The full state dict on the loss rank, an empty one elsewhere."""
        state = self._module.state_dict()
        mine = {k: v for k, v in state.items() if self.owner(k) == rank}
        gathered = transport.gather_object({k: _cpu(v) for k, v in mine.items()}, LOSS_RANK)
        if gathered is None:
            return {}
        merged: dict[str, Any] = {}
        for shard in gathered:
            merged.update(shard)
        return {key: merged.get(key, value) for key, value in state.items()}

    def own_state_dict(self, rank: int) -> dict[str, Any]:
        """The part of the state dict that a rank holds; what all hold is the loss rank's."""
        state = self._module.state_dict()
        return {name: _cpu(value) for name, value in state.items() if self.owner(name) == rank}

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, transport: Transport
    ) -> dict[str, Any]:
        """The full optimizer state on the loss rank, keyed as the optimizer keys it."""
        own = optimizer.state_dict()
        index = 0
        mine = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.is_meta and index in own["state"]:
                    mine[index] = {k: _cpu(v) for k, v in own["state"][index].items()}
                index += 1
        gathered = transport.gather_object(mine, LOSS_RANK)
        if gathered is None:
            return {}
        merged: dict[int, Any] = {}
        for shard in reversed(gathered):
            merged.update(shard)
        return {**own, "state": dict(sorted(merged.items()))}

    def gradients(self, rank: int) -> dict[str, Tensor]:
        """The gradients that a rank has accumulated, by parameter name, in host memory."""
        return {
            name: parameter.grad.detach().cpu()
            for name, parameter in self._module.named_parameters()
            if self.owner(name) == rank and parameter.grad is not None
        }

    def put_gradients(self, gradients: Mapping[str, Tensor], rank: int) -> None:
        """Set the gradients of a rank's parameters to what :meth:`gradients` gave.

        What all ranks hold, the loss rank trains: a gradient elsewhere would be clipped with it.
        """
        for name, parameter in self._module.named_parameters():
            if name in gradients and self.owner(name) == rank:
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def restore(self, rank: int, transport: Transport) -> None:
        """Bring the whole module back to the loss rank, into host memory; others keep their own.

        A GPU might not hold all of it, and what is half on one can't be run.

        A module that stays spread stays as it is.
        """
        if self.stays_spread:
            return
        own = {
            name: _cpu(tensor)
            for name, tensor in named_tensors(self._module)
            if self.owner(name) == rank and rank != LOSS_RANK
        }
        gathered = transport.gather_object(own, LOSS_RANK)
        if gathered is None:
            return
        found = {name: value for shard in gathered for name, value in shard.items()}
        for name, tensor in named_tensors(self._module):
            if tensor.is_meta:
                put(self._module, tensor, found[name])
        if any(tensor.device.type != "cpu" for _, tensor in named_tensors(self._module)):
            self._module.cpu()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, those that state dicts leave out too, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def put(module: nn.Module, old: Tensor, value: Tensor) -> Callable[[], None]:
    """Give a parameter or buffer on the meta device its value; a parameter keeps its identity.

    Returns:
        A function that takes the value back.
    """
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
        made.__dict__.update(old.__dict__)
        torch.utils.swap_tensors(old, made)
        return partial(torch.utils.swap_tensors, old, made)
    value = value.to(old.dtype)
    places = [
        (child, key)
        for child in module.modules()
        for key, buffer in child._buffers.items()  # noqa: SLF001 - a buffer may have two places
        if buffer is old
    ]

    def exchange(buffer: Tensor) -> None:
        for child, key in places:
            child._buffers[key] = buffer  # noqa: SLF001

    exchange(value)
    return partial(exchange, old)


def forget_graphs(module: nn.Module) -> None:
    """Keep no graph in attributes, such as ``weight_norm``'s weight, which is computed anew.

    A graph holds on to its parameters, which then can't be exchanged in place.
    """
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                vars(child)[name] = value.detach()


def _cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    if parameter.device == device:
        return
    if device.type == "meta":
        moved = nn.Parameter(
            torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
        )
    else:
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, moved)
    except RuntimeError:  # a graph that nobody needs any more refers to it
        gc.collect()
        torch.utils.swap_tensors(parameter, moved)
