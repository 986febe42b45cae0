"""Training throughput."""

from __future__ import annotations

import math
import resource
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.caching.entries import tensors_in
from lightning_tspipe.callbacks.common import Callback, may_log, pipelined_of
from lightning_tspipe.callbacks.timeline import PipelineTimeline
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.training.pipelined import Pipelined

_RECORDED_STEPS = 4
_MIB = 2**20
_DTYPES = {"16": torch.float16, "bf": torch.bfloat16, "64": torch.float64}
"""By how the Trainer's precision begins."""


class _Batch(NamedTuple):
    """A batch, with the totals at its end: of the run, also before it was resumed.

    Attributes:
        num_batches: Batches.
        num_samples: Samples.
        num_tokens: What ``length_fn`` counted in all replicas, as reported last.
        elapsed: Seconds of training.
        wait: Seconds from the end of the batch before to the start of this one.
        staleness: Number of updates that its teacher was late; None if there is no teacher.
    """

    num_batches: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    elapsed: float = 0.0
    wait: float = 0.0
    staleness: int | None = None


@dataclass
class _Fit:
    """The state of one fit.

    Attributes:
        batches: What came before the fit, and its last batches; of the first only the end counts.
        measures: Whether this rank does.
        from_ranks: Metrics that the ranks of a pipeline reported last.
        next_recording: Number of the batch at which steps are recorded for the bubble ratio.
        num_replicas: Replicas of the pipeline, or processes.
        num_batches: Batches of this fit, on every rank.
        reading: Seconds that this rank had read data when it reported last.
        mark: When the last batch ended.
        wait: Seconds from then to the start of this batch.
        steps: The global steps at the starts of the last two batches.
        counts: Whether tokens are counted; until the fit ends.
        before: Tokens of the run before this fit.
        num_tokens: Those of this fit's batches, on ranks that get batches.
        reports: On ranks that measure: tokens and seconds of the run, when last reported.
        flops: Operations of one sample as a share of all peaks; 0 if unknown, None before.
        last: The metrics of the last full window.
    """

    batches: deque[_Batch]
    measures: bool = False
    from_ranks: dict[str, float] = field(default_factory=dict)
    next_recording: float = math.inf
    num_replicas: int = 1
    num_batches: int = 0
    reading: float = 0.0
    mark: float = 0.0
    wait: float = 0.0
    steps: tuple[int, int] = (0, 0)
    counts: bool = False
    before: int = 0
    num_tokens: int = 0
    reports: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2))
    flops: float | None = None
    last: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class PipelineThroughputMonitor(Callback):
    """Logs the training throughput over a rolling window of batches.

    - ``samples_per_second``: of all data-parallel replicas together,
    - ``tokens_per_second``: the same of what ``length_fn`` counts, over the last window that was
      reported,
    - ``step_time``: seconds per batch, from the end of one to the end of the next,
    - ``data_wait_time``: seconds per batch in which training waits for the loader,
    - ``peak_memory``: peak memory in MiB, of tensors on a GPU and of the process otherwise,
    - ``mfu``: model FLOP/s utilisation: the operations of the networks, and of the loss beside them
      (heads of language models, say), as a share of the devices' peak, where both are known,
    - ``elapsed``: seconds of training so far, including those before a checkpoint.

    For a pipeline also:

    - ``bubble_ratio``: share of the time in which its ranks wait, in a few recorded steps,
    - ``teacher_staleness``: number of updates that the teacher was late,
    - ``peak_memory/rank0``, ...: of each rank of the first replica.

    Time spent in validation and k-NN does not count. The clock is read on the loss rank (else on
    global rank 0) and no device is synchronised: work queued on a device evens out over the window.
    Once per window the other ranks of a pipeline send the loss rank a few numbers, without waiting;
    with ``length_fn`` replicas, or processes, then add up what they have counted.
    While steps are recorded for the bubble ratio, a GPU's actions wait for their own stream.

    Args:
        window: Number of batches that the averages cover; rates are not logged before it is full.
        batch_size_fn: ``fn(batch) -> number of samples``; None takes the first tensor's length, or
            in a pipeline the number of samples that it knows. A pipeline of several ranks takes
            None only.
        length_fn: ``fn(batch) -> number of items`` of a whole batch, tokens, say, as in Lightning's
            ``ThroughputMonitor``. It is called where the data is read, so that it gets all of the
            batch in a pipeline, too. None counts nothing.
        bubble_every_n_batches: How often four steps are recorded for the bubble ratio; None:
            never. With a ``PipelineTimeline``, its recording is used.
        flops_per_sample: Floating-point operations of one sample in a training step; None counts
            those of a pipeline's networks and loss.
        peak_flops: Peak floating-point operations per second of one device; None takes the nominal
            value of a known GPU, and omits ``mfu`` otherwise.
        clock: Returns seconds, from any start.

    Raises:
        ConfigurationError: A window of fewer than 2 batches, or another number that is not above 0;
            or when training starts in a pipeline, ``batch_size_fn``.
    """

    window: int = 20
    batch_size_fn: Callable[[Any], int] | None = None
    length_fn: Callable[[Any], int] | None = None
    _: KW_ONLY
    bubble_every_n_batches: int | None = 200
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ConfigurationError(f"window={self.window}: an average needs at least 2 batches")
        for name in ("bubble_every_n_batches", "flops_per_sample", "peak_flops"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} must be above 0, or None")
        self._fit, self._restored = _Fit(deque([_Batch()])), _Batch()

    def summary(self) -> dict[str, float]:
        """The metrics of the last full window, with the totals; empty on ranks that don't measure.

        Contains what is logged, and ``num_batches``, ``num_samples``, and with ``length_fn``
        ``num_tokens``, which is that of the last report until training ends.
        """
        fit, totals = self._fit, self._fit.batches[-1]
        if not fit.measures:
            return {}
        return {
            **fit.last,
            "num_batches": float(totals.num_batches),
            "num_samples": float(totals.num_samples * fit.num_replicas),
            **({} if self.length_fn is None else {"num_tokens": float(totals.num_tokens)}),
            "elapsed": totals.elapsed,
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        totals = self._fit.batches[-1]._asdict()
        names = "num_batches", "num_samples", "num_tokens", "elapsed"
        return {name: totals[name] for name in names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = _Batch(**state_dict)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined, step = pipelined_of(trainer), trainer.global_step
        batches = deque([self._restored], maxlen=self.window + 1)
        self._fit = fit = _Fit(batches, steps=(step, step), mark=self.clock())
        fit.before, self._restored = self._restored.num_tokens, _Batch()
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        has_timeline = any(isinstance(callback, PipelineTimeline) for callback in callbacks)
        if self.bubble_every_n_batches is not None and not has_timeline:
            fit.next_recording = self.window
        fit.num_replicas = trainer.world_size
        if pipelined is not None:
            fit.reading = pipelined.seconds_reading
            fit.num_replicas = pipelined.data_parallel_size
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        fit.measures, fit.counts = may_log(trainer), self.length_fn is not None
        if self.batch_size_fn is not None and pipelined is not None and pipelined.num_ranks > 1:
            raise ConfigurationError(
                "batch_size_fn: the rank that measures gets no batch in a pipeline. Leave it out: "
                "samples are counted anyway, and what else a batch has by length_fn"
            )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.mark = self.clock()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit.mark = self.clock()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        fit = self._fit
        fit.wait = self.clock() - fit.mark
        fit.steps = (fit.steps[1], trainer.global_step)
        pipelined, every = pipelined_of(trainer), self.bubble_every_n_batches
        if pipelined is not None and every is not None and fit.num_batches >= fit.next_recording:
            fit.next_recording = fit.num_batches + every
            pipelined.record(_RECORDED_STEPS)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, pipelined, fit = self.clock(), pipelined_of(trainer), self._fit
        fit.num_batches += 1
        if self.length_fn is not None and (pipelined is None or pipelined.is_data_rank):
            fit.num_tokens += self.length_fn(batch)
        # The first batch, which takes longer, is in no window.
        reports = fit.num_batches % self.window == 1
        if pipelined is not None:
            self._exchange(pipelined, pl_module, reports=reports)
        if fit.measures:
            self._append(now, pipelined, batch)
        if reports and fit.counts:
            self._add_up_tokens(trainer, pl_module)
            fit.reports.append((fit.batches[-1].num_tokens, fit.batches[-1].elapsed))
        if not fit.measures:
            return
        metrics = self._metrics(trainer, pl_module)
        fit.last = metrics or fit.last
        elapsed = fit.batches[-1].elapsed
        pl_module.log_dict(
            {**metrics, "elapsed": elapsed}, on_step=True, on_epoch=False, batch_size=1
        )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit.counts:
            self._add_up_tokens(trainer, pl_module)
        self._fit.counts = False

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # On a failure the other ranks may be gone.
        if self._fit.counts and not getattr(trainer.strategy, "is_failing", False):
            self._add_up_tokens(trainer, pl_module)
            checkpoint["callbacks"][self.state_key] |= self.state_dict()

    def _append(self, now: float, pipelined: Pipelined | None, batch: Any) -> None:
        """A batch has ended."""
        fit = self._fit
        before, staleness = fit.batches[-1], None
        if pipelined is not None and pipelined.teacher_ran_ahead is not None:
            staleness = int(pipelined.teacher_ran_ahead and fit.steps[1] > fit.steps[0])
        ended = before._replace(
            num_batches=before.num_batches + 1,
            num_samples=before.num_samples + self._batch_size(pipelined, batch),
            elapsed=before.elapsed + (now - fit.mark),
            wait=fit.wait,
            staleness=staleness,
        )
        fit.mark = now
        fit.batches.append(ended)

    def _add_up_tokens(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the number of tokens up to date where it is measured; every rank calls it."""
        fit, pipelined = self._fit, pipelined_of(trainer)
        own = int(fit.num_tokens)
        if pipelined is None:
            there: Any = torch.tensor(own, device=pl_module.device)
            everywhere = int(trainer.strategy.reduce(there, reduce_op="sum"))
        else:
            ranks = pipelined.gather(own)
            everywhere = 0 if ranks is None else sum(pipelined.of_replicas(sum(ranks)))
        fit.batches[-1] = fit.batches[-1]._replace(num_tokens=fit.before + everywhere)

    def _exchange(self, pipelined: Pipelined, pl_module: LightningModule, *, reports: bool) -> None:
        """Send the loss rank what it cannot know by itself; every rank calls it."""
        fit = self._fit
        if fit.next_recording < math.inf and pipelined.has_recording:
            pipelined.timeline()
        if not reports:
            return
        before, fit.reading = fit.reading, pipelined.seconds_reading
        own = _peak_memory(pl_module.device), (fit.reading - before) / self.window
        ranks = pipelined.gather(own)
        if ranks is not None:
            memory = {f"peak_memory/rank{rank}": peak for rank, (peak, _) in enumerate(ranks)}
            fit.from_ranks = {
                "data_wait_time": ranks[pipelined.data_rank][1],
                "peak_memory": max(memory.values()),
                **memory,
            }

    def _metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The metrics of the window; empty until it is full."""
        fit, pipelined = self._fit, pipelined_of(trainer)
        if fit.num_batches <= self.window:
            return {}
        before, *batches = fit.batches
        seconds = batches[-1].elapsed - before.elapsed
        num_samples = batches[-1].num_samples - before.num_samples
        samples_per_second = num_samples / seconds * fit.num_replicas
        metrics = {"samples_per_second": samples_per_second, "step_time": seconds / self.window}
        if fit.counts:
            (tokens, start), (more, end) = fit.reports
            metrics["tokens_per_second"] = (more - tokens) / (end - start)
        if pipelined is None:
            metrics["data_wait_time"] = fmean(batch.wait for batch in batches)
            metrics["peak_memory"] = _peak_memory(pl_module.device)
        else:
            metrics |= fit.from_ranks
            if pipelined.bubble_ratio is not None:
                metrics["bubble_ratio"] = pipelined.bubble_ratio
            known = [batch.staleness for batch in batches if batch.staleness is not None]
            if known:
                metrics["teacher_staleness"] = fmean(known)
        if fit.flops is None:
            fit.flops = self._share_per_sample(trainer, pl_module, pipelined)
        if fit.flops:
            metrics["mfu"] = samples_per_second * fit.flops
        return metrics

    def _share_per_sample(
        self, trainer: Trainer, pl_module: LightningModule, pipelined: Pipelined | None
    ) -> float:
        """Operations of one sample as a share of all devices' peak FLOP/s; 0 if unknown."""
        peak, flops = self.peak_flops, self.flops_per_sample
        if peak is None:
            dtype = _DTYPES.get(str(trainer.precision)[:2], torch.float32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an unknown device needs no action
                peak = get_available_flops(pl_module.device, dtype)
        if peak is not None and flops is None and pipelined is not None:
            flops = pipelined.flops_per_sample()
        if peak is None or flops is None:
            return 0.0
        per_replica = 1 if pipelined is None else pipelined.num_ranks
        return flops / (peak * per_replica * self._fit.num_replicas)

    def _batch_size(self, pipelined: Pipelined | None, batch: Any) -> int:
        if self.batch_size_fn is not None:
            return self.batch_size_fn(batch)
        if pipelined is not None:
            return pipelined.batch_size
        # Lightning's own function warns about tensors of different lengths, which are common.
        return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


def _peak_memory(device: torch.device) -> float:
    """Peak memory in MiB: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024
