"""New interpreters without their imports: a fork that does what the new interpreter would do.

Importing torch and Lightning takes five seconds of a core for each process, and a job has up to
five processes. So this process imports everything once, and all that its descendants start by
``subprocess`` or by ``multiprocessing`` is forked instead: with the arguments, the environment, the
descriptors and the parent that it would have, and with the memory of that parent as well, of which
what a new interpreter would not know is forgotten. Draws that are *cold* do without this.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

_SEED_OF_TORCH = 67280421310721
_MAIN_PROCESS: Any = type(multiprocessing.process.current_process())  # imported by a main process
_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds


NewInterpreter = subprocess.Popen
"""A child as everybody starts one."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)


class Instant(NewInterpreter):  # type: ignore[type-arg]
    """A child that is forked if its command is one of this Python."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        base = super()._execute_child  # type: ignore[misc]
        wanted = inspect.signature(base).bind(*args, **kwargs).arguments
        command = [os.fspath(part) for part in wanted["args"]]
        if wanted["shell"] or not _is_this_python(command[0]):
            base(*args, **kwargs)
            return
        files = {0: wanted["p2cread"], 1: wanted["c2pwrite"], 2: wanted["errwrite"]}
        pid = _fork(
            command[1:], files={new: old for new, old in files.items() if old != -1},
            keeps=wanted["pass_fds"], cwd=wanted["cwd"], environment=wanted["env"],
            has_own_session=wanted["start_new_session"], first=wanted["preexec_fn"],
        )  # fmt: skip
        self.pid = pid
        self._child_created = True
        for pipe in ("p2cread", "c2pwrite", "errwrite"):
            if wanted[pipe] not in {-1, *_others(wanted, pipe)}:
                os.close(wanted[pipe])


def _others(wanted: Mapping[str, Any], pipe: str) -> list[int]:
    """Descriptors that are the caller's own: no pipe belongs to them."""
    ends = {"p2cread": "p2cwrite", "c2pwrite": "c2pread", "errwrite": "errread"}
    return [wanted[pipe]] if wanted[ends[pipe]] == -1 else []


def _spawn_instantly(path: Any, args: Sequence[Any], passfds: Iterable[int]) -> int:
    command = [os.fsdecode(part) for part in args]
    if not _is_this_python(os.fsdecode(path)):
        return _spawn(path, args, passfds)
    return _fork(command[1:], files={}, keeps=passfds)


def switch_on() -> None:
    """From now on, this process and its descendants start new interpreters by forking."""
    subprocess.Popen = Instant  # type: ignore[misc]
    vars(subprocess_handler)["Popen"] = Instant  # torchrun's
    multiprocessing.util.spawnv_passfds = _spawn_instantly  # type: ignore[attr-defined]


def _is_this_python(path: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(sys.executable)


def _fork(  # noqa: PLR0913 - what a new process gets
    command: Sequence[str],
    *,
    files: Mapping[int, int],
    keeps: Iterable[int],
    cwd: Any = None,
    environment: Mapping[str, str] | None = None,
    has_own_session: bool = False,
    first: Callable[[], None] | None = None,
) -> int:
    """Fork a process that runs the arguments of an interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes before Python is ready again in the child would be forgotten.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    code = 1
    try:
        switch_on()
        if has_own_session:
            os.setsid()
        _take(files, keeps)
        if cwd is not None:
            os.chdir(cwd)
        if environment is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()})
        if first is not None:
            first()
        _forget()
        code = _exit_code(lambda: _run(list(command)))
    except BaseException:  # noqa: BLE001 - nothing may go on in the frames of the parent
        traceback.print_exc()
    finally:
        os._exit(code)


def _take(files: Mapping[int, int], keeps: Iterable[int]) -> None:
    """Close what a new interpreter does not inherit.

    The numbers stay taken: objects of the parent's memory know them, and would close whatever else
    had them when they are collected.
    """
    moved = {new: os.dup(old) for new, old in files.items()}
    for new, old in moved.items():
        os.dup2(old, new)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - no paths
        if number not in {0, 1, 2, nowhere, *keeps}:
            os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


def _forget() -> None:
    """Know no more than a new interpreter that has imported the same."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.modules["__main__"] = types.ModuleType("__main__")
    process: Any = multiprocessing.process
    process._current_process = _MAIN_PROCESS()
    process._parent_process, process.ORIGINAL_DIR = None, os.getcwd()  # noqa: PTH109 - its type
    process._children = set()
    util: Any = multiprocessing.util
    util._finalizer_registry.clear()
    util._exiting = False
    util._temp_dir = None
    vars(process._current_process)["_config"].pop("tempdir", None)
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_pid = server._forkserver_fd = server._forkserver_address = None
    server._forkserver_alive_fd = server._inherited_fds = None
    server._preload_modules = ["__main__"]
    sys.excepthook, sys.stdout, sys.stderr = sys.__excepthook__, sys.__stdout__, sys.__stderr__
    sys.path_importer_cache.clear()
    vars(tempfile)["tempdir"] = None
    random.seed()
    torch.manual_seed(_SEED_OF_TORCH)
    torch.set_default_dtype(torch.float32)
    _be_rank(int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))


def _be_rank(rank: int) -> None:
    """As Lightning does when it is imported."""
    for world in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
        with suppress(ImportError):
            importlib.import_module(f"{world}.utilities.rank_zero").rank_zero_only.rank = rank


def _run(command: list[str]) -> None:
    """Run a script, a module or a line of code."""
    while command and command[0].startswith("-") and command[0] not in {"-m", "-c"}:
        command = command[2 if command[0] == "-X" else 1 :]
    kind, *rest = command
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        names = vars(sys.modules["__main__"])
        exec(compile(rest[0], "<string>", "exec"), names)  # noqa: S102 - what we were told to run
    elif kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()  # noqa: PTH109 - an entry of a list of texts
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.realpath(kind))  # noqa: PTH120 - as above
        runpy.run_path(kind, run_name="__main__")


def _exit_code(main: Callable[[], None]) -> int:
    """Run something as the main program, to the end of the interpreter."""
    code: Any = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)  # noqa: T201 - as an interpreter does
            code = 1
    except BaseException as error:  # noqa: BLE001 - whatever leaves a program
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    shut: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]
    for end in (shut, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with suppress(Exception):
            end()
    return int(code or 0)
