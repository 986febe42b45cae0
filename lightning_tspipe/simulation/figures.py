"""Metrics of a timeline, for a logger."""

from __future__ import annotations

from statistics import fmean

from lightning_tspipe.ir.action import Action, Op
from lightning_tspipe.simulation.timeline import Timeline

_KINDS = {
    Op.FORWARD: "forward",
    Op.TEACHER: "teacher",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "backward",
    Op.WEIGHT_BACKWARD: "backward",
}


def figures(timeline: Timeline) -> dict[str, float]:
    """Metrics of the steady steps.

    Returns:
        ``bubble_ratio`` and ``step_ms``; ``rank0_idle_ms`` (per step) of each rank; of each stage
        ``stage0_forward_ms``, ``stage0_teacher_ms`` and ``stage0_backward_ms``, the mean of one
        unit in the steady steps. A backward in two halves counts as their sum.
    """
    found = {"bubble_ratio": timeline.bubble_ratio, "step_ms": timeline.step_time * 1e3}
    for rank, (start, end) in enumerate(timeline.windows):
        idle = (end - start - timeline.busy(rank)) / timeline.num_steady_steps
        found[f"rank{rank}_idle_ms"] = max(0.0, idle) * 1e3
    for (stage, op), seconds in sorted(_durations(timeline).items()):
        name = f"stage{stage}_{_KINDS[Op(op)]}_ms"
        found[name] = found.get(name, 0.0) + fmean(seconds) * 1e3
    return found


def _durations(timeline: Timeline) -> dict[tuple[int, str], list[float]]:
    """Seconds of each unit, by stage and op."""
    steady = timeline.steps[1:-1] or timeline.steps
    found: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        action = Action.parse(span.action)
        if action.op in _KINDS and span.step in steady:
            found.setdefault((action.stage, span.op), []).append(span.end - span.start)
    return found
