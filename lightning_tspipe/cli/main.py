"""The entry point of ``tspipe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_tspipe.cli import checking, drawing, evaluating, exporting, planning, plotting
from lightning_tspipe.errors import TSPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 2 for errors that the user can fix, with a message that says how.
    """
    parser = argparse.ArgumentParser(prog="tspipe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_, add, run in (
        ("plan", "find the fastest pipeline", planning.add_arguments, planning.run),
        ("simulate", "draw a plan", drawing.add_simulation_arguments, drawing.run_simulation),
        ("check", "compare with one device", checking.add_arguments, checking.run),
        ("timeline", "draw a recorded run", drawing.add_timeline_arguments, drawing.run_timeline),
        ("plot", "draw what a run logged", plotting.add_arguments, plotting.run),
        ("evaluate", "classify by frozen features", evaluating.add_arguments, evaluating.run),
        ("export", "write weights for others", exporting.add_arguments, exporting.run),
    ):
        command = commands.add_parser(name, help=help_, description=help_)
        add(command)
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except TSPipeError as error:
        print(f"tspipe: {error}", file=sys.stderr)  # noqa: T201 - the command's output
        return 2
    return 0
