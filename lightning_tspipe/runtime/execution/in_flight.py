"""Batches in flight: begun before their steps, and gone on with by another run.

A teacher that runs ahead leaves outputs and BatchNorm statistics behind, which mean the same
whatever the placement. A rank whose own forwards run w batches ahead holds, between two steps, the
graphs of w batches, and what the rank before has sent for one more. Graphs can't be written; what
they saved can, together with the stage's inputs. The forwards run once more, on any weights, and
save that.

What is written are plain values and tensors, so a checkpoint can be read with ``weights_only``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_tspipe.capture.plan import ValueRef
from lightning_tspipe.errors import CaptureError
from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.execution.executor import RankStages, StepContext
from lightning_tspipe.runtime.execution.teacher_ahead import TeacherAhead
from lightning_tspipe.runtime.stages.batchnorm import Part
from lightning_tspipe.runtime.stages.captured import StepUnits, values_of_teacher
from lightning_tspipe.schedules.window_steps import BEGUN, NOTHING, Progress

Written = dict[str, Any]


class InFlight:
    """Keeps track of what is in flight, here or in the run that a checkpoint comes from.

    Args:
        engine: The rank's engine.
        stages: Hold the values.
        teacher: Decides whether a teacher runs ahead of updates.

    Attributes:
        units: By their numbers, the units of the batches on which work has begun.
        progress: What has been done of the batches between two updates.
    """

    def __init__(
        self, engine: Engine, stages: RankStages, teacher: TeacherAhead | None = None
    ) -> None:
        self._engine = engine
        self._stages = stages
        self._teacher = teacher
        self._values = values_of_teacher(engine.captured.plan)
        self._calls = engine.captured.plan.calls_of("teacher")
        self._ahead: Written | None = None
        self._written: Written | None = None
        self.units: dict[int, StepUnits] = {}
        self.progress = NOTHING

    # In this run

    def begin(self, index: int, units: StepUnits) -> bool:
        """The step of a batch begins.

        Returns:
            Whether work on it has begun before. Of another run only if the data is that run's.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead["batch_sizes"] == self._batch_sizes(units):
            self._put_ahead(index, units, ahead)
            self.units[index] = units
        if self._written is not None and self._written["sizes"] != _sizes(units):
            self._written = None
        if self._written is not None:
            self.progress = Progress.from_plain(self._written["progress"])
        has_begun = index in self.units or self._written is not None
        if not has_begun:
            self.progress = NOTHING
        elif self.progress == NOTHING:
            self.progress = BEGUN
        return has_begun

    def done(self, index: int, worked_on: Mapping[int, StepUnits]) -> None:
        """The step of a batch ends.

        Args:
            index: The batch.
            worked_on: Units of the batches that it worked on, by their offset from ``index``.
        """
        self.units = {index + offset: units for offset, units in worked_on.items() if offset > 0}

    def drop(self) -> None:
        """The next batch is not one that work has begun on; weights are those of now."""
        self._ahead = self._written = None
        if self.units:
            self._stages.drop()
            self.units = {}
        self.progress = NOTHING
        if self._engine.weights is not None:
            self._engine.weights.drain()

    def resume(self, ahead: Written | None, written: Sequence[Written] | None) -> None:
        """Go on with what was in flight in a checkpoint's run.

        Args:
            ahead: What :meth:`teacher_ahead` gave, with the statistics of all its ranks.
            written: What :meth:`write` gave on each of its ranks.

        Raises:
            CaptureError: The step uses other values of the teacher than that run's.
        """
        if ahead is not None and {v for v, _ in self._outputs(ahead)} != set(self._values):
            raise CaptureError(
                "the checkpoint was saved within an epoch by a step that used its teacher "
                "differently. Resume with that step, or from the end of an epoch"
            )
        self._ahead = ahead
        engine = self._engine
        if written and engine.weights is not None and len(written) == engine.transport.num_ranks:
            mine = written[engine.rank]
            is_same = mine["stages"] == self._same()
            if is_same and self._teacher is not None:
                is_same = self._teacher.read_back(mine["teacher"] or (False, None))
            self._written = mine if is_same else None

    @property
    def goes_on(self) -> bool:
        """Whether the first step goes on with what was in flight in another run."""
        return self._written is not None

    # A teacher that ran ahead

    def teacher_ahead(self, index: int) -> Written | None:
        """What has run ahead of step ``index``, which has not begun; None if nothing has.

        The teacher's calls have numbers of their own there: a step may get others beside them.
        """
        units = self.units.get(index)
        if units is None:
            return self._ahead
        self._stages.receive_ahead([index])
        numbers = {call: number for number, call in enumerate(self._calls)}
        outputs: list[list[Any]] = []
        if self._engine.is_loss_rank:
            outputs = [
                [numbers[call], ref.position, ref.slot, self._stages.value(index, units, call, ref)]
                for call, ref in self._values
            ]
        statistics: dict[int, dict[str, list[Part]]] = {}
        for _, (_, _, call), found in self._statistics():
            statistics.setdefault(numbers[call], {}).update(found)
        sizes = self._batch_sizes(units)
        there: Written = {"batch_sizes": sizes, "outputs": outputs, "statistics": statistics}
        copied: Written = tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), there)
        return copied

    def _put_ahead(self, index: int, units: StepUnits, ahead: Written) -> None:
        if self._engine.rank in self._engine.pipeline.readers(Op.TEACHER):
            for (call, ref), value in self._outputs(ahead):
                self._stages.put_value(index, units, call, ref, value.to(self._engine.device))
        teacher = next((stage for stage in self._stages if stage.op is Op.TEACHER), None)
        if teacher is not None:
            for number, found in ahead["statistics"].items():
                teacher.put_ahead((-1, 0, self._calls[number]), self._by_layer(found))

    def _outputs(self, ahead: Written) -> list[tuple[tuple[int, ValueRef], Tensor]]:
        """What the step uses of a teacher that ran ahead: the call and the place, and the value."""
        found = ahead["outputs"] if len(ahead["batch_sizes"]) == len(self._calls) else []
        return [((self._calls[number], ValueRef(*at)), value) for number, *at, value in found]

    def _batch_sizes(self, units: StepUnits) -> list[int]:
        return [units.inputs[call][0].shape[0] for call in self._calls]

    def _statistics(self) -> Iterable[tuple[str, tuple[int, int, int], dict[str, list[Part]]]]:
        """What ran ahead: the network, the batch, stage and call, and what its layers collected."""
        names = {layer: name for name, layer in self._engine.module.named_modules()}
        for stage in self._stages:
            for key, layers in stage.statistics_ahead():
                yield stage.network.name, key, {names[x]: parts for x, parts in layers.items()}

    def _by_layer(self, found: Mapping[str, Any]) -> dict[nn.Module, list[Part]]:
        """Statistics by name, of another run, for the layers that are here and on their device."""
        layers, device = dict(self._engine.module.named_modules()), self._engine.device
        return {
            layers[name]: [
                (n, mean.to(device), variance.to(device), run) for n, mean, variance, run in parts
            ]
            for name, parts in found.items()
            if name in layers
        }

    # Forwards of the student that ran ahead

    def write(self) -> Written | None:
        """This rank's batches in flight, of which nothing is under way; None without any."""
        weights = self._engine.weights
        if weights is None or not self.units:
            return None
        self._stages.receive_ahead(self.units)
        saved = [
            (saved.number, [batch, stage.index, unit, _copies(saved.inputs)])
            for stage in self._stages
            for (batch, unit), saved in stage.saved.items()
        ]
        return {
            "weights": weights.written(),
            "buffers": [
                [batch, str(action), payload, _copies(tensors)]
                for (batch, action, payload), tensors in self._stages.buffers.items()
            ],
            "inputs": [inputs for _, inputs in sorted(saved, key=lambda one: one[0])],
            "statistics": [
                [network, *key, {name: list(map(list, parts)) for name, parts in found.items()}]
                for network, key, found in self._statistics()
            ],
            "left": [deepcopy(stage.left) for stage in self._stages],
            "progress": self.progress.to_plain(),
            "teacher": None if self._teacher is None else self._teacher.written(),
            "stages": self._same(),
            "sizes": _sizes(self.units[min(self.units)]),
        }

    def _same(self) -> list[Any]:
        """What has to be the same where another run goes on with batches in flight."""
        engine, placement = self._engine, self._engine.placement
        assert engine.weights is not None
        cuts = [
            [name, *placement.ranks[name], *values]
            for name, values in sorted(placement.cuts.items())
        ]
        again = sorted(placement.recomputed)
        return [engine.weights.policy.name, engine.rank, cuts, again, "early apart"]

    def read_back(self, step: StepContext) -> None:
        """Before the first step of another run: what it wrote is in flight here.

        Args:
            step: The step that is about to begin.

        Raises:
            ConfigurationError: A forward isn't the same as in that run.
        """
        written, self._written = self._written, None
        if written is None:
            return
        weights, device = self._engine.weights, self._engine.device
        assert weights is not None
        weights.read_back(written["weights"])
        for batch, text, payload, tensors in written["buffers"]:
            self._stages.buffers[batch, Action.parse(text), payload] = [
                tensor.to(device) for tensor in tensors
            ]
        ops = {"student": Op.FORWARD, "teacher": Op.TEACHER}
        for own, left in zip(self._stages, written["left"], strict=True):
            own.left = left
        for network, batch, stage, call, found in written["statistics"]:
            owner = self._stages.of(Action(ops[network], stage, 0))
            owner.put_ahead((batch, stage, call), self._by_layer(found))
        buffers = [(b, b.clone()) for b in self._engine.module.buffers() if not b.is_meta]
        batches = written["weights"]["flights"]
        calls = dict.fromkeys(batches, 0)
        for batch, stage, unit, tensors in written["inputs"]:
            action = Action(Op.FORWARD, stage, unit, batch - step.index)
            inputs = tuple(t.to(device) for t in tensors)
            with weights.again(batch, batches[batch], calls[batch]):
                self._stages.of(action).repeat(batch, action, step.units[action.batch], inputs)
            calls[batch] += 1
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _sizes(units: StepUnits) -> list[list[int]]:
    return [list(spec.shape) for specs in units.inputs for spec in specs]


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]
