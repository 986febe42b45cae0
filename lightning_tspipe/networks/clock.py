"""How long a device takes for what it is asked to do, one thing after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Keep = Callable[[float], None]


class Clock:
    """Seconds between laps.

    On a GPU each lap is an event among what the device does, and the host waits once, when all is
    launched: so small things are timed as they run in a training, one behind the other.

    Args:
        device: That is watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[torch.cuda.Event, torch.cuda.Event, Keep]] = []
        self._event: torch.cuda.Event | None = None
        self._last = 0.0
        self.lap()

    def lap(self, keep: Keep | None = None) -> None:
        """Have the seconds since the last lap kept, on a GPU not before :meth:`settle`."""
        if self._device.type != "cuda":
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            if keep is not None:
                keep(seconds)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        if keep is not None and self._event is not None:
            self._laps.append((self._event, event, keep))
        self._event = event

    def settle(self) -> None:
        """Wait until all is done, and have it kept."""
        if self._laps:
            torch.cuda.synchronize(self._device)
        laps, self._laps = self._laps, []
        for begin, end, keep in laps:
            keep(begin.elapsed_time(end) / 1e3)
