"""What must hold after a fault: each check is a function of what was seen, and can fail."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.lab.drawing import BEFORE_THEY_MET, DAMAGES, HARMLESS, HAVE_PARENT, Draw
from tests.faults.lab.jobs import AFTER_FAULT, AFTER_TIMEOUT, Ended
from tests.faults.lab.striking import TEXT

TOLERANCE = 1e-12
"""Between a run that was stopped and one that was not; float64."""
_RESUMED = "the result from"
_CAUSE = re.compile(r"The job ends, because rank (\d+) \(pid \d+ on [^)]+\) .+ in .+")
_TORCHRUNS_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s+: (\d+)", re.DOTALL)
_ALL_STOP = "all ranks stop after this batch"
_NO_SPACE = "No space left on device"


@dataclass
class Seen:
    """Everything that is known about a draw when it is over.

    Attributes:
        draw: What was drawn.
        ended: What became of the job.
        difference: For runs that must come to their end: the largest difference to the reference;
            None if there is no result.
        other: The second of two jobs.
        other_difference: The same for it.
        files: Files that a job should not leave, shared memory and sockets.
        left_to_next: Those of them that the user's next job has removed.
        checkpoint: The last one's name; "" if there is none.
        broken: Checkpoints that can't be read, and why.
        resumed: What became of the job that goes on from the last one.
        resumed_difference: Of its result.
    """

    draw: Draw
    ended: Ended
    difference: float | None = None
    other: Ended | None = None
    other_difference: float | None = None
    files: list[str] = field(default_factory=list)
    left_to_next: list[str] = field(default_factory=list)
    checkpoint: str = ""
    broken: list[str] = field(default_factory=list)
    resumed: Ended | None = None
    resumed_difference: float | None = None


Check = Callable[[Seen], str]
"""What is wrong; "" if nothing is."""


def was_struck(seen: Seen) -> str:
    """A fault that never happens shows nothing; from outside it may come too late."""
    fault = seen.draw.fault
    if seen.ended.was_struck or fault.moment in {"any", "resume"}:
        return ""
    return f"the moment was never reached: {fault}"


def all_ended(seen: Seen) -> str:
    """No process is left after the limit."""
    texts = []
    jobs = {"the job": seen.ended, "the other job": seen.other, "the resumed job": seen.resumed}
    for name, job in jobs.items():
        if job is not None and job.left:
            texts.append(f"{name} had not ended after {job.seconds:.1f} s: {job.left}")
    return "; ".join(texts)


def exit_codes(seen: Seen) -> str:
    """As the guide says: 0 only for a run that is complete."""
    jobs = [(seen.ended, _codes(seen))]
    jobs += [(job, _complete) for job in (seen.other, seen.resumed) if job is not None]
    for job, is_right in jobs:
        wrong = {name: code for name, code in job.codes.items() if not is_right(name, code)}
        if wrong and not job.left:
            return f"exit codes {wrong}\n{job.output}"
    return ""


_IsRight = Callable[[str, int | None], bool]


def _complete(_name: str, code: int | None) -> bool:
    return code == 0


def _failed(_name: str, code: int | None) -> bool:
    return code not in {0, None}


def must_complete(seen: Seen) -> bool:
    """Whether the run comes to its end as if nothing had been."""
    return seen.draw.fault.kind in HARMLESS or not (
        seen.ended.was_struck or seen.draw.fault.kind in DAMAGES
    )


def _codes(seen: Seen) -> _IsRight:
    fault = seen.draw.fault
    if must_complete(seen):
        return _complete
    if fault.kind == "flipped" and seen.difference is not None:
        return _complete  # where nothing reads: then the result must be right
    if fault.kind == "SIGKILL":
        return _signalled(seen, {-signal.SIGKILL})
    if fault.kind == "SIGTERM":
        return _signalled(seen, _after_sigterm(seen))
    if _is_apart(seen):
        return lambda name, code: (
            code not in ({0, None} if name == f"rank {fault.rank}" else {None})
        )
    return _failed


def _is_apart(seen: Seen) -> bool:
    """Whether each rank is a process of its own, and the training of all of them complete."""
    return seen.draw.fault.moment == "teardown" and seen.draw.launcher not in HAVE_PARENT


def _after_sigterm(seen: Seen) -> set[int]:
    """Of the process that got it: before and after the training it ends as any process does."""
    fault = seen.draw.fault
    if fault.target == "parent":
        # Which shells can't tell apart; torchrun ends with 1, while it looks after its workers.
        is_torchruns = seen.draw.launcher == "torchrun" and fault.moment != "any"
        also = {1} if seen.draw.launcher == "torchrun" else {143}
        return also if is_torchruns else {-signal.SIGTERM, *also}
    if fault.moment in {"start-up", "teardown"}:
        return {-signal.SIGTERM}
    if fault.moment == "any":
        return {-signal.SIGTERM, 143}
    if seen.draw.launcher == "torchrun":
        return {-signal.SIGTERM, 1}
    return {143}


def _signalled(seen: Seen, allowed: set[int]) -> _IsRight:
    """Codes of the one that got the signal, and of the others: they fail."""
    fault = seen.draw.fault
    together = allowed == {143}

    def is_right(name: str, code: int | None) -> bool:
        is_target = name == f"rank {fault.rank}" or (
            name == "parent" and (fault.target == "parent" or together)
        )
        if is_target or together:
            return code in allowed
        if _is_apart(seen):
            return code is not None  # a rank may be gone already
        return _failed(name, code)

    return is_right


def one_cause(seen: Seen) -> str:
    """At most one traceback, and a line that tells which rank ended the job, and how."""
    if must_complete(seen):
        return ""
    output = seen.ended.output
    number, allowed = num_tracebacks(output), _tracebacks(seen)
    if number > allowed:
        return f"{number} tracebacks, and not {allowed} at most\n{output}"
    missing = _missing(seen, output)
    return f"{missing}\n{output}" if missing else ""


def num_tracebacks(output: str) -> int:
    """How often something explains itself; a loader's worker is quoted by its rank."""
    parts = len(re.findall(r"(?<!Original )Traceback \(most recent call last\)", output))
    chained = r"During handling of the above exception|the direct cause of the following exception"
    return parts - len(re.findall(chained, output))


