"""The walk-throughs of docs/contributing.md, followed to the letter in a copy of the tree.

Blocks with a title are followed in their order: ``py`` is a new file, ``diff`` changes one (its
context must be there exactly once), and ``bash title="run"`` is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.choosing import some_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r'^```(?P<kind>py|diff|bash) title="(?P<title>[^"]+)"\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "dist", "lightning_logs")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}$\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def changed(text: str, diff: str) -> str:
    """A text with the lines of a diff in it."""
    lines = diff.splitlines(keepends=True)
    before, after = (
        "".join(line[1:] for line in lines if line[0] in kind) for kind in (" -", " +")
    )
    assert text.count(before) == 1, f"{text.count(before)} times in the file:\n{before}"
    return text.replace(before, after)


def test_a_diff_is_applied_where_its_context_stands() -> None:
    assert changed("a\nb\nc\n", " a\n-b\n+B\n+\n") == "a\nB\n\nc\n"
    with pytest.raises(AssertionError, match="2 times"):
        changed("a\na\n", " a\n+b\n")


def run(script: str, tree: Path) -> None:
    done = subprocess.run(  # noqa: S603 - a block of our own page
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    print(done.stdout)  # noqa: T201 - pytest shows it where something fails
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"


@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "title", some_of(["Add a schedule", "Add a callback"], slow=["Add a callback"])
)
def test_a_newcomer_gets_through(title: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    (tree / ".venv").symlink_to(sys.prefix)
    for block in BLOCK.finditer(section(title)):
        file = tree / block["title"]
        if block["kind"] == "py":
            file.parent.mkdir(exist_ok=True)  # runs/, which git leaves out
            file.write_text(block["body"], encoding="utf-8")
        elif block["kind"] == "diff":
            text = file.read_text(encoding="utf-8")
            file.write_text(changed(text, block["body"]), encoding="utf-8")
        else:
            run(block["body"], tree)
