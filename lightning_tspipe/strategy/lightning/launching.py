"""Launch the processes of the other ranks: as scripts (``popen``), or as functions.

All of them end when the one that started them is gone, and that one when they fail; what is printed
of it is the cause alone. Lightning handles exceptions where ``fit`` was called, which is not in a
worker that is a function (``spawn``, ``fork``): there nobody would tell the other ranks, and the
parent reports whichever process ended first.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)

from lightning_tspipe.errors import TransportError
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.faults import local_processes
from lightning_tspipe.runtime.faults.failures import print_at_the_end, say
from lightning_tspipe.runtime.faults.local_processes import PARENT
from lightning_tspipe.runtime.faults.private_folder import shared_temporary_folder
from lightning_tspipe.runtime.faults.rendezvous import HEIR, JOB_TOKEN, Launched, process_name
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces

_GRACE = 6.0
_PERIOD = 0.2
_SIGTERM_CODES = {-signal.SIGTERM, 128 + signal.SIGTERM}


class _PassedOn:
    """A SIGTERM is one to the workers, which stop together; then it ends the parent too.

    Ended at once, the parent would take the workers with it before they could save; and in the
    middle of starting them, it would wait for those that it has started.

    Args:
        launcher: Knows the workers.
    """

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        self._pid = os.getpid()
        self._signum = 0
        self._is_due = False

    def __call__(self, signum: int, _frame: Any) -> None:
        """Handle the signal."""
        if os.getpid() != self._pid:  # a worker that was forked just now, and is meant itself
            self.give_back()
            os.kill(os.getpid(), signum)
            return
        self._signum, self._is_due = signum, True
        self.pass_on()

    def pass_on(self) -> None:
        """Tell the workers, if it has come and they have been started."""
        if self._is_due and self._launcher.procs:
            self._is_due = False
            self._launcher.kill(self._signum)

    def end(self) -> None:
        """Do what the signal would have done, and tidy up if that is to end this process.

        Raises:
            SIGTERMException: Lightning's own.
        """
        self.give_back()
        if self._previous is signal.SIG_DFL:
            raise self._launcher._strategy.namespace.sigterm_exception  # noqa: SLF001
        os.kill(os.getpid(), self._signum)

    def give_back(self) -> None:
        """Have the signal handled as before."""
        signal.signal(signal.SIGTERM, self._previous)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Be the handler while inside."""
        if threading.current_thread() is not threading.main_thread():
            yield  # which alone can do something about signals
            return
        signal.signal(signal.SIGTERM, self)
        try:
            yield
        except BaseException:
            if self._signum and self._previous is not signal.SIG_DFL:
                self.end()
            raise
        else:
            if self._signum:
                self.end()
        finally:
            self.give_back()


