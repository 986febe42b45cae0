"""Training throughput, measured without slowing training down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.throughput import Throughput
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, may_log, pipelined_of
from lightning_tspipe.callbacks.machine import known_peak_flops, peak_memory
from lightning_tspipe.callbacks.timeline import PipelineTimeline
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_tspipe.strategy.training.pipelined import Pipelined


_RECORDED_STEPS = 4


@dataclass
class _Totals:
    """Totals of the run, including the time before it was resumed from a checkpoint."""

    num_batches: int = 0
    num_samples: int = 0
    elapsed: float = 0.0


@dataclass
class _Window:
    """The last batches.

    Attributes:
        rates: Lightning's calculator.
        waits: For each batch, seconds from the end of the batch before to its start.
        staleness: For each batch, the number of updates that the teacher was late.
        from_ranks: Metrics that the ranks of a pipeline reported last.
    """

    rates: Throughput
    waits: deque[float]
    staleness: deque[int]
    from_ranks: dict[str, float] = field(default_factory=dict)


class PipelineThroughputMonitor(Callback):
    """Logs the training throughput over a rolling window of batches.

    - ``samples_per_second``: of all data-parallel replicas together,
    - ``step_time``: seconds per batch, from the end of one to the end of the next,
    - ``data_wait_time``: seconds per batch in which training waits for the loader,
    - ``peak_memory``: peak memory in MiB, of tensors on a GPU and of the process otherwise,
    - ``mfu``: model FLOP/s utilisation: the model's operations as a share of the devices' peak,
      where both are known,
    - ``elapsed``: seconds of training so far, including those before a checkpoint.

    For a pipeline also:

    - ``bubble_ratio``: share of the time in which its ranks wait, in a few recorded steps,
    - ``teacher_staleness``: number of updates that the teacher was late,
    - ``peak_memory/rank0``, ...: of each rank of the first replica.

    Time spent in validation and k-NN does not count. The clock is read on the loss rank (else on
    global rank 0) and no device is synchronised: work queued on a device evens out over the window.
    Once per window the other ranks of a pipeline send the loss rank a few numbers, without waiting.
    While steps are recorded for the bubble ratio, a GPU's actions wait for their own stream.

    Args:
        window: Number of batches that the averages cover; rates are not logged before it is full.
        batch_size_fn: ``fn(batch) -> number of samples``; None takes the first tensor's length, or
            in a pipeline the number of samples that it knows.
        bubble_every_n_batches: How often four steps are recorded for the bubble ratio; None:
            never. With a ``PipelineTimeline``, its recording is used.
        flops_per_sample: Floating-point operations of one sample in a training step; None counts
            those of a pipeline's networks.
        peak_flops: Peak floating-point operations per second of one device; None takes the nominal
            value of a known GPU, and omits ``mfu`` otherwise.
        clock: Returns seconds, from any start.

    Raises:
        ConfigurationError: A window of fewer than 2 batches, or another number that is not above 0.
    """

    def __init__(  # noqa: PLR0913 - settings by keyword
        self,
        window: int = 20,
        batch_size_fn: Callable[[Any], int] | None = None,
        *,
        bubble_every_n_batches: int | None = 200,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 2:
            raise ConfigurationError(f"window={window}: an average needs at least 2 batches")
        for name, value in (
            ("bubble_every_n_batches", bubble_every_n_batches),
            ("flops_per_sample", flops_per_sample),
            ("peak_flops", peak_flops),
        ):
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be above 0, or None")
        self.window = window
        self.batch_size_fn = batch_size_fn
        self.bubble_every_n_batches = bubble_every_n_batches
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self.clock = clock
        self._window: _Window | None = None
        self._num_replicas = 1
        self._totals, self._restored = _Totals(), _Totals()
        self._num_batches = 0  # of this fit, on every rank
        self._recorded_at = -1
        self._records = False
        self._reading = 0.0
        self._mark = 0.0
        self._wait = 0.0
        self._steps = (0, 0)
        self._flops: float | None = None
        self._last: dict[str, float] = {}

    def summary(self) -> dict[str, float]:
        """The metrics of the last full window, with the totals; empty on ranks that don't measure.

        Contains what is logged, and ``num_batches`` and ``num_samples``.
        """
        if self._window is None:
            return {}
        totals = {
            "num_batches": float(self._totals.num_batches),
            "num_samples": float(self._totals.num_samples * self._num_replicas),
            "elapsed": self._totals.elapsed,
        }
        return {**self._last, **totals}

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self._totals))

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = _Totals(**state_dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        self._totals, self._restored = self._restored, _Totals()
        self._num_batches, self._recorded_at = 0, -1
        self._steps = (trainer.global_step, trainer.global_step)
        self._flops, self._last, self._window = None, {}, None
        self._reading = 0.0 if pipelined is None else pipelined.seconds_reading
        self._records = self.bubble_every_n_batches is not None and not any(
            isinstance(callback, PipelineTimeline)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        if not may_log(trainer):
            return
        self._num_replicas = (
            trainer.world_size if pipelined is None else pipelined.data_parallel_size
        )
        self._window = _Window(
            Throughput(world_size=self._num_replicas, window_size=self.window + 1),
            deque(maxlen=self.window),
            deque(maxlen=self.window),
        )
        self._mark = self.clock()  # a run resumed within an epoch has no epoch start

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = self.clock()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = self.clock()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._wait = self.clock() - self._mark
        self._steps = (self._steps[1], trainer.global_step)
        pipelined = pipelined_of(trainer)
        if pipelined is not None and self._records and self._num_batches >= self.window:
            assert self.bubble_every_n_batches is not None
            last = self._recorded_at
            if last < 0 or self._num_batches - last >= self.bubble_every_n_batches:
                self._recorded_at = self._num_batches
                pipelined.record(_RECORDED_STEPS)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, pipelined = self.clock(), pipelined_of(trainer)
        self._num_batches += 1
        if pipelined is not None:
            self._exchange(pipelined, pl_module)
        if self._window is None:
            return
        totals = self._totals
        totals.elapsed += now - self._mark
        self._mark = now
        totals.num_batches += 1
        totals.num_samples += self._batch_size(pipelined, batch)
        self._window.waits.append(self._wait)
        if pipelined is not None and pipelined.teacher_ran_ahead is not None:
            updated = self._steps[1] > self._steps[0]
            self._window.staleness.append(int(pipelined.teacher_ran_ahead and updated))
        self._window.rates.update(
            time=totals.elapsed, batches=totals.num_batches, samples=totals.num_samples
        )
        metrics = self._metrics(trainer, pl_module, self._window)
        self._last = metrics or self._last
        metrics["elapsed"] = totals.elapsed
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _exchange(self, pipelined: Pipelined, pl_module: LightningModule) -> None:
        """Send the loss rank what it cannot know by itself; every rank calls it."""
        if self._records and pipelined.has_recording:
            pipelined.timeline()
        if self._num_batches % self.window:
            return
        reading, self._reading = self._reading, pipelined.seconds_reading
        own = peak_memory(pl_module.device), (self._reading - reading) / self.window
        ranks = pipelined.gather(own)
        if ranks is None or self._window is None:
            return
        memory = {f"peak_memory/rank{rank}": peak for rank, (peak, _) in enumerate(ranks)}
        self._window.from_ranks = {
            "data_wait_time": ranks[pipelined.data_rank][1],
            "peak_memory": max(memory.values()),
            **memory,
        }

    def _metrics(
        self, trainer: Trainer, pl_module: LightningModule, window: _Window
    ) -> dict[str, float]:
        rates = window.rates.compute()
        if "device/samples_per_sec" not in rates:  # the window is not full yet
            return {}
        samples_per_second = rates["device/samples_per_sec"] * self._num_replicas
        metrics = {
            "samples_per_second": samples_per_second,
            "step_time": 1.0 / rates["device/batches_per_sec"],
        }
        pipelined = pipelined_of(trainer)
        if pipelined is None:
            metrics["data_wait_time"] = fmean(window.waits)
            metrics["peak_memory"] = peak_memory(pl_module.device)
        else:
            metrics |= window.from_ranks
            if pipelined.bubble_ratio is not None:
                metrics["bubble_ratio"] = pipelined.bubble_ratio
            if window.staleness:
                metrics["teacher_staleness"] = fmean(window.staleness)
        if self._flops is None:
            self._flops = self._share_per_sample(trainer, pl_module, pipelined)
        if self._flops:
            metrics["mfu"] = samples_per_second * self._flops
        return metrics

    def _share_per_sample(
        self, trainer: Trainer, pl_module: LightningModule, pipelined: Pipelined | None
    ) -> float:
        """Operations of one sample as a share of all devices' peak FLOP/s; 0 if unknown."""
        peak = self.peak_flops or known_peak_flops(pl_module.device, str(trainer.precision))
        flops = self.flops_per_sample
        if peak is not None and flops is None and pipelined is not None:
            flops = pipelined.flops_per_sample()
        if peak is None or flops is None:
            return 0.0
        per_replica = 1 if pipelined is None else pipelined.num_ranks
        return flops / (peak * per_replica * self._num_replicas)

    def _batch_size(self, pipelined: Pipelined | None, batch: Any) -> int:
        if self.batch_size_fn is not None:
            return self.batch_size_fn(batch)
        return _first_length(batch) if pipelined is None else pipelined.batch_size


def _first_length(batch: Any) -> int:
    # Lightning's own function warns about tensors of different lengths, which are common.
    leaves = pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 1)
