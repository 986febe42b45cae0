"""Each line of the support table names a test that exists; so does the list of conformance."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guide/lightning.md"
LIST = ROOT / "tests/conformance/README.md"
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def rows() -> list[str]:
    """The lines of tables that end in a column of tests."""
    found, inside = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.endswith("| Test |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|--"):
            found.append(line)
    return found


def test_there_is_a_table() -> None:
    assert len(rows()) > 40


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.strip("| ")[:40])
def test_a_row_says_what_holds_and_names_its_test(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 3, row
    assert all(cells), row
    assert_they_exist(cells[2])


def assert_they_exist(text: str) -> None:
    named = TEST.findall(text)
    assert named, text
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in names_in(file), f"{file} has no {name}"


def words() -> set[str]:
    """What the tables' first columns, between them all, speak of."""
    return set(re.findall(r"\w+", " ".join(row.strip("|").split(" | ")[0] for row in rows())))


@pytest.mark.parametrize("world", ["lightning.pytorch", "pytorch_lightning"])
def test_there_are_no_silent_gaps(world: str) -> None:
    """Each argument of a Trainer has its line, and so has each of Lightning's callbacks."""
    package = importlib.import_module(world)
    arguments = set(inspect.signature(package.Trainer).parameters)
    callbacks = set(importlib.import_module(f"{world}.callbacks").__all__)
    # What the page is about; what another package's callback reads; base classes.
    others = {"strategy", "model_registry", "Callback", "Checkpoint"}
    assert sorted((arguments | callbacks) - others - words()) == []


def test_the_list_of_conformance_names_tests_that_exist() -> None:
    text = LIST.read_text(encoding="utf-8")
    assert_they_exist(text)
    assert len(TEST.findall(text)) == text.count("::")
