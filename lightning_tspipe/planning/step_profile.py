"""Everything that planning needs to know about a training step: saved, it plans elsewhere."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.planner import per_replica, plan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.workload import Workload


@dataclass(frozen=True)
class StepProfile:
    """What a step does and what its networks cost, on the device where they were measured.

    Attributes:
        student: Profile of the trainable network.
        teacher: Profile of the forward-only network, or None.
        num_calls: Calls per step of the student and of the teacher.
        batch_sizes: Samples in each call of the student.
        paired: Whether the teacher is built like the beginning of the student, and follows it.
        optimizer_bytes_per_parameter_byte: 0 for SGD, 1 with momentum, 2 for Adam.
        input_bytes_per_sample: One sample of a call's input.
        update_seconds_per_byte: Of the optimizer step, per byte of trained parameters.
        frozen: Whether the teacher is the student's frozen part, which the rest of it reads.
    """

    student: NetworkProfile
    teacher: NetworkProfile | None
    num_calls: tuple[int, int]
    batch_sizes: tuple[int, ...]
    paired: bool
    optimizer_bytes_per_parameter_byte: float = 1.0
    input_bytes_per_sample: int = 0
    update_seconds_per_byte: float = 0.0
    frozen: bool = False

    @property
    def state_bytes(self) -> int:
        """Parameters of both networks, gradients and optimizer state: one whole replica."""
        networks = [self.student, *([self.teacher] if self.teacher is not None else [])]
        held = sum(atom.parameter_bytes for network in networks for atom in network.atoms)
        trained = sum(atom.trainable_bytes for atom in self.student.atoms)
        return held + int(trained * (1 + self.optimizer_bytes_per_parameter_byte))

    def recomputing(self, atoms: Collection[int]) -> StepProfile:
        """The same step, with atoms of the student that run again in the backward."""
        return replace(self, student=self.student.recomputing(atoms))

    def freezing(self, num_atoms: int) -> StepProfile:
        """The same step after the student's first atoms have become a forward-only network."""
        if num_atoms == 0:
            return self
        frozen, trained = self.student.atoms[:num_atoms], self.student.atoms[num_atoms:]
        return replace(
            self,
            student=NetworkProfile(trained),
            teacher=NetworkProfile(tuple(replace(a, trainable_bytes=0) for a in frozen)),
            num_calls=(self.num_calls[0], self.num_calls[0]),
            paired=False,
            frozen=True,
        )

    def plan(self, num_ranks: int, **wishes: Any) -> Plan:  # noqa: ANN401 - as in `plan`
        """The fastest plan over ``num_ranks`` ranks; see :func:`~.planner.plan` for the wishes.

        Raises:
            PartitionError: Too few atoms, or no cut fits: names the atom and the amount.
            ConfigurationError: A wish that cannot be.
        """
        return plan(
            self.student,
            self.teacher,
            num_ranks=num_ranks,
            num_calls=self.num_calls,
            batch_sizes=self.batch_sizes,
            paired=self.paired,
            optimizer_bytes_per_parameter_byte=self.optimizer_bytes_per_parameter_byte,
            input_bytes_per_sample=self.input_bytes_per_sample,
            update_seconds_per_byte=self.update_seconds_per_byte,
            frozen=self.frozen,
            **wishes,
        )

    def workload(self, num_ranks: int, num_replicas: int, **limits: Any) -> Workload:  # noqa: ANN401
        """What one replica has to do, and on what; other fields of ``Workload`` are ``limits``.

        Raises:
            ConfigurationError: The samples can't be divided evenly.
        """
        return Workload(
            student=self.student,
            teacher=self.teacher,
            num_ranks=num_ranks,
            num_calls=self.num_calls,
            batch_sizes=per_replica(self.batch_sizes, num_replicas),
            paired=self.paired,
            optimizer_bytes_per_parameter_byte=self.optimizer_bytes_per_parameter_byte,
            num_replicas=num_replicas,
            update_seconds_per_byte=self.update_seconds_per_byte,
            input_bytes_per_sample=self.input_bytes_per_sample,
            frozen=self.frozen,
            **limits,
        )

    def with_batch(self, samples: int) -> StepProfile:
        """The same step with ``samples`` in its largest calls, the others in proportion.

        Raises:
            ConfigurationError: A call would be empty.
        """
        largest = max(self.batch_sizes)
        sizes = tuple(size * samples // largest for size in self.batch_sizes)
        if min(sizes) < 1:
            raise ConfigurationError(f"a batch of {samples} samples leaves calls empty")
        return replace(self, batch_sizes=sizes)

    def to_json(self) -> str:
        """Everything, as JSON that :meth:`from_json` reads."""
        data = {name: getattr(self, name) for name in _PLAIN}
        for name in ("student", "teacher"):
            network: NetworkProfile | None = getattr(self, name)
            data[name] = None if network is None else [atom.to_dict() for atom in network.atoms]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigurationError: The text is something else.
        """
        try:
            data = json.loads(text)
            values = {name: data[name] for name in _PLAIN}
            values["num_calls"] = tuple(values["num_calls"])
            values["batch_sizes"] = tuple(values["batch_sizes"])
            for name in ("student", "teacher"):
                values[name] = None if data[name] is None else _network(data[name])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"not a profile ({type(error).__name__}: {error}); `tspipe plan --save-profile` "
                "writes one"
            ) from error
        return cls(**values)


_PLAIN = (
    "num_calls",
    "batch_sizes",
    "paired",
    "optimizer_bytes_per_parameter_byte",
    "input_bytes_per_sample",
    "update_seconds_per_byte",
)


def _network(atoms: Sequence[dict[str, Any]]) -> NetworkProfile:
    return NetworkProfile(tuple(AtomProfile.from_dict(atom) for atom in atoms))
