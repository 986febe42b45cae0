"""Plans as checkpoints keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.plain import plain
from lightning_tspipe.planning.placement import Pieces, Placement
from lightning_tspipe.planning.plan import PLACED, PLAN, Plan, RunPlan
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile
from lightning_tspipe.planning.relay import RelayPlan
from lightning_tspipe.planning.step_profile import StepProfile

MADE_FOR: dict[str, Any] = {"devices": 2, "schedule": "tspipe", "partition": "auto"}
HEADS = Placement(
    2, (0, 1, 2), (0, 1), (0, 3), (1,), 2, frozenset({1}), frozenset({0, 2}), 3,
    ((0,), (0, 1)), ((1,),), Pieces(2, 4),
)  # fmt: skip


def found() -> Plan:
    atoms = tuple(
        AtomProfile(f"{n}", {1: 1.1 * n + 0.1, 4: 3.3 * n}, {1: 2.0, 4: 7.0}) for n in range(5)
    )
    network = NetworkProfile(atoms)
    return StepProfile(network, network, (1, 1), (8,)).plan(2)


@pytest.mark.parametrize(
    "kept",
    [
        RunPlan(MADE_FOR, "given", HEADS),
        RunPlan(MADE_FOR, "flops", found().placement, found()),
        RunPlan(MADE_FOR, "times", blocks=RelayPlan((0, 1, 3), (2, 1), (0.5, 1.0), (3, 4))),
    ],
)
def test_a_way_through_text(kept: RunPlan) -> None:
    entries = kept.to_entries()
    assert all(isinstance(text, str | None) for text in entries.values())
    again = RunPlan.from_entries({"seed": 1, **entries})
    assert again == kept
    assert again.carries_out(kept)
    assert again.costs == kept.costs  # by which actions are ordered
    if kept.plan is not None:
        assert Plan.from_json(str(entries[PLAN])) == kept.plan


def test_what_another_run_must_have_in_common() -> None:
    kept = RunPlan(MADE_FOR, "times", HEADS)
    assert kept.differences(MADE_FOR) == []
    assert kept.differences(MADE_FOR | {"partition": [1, 2], "devices": 3}) == [
        "devices (2 then, 3 now)", "partition ('auto' then, [1, 2] now)",
    ]  # fmt: skip
    assert not kept.carries_out(replace(kept, placement=replace(HEADS, student_ranks=(1, 0))))


def test_values_that_text_has_not() -> None:
    assert plain((1, {2: frozenset({5, 4})}, None, 0.5)) == [1, {"2": [4, 5]}, None, 0.5]
    assert plain({"backend": print}) == {"backend": repr(print)}


def test_checkpoints_of_older_versions_and_damaged_ones() -> None:
    assert RunPlan.from_entries({"seed": 1}) is None
    entries = RunPlan(MADE_FOR, "given", HEADS).to_entries()
    for text in ("", "[]", "{}", str(entries[PLACED]).replace("pieces", "parts")):
        with pytest.raises(CheckpointError, match="Remove checkpoint"):
            RunPlan.from_entries({**entries, PLACED: text})
    with pytest.raises(CheckpointError, match="plan can't be read"):
        RunPlan.from_entries({**entries, PLAN: "{}"})
