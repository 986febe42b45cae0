"""Each line of the tables of support names a test that exists; so does the list of conformance."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHTNING = ROOT / "docs/guide/lightning.md"
PAGES = {LIGHTNING: 3, ROOT / "docs/guide/lightly.md": 4}
"""The pages with such tables, and their numbers of columns."""
LIST = ROOT / "tests/conformance/README.md"
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def rows(page: Path) -> list[str]:
    """The lines of tables that end in a column of tests."""
    found, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.endswith("| Test |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|--"):
            found.append(line)
    return found


def test_there_are_tables() -> None:
    assert [len(rows(page)) > 15 for page in PAGES] == [True, True]


@pytest.mark.parametrize(
    ("row", "num_columns"),
    [(row, number) for page, number in PAGES.items() for row in rows(page)],
    ids=lambda value: str(value).strip("| ")[:40],
)
def test_a_row_says_what_holds_and_names_its_test(row: str, num_columns: int) -> None:
    cells = [cell.strip() for cell in row[1:-1].split("|")]
    assert len(cells) == num_columns, row
    assert all((cells[0], cells[1], cells[-1])), row
    assert_they_exist(cells[-1])


def assert_they_exist(text: str) -> None:
    named = TEST.findall(text)
    assert named, text
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in names_in(file), f"{file} has no {name}"


def words() -> set[str]:
    """What the first columns of the page on Lightning, between them all, speak of."""
    return set(
        re.findall(r"\w+", " ".join(row.strip("|").split(" | ")[0] for row in rows(LIGHTNING)))
    )


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
