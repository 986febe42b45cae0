"""Who owns which parameters and buffers, and how they come together again.

Every rank keeps the module's skeleton: what others own moves to the meta device in place, keeping
identity, name and shape. So optimizers and EMA loops run unmodified and touch only what is real.

A parameter that several ranks read is *tied*: each of them holds it, and the first is its owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.moving import move, put
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.planning.placement import Cuts, Placement
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.replicas import REST

_HOST = torch.device("cpu")
Ranks = tuple[int, ...]
"""That hold something; the first is its owner."""


class Follower(NamedTuple):
    """A copy of the module: each of its tensors lies on the ranks of the one that it is a copy of.

    Attributes:
        module: The copy, with the same names.
        device: Where a rank keeps what it holds of it.
    """

    module: nn.Module
    device: torch.device


class Shards:
    """The owner of each parameter and buffer of a module.

    Args:
        module: The LightningModule, still whole.
        captured: The step, with the networks that are divided among the ranks.
        placement: Who gets what.
        followers: Copies of the module that go along.

    Attributes:
        stays_spread: Whether no rank may hold the whole module, after the training neither.
        beside: Of what stages read, the parameters that other modules have too, as the loss does,
            and those with which the step computes.
    """

    def __init__(
        self,
        module: nn.Module,
        captured: Captured,
        placement: Placement,
        followers: Sequence[Follower] = (),
    ) -> None:
        self._module = module
        self._followers = followers
        self._followed = captured.followed
        self.stays_spread = False
        self._holders: dict[str, Ranks] = {}
        self._tied: set[str] = set()
        self._stages: dict[NetworkName, dict[str, int]] = {"student": {}, "teacher": {}}
        self._inside: dict[NetworkName, set[str]] = {"student": set(), "teacher": set()}
        names = {id(tensor): name for name, tensor in named_tensors(module)}
        inside: set[nn.Module] = set()
        for name, network in captured.held.items():
            self._read(name, network.atoms, placement.cuts[name], placement.holders[name])
            for block in map(module.get_submodule, network.block_names):
                inside.update(block.modules())
                self._inside[name] |= {names[id(each)] for each in block.parameters()}
        rest = (part for part in module.modules() if part not in inside)
        beside = {names[id(own)] for part in rest for own in part.parameters(recurse=False)}
        read = {names[id(module.get_parameter(name))] for name in captured.plan.parameters}
        self.beside = (beside | read) & self._holders.keys()
        self._hold(self.beside | read, (LOSS_RANK,))
        self._holders |= {
            tensor: self._holders[original]
            for tensor, original in self._followed.items()
            if original in self._holders
        }
        for path, tensor in named_tensors(module, remove_duplicate=False):
            if names[id(tensor)] in self._holders:  # state dicts have all names of a tensor
                self._holders[path] = self._holders[names[id(tensor)]]

    def _read(
        self, name: NetworkName, atoms: Sequence[Atom], cuts: Cuts, holders: Sequence[Ranks]
    ) -> None:
        """Note what the stages of a network read."""
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            for atom in atoms[start:stop]:
                self._hold(atom.tensor_names, holders[stage])
                for each in atom.tensor_names:
                    # The first of several stages is the last to have its backward.
                    self._stages[name].setdefault(each, stage)

    def _hold(self, names: Iterable[str], ranks: Ranks) -> None:
        """Ranks read some parameters or buffers, and maybe others do, too."""
        for name in names:
            known = self._holders.get(name, ranks)
            self._holders[name] = tuple(dict.fromkeys((*known, *ranks)))
            if len(self._holders[name]) > len(known):
                self._tied.add(name)

    def owner(self, name: str) -> int:
        """The rank that holds a parameter or buffer, by its name."""
        # Whatever no stage reads (the rest of the module, unused parameters) is the loss rank's.
        return self._holders.get(name, (LOSS_RANK,))[0]

    def is_divided(self, name: str) -> bool:
        """Whether only its holders have a parameter or buffer of a network.

        A buffer that no atom reads, as an average's counter, changes in hooks, on every rank.
        """
        return name in self._holders or any(name in inside for inside in self._inside.values())

    def names(self, rank: int) -> set[str]:
        """The parameters that a rank updates."""
        return {name for name, _ in self._module.named_parameters() if self._updates(name, rank)}

    def _updates(self, name: str, rank: int) -> bool:
        return rank in self._holders[name] if name in self._tied else self.owner(name) == rank

    def by_stage(self, rank: int) -> dict[int, list[nn.Parameter]]:
        """What a rank may train, by the stage of the student; ``REST`` for what no stage reads.

        Those of :attr:`tied` are left out.
        """
        found: dict[int, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self._trained():
            if self.owner(name) == rank and name not in self._tied:
                found[self._stages["student"].get(name, REST)].append(parameter)
        return dict(found)

    @property
    def tied(self) -> dict[str, tuple[nn.Parameter, Ranks]]:
        """The tied parameters that may be trained, by name, and the ranks that hold them."""
        return {
            name: (parameter, self._holders[name])
            for name, parameter in self._trained()
            if name in self._tied
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What may be trained."""
        # A teacher may be the student's own frozen part, with the same blocks.
        teacher = self._inside["teacher"] - self._inside["student"]
        untrained = {*self._followed, *self._stages["teacher"], *teacher}
        for name, parameter in self._module.named_parameters():
            if name not in untrained:
                yield name, parameter

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank holds a parameter or buffer; what is not divided, all of them do."""
        return rank in self._holders.get(name, (LOSS_RANK,)) or not self.is_divided(name)

    def lies_as(self, other: Shards) -> bool:
        """Whether each rank holds what it does by another placement of the same module."""
        mine, others = (
            (each._holders, each._inside, each._tied, each.beside, each._followed)  # noqa: SLF001
            for each in (self, other)
        )
        return mine == others

    def place(self, rank: int, device: torch.device) -> None:
        """Move this rank's own tensors to the device, and foreign ones to the meta device."""
        for module, where in (Follower(self._module, device), *self._followers):
            self._place(module, where, rank)

    def _place(self, module: nn.Module, device: torch.device, rank: int) -> None:
        move(module, device, lambda name: device if self.holds(name, rank) else "meta")

    def forget_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop what an optimizer restored for parameters of other ranks."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_meta:
                    optimizer.state.pop(parameter, None)

    def state_dict(self, rank: int, transport: Transport) -> dict[str, Any]:
        """The full state dict on the loss rank, an empty one elsewhere."""
        return self.completed(self._module.state_dict(), rank, transport)

    def completed(self, state: dict[str, Any], rank: int, transport: Transport) -> dict[str, Any]:
        """A state dict of the module or of a copy, with what other ranks hold.

        Every rank calls it.

        Returns:
            All of it on the loss rank, nothing elsewhere.
        """
        found = _together(self._own(state, rank), transport)
        return {} if found is None else {key: found.get(key, state[key]) for key in state}

    def own_state_dict(self, rank: int) -> dict[str, Any]:
        """The part of the state dict that a rank holds; what all hold is the loss rank's."""
        return self._own(self._module.state_dict(), rank)

    def _own(self, state: dict[str, Any], rank: int) -> dict[str, Any]:
        return {name: _cpu(value) for name, value in state.items() if self.owner(name) == rank}

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, transport: Transport
    ) -> dict[str, Any]:
        """The full optimizer state on the loss rank, keyed as the optimizer keys it."""
        own = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {
            index: {key: _cpu(value) for key, value in own["state"][index].items()}
            for index, parameter in enumerate(parameters)
            if not parameter.is_meta and index in own["state"]
        }
        found = _together(mine, transport)
        return {} if found is None else {**own, "state": dict(sorted(found.items()))}

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
            if name in gradients and self._updates(name, rank):
                parameter.grad = gradients[name].to(parameter.device, copy=True)

    def restore(self, rank: int, transport: Transport) -> None:
        """Bring the whole module back to the loss rank, into host memory; others keep their own.

        A GPU might not hold all of it, and what is half on one can't be run.

        A module that stays spread stays as it is.
        """
        if self.stays_spread:
            return
        modules = (self._module, *(each.module for each in self._followers))
        own = {
            (place, name): _cpu(tensor)
            for place, module in enumerate(modules)
            for name, tensor in named_tensors(module)
            if self.owner(name) == rank and rank != LOSS_RANK
        }
        found = _together(own, transport)
        if found is None:
            return
        for place, module in enumerate(modules):
            for name, tensor in named_tensors(module):
                if tensor.is_meta:
                    put(module, tensor, found[place, name])
            move(module, _HOST, lambda _: _HOST)


