"""Timelines in the trace event format, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_tspipe.simulation.attribution import Attribution
from lightning_tspipe.simulation.timeline import Timeline, aligned


def chrome_trace(
    timelines: Mapping[str, Timeline], attributions: Mapping[str, Attribution]
) -> dict[str, Any]:
    """One process for each timeline, with a thread for each rank; the first steady steps aligned.

    Args:
        timelines: Timelines by name.
        attributions: Attributions of some of them, by the same names, whose idle time is then shown
            with its cause.
    """
    events: list[dict[str, Any]] = []
    parts = aligned(timelines.values())
    for pid, ((name, timeline), (zero, _)) in enumerate(zip(timelines.items(), parts, strict=True)):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        events += timeline.trace_events(pid, zero)
        if name in attributions:
            events += _idle_events(attributions[name], pid, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _idle_events(attribution: Attribution, pid: int, zero: float) -> list[dict[str, Any]]:
    return [
        {
            "name": str(idle),
            "cat": "idle",
            "ph": "X",
            "pid": pid,
            "tid": idle.rank,
            "ts": (idle.start - zero) * 1e6,
            "dur": idle.seconds * 1e6,
        }
        for idle in attribution.idle
    ]
