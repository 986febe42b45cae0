"""Batches on their way into a pipeline: the data rank reads and tells of them, the others hear.

Of a batch the data rank makes what the networks get (the prologue of the step), and describes it to
the others; fields that losses read travel beside. How many of the batches that follow are told of
depends on how far the programs of the steps look ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from lightning_tspipe.capture.plan import Inputs, NetworkName, Specs, TensorSpec
from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.ir.pipeline import Pipeline
from lightning_tspipe.ir.schedule import Schedule
from lightning_tspipe.ir.validation import validate
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.replay.purity import Comparisons, fingerprints, is_compared
from lightning_tspipe.replay.runner import StepRunner
from lightning_tspipe.runtime.batches.metadata import Known, StepHeader
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.stages.captured import StepUnits
from lightning_tspipe.runtime.transport.base import Receipt
from lightning_tspipe.runtime.transport.channels import Channel, Edge, program_edges
from lightning_tspipe.schedules.registry import build_step, lookahead
from lightning_tspipe.schedules.window_steps import BEGUN, NOTHING, Progress, WindowSteps
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
from lightning_tspipe.simulation.cost import CostTable

BatchAndStep = tuple[Any, Step]
Version = tuple[tuple[NetworkName, object], ...]
_LAST, _FLUSHED = -2, "flushed"  # what is told when nothing more will be


class Programs:
    """The validated programs of a pipeline's steps; the same on all ranks.

    Args:
        pipeline: The pipeline.
        schedule: By its name; of heads, ``tspipe`` runs their trunk ahead and the others don't.
        costs: Costs of the stages, for the order of actions; None for equal ones.
        placement: Says which backwards may run in two halves, and how far a trunk runs ahead.
        ahead: The steps of windows whose teacher runs ahead of updates; None: it never does.

    Attributes:
        rest: What a progress leaves to do for batches whose losses have run, and the progress
            behind that.
        lets_ahead: Whether a teacher runs ahead of updates now; may be set where a window begins,
            as :attr:`every`.
        every: Batches of a window.
        steps_early: How many steps before another rank has to know of a batch that is.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: str,
        costs: CostTable | None,
        placement: Placement,
        ahead: WindowSteps | None = None,
    ) -> None:
        depth = placement.depth
        build = partial(build_step, schedule, pipeline, costs, split=placement.split, depth=depth)

        @cache
        def program_of(*, fresh: bool, ahead: int) -> Schedule:
            program = build(fresh=fresh, ahead=ahead)
            validate(program)
            return program

        def of(before: Progress, ahead: int) -> tuple[Schedule, Progress]:
            return program_of(fresh=before == NOTHING, ahead=ahead), BEGUN

        self._of: Callable[[Progress, int], tuple[Schedule, Progress]] = of
        nothing = Schedule(pipeline, ((),) * pipeline.num_ranks)
        self.rest: Callable[[Progress], tuple[Schedule, Progress]] = lambda p: (nothing, p)
        self._lookahead = lookahead(schedule, pipeline, depth)
        self._whole: Schedule | None = None
        if schedule in ACROSS_STEPS:
            steps = WindowSteps(schedule, pipeline)
            self._of, self.rest, self._whole = steps.step, steps.rest, steps.everything
        # A rank that waits for the data rank's word as deep as it looks itself would wait for the
        # end of its step.
        self._announced = max(self._lookahead) + (schedule in WINDOWS and any(self._lookahead))
        self.steps_early = self._announced - min(self._lookahead)
        self._ahead, self.lets_ahead, self.every = ahead, False, 1
        if ahead is not None:
            # With 1F1B the data rank's step begins as many steps behind that of the loss rank.
            self._sooner = 1 if schedule in ACROSS_STEPS else pipeline.num_ranks
            self.steps_early = max(self.steps_early, self._sooner)

    def of(self, before: Progress, ahead: int, beyond: int = 0) -> tuple[Schedule, Progress]:
        """The program of a step, and the progress behind it.

        Args:
            before: The progress before: whether anything of its batch has been done, and what.
            ahead: How many of the batches that follow may be worked on.
            beyond: Of how many behind an update the teacher may run.
        """
        if self.lets_ahead and self._ahead is not None:
            return self._ahead.step(before, ahead, beyond)
        return self._of(before, ahead)

    @property
    def lookahead(self) -> tuple[int, ...]:
        """For each rank, up to how many batches ahead its steps have to do with."""
        if self.lets_ahead and self._ahead is not None:
            return (self._furthest,) * len(self._lookahead)
        return self._lookahead

    @property
    def announced(self) -> int:
        """How many batches ahead the data rank tells of."""
        if self.lets_ahead and self._ahead is not None:
            return self._furthest + self._sooner
        return self._announced

    @property
    def _furthest(self) -> int:
        """The last batch of the next window, unless that is long."""
        assert self._ahead is not None
        return min(self._ahead.lookahead, 2 * self.every - 1)

    @property
    def edges(self) -> set[Edge]:
        """What any of the programs needs: that of which all others are parts."""
        most = max(self._lookahead)
        edges = program_edges(self._whole or self._of(NOTHING, most)[0])
        return edges if self._ahead is None else edges | program_edges(self._ahead.everything)