def beside_stages(module: nn.Module, captured: Captured) -> list[nn.Parameter]:
    """The parameters that lie with the loss: no stage reads them, or the step computes with them.

    Args:
        module: The LightningModule.
        captured: The step.
    """
    read = {each for held in captured.held.values() for a in held.atoms for each in a.tensor_names}
    read |= captured.followed.keys()
    computed = captured.plan.parameters
    named = module.named_parameters()
    return [own for name, own in named if name not in read or name in computed]


def named_tensors(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, also those that state dicts leave out; once, or by each name."""
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def _cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _together(own: dict[Any, Any], transport: Transport) -> dict[Any, Any] | None:
    """What all ranks have, on the loss rank, whose own counts where several have the same."""
    gathered = transport.gather_object(own, LOSS_RANK)
    if gathered is None:
        return None
    return {key: value for shard in reversed(gathered) for key, value in shard.items()}


def followed_tensors(
    module: nn.Module, networks: Networks, *, needs_all: bool = False
) -> dict[str, str]:
    """What each parameter and buffer of a teacher follows that the training step never calls.

    Such a teacher is an average of the student's weights. Each of its tensors lies where the tensor
    lies that it follows, whatever the placement: it is updated without a message, and moves along
    when stages do::

        student   | atom 0 | atom 1 | atom 2 | atom 3 |
        average   | atom 0 | atom 1 | atom 2 | atom 3 |
                  |<---- rank 1 --->|<---- rank 0 --->|

    Args:
        module: The LightningModule.
        networks: Of which the step doesn't call the teacher.
        needs_all: Whether the step changes the teacher.

    Returns:
        By dotted names, the student's tensor of the same name and shape within its submodule; what
        has none is left out.

    Raises:
        PartitionError: All are needed, and one follows nothing.
    """
    found: dict[str, str] = {}
    for copy in networks.teacher:
        original = networks.pairs.get(copy)
        sources = {} if original is None else dict(named_tensors(module.get_submodule(original)))
        for name, tensor in named_tensors(module.get_submodule(copy)):
            if name in sources and sources[name].shape == tensor.shape:
                found[f"{copy}.{name}"] = f"{original}.{name}"
            elif needs_all:
                raise PartitionError(
                    f"the step averages parameters, but {copy}.{name} has no counterpart with its "
                    "name and shape in the student, so the two could be on different ranks. "
                    "Give the teacher the same structure as the beginning of the student "
                    "(copy.deepcopy)"
                )
    return found
