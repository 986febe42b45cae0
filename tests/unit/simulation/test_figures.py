from __future__ import annotations

from typing import Any

import pytest

from lightning_tspipe.schedules.registry import build_step
from lightning_tspipe.simulation.simulator import simulate
from lightning_tspipe.simulation.timeline import Span, Timeline
from tests.unit.pipelines import uniform_costs


def test_figures_of_a_simulation_are_its_costs(make_pipeline: Any) -> None:
    pipeline = make_pipeline(2, 2, 1)
    costs = uniform_costs(pipeline, forward=0.25, backward=0.5, teacher=0.125)
    schedule = build_step("tspipe", pipeline, costs, fresh=False, ahead=1, split=frozenset({1}))
    timeline = simulate([schedule] * 6, costs)
    found = timeline.figures()
    for stage in (0, 1):
        assert found.pop(f"stage{stage}_forward_ms") == pytest.approx(250)
        # Of stage 1, the sum of its halves.
        assert found.pop(f"stage{stage}_backward_ms") == pytest.approx(500)
        assert found.pop(f"stage{stage}_teacher_ms") == pytest.approx(125)
    step = found.pop("step_ms")
    assert step == pytest.approx(timeline.step_time * 1e3)
    # Each rank works 2 units of a forward, a backward and a teacher's forward.
    idle = [found.pop(f"rank{rank}_idle_ms") for rank in (0, 1)]
    assert idle == pytest.approx([step - 1750, step - 1750])
    assert found == {"bubble_ratio": pytest.approx(sum(idle) / 2 / step)}


def test_only_the_steady_steps_count() -> None:
    spans = tuple(
        Span(0, "0F0", "F", step, 10.0 * step, 10.0 * step + seconds)
        for step, seconds in enumerate((5.0, 1.0, 3.0, 8.0))
    )
    assert Timeline(spans, 1).figures()["stage0_forward_ms"] == 2000
    assert Timeline(spans[:2], 1).figures()["stage0_forward_ms"] == 3000