class Intake:
    """One rank's part in reading batches, and its view of what the data rank has said of them.

    Batches are numbered over all epochs. The data rank describes each one as early as its schedule
    looks at it; another rank hears of as many as its own next step needs, and waits for no more::

        data rank   step 0: batches 0 1 2 3   step 1: 4   step 2: 5   step 3: no 6
        rank 0      step 0: 0 1               step 1: 2   step 2: 3   ...

    An epoch that is left early leaves descriptions behind that nobody took. Every rank notices its
    end by itself, and what was said in an earlier *round* is then skipped.

    Args:
        engine: The rank's engine.
        programs: How far steps look ahead.
        runner: Runs prologues.
    """

    def __init__(self, engine: Engine, programs: Programs, runner: StepRunner) -> None:
        self._engine = engine
        self._programs = programs
        self._runner = runner
        self._plan = engine.captured.plan
        self._round = 0
        self._headers: dict[int, StepHeader] = {}
        self._companions: dict[int, Receipt] = {}
        """On a rank with a loss: fields of batches, where they travel with the descriptions."""
        self._words: dict[int, str] = {}
        """What all ranks do when they have come to a batch, see ``stopping``."""
        self._end = -1
        self._inputs: dict[int, Inputs] = {}
        """On the data rank: what the networks get of the batches that were told of."""
        self._versions: dict[int, list[list[int]]] = {}
        self._first: int | None = None
        self._compared = Comparisons()

        @cache
        def units(inputs: tuple[Specs, ...], known: int, _: Version) -> StepUnits:
            return StepUnits(engine.captured, engine.placement, inputs, known)

        self._units = units

    def open(self, step: Step, batch: Any, ahead: Sequence[BatchAndStep]) -> dict[int, StepHeader]:
        """Tell of the batches, or hear of them.

        Args:
            step: The step that begins.
            batch: Its batch, on the data rank.
            ahead: There, the batches that follow and their steps.

        Returns:
            The batches that the step has to do with, by their numbers.
        """
        engine, lookahead = self._engine, self._programs.lookahead
        _, number = engine.position
        if engine.is_data_rank:
            self._announce(step, batch, ahead)
        started = time.perf_counter()
        last = self._await(number, number + lookahead[engine.rank])
        if not engine.is_data_rank:
            engine.recorder.paused("receive", started)
        # Every rank has come so far, or behind the last batch.
        for due in [due for due in self._words if due <= number + min(lookahead)]:
            engine.stop.hear(self._words.pop(due))
        return {n: self._headers[n] for n in range(number, last + 1)}

    def open_one(self, step: Step, batch: Any) -> StepHeader:
        """The same for a single batch, which only runs ahead."""
        _, number = self._engine.position
        if self._engine.is_data_rank:
            self._tell(number, self._describe(number, step, batch, effects=False))
        self._await(number, number)
        return self._headers[number]

    def inputs(self, headers: Mapping[int, StepHeader], number: int) -> dict[int, Inputs]:
        """On the data rank: what the networks get, by the offset from a batch; empty elsewhere."""
        return {n - number: self._inputs[n] for n in headers if n in self._inputs}

    def forget(self, number: int) -> None:
        """The step of a batch is over."""
        self._headers.pop(number, None)
        self._engine.mode.known.pop(number, None)
        self._inputs.pop(number, None)
        self._versions.pop(number, None)

    def flush(self) -> None:
        """Behind :meth:`drop`: hear what was told and nobody waits for; every rank calls it."""
        transport, data_rank = self._engine.transport, self._engine.placement.data_rank
        if self._engine.is_data_rank:
            self._tell(_LAST, None, _FLUSHED)
            self._words.clear()
            self._end = -1
            return
        word = ""
        while word != _FLUSHED:
            _, _, header, word = transport.receive_object(data_rank, Channel.HEADERS)
            receipt = None if header is None else self._exchange_early(header)
            if receipt is not None:
                receipt.wait()

    def drop(self) -> None:
        """None of the batches that were told of will come; every rank calls it."""
        self._refuse_difference(wait=True)
        self._round += 1
        for receipt in self._companions.values():
            receipt.wait()
        self._companions.clear()
        self._headers.clear()
        self._engine.mode.known.clear()
        self._words.clear()
        self._inputs.clear()
        self._versions.clear()
        self._end = -1

    def _tell(self, number: int, header: StepHeader | None, word: str = "") -> None:
        """On the data rank: there is another batch, or (without a header) none for now.

        Args:
            number: Of the batch, the one after those told of before.
            header: What it is like.
            word: What all ranks do when they have come to it.
        """
        if header is None and self._end == number:
            return  # nobody listens any more
        transport = self._engine.transport
        for rank in range(transport.num_ranks):
            if rank != transport.rank:
                said = (self._round, number, header, word)
                transport.send_object(said, rank, Channel.HEADERS)
        self._take(number, header, word)

    def _await(self, number: int, last: int) -> int:
        """Wait until the batches from ``number`` on are known, as far as there are any.

        Args:
            number: The batch whose step begins.
            last: The last one that this rank's step has to do with.

        Returns:
            The last one that is known, at most ``last``.
        """
        transport, data_rank = self._engine.transport, self._engine.placement.data_rank
        with waiting("the start of a step"):
            while last not in self._headers and not number < self._end <= last:
                told, number_told, header, word = transport.receive_object(
                    data_rank, Channel.HEADERS
                )
                receipt = None if header is None else self._exchange_early(header)
                if told == self._round:
                    self._take(number_told, header, word)
                    if receipt is not None:
                        self._companions[number_told] = receipt
                elif receipt is not None:
                    receipt.wait()
        while last not in self._headers:
            last -= 1
        return last

    def _take(self, number: int, header: StepHeader | None, word: str) -> None:
        if header is None:
            self._end = number
        else:
            self._headers[number] = header
            self._engine.mode.known[number] = header.known
            self._end = -1
        if word:
            self._words[number] = word

    def _announce(self, step: Step, batch: Any, ahead: Sequence[BatchAndStep]) -> None:
        """On the data rank: find the call inputs, and tell of the batches that are new.

        Raises:
            CaptureError: Its calls get something else than when they ran ahead.
        """
        engine, (seed, number) = self._engine, self._engine.position
        started = time.perf_counter()
        self._refuse_difference()
        told = self._inputs.get(number)
        if told is not None and not engine.mode.reuses_inputs(self._plan):
            # Of a batch that was told of before, the prologue runs once more, with its effects.
            own = self._runner.inputs(step, batch, seed + number, effects=True)
            own = self._known_of(number, batch, own).select(own)
            self._compare((step, batch, number), told, own)
        word, most = engine.stop.next_word(), self._programs.announced
        for n, (following, its_step) in enumerate([(batch, step), *ahead], number):
            if n not in self._inputs:
                header = self._describe(n, its_step, following, effects=n == number)
                self._tell(n, header, word if n == number + most else "")
                self._exchange_early(header, following)
        if len(ahead) < most:
            self._tell(number + len(ahead) + 1, None, word)
        engine.recorder.ran(number, Action(Op.DATA, engine.rank), started)

    def _describe(self, number: int, step: Step, batch: Any, *, effects: bool) -> StepHeader:
        """On the data rank: make what networks get of a batch.

        Args:
            number: Of the batch.
            step: Its step.
            batch: The batch.
            effects: Whether its step begins: then what it does to parameters happens.
        """
        seed, _ = self._engine.position
        made = self._runner.inputs(step, batch, seed + number, effects=effects)
        known = self._known_of(number, batch, made)
        self._first = number if self._first is None else self._first
        compared = made if is_compared(number, self._first, seed) else ()
        self._inputs[number] = own = known.select(made)
        self._versions[number] = [[tensor._version for tensor in each] for each in own]  # noqa: SLF001
        return StepHeader.of(batch, own, known=known, fingerprints=fingerprints(compared))

    def _compare(self, of: tuple[Step, Any, int], told: Inputs, own: Inputs) -> None:
        """On the data rank: what networks get of a batch is what they got when they ran ahead.

        Where trained ones read forward-only ones, what those got by then stands for its shape.

        Args:
            of: The step, its batch, and the batch's number.
            told: What they got.
            own: What they get now.

        Raises:
            CaptureError: It isn't.
        """
        for call, (ones, others) in enumerate(zip(told, own, strict=True)):
            if list(map(TensorSpec.of, ones)) != list(map(TensorSpec.of, others)):
                raise self._impure(of, call)
        fed = self._plan.fed_at
        made = [k for k, c in enumerate(self._plan.calls) if not fed or c.network == "teacher"]
        calls = [call for call in made for _ in own[call]]
        before, now = ([t for call in made for t in each[call]] for each in (told, own))
        versions = [version for call in made for version in self._versions[of[2]][call]]
        self._compared.add((of, calls), before, now, versions)
        self._inputs[of[2]] = own
        self._refuse_difference()

    def _refuse_difference(self, *, wait: bool = False) -> None:
        found = self._compared.first_difference(wait=wait)
        if found is not None:
            (of, calls), place = found
            raise self._impure(of, calls[place])

    def _impure(self, of: tuple[Step, Any, int], call: int) -> CaptureError:
        (step, batch, number), (seed, _) = of, self._engine.position
        return self._runner.impure(step, batch, seed + number, call)

    def _known_of(self, number: int, batch: Any, inputs: Inputs) -> Known:
        """On the data rank: what is known of a batch, decided once."""
        if number in self._headers:
            return self._headers[number].known
        return self._engine.mode.see(batch, inputs)

    def fields(self, header: StepHeader, batch: Any) -> Callable[[], Any]:
        """Send the fields that the losses read (data rank), or ask for them (loss ranks).

        Returns:
            Gives the batch as this rank has it.
        """
        engine = self._engine
        started = time.perf_counter()
        if self._programs.steps_early:
            receipt = self._companions.pop(engine.position[1], None)
        else:
            receipt = self._exchange_fields(header, batch)
        engine.recorder.paused("send", started)

        def whole() -> Any:
            if engine.is_data_rank:
                return batch
            started = time.perf_counter()
            found = header.batch(self._plan, receipt)
            engine.recorder.paused("receive", started)
            return found

        return whole

    def _exchange_early(self, header: StepHeader, batch: Any = None) -> Receipt | None:
        """The same with the description of a batch, if it is told of steps before."""
        return self._exchange_fields(header, batch) if self._programs.steps_early else None

    def _exchange_fields(self, header: StepHeader, batch: Any) -> Receipt | None:
        plan, engine, channel = self._plan, self._engine, Channel.EARLY_FIELDS
        return header.exchange_fields(plan, batch, engine.transport, channel, engine.pipeline)

    def units(self, header: StepHeader, version: Version) -> StepUnits:
        """How a batch flows through networks that are as a version says."""
        return self._units(header.inputs, header.known.num_atoms, version)

    def version(self) -> Version:
        """What hooks may change between steps, of each network."""
        networks = self._engine.captured.networks.items()
        return tuple((name, tuple(c.version for c in each.routes)) for name, each in networks)
