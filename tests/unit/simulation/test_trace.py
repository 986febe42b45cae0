from __future__ import annotations

from typing import Any

from lightning_tspipe.schedules.gpipe import gpipe
from lightning_tspipe.simulation.attribution import attribute
from lightning_tspipe.simulation.simulator import simulate
from lightning_tspipe.simulation.trace import chrome_trace
from tests.unit.pipelines import uniform_costs


def test_two_processes_whose_steady_steps_begin_together(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 1, 2, teacher=False)
    fast, slow = (
        simulate([gpipe(pipeline)] * 4, uniform_costs(pipeline, forward=seconds))
        for seconds in (1.0, 3.0)
    )
    trace = chrome_trace({"measured": fast, "simulated": slow}, {"measured": attribute(fast)})
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "simulated"}
    begins = [
        min(e["ts"] for e in events if e["pid"] == pid and e.get("args", {}).get("step") == 1)
        for pid in names
    ]
    # Nothing lies before the trace's beginning.
    assert begins[0] == begins[1] == slow.steady_start * 1e6
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    idle = [e for e in events if e.get("cat") == "idle"]
    assert {e["pid"] for e in idle} == {0}
    assert "waiting for 1B1 of rank 0" in {e["name"] for e in idle if e["tid"] == 1}
