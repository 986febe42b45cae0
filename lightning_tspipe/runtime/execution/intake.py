"""Batches on their way into a pipeline: the data rank reads and tells of them, the others hear.

Of a batch the data rank makes what the networks get (the prologue of the step), and describes it to
the others; fields that losses read travel beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_tspipe.capture.plan import NetworkName, TensorSpec
from lightning_tspipe.capture.replay import StepRunner
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.runtime.batches.announcements import Announcements
from lightning_tspipe.runtime.batches.metadata import NOTHING_KNOWN, Known, StepHeader, send_fields
from lightning_tspipe.runtime.execution.programs import Programs
from lightning_tspipe.runtime.execution.rank import Rank
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.stages.units import StepUnits
from lightning_tspipe.runtime.transport.base import Receipt
from lightning_tspipe.runtime.transport.channels import Channel

BatchAndStep = tuple[Any, Step]


class Intake:
    """One rank's part in reading batches.

    Args:
        here: The rank.
        captured: The step.
        cuts: Of its networks.
        placement: Who reads the data, and in how many micro-batches it flows.
        programs: How far steps look ahead.
        runner: Runs prologues.
        loss_ranks: The ranks whose losses read fields of the batch.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a pipeline
        self,
        here: Rank,
        captured: Captured,
        cuts: Mapping[NetworkName, tuple[int, ...]],
        placement: Placement,
        programs: Programs,
        runner: StepRunner,
        loss_ranks: Sequence[int],
    ) -> None:
        self._here = here
        self._captured = captured
        self._cuts = cuts
        self._placement = placement
        self._programs = programs
        self._runner = runner
        self._loss_ranks = loss_ranks
        self._rank, self._data_rank = here.transport.rank, placement.data_rank
        self._reads = self._rank == self._data_rank
        self._known = Announcements(
            here.transport, self._data_rank, here.stop.hear, self._ask_early
        )
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        """On the data rank: what the networks get of the batches that were told of."""
        self._now: tuple[Tensor, ...] = ()
        """The same of the current batch, whose prologue ran once more, with its effects."""
        self._units: dict[tuple[tuple[TensorSpec, ...], int], StepUnits] = {}

    def open(
        self, step: Step, batch: Any, ahead: Sequence[BatchAndStep], number: int, seed: int
    ) -> dict[int, StepHeader]:
        """Tell of the batches, or hear of them.

        Args:
            step: The step that begins.
            batch: Its batch, on the data rank.
            ahead: There, the batches that follow and their steps.
            number: Of the batch.
            seed: Of the random streams.

        Returns:
            The batches that the step has to do with, by their numbers.
        """
        if self._reads:
            self._now = self._announce(step, batch, ahead, number, seed)
        started = time.perf_counter()
        last = self._known.await_batches(number, number + self._programs.lookahead[self._rank])
        if not self._reads:
            self._here.recorder.paused("receive", started)
        self._known.hear(number + min(self._programs.lookahead))
        return {n: self._known[n] for n in range(number, last + 1)}

    def open_one(self, step: Step, batch: Any, number: int, seed: int) -> StepHeader:
        """The same for a single batch, which only runs ahead."""
        if self._reads:
            known = self._make_inputs(number, step, batch, seed)
            header = StepHeader.of(batch, self._inputs[number], known=known)
            self._known.tell(number, header)
            self._now = self._inputs[number]
        self._known.await_batches(number, number)
        return self._known[number]

    def inputs(
        self, headers: Mapping[int, StepHeader], number: int
    ) -> dict[int, tuple[Tensor, ...]]:
        """On the data rank: what the networks get, by the offset from a batch; empty elsewhere."""
        if not self._reads:
            return {}
        return {n - number: self._inputs[n] for n in headers} | {min(headers) - number: self._now}

    def forget(self, number: int) -> None:
        """The step of a batch is over."""
        self._known.forget(number)
        self._inputs.pop(number, None)
        self._now = ()

    def drop(self) -> None:
        """None of the batches that were told of will come; every rank calls it."""
        self._known.drop()
        self._inputs.clear()

    def _announce(
        self, step: Step, batch: Any, ahead: Sequence[BatchAndStep], number: int, seed: int
    ) -> tuple[Tensor, ...]:
        """On the data rank: find the call inputs, and tell of the batches that are new.

        Returns:
            The call inputs of this batch.

        Raises:
            CaptureError: Its calls have other shapes than when they ran ahead.
        """
        started = time.perf_counter()
        told, known = self._inputs.get(number), NOTHING_KNOWN
        own = told
        if own is None or not self._here.mode.reuses_inputs(self._captured.plan):
            own = self._runner.inputs(step, batch, seed + number, effects=True)
            known = self._known_of(number, batch, own)
            own = known.select(own)
        if told is not None and list(map(TensorSpec.of, told)) != list(map(TensorSpec.of, own)):
            raise CaptureError(
                "the calls of this batch have other shapes than when they ran ahead: the step must "
                "compute the same inputs whenever it is given the same batch"
            )
        word, most = self._here.stop.next_word(), self._programs.announced
        for n, (following, its_step) in enumerate([(batch, step), *ahead], number):
            if n in self._inputs:
                continue
            if n == number:
                self._inputs[n] = own
            else:
                known = self._make_inputs(n, its_step, following, seed)
            header = StepHeader.of(following, self._inputs[n], known=known)
            self._known.tell(n, header, word if n == number + most else "")
            if self._programs.tells_early:
                fields = self._captured.plan.batch_fields
                ranks = self._loss_ranks
                send_fields(following, fields, self._here.transport, Channel.EARLY_FIELDS, ranks)
        if len(ahead) < most:
            self._known.tell(number + len(ahead) + 1, None, word)
        self._here.recorder.ran(number, Action(Op.DATA, self._rank), started)
        return own

    def _make_inputs(self, number: int, step: Step, batch: Any, seed: int) -> Known:
        """On the data rank: what networks get of a batch to come; what is known of it."""
        made = self._runner.inputs(step, batch, seed + number, effects=False)
        known = self._known_of(number, batch, made)
        self._inputs[number] = known.select(made)
        return known

    def _known_of(self, number: int, batch: Any, inputs: Sequence[Tensor]) -> Known:
        """On the data rank: what is known of a batch, decided once."""
        if number in self._known:
            return self._known[number].known
        return self._here.mode.see(batch, inputs)

    def fields(self, header: StepHeader, batch: Any, number: int) -> Callable[[], Any]:
        """Send the fields that the losses read (data rank), or ask for them (loss ranks).

        Returns:
            Gives the batch as this rank has it.
        """
        started = time.perf_counter()
        fields, recorder = self._captured.plan.batch_fields, self._here.recorder
        if self._programs.tells_early:
            receipt = self._known.companion(number)
        else:
            receipt = header.exchange_fields(
                fields, batch, self._here.transport, self._data_rank, Channel.EARLY_FIELDS,
                self._loss_ranks,
            )  # fmt: skip
        recorder.paused("send", started)

        def whole() -> Any:
            if self._reads:
                return batch
            started = time.perf_counter()
            found = header.batch(fields, receipt)
            recorder.paused("receive", started)
            return found

        return whole

    def _ask_early(self, header: StepHeader) -> Receipt | None:
        """On a rank with a loss: the fields of a batch, if they travel with its description."""
        if self._rank not in self._loss_ranks or not self._programs.tells_early:
            return None
        fields, transport = self._captured.plan.batch_fields, self._here.transport
        return header.ask_for_fields(fields, transport, self._data_rank, Channel.EARLY_FIELDS)

    def units(self, header: StepHeader) -> StepUnits:
        """How a batch flows."""
        samples = header.known.samples
        key = (header.inputs, 0 if samples is None else samples.known)
        if key not in self._units:
            self._units[key] = StepUnits(
                self._captured.plan,
                self._captured.networks,
                self._cuts,
                self._placement.num_microbatches,
                header.inputs,
                self._here.context,
                key[1],
            )
        return self._units[key]
