"""Copies of the student that the training step never calls: averages of its weights.

Each tensor of such a copy lies where the tensor lies that it follows, whatever the placement. So an
average is updated without a message, and moves along when stages do::

    student   | atom 0 | atom 1 | atom 2 | atom 3 |
    average   | atom 0 | atom 1 | atom 2 | atom 3 |
              |<---- rank 1 --->|<---- rank 0 --->|
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning.profile import NetworkProfile
from lightning_tspipe.runtime.stages.network import ChainNetwork


def followed_tensors(
    module: nn.Module, networks: Networks, *, needs_all: bool = False
) -> dict[str, str]:
    """What each parameter and buffer of a teacher follows, by dotted names.

    Args:
        module: The LightningModule.
        networks: Of which the step doesn't call the teacher.
        needs_all: Whether the step changes the teacher.

    Returns:
        The student's tensor of the same name and shape within its submodule; what has none is left
        out.

    Raises:
        PartitionError: All are needed, and one follows nothing.
    """
    found: dict[str, str] = {}
    for copy in networks.teacher:
        original = networks.pairs.get(copy)
        sources = {} if original is None else _tensors(module.get_submodule(original))
        for name, tensor in _tensors(module.get_submodule(copy)).items():
            if name in sources and sources[name].shape == tensor.shape:
                found[f"{copy}.{name}"] = f"{original}.{name}"
            elif needs_all:
                raise PartitionError(
                    f"the step averages parameters, and {copy}.{name} has no counterpart of its "
                    "name and shape in the student, so that the parts of a pair could come to "
                    "different ranks. Give the teacher the same structure as the beginning of the "
                    "student (copy.deepcopy)"
                )
    return found


def with_averages(
    profile: NetworkProfile, student: ChainNetwork, followed: Mapping[str, str]
) -> NetworkProfile:
    """The costs of a student's atoms with the bytes of what follows them."""
    averaged = set(followed.values())
    return profile.holding(
        [student.num_bytes(index, averaged) for index in range(profile.num_atoms)]
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
