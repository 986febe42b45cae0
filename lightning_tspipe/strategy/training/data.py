"""Read batches on one rank of a pipeline: loaders, batches ahead, transfer to the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.batches.loading import LookaheadLoader, Remote, RemoteLoader
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import declared_delay, fanout_of
from lightning_tspipe.strategy.training.windows import late_windows, window_of

_ROUNDS = 4
"""Batches per rank that are read ahead in windows: see ``WindowSteps.lookahead``."""


class Data:
    """Reads ahead on one rank, and keeps the others in step.

    Args:
        run: The run.

    Attributes:
        loader: The training loader; None before there is one.
        prepared: Batches that are on the device already, by their numbers.
        has_begun: Whether the step of the current batch has begun.
        position: Of the engine before the current batch; None before the first.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.loader: LookaheadLoader | None = None
        self.prepared: dict[int, Any] = {}
        self.has_begun = False
        self.position: tuple[int, int] | None = None
        self._num_loaders = 0
        self._announced: dict[int, deque[tuple[int, bool]]] = {}

    def reconnected(self) -> None:
        """The ranks have other places: loaders are made anew."""
        self.loader, self._announced = None, {}

    def read(self, started: float) -> None:
        """This rank has read a training batch, from ``started`` until now."""
        run, seconds = self._run, time.perf_counter() - started
        run.shortest_reading = min(run.shortest_reading or seconds, seconds)
        run.seconds_reading += seconds
        run.recorder.paused("load", started)

    def loader_of_rank(self, dataloader: object) -> object:
        """The loader that this rank iterates, in the place of the user's."""
        run = self._run
        number, self._num_loaders = self._num_loaders, self._num_loaders + 1
        length = self._agreed_length(dataloader) if run.is_data_rank else None
        length = run.transport.broadcast_object(length, run.data_rank)
        if not run.is_data_rank:
            return RemoteLoader(dataloader, length, partial(self._hear, number))
        announce = partial(self._announce, number) if length is None else None
        return self._look_ahead(dataloader, announce)

    def _agreed_length(self, dataloader: object) -> int | None:
        """Batches of the loader; None if it does not know them.

        Raises:
            ConfigurationError: Another replica is to train on fewer or more: one would wait for it.
        """
        length = sized_len(dataloader)
        lengths = self._run.replicas.gather(length) if self._run.trainer.training else [length]
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"the replicas have training loaders of {lengths} batches. Give all replicas "
                "equally many, as a DistributedSampler does"
            )
        return length

    def _announce(self, loader: int, iteration: int, more: bool) -> None:
        for rank in range(self._run.num_ranks):
            if rank != self._run.data_rank:
                self._run.transport.send_object((loader, iteration, more), rank, Channel.MORE)

    def _hear(self, loader: int) -> tuple[int, bool]:
        """What the data rank announces next of one of its loaders."""
        started = time.perf_counter()
        announced = self._announced.setdefault(loader, deque())
        with waiting("whether there is another batch"):
            while not announced:
                other, *what = self._run.transport.receive_object(self._run.data_rank, Channel.MORE)
                self._announced.setdefault(other, deque()).append((what[0], what[1]))
        self._run.recorder.paused("load", started)
        return announced.popleft()

    def _look_ahead(
        self, dataloader: Any, announce: Callable[[int, bool], None] | None = None
    ) -> LookaheadLoader:
        trains = self._run.trainer.training
        length = sized_len(dataloader)
        loader = LookaheadLoader(dataloader, announce, trains=trains)
        loader.promised = 0 if length is None or self._run.num_ranks == 1 else length
        if length is None and self._run.num_replicas > 1:
            loader.agree = self._run.replicas.all_say
        if trains:
            self.loader = loader
            loader.trained = self._run.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            loader.on_read, loader.follows = self.read, self._begin_next_epoch
            loader.num_batches, loader.depth = self._num_batches(length), self._depth
            loader.may_repeat = self._run.total_ranks == 1  # no failure of several ranks is saved
            self.prepared = {}  # numbers start anew
            here = self._run.resumption.here
            if here is not None and here["loader"] is not None:
                loader.resume(here["loader"])
        return loader

    def restore_random(self) -> None:
        """A resumed run draws on where it was stopped, before any hook of an epoch or a batch."""
        resumption = self._run.resumption
        random, resumption.random = resumption.random, None
        if self.loader is not None:  # which knows what has been read already
            self.loader.restore_random()
        elif random is not None:
            random.restore()

    def _begin_next_epoch(self) -> bool:
        """Where an epoch's batches end: whether the next one's may be read already."""
        trainer, epoch = self._run.trainer, self._run.trainer.current_epoch + 1
        most = trainer.max_epochs
        if self._run.options.drain_epochs or trainer.should_stop or most in {None, epoch}:
            return False
        _set_sampler_epoch(self.loader, epoch)
        return True

    @property
    def _depth(self) -> int:
        """How many batches are read ahead."""
        depth = self._run.options.queue_depth
        has_heads = fanout_of(self._run.module) is not None
        if has_heads and depth != "auto":
            return max(1, depth)
        size = self._run.num_ranks
        if window_of(self._run):  # batches go round, and teachers run ahead of updates
            return max(_ROUNDS * size, late_windows(self._run) + size)
        return size if self._run.options.schedule in WINDOWS or has_heads else 1

    def _num_batches(self, length: int | None) -> float:
        """Batches of an epoch, as the Trainer counts them."""
        limit = self._run.trainer.limit_train_batches
        if isinstance(limit, int):
            return limit if length is None else min(length, limit)
        return math.inf if length is None else int(length * limit)

    def batch_to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """The batch that comes, on the device."""
        if isinstance(batch, Remote):
            return batch
        if self._run.trainer.training and self.loader is not None:
            self.loader.take()
            self.has_begun = False
            self.position = self._run.engine.position if self._run.engine is not None else None
            prepared = self.prepared.pop(self.loader.current, None)
            if prepared is not None:
                return prepared
        return self.transfer(batch, device, dataloader_idx)

    def before_transfer(
        self, batch: Any, dataloader_idx: int = 0, *, is_ahead: bool = False
    ) -> Any:
        """The first hook of a batch; of one that was prepared ahead, it has run already."""
        module, loader = self._run.module, self.loader if self._run.trainer.training else None
        has_run = loader is not None and loader.current + 1 in self.prepared and not is_ahead
        if isinstance(batch, Remote) or has_run:
            return batch
        return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)  # noqa: SLF001

    def transfer(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """A batch on this rank's device, after the hooks that copy and change it."""
        module, device = self._run.module, device or self._run.root_device
        with copied_beside(self._run.root_device):
            return module._apply_batch_transfer_handler(batch, device, dataloader_idx)  # noqa: SLF001

    def share(self, batch: Any) -> Any:
        """The data rank's batch, on every rank's device."""
        first = on_cpu(batch) if self._run.is_data_rank else None
        first = self._run.transport.broadcast_object(first, self._run.data_rank)
        return to_device(first, self._run.root_device)

    def next_batches(self, batch_idx: int, most: int) -> list[Any]:
        """The batches after this one, transferred, as far as they are known and will be trained."""
        loader = self.loader
        if loader is None or not self._run.is_data_rank or not self._runs_ahead():
            return []
        left = self._run.trainer.fit_loop.max_batches - batch_idx - 1
        if not self._run.options.drain_epochs:
            left = math.inf
        number = int(max(0, min(most, left, len(loader.upcoming))))
        for offset, batch in enumerate(loader.upcoming[:number], 1):
            if loader.current + offset not in self.prepared:
                converted = self._run.precision_plugin.convert_input(batch)
                converted = self.before_transfer(converted, is_ahead=True)
                self.prepared[loader.current + offset] = self.transfer(converted)
        return [self.prepared[loader.current + offset] for offset in range(1, number + 1)]

    def _runs_ahead(self) -> bool:
        """Whether work on the batches behind this one may begin in this step."""
        if self._run.options.schedule in WINDOWS:
            return True
        has_teacher = self._run.engine is not None and self._run.engine.pipeline.teacher is not None
        if self._run.options.schedule != "tspipe" or not has_teacher:
            return False
        trainer = self._run.trainer
        stepping = not trainer.fit_loop._should_accumulate()  # noqa: SLF001
        step = trainer.global_step + int(stepping)
        declared = declared_delay(self._run.trainer)
        return declared is None or (bool(declared.delay) and step >= declared.start_step)


def copied_beside(device: torch.device) -> AbstractContextManager[Any]:
    """Copies from the host to a GPU, while inside, run beside what the GPU computes.

    What is launched behind a copy waits for it; the copy waits for nothing, and so the host, which
    is ahead of its GPU, is not held either where a batch lies in pageable memory.

    Args:
        device: Where the batches go; on a CPU they are copied as usual.
    """
    return nullcontext() if device.type != "cuda" else _Copying(_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Copying(TorchFunctionMode):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        moves = func is Tensor.to or func is Tensor.cuda
        if not moves or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        computing = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream):
            result = func(*args, **(kwargs or {}))
        if result.device.type == "cuda":
            computing.wait_stream(self._stream)
            result.record_stream(computing)  # or its memory would be free for the next copy
        return result


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)


def on_cpu(batch: Any) -> Any:
    """A batch with its tensors in host memory."""
    return to_device(batch, torch.device("cpu"))
