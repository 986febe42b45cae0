"""The entry point of ``tspipe``."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lightning_tspipe.cli import (
    checking,
    drawing,
    evaluating,
    exporting,
    plan_options,
    planning,
    plotting,
)
from lightning_tspipe.errors import TSPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 2 for errors that the user can fix, with a message that says how.
    """
    parser = argparse.ArgumentParser(prog="tspipe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, title, kind, run in (
        ("plan", "find the fastest pipeline", plan_options.Options, planning.run),
        ("simulate", "draw a plan", drawing.SimulationOptions, drawing.run_simulation),
        ("check", "compare with one device", checking.Options, checking.run),
        ("timeline", "draw a recorded run", drawing.TimelineOptions, drawing.run_timeline),
        ("plot", "draw what a run logged", plotting.Options, plotting.run),
        ("evaluate", "classify by frozen features", evaluating.Options, evaluating.run),
        ("export", "write weights for others", exporting.Options, exporting.run),
    ):
        command = commands.add_parser(name, help=title, description=title)
        _add_arguments(command, kind)
        command.set_defaults(run=run, kind=kind)
    options = vars(parser.parse_args(arguments))
    run, kind = options.pop("run"), options.pop("kind")
    try:
        for field in fields(kind):
            parse = field.metadata.get("parse")
            if parse is not None and options[field.name] is not None:
                options[field.name] = parse(options[field.name])
        run(kind(**options))
    except TSPipeError as error:
        print(f"tspipe: {error}", file=sys.stderr)  # noqa: T201 - the command's output
        return 2
    return 0


def _add_arguments(parser: argparse.ArgumentParser, kind: Any) -> None:  # noqa: ANN401 - a class
    """Add an argument for each field of a dataclass, whose docstrings have their help.

    A field without a default is positional, unless it is ``required``; its metadata is that of the
    argument, and ``parse``, which makes a value of its text.
    """
    texts = "\n".join(inspect.getdoc(base) or "" for base in kind.__mro__)
    helps = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", texts, re.MULTILINE))
    hints = get_type_hints(kind)
    for each in fields(kind):
        settings = {name: value for name, value in each.metadata.items() if name != "parse"}
        settings["help"] = " ".join(helps[each.name].split())
        hint = hints[each.name]
        if isinstance(hint, UnionType):  # or None
            hint = get_args(hint)[0]
        if get_origin(hint) is list:
            hint = get_args(hint)[0]
            if "action" not in settings:
                settings["nargs"] = "+"
        if hint is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = str if "parse" in each.metadata else hint
        name = each.name
        if each.default is not MISSING or "required" in settings:
            name = "--" + name.replace("_", "-")
            settings["default"] = None if each.default is MISSING else each.default
        parser.add_argument(name, **settings)