def _tracebacks(seen: Seen) -> int:
    """Torchrun has one of its own."""
    own = int(seen.draw.fault.kind in {"exception", "full disk", *DAMAGES})
    return own + (seen.draw.launcher == "torchrun")


def _missing(seen: Seen, output: str) -> str:
    """What the output does not say."""
    draw, fault = seen.draw, seen.draw.fault
    wanted = {"exception": TEXT, "full disk": _NO_SPACE, "truncated": seen.checkpoint}
    text = wanted.get(fault.kind, "")
    if fault.kind == "flipped" and seen.difference is None:
        text = seen.checkpoint
    if text not in output:
        return f"nobody says {text!r}"
    rank = seen.ended.struck_rank
    has_others = draw.configuration.num_ranks > 1 and fault.moment != "teardown"
    if rank is None or not has_others or fault.kind in DAMAGES:
        return ""
    if fault.place in BEFORE_THEY_MET:
        return _wrong_before_they_met(seen, output, rank)
    if fault.kind == "SIGTERM" and _ALL_STOP in output:
        return ""
    # Who fills a disk is not who fails.
    return _wrong_cause(output, None if fault.kind == "full disk" else rank)


def _wrong_before_they_met(seen: Seen, output: str, rank: int) -> str:
    """What is wrong where the ranks don't know each other yet, and the launcher may tell."""
    draw, fault = seen.draw, seen.draw.fault
    is_told = bool(_CAUSE.search(output))
    is_alone = draw.launcher in {"slurm", "torchrun"} or (draw.launcher == "popen" and rank == 0)
    if is_alone and not is_told and fault.kind in {"SIGKILL", "SIGTERM", "two jobs"}:
        return ""  # nobody else has met it: the launcher tells, or whoever ended the script
    if is_alone and draw.launcher != "torchrun" and not is_told and fault.kind == "exception":
        return ""  # the one traceback is its own; srun tells which task it was, a shell has one
    if draw.launcher == "torchrun" and not is_told and fault.kind == "exception":
        # Torchrun ends the others a tenth of a second later: it tells whose traceback it is.
        told = _TORCHRUNS_CAUSE.findall(output)
        return "" if told == [str(rank)] else f"rank {rank} is the cause, and torchrun tells {told}"
    if fault.kind == "SIGSTOP":
        absent = rf"The job ends, because .*rank {rank} did not join within"
        # Or whoever has started it, and knows that it was stopped, is the first.
        is_told = bool(re.search(absent, output)) or not _wrong_cause(output, rank)
        return "" if is_told else f"nobody says that rank {rank} did not join"
    return _wrong_cause(output, None if fault.kind == "full disk" else rank)


