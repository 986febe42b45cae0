"""How fast training is, without slowing it down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, may_log, pipelined_of
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PipelineThroughputMonitor(Callback):
    """Logs what training reaches, over a rolling window of batches.

    - ``samples_per_second``: of all data-parallel replicas together,
    - ``step_time``: seconds per batch, from the end of one to the end of the next,
    - ``data_wait_time``: seconds per batch between a batch's end and the next one's start,
    - ``bubble_ratio``: share of the pipeline's time in which its ranks wait (tspipe only),
    - ``peak_memory``: MiB that this rank's tensors took at most (CUDA only).

    Time spent in validation does not count. The clock is read on the loss rank (else on global rank
    0) only and no device is synchronised: work queued on a device evens out over the window.

    Args:
        window: Number of batches that the averages cover; nothing is logged before it is full.
        batch_size_fn: ``fn(batch) -> number of samples``; None takes the first tensor's length, or
            what the pipeline says where the batch lives on another rank.
        clock: Seconds, from any start.

    Raises:
        ConfigurationError: A window of less than 2 batches.
    """

    def __init__(
        self,
        window: int = 20,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 2:
            raise ConfigurationError(f"window={window}: an average needs at least 2 batches")
        self.window = window
        self.batch_size_fn = batch_size_fn
        self.clock = clock
        self._throughput: Throughput | None = None
        self._waits: deque[float] = deque(maxlen=window)
        self._num_replicas = 1
        self._num_batches = 0
        self._num_samples = 0
        self._elapsed = 0.0
        self._mark = 0.0
        self._wait = 0.0
        self._last: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """The figures of the last full window, with the totals; empty on ranks that don't measure.

        Beside what is logged: ``num_batches``, ``num_samples`` and ``elapsed`` (seconds).
        """
        if self._throughput is None:
            return {}
        totals = {
            "num_batches": float(self._num_batches),
            "num_samples": float(self._num_samples * self._num_replicas),
            "elapsed": self._elapsed,
        }
        return {**self._last, **totals}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not may_log(trainer):
            return
        pipelined = pipelined_of(trainer)
        self._num_replicas = (
            trainer.world_size if pipelined is None else pipelined.data_parallel_size
        )
        self._throughput = Throughput(world_size=self._num_replicas, window_size=self.window + 1)
        self._waits.clear()
        self._last = {}
        self._num_batches = self._num_samples = 0
        self._elapsed = 0.0
        self._mark = self.clock()  # a run resumed within an epoch has no epoch start
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = self.clock()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = self.clock()

    @override
    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._wait = self.clock() - self._mark

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._throughput is None:
            return
        now = self.clock()
        self._elapsed += now - self._mark
        self._mark = now
        self._num_batches += 1
        self._num_samples += self._batch_size(trainer, batch)
        self._waits.append(self._wait)
        self._throughput.update(
            time=self._elapsed, batches=self._num_batches, samples=self._num_samples
        )
        metrics = self._metrics(trainer, pl_module)
        if metrics:
            self._last = metrics
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        assert self._throughput is not None
        rates = self._throughput.compute()
        if "device/samples_per_sec" not in rates:  # the window is not full yet
            return {}
        metrics = {
            "samples_per_second": rates["device/samples_per_sec"] * self._num_replicas,
            "step_time": 1.0 / rates["device/batches_per_sec"],
            "data_wait_time": fmean(self._waits),
        }
        pipelined = pipelined_of(trainer)
        if pipelined is not None and pipelined.bubble_ratio is not None:
            metrics["bubble_ratio"] = pipelined.bubble_ratio
        if pl_module.device.type == "cuda":
            metrics["peak_memory"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**20
        return metrics

    def _batch_size(self, trainer: Trainer, batch: Any) -> int:
        if self.batch_size_fn is not None:
            return self.batch_size_fn(batch)
        known = getattr(pipelined_of(trainer), "batch_size", None)
        return extract_batch_size(batch) if known is None else int(known)
