"""A captured step: the plan of its calls, and the networks that they go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_tspipe.capture.plan import NetworkName, StepPlan
from lightning_tspipe.ir.pipeline import LOSS_RANK, Coupling, NetworkLayout, Pipeline
from lightning_tspipe.runtime.stages.heads import Heads
from lightning_tspipe.runtime.stages.network import ChainNetwork


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls.

    Attributes:
        plan: The plan.
        networks: The networks whose calls go through the pipeline.
        heads: The heads of a fan-out, which the step calls where they are.
        followed: Of a teacher that the step doesn't call, the tensor of the student that each of
            its tensors follows, by dotted names.
    """

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]
    heads: Heads | None = None
    followed: Mapping[str, str] = field(default_factory=dict)

    @property
    def held(self) -> dict[NetworkName, ChainNetwork | Heads]:
        """All that is divided among the ranks."""
        return {**self.networks, **({"student": self.heads} if self.heads is not None else {})}

    @property
    def is_frozen(self) -> bool:
        """Whether the student's first atoms run in the place of a teacher."""
        teacher = self.networks.get("teacher")
        return teacher is not None and teacher.called_as == "student"

    @property
    def whole(self) -> Captured:
        """The same with the frozen part in the student, where it comes from."""
        networks = {name: x for name, x in self.networks.items() if x.called_as == name}
        return replace(self, networks=networks)


def layout(
    captured: Captured,
    ranks: Mapping[NetworkName, tuple[int, ...]],
    cuts: Mapping[NetworkName, tuple[int, ...]],
    num_microbatches: int,
    num_ranks: int,
) -> Pipeline:
    """The pipeline of a captured step; the last rank reads the data.

    Args:
        captured: The step.
        ranks: The rank of each stage of each network.
        cuts: Their cuts.
        num_microbatches: Micro-batches per call.
        num_ranks: Ranks of the pipeline.
    """
    layouts = {
        name: NetworkLayout(
            ranks[name],
            len(captured.plan.calls_of(network.called_as)),
            num_microbatches,
            network.output_stages(cuts[name]),
        )
        for name, network in captured.networks.items()
    }
    if captured.heads is not None:
        heads = NetworkLayout(ranks["student"], 1, 1, frozenset(range(len(captured.heads.atoms))))
        return Pipeline(
            num_ranks, heads, layouts["teacher"], num_ranks - 1, LOSS_RANK, Coupling.FANOUT
        )
    # An evaluation may call the teacher only.
    no_student = NetworkLayout(ranks["student"], 0, num_microbatches, frozenset())
    student, teacher = layouts.get("student", no_student), layouts.get("teacher")
    coupling = Coupling.PREFIX if captured.is_frozen else Coupling.CHAIN
    return Pipeline(num_ranks, student, teacher, num_ranks - 1, LOSS_RANK, coupling)
