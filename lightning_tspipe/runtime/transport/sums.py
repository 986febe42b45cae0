"""A number that all ranks of a pipeline add up, without a host that waits for its device."""

from __future__ import annotations

from torch import Tensor

from lightning_tspipe.capture.plan import TensorSpec
from lightning_tspipe.runtime.transport.base import Transport
from lightning_tspipe.runtime.transport.channels import Channel, edges_along


def sum_over_ranks(own: Tensor, transport: Transport) -> Tensor:
    """The sum of a number over all ranks, on each of them; every rank calls it.

    It goes from the first rank to the last one, and back: two messages between neighbours, which
    are connected anyway, in the order of the ranks, so that rounding is the same on all of them.

    Args:
        own: This rank's, shape (), where its device is.
        transport: Of the pipeline.

    Returns:
        The sum, of the same shape and type and on the same device.
    """
    rank, last = transport.rank, transport.num_ranks - 1
    transport.open(edges_along(transport.num_ranks))
    spec = TensorSpec.of(own)
    total = own
    if rank > 0:
        (before,) = transport.receive([spec], rank - 1, Channel.SUMS).wait()
        total = before + own
    if rank < last:
        transport.send([total], rank + 1, Channel.SUMS)
        (total,) = transport.receive([spec], rank + 1, Channel.SUMS).wait()
    if rank > 0:
        transport.send([total], rank - 1, Channel.SUMS)
    return total
