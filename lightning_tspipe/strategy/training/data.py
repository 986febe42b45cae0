"""Which rank reads which batch: loaders, the batch ahead, transfer to the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len
from typing_extensions import override

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.batches.loading import LookaheadLoader
from lightning_tspipe.runtime.batches.random_states import RandomStates
from lightning_tspipe.runtime.batches.remote_loading import (
    Remote,
    RemoteLoader,
    UnsizedRemoteLoader,
)
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.transport.channels import Channel
from lightning_tspipe.schedules.registry import ASYNCHRONOUS
from lightning_tspipe.strategy.lightning.processes import ProcessHooks
from lightning_tspipe.strategy.setup.fanout import fanout_of
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.training.batches import CopyStream, on_cpu, to_device
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.repacking import Repacking
from lightning_tspipe.strategy.training.step_results import StepSync

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class DataHooks(ProcessHooks):
    """The part of the strategy that reads ahead on one rank and keeps the others in step."""

    options: SetupOptions
    pipelined: Pipelined
    _engine: Engine | None
    _loader: LookaheadLoader | None
    _prepared: dict[int, Any]
    _num_loaders: int
    _words: dict[int, deque[tuple[int, bool]]]
    step_sync: StepSync | None
    _resumed: dict[str, Any] | None
    _random: RandomStates | None
    _copies: CopyStream | None
    repacking: Repacking

    @property
    @override
    def is_distributed(self) -> bool:
        """Whether Lightning splits samplers, unless the replicas get parts of batches."""
        module = self.lightning_module
        deals = module is not None and self.repacking.repacks and self._trainer.training
        return super().is_distributed and not deals

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @override
    def process_dataloader(self, dataloader: object) -> object:
        number, self._num_loaders = self._num_loaders, self._num_loaders + 1
        if self._trainer.training:
            dataloader = self.repacking.share(dataloader)
        length = self._agreed_length(dataloader) if self.is_data_rank else None
        if self.num_ranks == 1:
            return self._look_ahead(dataloader)
        data_rank = self.num_ranks - 1
        length = self.transport.broadcast_object(length, data_rank)
        if not self.is_data_rank:
            if length is not None:
                return RemoteLoader(dataloader, length)
            return UnsizedRemoteLoader(dataloader, partial(self._hear, number))
        announce = partial(self._announce, number) if length is None else None
        return self._look_ahead(dataloader, announce)

    def _agreed_length(self, dataloader: object) -> int | None:
        """Batches of the loader; None if it does not know them.

        Raises:
            ConfigurationError: Another replica is to train on fewer or more: one would wait for it.
        """
        length = sized_len(dataloader)
        lengths = self.replicas.gather(length) if self._trainer.training else [length]
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"the replicas have training loaders of {lengths} batches. Give each replica "
                "as many: a DistributedSampler does"
            )
        return length

    def _announce(self, loader: int, iteration: int, more: bool) -> None:
        for rank in range(self.num_ranks - 1):
            self.transport.send_object((loader, iteration, more), rank, Channel.MORE)

    def _hear(self, loader: int) -> tuple[int, bool]:
        """The next word of the data rank about one of its loaders."""
        started = time.perf_counter()
        words = self._words.setdefault(loader, deque())
        with waiting("whether there is another batch"):
            while not words:
                other, *word = self.transport.receive_object(self.num_ranks - 1, Channel.MORE)
                self._words.setdefault(other, deque()).append((word[0], word[1]))
        self.pipelined.recorder.paused("load", started)
        return words.popleft()

    def _look_ahead(
        self, dataloader: Any, announce: Callable[[int, bool], None] | None = None
    ) -> LookaheadLoader:
        trains = self._trainer.training
        on_read = self.pipelined.read if trains else None
        num_batches = self._num_batches(sized_len(dataloader)) if trains else math.inf
        loader = LookaheadLoader(
            dataloader, announce, on_read, trains=trains, num_batches=num_batches,
            depth=self._depth if trains else 1,
            follows=self._begin_next_epoch if trains else lambda: False,
        )  # fmt: skip
        if sized_len(dataloader) is None and self.num_replicas > 1:
            loader.agree = self.replicas.all_say
        if trains:
            self._loader = loader
            loader.may_repeat = self.total_ranks == 1  # no failure of several ranks is saved
            self._prepared = {}  # numbers start anew
            if self._resumed is not None and self._resumed["loader"] is not None:
                loader.resume(self._resumed["loader"])
        return loader

    def restore_random(self) -> None:
        """A resumed run draws on where it was stopped, before any hook of an epoch or a batch."""
        random, self._random = self._random, None
        if self._loader is not None:  # which knows what has been read already
            self._loader.restore_random()
        elif random is not None:
            random.restore()

    def _begin_next_epoch(self) -> bool:
        """Where an epoch's batches end: whether the next one's may be read already."""
        trainer, epoch = self._trainer, self._trainer.current_epoch + 1
        most = trainer.max_epochs
        if self.options.drain_epochs or trainer.should_stop or most in {None, epoch}:
            return False
        sampler = getattr(self._loader, "sampler", None)
        batch_sampler = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        for each in (sampler, batch_sampler):
            set_epoch = getattr(each, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return True

    @property
    def _depth(self) -> int:
        """How many batches are read ahead."""
        depth = self.options.queue_depth
        if fanout_of(self._module) is not None and depth != "auto":
            return max(1, depth)
        is_deep = self.options.schedule == ASYNCHRONOUS or fanout_of(self._module) is not None
        return self.num_ranks if is_deep else 1

    def _num_batches(self, length: int | None) -> float:
        """Batches of an epoch, as the Trainer counts them."""
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int):
            return limit if length is None else min(length, limit)
        return math.inf if length is None else int(length * limit)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, Remote):
            return batch
        if self._trainer.training and self._loader is not None:
            self._loader.take()
            self._has_begun = False
            self._position = self._engine.position if self._engine is not None else None
            prepared = self._prepared.pop(self._loader.current, None)
            if prepared is not None:
                return prepared
        return self.transfer(batch, device, dataloader_idx)

    def before_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The first hook of a batch; of one that was prepared ahead, it has run already."""
        if isinstance(batch, Remote):
            return batch
        loader = self._loader if self._trainer.training else None
        if loader is not None and loader.current + 1 in self._prepared:
            return batch
        return self._call_before_transfer(batch, dataloader_idx)

    def _call_before_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        module = self._module
        return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)  # noqa: SLF001

    def transfer(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """A batch on this rank's device, after the hooks that copy and change it."""
        if self._copies is None:
            self._copies = CopyStream(self.root_device)
        with self._copies.copying():
            return super().batch_to_device(batch, device, dataloader_idx)

    def share(self, batch: Any) -> Any:
        """The data rank's batch, on every rank's device."""
        first = on_cpu(batch) if self.is_data_rank else None
        first = self.transport.broadcast_object(first, self.num_ranks - 1)
        return to_device(first, self.root_device)

    def _next_batches(self, batch_idx: int, most: int) -> list[Any]:
        """The batches after this one, transferred, as far as they are known and will be trained."""
        loader = self._loader
        if loader is None or not self._runs_ahead():
            return []
        left = self._trainer.fit_loop.max_batches - batch_idx - 1
        if not self.options.drain_epochs:
            left = math.inf
        number = int(max(0, min(most, left, len(loader.upcoming))))
        for offset, batch in enumerate(loader.upcoming[:number], 1):
            if loader.current + offset not in self._prepared:
                converted = self.precision_plugin.convert_input(batch)
                converted = self._call_before_transfer(converted, 0)
                self._prepared[loader.current + offset] = self.transfer(converted)
        return [self._prepared[loader.current + offset] for offset in range(1, number + 1)]

    def _runs_ahead(self) -> bool:
        """Whether work on the batches behind this one may begin in this step."""
        if self.options.schedule == ASYNCHRONOUS:
            return True
        has_teacher = self._engine is not None and self._engine.pipeline.teacher is not None
        if self.options.schedule != "tspipe" or not has_teacher:
            return False
        trainer = self._trainer
        stepping = not trainer.fit_loop._should_accumulate()  # noqa: SLF001
        step = trainer.global_step + int(stepping)
        declared = self._declared_delay
        return declared is None or (bool(declared.delay) and step >= declared.start_step)

    @property
    def _declared_delay(self) -> Any:
        """The callback in which the user says how late the teacher is; None without one."""
        callbacks = getattr(self._trainer, "callbacks", ())
        return next(
            (c for c in callbacks if hasattr(c, "delay") and hasattr(c, "start_step")), None
        )

    def _step(self, name: str, rest: Sequence[Any], batch_idx: int) -> Callable[[Any], Any]:
        """A user's step as a function of the batch alone."""
        method = getattr(self._module, name)
        others = [batch_idx if i == 0 else value for i, value in enumerate(rest)]

        def step(batch: Any) -> Any:
            if not self._trainer.predicting:
                # Lightning finds the batch size for averages here.
                results = self._trainer._results  # noqa: SLF001
                assert results is not None
                results.batch, results.batch_size = batch, None
            with self.replicas.as_world():
                engine = self._engine
                logs = self.is_loss_rank if engine is None else engine.computes_loss
                if self.step_sync is None or not logs:
                    return method(batch, *others)
                with self.step_sync.watch(name):
                    return method(batch, *others)

        return step
