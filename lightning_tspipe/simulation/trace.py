"""Timelines in the trace event format, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_tspipe.simulation.attribution import Attribution, Idle
from lightning_tspipe.simulation.timeline import Span, Timeline, aligned


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
        ranks = {f"rank {rank}": rank for rank in range(timeline.num_ranks)}
        events += [
            {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": title}}
            for kind, titles in (("process_name", {name: 0}), ("thread_name", ranks))
            for title, tid in titles.items()
        ]
        idle = attributions[name].idle if name in attributions else ()
        shown: list[Span | Idle] = [*timeline.spans, *idle]
        for each in shown:
            event = {
                "name": str(each),
                "cat": "idle",
                "ph": "X",
                "pid": pid,
                "tid": each.rank,
                "ts": (each.start - zero) * 1e6,
                "dur": (each.end - each.start) * 1e6,
            }
            if isinstance(each, Span):
                reads = {"reads": each.read} if each.read else {}
                event |= {"name": each.action, "cat": each.op, "args": {"step": each.step} | reads}
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
