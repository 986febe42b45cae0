"""A captured step: the plan of its calls, and the networks that they go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightning_tspipe.capture.plan import NetworkName, StepPlan, ValueRef
from lightning_tspipe.ir.pipeline import NetworkLayout
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.stages.network import ChainNetwork


class HeldAtom(Protocol):
    """A part of a network that lies on one rank; names are those of the LightningModule."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Its parameters."""

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Its buffers."""


class Held(Protocol):
    """A network as far as it is divided among ranks."""

    @property
    def atoms(self) -> Sequence[HeldAtom]:
        """What cuts may separate."""

    @property
    def block_names(self) -> tuple[str, ...]:
        """The submodules that it consists of."""


@dataclass(frozen=True)
class Captured:
    """A step after the trace: the plan and the networks that it calls.

    Attributes:
        plan: The plan.
        networks: The networks whose calls go through the pipeline.
        beside: Networks that the step calls where they are, and that are divided among ranks too.
        followed: Of a teacher that the step doesn't call, the tensor of the student that each of
            its tensors follows, by dotted names.
    """

    plan: StepPlan
    networks: dict[NetworkName, ChainNetwork]
    beside: Mapping[NetworkName, Held] = field(default_factory=dict)
    followed: Mapping[str, str] = field(default_factory=dict)

    @property
    def held(self) -> dict[NetworkName, Held]:
        """All that is divided among the ranks."""
        return {**self.networks, **self.beside}

    @property
    def whole(self) -> Captured:
        """The same with a frozen part in the network where it comes from."""
        networks = {name: x for name, x in self.networks.items() if x.called_as == name}
        return replace(self, networks=networks)


@dataclass(frozen=True)
class Division:
    """Where networks are cut, and which ranks have their stages.

    Attributes:
        cuts: For each network the first atom of each stage, and the number of atoms.
        ranks: The rank of each of its stages.
        num_microbatches: Micro-batches per call.
        num_ranks: Ranks of the pipeline.
    """

    cuts: Mapping[NetworkName, tuple[int, ...]]
    ranks: Mapping[NetworkName, tuple[int, ...]]
    num_microbatches: int
    num_ranks: int

    @classmethod
    def of(cls, captured: Captured, placement: Placement) -> Division:
        """As a placement has it."""
        cuts: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_cuts}
        ranks: dict[NetworkName, tuple[int, ...]] = {"student": placement.student_ranks}
        if "teacher" in captured.networks:
            cuts["teacher"], ranks["teacher"] = placement.teacher_cuts, placement.teacher_ranks
        return cls(cuts, ranks, placement.num_microbatches, placement.num_ranks)

    def layouts(self, captured: Captured) -> dict[NetworkName, NetworkLayout]:
        """The layout of each network whose calls go through a pipeline."""
        return {
            name: NetworkLayout(
                self.ranks[name],
                len(captured.plan.calls_of(network.called_as)),
                self.num_microbatches,
                network.output_stages(self.cuts[name]),
            )
            for name, network in captured.networks.items()
        }


def values_of_teacher(plan: StepPlan) -> list[tuple[int, ValueRef]]:
    """The values of the teacher's calls that a step uses."""
    reached = {(i.call, i.position) for i in plan.interceptions}
    return [
        (call, ref)
        for call in plan.calls_of("teacher")
        for ref in plan.used["teacher"]
        if (call, ref.position) in reached
    ]