def _wrong_cause(output: str, rank: int | None) -> str:
    """What is wrong with the line that tells why the job ends; all who print it must agree."""
    told = sorted(set(_CAUSE.findall(output)))
    who = "a rank" if rank is None else f"rank {rank}"
    if not told:
        return f"no line tells why the job ends, because of {who}"
    is_right = len(told) == 1 and rank in {None, int(told[0])}
    return "" if is_right else f"{who} is the cause, and told is {told}"


def nothing_left(seen: Seen) -> str:
    """No file beside those that were asked for, no shared memory, no socket."""
    if all_ended(seen):  # these are theirs
        return ""
    files, fault = seen.files, seen.draw.fault
    num_ranks = seen.draw.configuration.num_ranks
    was_alone = fault.moment == "teardown" or not seen.ended.have_met or num_ranks == 1
    if fault.kind == "SIGKILL" and was_alone:
        # Who would have removed these is gone, and may have had nobody who knew of them.
        files = [name for name in files if name not in seen.left_to_next]
    return f"left: {', '.join(files)}" if files else ""


def checkpoints_load(seen: Seen) -> str:
    """Whatever has the name of a checkpoint is whole."""
    return f"checkpoints that can't be read: {'; '.join(seen.broken)}" if seen.broken else ""


def results_equal(seen: Seen) -> str:
    """What was not stopped, and what went on, is the run that nobody stopped."""
    found: list[tuple[str, float | None]] = []
    if must_complete(seen) or (seen.difference is not None and seen.draw.fault.kind in DAMAGES):
        found.append(("the result", seen.difference))
    if seen.other is not None:
        found.append(("the other job's result", seen.other_difference))
    if seen.resumed is not None:
        found.append((f"{_RESUMED} {seen.checkpoint}", seen.resumed_difference))
    texts, is_exact = [], seen.draw.configuration.resumes_exactly
    for name, difference in found:
        if difference is None:
            texts.append(f"{name} is missing")
        elif not (difference <= TOLERANCE or (name.startswith(_RESUMED) and not is_exact)):
            texts.append(f"{name} is {difference:.1e} off")
    return "; ".join(texts)


CHECKS: dict[str, Check] = {
    "the fault happened": was_struck,
    "all ended in time": all_ended,
    "exit codes": exit_codes,
    "one cause": one_cause,
    "nothing left": nothing_left,
    "checkpoints load": checkpoints_load,
    "results equal": results_equal,
}


def failures(seen: Seen) -> dict[str, str]:
    """What is wrong, by check."""
    found = {name: check(seen) for name, check in CHECKS.items()}
    return {name: text for name, text in found.items() if text}


def limits() -> str:
    """In words, for the report."""
    return (
        f"{AFTER_FAULT:.0f} s after a fault, timeout + {AFTER_TIMEOUT:.0f} s for a stopped rank; "
        f"results within {TOLERANCE:g}"
    )