@dataclass
class InWorker:
    """A function of a Trainer, such as its fit, that handles exceptions as a script would.

    Attributes:
        function: What is to run.
        method: How workers start.
        states: The parent's random states and flags of torch, where the start method leaves them
            behind; None: it doesn't, or Lightning takes them along.
        temporary: The parent's folder for temporary files; None: the system's.
        parent: Who started the worker.
        token: What all workers of the job have in common.
    """

    function: Callable[..., Any]
    method: str
    states: Any = None
    temporary: str | None = field(default_factory=lambda: tempfile.tempdir)
    parent: str = field(default_factory=local_processes.signed_by_this_process)
    token: str = field(default_factory=secrets.token_hex)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it.

        Raises:
            BaseException: Whatever the function raises, when callbacks and ranks know of it.
            SystemExit: It failed because another one did, and has said so.
        """
        local_processes.end_with_parent(self.parent)
        os.environ[PARENT] = os.environ[HEIR] = self.parent
        os.environ[JOB_TOKEN] = self.token
        local_processes.watch_launcher()
        tempfile.tempdir = self.temporary
        if self.states is not None:
            self.states.restore()
        trainer = getattr(self.function, "__self__", None)
        if self.method != "fork":
            own_memory([*args, *kwargs.values(), *getattr(trainer, "callbacks", ())])
        parents = signal.getsignal(signal.SIGTERM)
        if isinstance(parents, _PassedOn):  # inherited by a fork
            parents.give_back()
        try:
            return self.function(*args, **kwargs)
        except BaseException as exception:
            if trainer is not None:
                strategy = trainer.strategy
                strategy.namespace.interrupt(trainer, exception)
                trainer._signal_connector.teardown()  # noqa: SLF001
                if not strategy.is_failing:
                    # What it saves of this end is written meanwhile, and this process may be the
                    # first to end: then the launcher ends all, in the middle of a file.
                    strategy.shutdown.await_ends()
                if strategy.failures is not None and strategy.failures.tell_now(exception):
                    raise SystemExit(1) from None
            raise


class _Scripts:
    """The part of a launcher that starts the script again for each other rank of the machine."""

    _module: Any
    """Lightning's, of one namespace or the other."""
    cluster_environment: Any
    num_processes: int
    num_nodes: int
    procs: list[subprocess.Popen[bytes]]

    def _call_children_scripts(self) -> None:
        """Start them, so that they end with this process."""

        def start(command: Sequence[str], env: dict[str, str], cwd: str | None) -> Any:
            return subprocess.Popen(  # noqa: S603 - what the user started
                command, cwd=cwd, env={**env, PARENT: local_processes.signed_by_this_process()},
                preexec_fn=local_processes.before_exec(),  # noqa: PLW1509 - one system call, and no lock is taken
            )  # fmt: skip

        os.environ[JOB_TOKEN] = secrets.token_hex()
        with attributes_replaced([(self._module, "subprocess", SimpleNamespace(Popen=start))]):
            super()._call_children_scripts()  # type: ignore[misc]

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the other ranks; then this process is rank 0."""
        del trainer
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            # Without Lightning's observer, which would kill all, at some time within 5 s of a
            # failure and without a word: the ranks watch each other.
            self._call_children_scripts()
        self._module._set_num_threads_if_needed(num_processes=self.num_processes)  # noqa: SLF001
        return function(*args, **kwargs)


class _Workers:
    """The part of a launcher that gives workers their function."""

    _strategy: Any
    _start_method: str
    _folder: str
    procs: list[Any]

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the workers and wait for them; what rank 0's returns."""
        self._strategy.have_workers_failed = False
        self.procs = []  # not those of an earlier launch
        states = None
        if self._start_method == "forkserver":
            # What its workers would not inherit: Lightning takes it to spawned ones only.
            states = self._strategy.namespace.workers._GlobalStateSnapshot.capture()  # noqa: SLF001
            shared_temporary_folder()  # now: it serves all launches of this process
        worker = InWorker(function, self._start_method, states)
        # Temporary files of torch and Lightning lie where they are removed: those of tracebacks,
        # and of the weights that travel back, would stay if a worker fails.
        job = Launched(worker.token, self._strategy.cluster_environment.main_port)
        self._folder = str(job.temporary)
        is_over, signals = threading.Event(), _PassedOn(self)
        threading.Thread(target=self._look_after, args=(is_over, signals), daemon=True).start()
        try:
            launch = super().launch  # type: ignore[misc]
            with attributes_replaced([(tempfile, "tempdir", self._folder)]), signals.during():
                return launch(worker, *args, trainer=trainer, **kwargs)
        except BaseException as exception:
            self._strategy.have_workers_failed = True
            words = _last_words(exception, job)
            code = getattr(exception, "exit_code", None)
            if code in _SIGTERM_CODES:
                if code == -signal.SIGTERM and words:
                    say(words)
                raise self._strategy.namespace.sigterm_exception from exception
            if isinstance(exception, ProcessException):
                # Nothing has failed in the parent.
                print_at_the_end(exception, words)
            raise
        finally:
            is_over.set()
            try:
                self._await_workers()
            finally:
                job.remove()

    def _await_workers(self) -> None:
        """Until all have ended: after Ctrl-C, which they have heard as well, they tidy up.

        Those that have not after a while, or at a second Ctrl-C, are killed.
        """
        try:
            local_processes.until(
                lambda: not any(worker.is_alive() for worker in self.procs), _GRACE
            )
        finally:
            for worker in self.procs:
                if worker.is_alive():
                    worker.kill()

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        if local_processes.parent_of(os.environ[HEIR]).is_ending:
            raise SystemExit(1)  # there is nobody who would take them
        with attributes_replaced([(tempfile, "tempdir", self._folder)]):
            return super()._collect_rank_zero_results(trainer, results)  # type: ignore[misc]

    def _look_after(self, is_over: threading.Event, signals: _PassedOn) -> None:
        """Kill the workers that are left a while after one has failed, such as stopped ones.

        torch asks them to end, and would wait for 30 s. And pass on a signal that came before
        they were there.
        """
        while not is_over.wait(_PERIOD):
            signals.pass_on()
            # Seen in passing: only one thread may ask for exit codes, and torch does.
            codes = [getattr(worker._popen, "returncode", None) for worker in self.procs]  # noqa: SLF001
            if any(codes):
                if not is_over.wait(_GRACE):
                    for worker in self.procs:
                        worker.kill()
                return


