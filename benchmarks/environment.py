"""What a benchmark ran on."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def environment_of(packages: Sequence[str]) -> dict[str, object]:
    """Machine, versions of ``packages``, date and command."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": f"python {shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])}",
    }


def show(report: Mapping[str, object], file: Path | None) -> None:
    """Print a report as JSON, and write it if there is a file."""
    text = json.dumps(report, indent=2) + "\n"
    print(text)
    if file is not None:
        file.write_text(text, encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
