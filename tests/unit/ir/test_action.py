from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.errors import ScheduleError
from lightning_tspipe.ir.action import Action, Op


@given(
    op=st.sampled_from(Op),
    stage=st.integers(0, 99),
    unit=st.integers(0, 99),
    batch=st.integers(0, 3),
)
def test_prints_and_parses(op: Op, stage: int, unit: int, batch: int) -> None:
    action = Action(op, stage, None if op.is_rank_wide else unit, batch)
    assert Action.parse(str(action)) == action


def test_grammar() -> None:
    assert str(Action(Op.TEACHER, 2, 0, 1)) == "2T0+1"
    assert str(Action(Op.DATA, 1, batch=1)) == "1D+1"
    assert str(Action(Op.LOSS, 0)) == "0L"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"^'{re.escape(text)}' is not an action") for text in ("", "F0", "1X0", "1F0+")),
        ("1F", "^FORWARD needs a unit$"),
        ("1L0", "^LOSS takes no unit$"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action.parse(text)