@torch.no_grad()
def own_memory(owners: Iterable[Any]) -> None:
    """Copy what came from the parent: tensors of modules, and of objects such as callbacks.

    torch lets all workers share them, and one that two ranks update would be updated twice.

    Of an object, the tensors and modules that its attributes are; data sets keep sharing theirs.
    """
    for owner in owners:
        modules = [owner] if isinstance(owner, nn.Module) else []
        if not modules and hasattr(owner, "state_dict"):
            _own_attributes(owner)
            modules = [value for value in vars(owner).values() if isinstance(value, nn.Module)]
        for module in modules:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                tensor.data = tensor.data.clone()
            for child in module.modules():
                _own_attributes(child)


def _own_attributes(owner: Any) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, Tensor) and value.is_shared():
            vars(owner)[name] = value.clone().requires_grad_(value.requires_grad)


def _last_words(exception: BaseException, job: Launched) -> str:
    """What is to be said of workers that have ended, if they have told nothing themselves."""
    told = set(job.told_causes())
    if isinstance(exception, ProcessRaisedException):
        if exception.error_index in told:
            return ""  # with its traceback: another rank's word is no reason to lose that
        text = exception.msg.partition("error:\n")[2].rstrip() or exception.msg
        path, _, says = text.splitlines()[-1].partition(": ")
        kind = path.rpartition(".")[2]
        if kind == TransportError.__name__ and not told:
            # It has met nobody, which is no fault of its own.
            return f"The job ends, because {says}"
        return f"{text}\n{_cause(exception, f'raised {kind}', job)}"
    if isinstance(exception, ProcessExitedException) and not told:
        how = f"ended with exit code {exception.exit_code}"
        if exception.signal_name:
            how = f"was killed by {exception.signal_name}"
        return _cause(exception, how, job)
    return ""


def _cause(exception: ProcessException, how: str, job: Launched) -> str:
    rank = exception.error_index
    who = process_name(rank, exception.error_pid)
    return f"The job ends, because {who} {how} in {job.phase_of(rank)}"


def _launcher_class(name: str, part: type, base: type, **members: Any) -> type:
    return type(name, (part, base), {"__module__": __name__, **members})


WORKER_LAUNCHERS = {
    each.name: _launcher_class(f"Launcher{number}", _Workers, each.workers._MultiProcessingLauncher)  # noqa: SLF001
    for number, each in enumerate(installed_namespaces())
}
"""The launchers of workers that are functions, by namespace."""
# Under their names, since they travel to the workers.
globals().update({made.__name__: made for made in WORKER_LAUNCHERS.values()})


def script_launcher(run: Any) -> Any:
    """The launcher of a strategy whose workers are scripts."""
    module = run.namespace.scripts
    base = module._SubprocessScriptLauncher  # noqa: SLF001
    made = _launcher_class("ScriptLauncher", _Scripts, base, _module=module)
    return made(run.cluster_environment, run.num_processes, run.num_nodes)
