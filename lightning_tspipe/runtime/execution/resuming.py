"""One rank between two steps: what another run goes on with, and what it goes on with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_tspipe.runtime.batches.metadata import StepHeader
from lightning_tspipe.runtime.execution import in_flight as flights
from lightning_tspipe.runtime.execution.lookahead import Ahead
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.weights.teacher_prediction import TeacherPrediction


class Resumable(Rank):
    """A rank whose steps can be gone on with; made as a :class:`Rank` is."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._index = 0
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        """On the data rank: the call inputs of the batches that were told of."""
        self._flights: dict[str, Any] | None = None
        self._teacher_before: dict[str, Any] | None = None

    def predict_teacher(self) -> TeacherPrediction | None:
        """From now on, teacher forwards that run ahead read predicted weights."""
        teacher = self.captured.networks.get("teacher")
        if teacher is None:
            return None
        if self.executor.teacher is None:
            blocks = {name: self.module.get_submodule(name) for name in teacher.block_names}
            self.executor.teacher = TeacherPrediction(blocks, self._teacher_before)
        return self.executor.teacher

    def flights(self) -> dict[str, Any] | None:
        """Between two steps: this rank's batches in flight; None if there are none.

        Every rank calls it, and one that goes on from them has to have the same stages.
        """
        units = self._lookahead.units
        if self.weights is None or not units:
            return None
        sizes = [list(spec.shape) for spec in units[self._index].inputs]
        written = flights.write(self.executor, self.weights, units, self.module)
        return {**written, "stages": self._stages(), "sizes": sizes}

    def _stages(self) -> list[Any]:
        """What has to be the same where another run goes on with batches in flight."""
        assert self.weights is not None
        again = sorted(self.placement.recomputed)
        cuts = [[name, *values] for name, values in sorted(self.cuts.items())]
        return [self.weights.policy.name, self.rank, cuts, again]

    def _take_flights(self, header: StepHeader) -> dict[str, Any] | None:
        """The batches in flight of the run that is resumed, if the data is what it was."""
        found, self._flights = self._flights, None
        sizes = [list(spec.shape) for spec in header.inputs]
        return found if found is not None and found["sizes"] == sizes else None

    def settle(self, *, keeps_flights: bool = False) -> None:
        """Between two steps, before anything is saved; every rank calls it.

        Args:
            keeps_flights: Whether forwards of the student that ran ahead are saved too. Otherwise
                they are forgotten, and done again: what is saved, and what goes on, is a pipeline
                that is about to be filled.
        """
        if not keeps_flights and self.weights is not None and self._lookahead.units:
            self._lookahead.drop()
            self.weights.drain()

    @property
    def position(self) -> tuple[int, int]:
        """The seed of the steps' random streams, and the number of the next step."""
        return self._seed, self._index

    def ahead(self) -> Ahead | None:
        """Between two steps: what has run ahead of the next one; None if nothing has.

        A trunk that never changes runs again instead.
        """
        return None if self.heads is not None else self._lookahead.state(self._index)

    def resume(
        self,
        position: tuple[int, int],
        ahead: Ahead | None,
        in_flight: Sequence[dict[str, Any]] | None = None,
        teacher_before: dict[str, Any] | None = None,
    ) -> None:
        """Go on where another engine stopped; all ranks call it before their first step.

        Args:
            position: Its :attr:`position`.
            ahead: What its loss rank knew to have run ahead, on all ranks.
            in_flight: What :meth:`flights` gave on each of its ranks. With other stages or another
                policy, the forwards are done again.
            teacher_before: What its :class:`TeacherPrediction` knew, of all ranks.

        Raises:
            CaptureError: The step uses other values of the teacher than that engine's.
        """
        self._lookahead.resume(ahead)
        self._seed, self._index = position
        self._teacher_before = teacher_before
        if in_flight and self.weights is not None and len(in_flight) == self.transport.num_ranks:
            mine = in_flight[self.rank]
            self._flights = mine if mine["stages"] == self._stages() else None

    def drain(self) -> None:
        """Forget what ran ahead: the next batches are not those told of. Every rank calls it."""
        self._lookahead.drop()
        self.announcements.drop()
        self._flights = None
        if self.weights is not None:
            self.weights.drain()
        self._inputs.clear()
