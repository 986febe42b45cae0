"""Nobody outside of the modes asks which mode it is: the sources are read."""

from __future__ import annotations

import re
from pathlib import Path

import lightning_tspipe

PACKAGE = Path(lightning_tspipe.__file__).parent
CHOOSING = {"strategy/training/placing.py"}
"""Where engines are made."""
RELAY = {"strategy/training/relaying.py", "strategy/setup/block_costs.py"}
"""What prepares and drives blocks only."""


def _sources() -> dict[str, str]:
    """The sources of runtime and strategy outside of the modes, by their names."""
    found = {
        str(path.relative_to(PACKAGE)): path.read_text()
        for room in ("runtime", "strategy")
        for path in (PACKAGE / room).rglob("*.py")
    }
    return {name: text for name, text in found.items() if not name.startswith("runtime/modes/")}


def test_modes_are_known_where_they_are_chosen_only() -> None:
    known = {name for name, text in _sources().items() if "runtime.modes" in text}
    assert known == CHOOSING | RELAY


def test_nobody_asks_which_mode_it_is() -> None:
    questions = re.compile(
        r"isinstance\([^)]*\b(?:Heads|FrozenPart|\w+Engine|\w*Mode)\b"
        r"|\b(?:engine|captured|here)\.heads\b|\bis_frozen\b|\b_relaying\b|\.coupling\b|\bis_chain\b"
    )
    found = {path: questions.findall(text) for path, text in _sources().items()}
    assert {path: asked for path, asked in found.items() if asked} == {}


def test_the_files_of_a_step_exist() -> None:
    text = (Path(__file__).parents[2] / "docs/how-it-works.md").read_text()
    named = re.findall(r"`((?:runtime|strategy)/[\w/]+\.py)`", text)
    assert len(named) >= 8
    assert [name for name in named if not (PACKAGE / name).exists()] == []
