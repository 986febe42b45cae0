"""The Python of README and docs runs: each page is one script, run as a reader would run it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<info>python[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def script_of(text: str) -> str:
    """All Python blocks of a page, at their own line numbers, so that tracebacks point there."""
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        first = text.count("\n", 0, block.start("code"))
        indent = len(block["indent"])
        for number, line in enumerate(block["code"].splitlines(), start=first):
            lines[number] = line[indent:]
    return "\n".join(lines).rstrip() + "\n"


def with_python() -> list[Path]:
    return [page for page in PAGES if FENCE.search(page.read_text())]


PAGE = """\
# Title
```python
x = 1
```
```bash
make
```
- item
    ```python
    y = x
    ```
"""


def test_script_keeps_line_numbers_and_leaves_other_languages_out() -> None:
    assert script_of(PAGE).splitlines() == ["", "", "x = 1", "", "", "", "", "", "", "y = x"]


def test_readme_has_python() -> None:
    assert ROOT / "README.md" in with_python()


HOW_IT_WORKS, CONTRIBUTING = ROOT / "docs/how-it-works.md", ROOT / "docs/contributing.md"
NAMED = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.\w+)?)`")


@pytest.mark.parametrize("page", [HOW_IT_WORKS, CONTRIBUTING], ids=lambda page: page.stem)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8"))) - {"site/", "runs/"}
    below = ("", "lightning_tspipe", "lightning_tspipe/strategy", "tests")
    missing = {n for n in named if not any((ROOT / folder / n).exists() for folder in below)}
    assert named
    assert not missing


def test_a_step_is_read_in_eight_files_at_most() -> None:
    text = HOW_IT_WORKS.read_text(encoding="utf-8")
    (section,) = re.findall(r"^## One step, file by file$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    files = re.findall(r"^\| \d \| `([\w/]+\.py)` \|", section, re.MULTILINE)
    assert 1 < len(set(files)) <= 8
    assert {name for name in NAMED.findall(section) if name.endswith(".py")} == set(files)


# One page runs with every `make test`; the README, which is the longest, with the slow ones.
FIRST = {"docs/index.md"}


def pages() -> list[Any]:
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] * (name not in FIRST))
        for page in with_python()
        for name in [str(page.relative_to(ROOT))]
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_the_examples_of_how_to_write_a_test_pass(tmp_path: Path) -> None:
    file = tmp_path / "test_page.py"
    file.write_text(script_of((ROOT / "tests" / "README.md").read_text()))
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    plugins = ["-p", "tests.integration.conftest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(  # noqa: S603 -- as below
        [sys.executable, "-m", "pytest", *options, *plugins, str(file)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 passed" in done.stdout


@pytest.mark.distributed
@pytest.mark.timeout(240)  # the README takes a minute of two free cores
@pytest.mark.parametrize("page", pages())
def test_page_runs(page: Path, tmp_path: Path) -> None:
    # A process of its own, because a strategy with several devices starts the script once for each.
    script = tmp_path / f"page_{page.stem}.py"  # not lightly.py, which that page imports
    script.write_text(script_of(page.read_text()))
    with subprocess.Popen(  # noqa: S603 -- the script is a page of this repository
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=220)[1]
        finally:
            # The processes of the other devices too: one that is left would hold the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
