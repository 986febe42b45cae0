"""Error messages for networks that fit no device."""

from __future__ import annotations

from itertools import pairwise

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.layout import Layout
from lightning_tspipe.planning.partition import megabytes
from lightning_tspipe.planning.workload import Workload

_REMEDY = "Use more devices, smaller batches or a smaller network, or raise the limit"


def does_not_fit(closest: Layout) -> PartitionError:
    """The error that names the atom that no rank can hold, or else the rank without memory.

    Args:
        closest: The layout that exceeds the limits least.
    """
    workload = closest.workload
    limit = min(workload.state_limit, max(workload.memory_limits))
    for name, size in _atom_sizes(workload):
        if size > limit:
            return PartitionError(
                f"atom {name!r} alone needs {megabytes(size)} for its parameters, gradients and "
                f"optimizer state, and a rank may hold {megabytes(limit)}. An atom is never "
                f"divided. {_REMEDY}"
            )
    over_state = max(closest.state_bytes) > workload.state_limit
    held = closest.state_bytes if over_state else closest.memory_bytes
    limits = workload.memory_limits
    if over_state:
        limits = (workload.state_limit,) * workload.num_ranks
    what = "parameters, gradients and optimizer state" if over_state else "state and activations"
    over = [size - most for size, most in zip(held, limits, strict=True)]
    rank = over.index(max(over))
    return PartitionError(
        f"rank {rank} would need {megabytes(held[rank])} for {what}, and may hold "
        f"{megabytes(limits[rank])}; {_largest_atom(closest, rank)}. {_REMEDY}"
    )


def _atom_sizes(workload: Workload) -> list[tuple[str, float]]:
    """Name and state bytes of every atom that is placed on its own."""
    sizes = []
    for network, sums in (
        (workload.student, workload.state_sums),
        (workload.independent_teacher, workload.teacher_state_sums),
    ):
        if network is not None:
            needs = (stop - start for start, stop in pairwise(sums))
            sizes += list(zip((atom.name for atom in network.atoms), needs, strict=True))
    return sizes


def _largest_atom(layout: Layout, rank: int) -> str:
    workload = layout.workload
    stages = zip(pairwise(layout.cuts.student), layout.student_ranks, strict=True)
    held = [atom for (start, stop), r in stages if r == rank for atom in range(start, stop)]
    size = {
        atom: sum(
            sums[atom + 1] - sums[atom] for sums in (workload.state_sums, workload.activation_sums)
        )
        for atom in held
    }
    largest = max(size, key=size.__getitem__)
    return (
        f"its largest atom is {workload.student.atoms[largest].name!r}: {megabytes(size[largest])}"
    )
