"""Optimizer state that is held once for all replicas of a pipeline, and not once for each.

Peers hold the same parameters, and average their gradients. What an optimizer keeps for a parameter
(momentum, moments), only its *owner* among them has; the owner updates it, and the others hear its
new value::

    replica 0   p0 p1 p2   gradients: the same   step: p0 p2     p0 p2 ──► replica 1
    replica 1   p0 p1 p2   on all peers          step: p1        p1 ─────► replica 0

That is the first stage of ZeRO (Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models*, 2020, section 5.1), of whole parameters: any optimizer that treats them
one by one may be used, and does what it does for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.transport.replicas import (
    BUCKET_BYTES,
    Replicas,
    divided,
    reaching_peers,
)

_OWNERS = "update parameters with"


class StateSharding:
    """Divides what optimizers keep among peers, and what they update.

    Args:
        replicas: Gives the replicas of now; they may change between two epochs.
        is_on: Whether it does; else each peer has everything.
    """

    def __init__(self, replicas: Callable[[], Replicas], *, is_on: bool) -> None:
        self._replicas = replicas
        self._is_on = is_on
        self._owners: dict[Optimizer, dict[nn.Parameter, int]] = {}

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """While inside, a step of an optimizer updates what this rank owns, and all peers have it.

        Args:
            optimizer: The optimizer; it may run a closure, which makes the gradients, within its
                step.
        """
        if not self._is_on or self._replicas().number == 1:
            yield
            return
        step = _Step(optimizer.step, partial(self._hide, optimizer))
        with attributes_replaced([(optimizer, "step", step)]):
            yield
        self._share(step.updated, self._owners.get(optimizer, {}))

    def _hide(self, optimizer: Optimizer) -> tuple[list[nn.Parameter], dict[nn.Parameter, Tensor]]:
        """Take away the gradients of what other peers own.

        Returns:
            All parameters that are about to be updated, and the gradients.
        """
        owners, index = self._assign(optimizer), self._replicas().index
        self.drop(optimizer)  # what a checkpoint brought, say
        hidden: dict[nn.Parameter, Tensor] = {}
        updated = [parameter for parameter in owners if parameter.grad is not None]
        for parameter in updated:
            if owners[parameter] != index and parameter.grad is not None:
                hidden[parameter], parameter.grad = parameter.grad, None
        return updated, hidden

    def _assign(self, optimizer: Optimizer) -> dict[nn.Parameter, int]:
        """The owner of each parameter that was trained once; the same on all peers.

        One that is thawed gets an owner then. The others keep theirs, who has their state.
        """
        owners = self._owners.setdefault(optimizer, {})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        new = [p for p in parameters if p.requires_grad and not p.is_meta and p not in owners]
        loads = [0] * self._replicas().number
        for parameter, owner in owners.items():
            loads[owner] += parameter.nbytes
        for parameter in sorted(new, key=lambda p: -p.nbytes):
            owner = loads.index(min(loads))
            owners[parameter] = owner
            loads[owner] += parameter.nbytes
        return owners

    @torch.no_grad()
    def _share(self, parameters: Sequence[nn.Parameter], owners: dict[nn.Parameter, int]) -> None:
        """Give all peers the values of parameters, from their owners."""
        replicas = self._replicas()
        on_way = []
        for owner in range(replicas.number):
            for group in divided((p for p in parameters if owners[p] == owner), BUCKET_BYTES):
                flat = torch.cat([p.detach().reshape(-1) for p in group])
                with reaching_peers(_OWNERS):
                    work: Any = dist.broadcast(
                        flat, group=replicas.peers, group_src=owner, async_op=True
                    )
                on_way.append((work, flat, group, owner))
        for work, flat, group, owner in on_way:
            with reaching_peers(_OWNERS):
                work.wait()
            if owner != replicas.index:
                parts = flat.split([p.numel() for p in group])
                made = [part.view(p.shape) for part, p in zip(parts, group, strict=True)]
                torch._foreach_copy_(list(group), made)

    # The whole state

    def holds(self, optimizer: Optimizer, parameter: nn.Parameter | None) -> bool:
        """Whether this replica is the one that keeps something for a parameter."""
        owners: Mapping[Any, int] = self._owners.get(optimizer, {})
        return owners.get(parameter, 0) == self._replicas().index

    def complete(self, optimizer: Optimizer, *, to_save: bool = False) -> bool:
        """Give peers all of an optimizer's state, until :meth:`drop`; every one calls it.

        Args:
            optimizer: The optimizer.
            to_save: Whether only the first replica needs it, in host memory.

        Returns:
            Whether all of it is here now.
        """
        owners, replicas = self._owners.get(optimizer), self._replicas()
        if not owners or replicas.number == 1:
            return True
        for index in range(replicas.number):
            own = [p for p, owner in owners.items() if owner == index]
            mine = None
            if index == replicas.index:
                mine = [_described(optimizer.state.get(parameter)) for parameter in own]
            box = [mine]
            with reaching_peers(_OWNERS):
                dist.broadcast_object_list(box, group=replicas.peers, group_src=index)
            assert box[0] is not None
            for parameter, described in zip(own, box[0], strict=True):
                if described is None:
                    continue
                own_state = optimizer.state[parameter] if index == replicas.index else {}
                state: dict[str, Any] = {}
                for key, value in described.items():
                    found = _sent(value, own_state.get(key), parameter.device, replicas, index)
                    state[key] = found.cpu() if to_save and isinstance(found, Tensor) else found
                if index != replicas.index and (replicas.is_first or not to_save):
                    optimizer.state[parameter] = state
        return replicas.is_first or not to_save

    def drop(self, optimizer: Optimizer) -> None:
        """Forget what other peers hold."""
        index = self._replicas().index
        for parameter, owner in self._owners.get(optimizer, {}).items():
            if owner != index:
                optimizer.state.pop(parameter, None)

    def forget(self) -> None:
        """Every rank has everything, or the optimizers are others: owners are found anew."""
        self._owners.clear()


class _Step:
    """A step of an optimizer, in which it sees some of the gradients only.

    Args:
        step: The optimizer's.
        hide: Takes the others away; gives what is updated anywhere, and the gradients.

    Attributes:
        updated: What was updated.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        hide: Callable[[], tuple[list[nn.Parameter], dict[nn.Parameter, Tensor]]],
    ) -> None:
        self._step, self._hide = step, hide
        self._hidden: dict[nn.Parameter, Tensor] = {}
        self.updated: list[nn.Parameter] = []

    def __call__(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        def begin() -> Any:
            result = None if closure is None else closure()
            self.updated, self._hidden = self._hide()
            return result

        try:
            if closure is not None:
                return self._step(begin, **kwargs)
            begin()
            return self._step(**kwargs)
        finally:
            for parameter, gradient in self._hidden.items():
                parameter.grad = gradient


class _Large:
    """Stands for a tensor that travels by itself: from host to host, or from device to device."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.is_on_host = tensor.shape, tensor.dtype, tensor.is_cpu

    def empty(self, device: torch.device) -> Tensor:
        """Room for it, on the host or a device."""
        place = torch.device("cpu") if self.is_on_host else device
        return torch.empty(self.shape, dtype=self.dtype, device=place)


def _sent(
    value: Any, own: Tensor | None, device: torch.device, replicas: Replicas, source: int
) -> Any:
    """What a peer has, on all of them.

    Args:
        value: It, or (of a large tensor) how large it is.
        own: It, on the peer that has it.
        device: For a large tensor that isn't on the host there.
        replicas: The peers.
        source: The one that has it.
    """
    if not isinstance(value, _Large):
        return value
    sent = (value.empty(device) if own is None else own).contiguous()
    with reaching_peers(_OWNERS):
        dist.broadcast(sent, group=replicas.peers, group_src=source)
    return sent


def _described(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of what is kept for a parameter, the small; tensors that travel by themselves as such."""
    if state is None:
        return None
    # A pickled tensor of another device would come to life on that one.
    return {
        key: _Large(value)
        if isinstance(value, Tensor) and (value.dim() or not value.is_cpu)
        else value
        for key, value in state.items()
    }
