from __future__ import annotations

import time
from itertools import islice

from lightning_tspipe.ir.action import Action
from lightning_tspipe.runtime.batches.loading import LookaheadLoader
from lightning_tspipe.runtime.recording import Recorder


def test_a_recorder_notes_one_window() -> None:
    recorder = Recorder()
    forward = Action.parse("1F0")
    recorder.ran(0, forward, time.perf_counter())
    recorder.paused("send", time.perf_counter())
    assert (recorder.spans(1), recorder.pauses(1)) == ((), ())
    recorder.start()
    started = time.perf_counter()
    recorder.ran(3, forward, started)
    recorder.paused("load", started)
    recorder.stop()
    recorder.ran(4, forward, started)
    (span,), (pause,) = recorder.spans(2), recorder.pauses(2)
    assert (span.rank, span.action, span.op, span.step, span.start) == (2, "1F0", "F", 3, started)
    assert started <= span.end <= pause.end <= time.perf_counter()
    assert (pause.rank, pause.reason, pause.start) == (2, "load", started)
    recorder.start()
    assert (recorder.spans(1), recorder.pauses(1)) == ((), ())


def test_a_loader_tells_when_it_read() -> None:
    times: list[float] = []
    before = time.perf_counter()
    loader = LookaheadLoader(range(3), on_read=times.append)
    # It holds the next batch while the current one is trained.
    assert list(islice(loader, 1)) == [0]
    assert len(times) == 2
    assert before <= times[0] <= times[1] <= time.perf_counter()
