"""What forwards read beside what is trained, and must not change while batches are in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.runtime.stages.captured import Captured


def still(captured: Captured, *names: NetworkName) -> list[Tensor]:
    """What forwards of networks read on this rank beside what is trained, and don't write.

    Args:
        captured: The networks.
        names: Of the networks; none: all of them.
    """
    networks = captured.networks.values()
    written = {id(b) for network in networks for route in network.routes for b in route.written}
    teacher = captured.networks.get("teacher")
    read: list[Tensor] = [] if teacher is None else list(_own_parameters(teacher.modules))
    for name in names or captured.networks:
        for part in captured.networks[name].modules:
            # BatchNorm counts its batches, of which nothing depends while it has a momentum.
            own = part.named_buffers(recurse=False)
            read += [b for n, b in own if id(b) not in written and n != "num_batches_tracked"]
    return [tensor for tensor in read if not tensor.is_meta]


def read_by_teacher(captured: Captured) -> list[Tensor]:
    """What its forwards read on this rank, and don't write, as it is now."""
    modules = captured.networks["teacher"].modules
    averaging = [part for part in modules if isinstance(part, _BatchNorm) and part.training]
    unread = {id(own) for part in averaging for own in part.buffers(recurse=False)}
    return [tensor for tensor in still(captured, "teacher") if id(tensor) not in unread]


def _own_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters(recurse=False)
