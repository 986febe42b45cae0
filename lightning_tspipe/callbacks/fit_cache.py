"""The activation cache of one fit, shared by all processes of a machine."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_tspipe import caching
from lightning_tspipe.caching import ActivationCache, Boundary, Segment, WithIds, Worth
from lightning_tspipe.caching.arena import available_disk, available_memory, megabytes
from lightning_tspipe.caching.cache import Counts
from lightning_tspipe.caching.entries import Numbers, is_loaded, tensors_in
from lightning_tspipe.caching.inputs import Path, ids_of
from lightning_tspipe.caching.store import StoreHandle
from lightning_tspipe.callbacks.common import Restoring, decided_on, pipelined_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.strategy.setup.options import parse_bytes

log = logging.getLogger("lightning_tspipe")

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_SHARE = 4
"""A budget that is not given is this fraction of what is free."""


class FitCache(Restoring):
    """A cache of what a network's frozen layers return by sample, while a fit lasts.

    It is made with the training loader, before its workers start. The settings are those of
    ``AutoCache``.

    Attributes:
        memory: Bytes of each machine's shared memory; None: a quarter of its free memory.
        disk: Bytes of each machine's disk; None: a quarter of the free space.
        is_required: Whether it is an error if nothing can be cached, instead of a line in the log.
        name: Name of the network, for messages.
        cache: The cache; None before and after the fit, and where nothing can be cached.
        cuts: Numbers of frozen atoms, one for each step of freezing. They belong to the run, since
            a cache with a ``dtype`` rounds at each of them.
        segments: The frozen layers in this fit, cut there.
        worth: What was measured in this fit, or in the last one; None before.
        is_on: Whether activations are cached; None before that is decided.
        is_verified: Whether activations that were read have been compared with computed ones.
    """

    def __init__(  # noqa: PLR0913 - settings by keyword
        self,
        network: str | None = None,
        *,
        memory: int | str = "auto",
        disk: int | str = 0,
        folder: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | str | None = None,
        ids: Path | None = None,
        always: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        # "auto": a share of what is free
        self.memory = None if memory == "auto" else parse_bytes(memory)
        self.disk = None if disk == "auto" else parse_bytes(disk)
        self.folder = folder
        self.dtype = _as_dtype(dtype)
        self.ids = ids
        self.always = always
        self.is_required = True
        self.name = ""
        self.cache: ActivationCache | None = None
        self._dataset: Any = None
        self._begin(None)

    def _begin(self, trainer: Trainer | None) -> None:
        """Begin a fit, of which nothing is known."""
        self.cuts, self.segments = [0], list[Segment]()
        self.worth: Worth | None = None
        self.is_on: bool | None = None
        self.is_verified = False
        self._trainer = trainer
        self._epoch: int | None = None
        self._is_given_up = False
        self._seconds_saved = 0.0  # to load and decode a sample, if a hit saves them
        self._on_host: Any = None  # while a fit lasts: it can't be pickled

    # Before the first batch

    def budgets(self) -> tuple[int, int]:
        """Bytes of memory and disk, on this machine at this moment."""
        memory, disk = self.memory, self.disk
        if memory is None:
            memory = (available_memory() or 2**32) // _SHARE
        if disk is None:
            disk = available_disk(self.folder) // _SHARE
        if None in {self.memory, self.disk}:
            log.info(
                "cached activations may take %s of memory and %s on disk; give other budgets with "
                "AutoCache(memory=..., disk=...)", megabytes(memory), megabytes(disk),
            )  # fmt: skip
        return memory, disk

    def follow(self, trainer: Trainer) -> None:
        """Open the cache with the training loader of this fit; every rank calls it."""
        self.restore()
        self._begin(trainer)
        self._on_host = WeakTensorKeyDictionary()
        strategy: Any = trainer.strategy
        module: Any = trainer.lightning_module
        process, transfer = strategy.process_dataloader, module.transfer_batch_to_device

        def process_dataloader(dataloader: Any) -> Any:
            if trainer.training and not self._is_given_up:
                self._serve(trainer, dataloader)
            return process(dataloader)

        @functools.wraps(transfer)  # Lightning asks whether a user has overridden it
        def to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            moved = transfer(batch, *args, **kwargs)
            with suppress(ConfigurationError):  # a batch without ids, of another loader
                ids = ids_of(moved, self.ids)
                if isinstance(ids, Tensor) and ids.device.type != "cpu":
                    # A copy, since the user may write into the loader's tensor.
                    self._on_host[ids] = ids_of(batch, self.ids).clone(), ids._version  # noqa: SLF001
            return moved

        replaced = [
            (strategy, "process_dataloader", process_dataloader),
            (module, "transfer_batch_to_device", to_device),
        ]
        self.undo.enter_context(attributes_replaced(replaced))

    def _serve(self, trainer: Trainer, loader: Any) -> None:
        """Let the loader of an epoch leave out inputs whose activations are cached."""
        if self.cache is None:
            self._open(trainer, loader)
        elif trainer.current_epoch == self._epoch:
            raise ConfigurationError(
                "the fit has several training loaders, whose samples may have the same ids: train "
                "with one loader, for instance of a ConcatDataset, or without the cache"
            )
        self._epoch, self._dataset = trainer.current_epoch, getattr(loader, "dataset", None)
        if isinstance(self._dataset, WithIds):
            self._dataset.read_from(self.cache)

    def expect_loader(self) -> None:
        """Expect a new training loader in this epoch."""
        self._epoch = None

    def _open(self, trainer: Trainer, loader: Any) -> None:
        """Make the cache on one rank of each machine, and share it; every rank calls it.

        Raises:
            ConfigurationError: On every rank: samples without ids, samples that differ each time
                they are read, or budgets that exceed what is free.
        """

        def make() -> StoreHandle:
            self.cache = self._made(getattr(loader, "dataset", None), check=trainer.is_global_zero)
            self._seconds_saved = _seconds_to_load(loader)
            return self.cache.handle

        try:
            handles = [
                decided_on(trainer, make, node * max(1, trainer.num_devices))
                for node in range(trainer.num_nodes)
            ]
        except ConfigurationError as why:
            if self.is_required:
                raise
            self._is_given_up = True
            self._discard()
            if trainer.is_global_zero:
                log.info("activations of frozen layers are not cached: %s", why)
        else:
            self.cache = self.cache or ActivationCache.attach(handles[trainer.node_rank])

    def _made(self, dataset: Any, *, check: bool) -> ActivationCache:
        try:
            num_samples = len(dataset)
        except TypeError:
            raise ConfigurationError(
                "activations are cached by sample: train with DataLoader(WithIds(dataset)) and a "
                f"dataset that has a length; {type(dataset).__name__} has none"
            ) from None
        if self.ids is None and not isinstance(dataset, WithIds):
            raise ConfigurationError(
                "activations are cached by sample, and these samples have no ids: train with "
                "DataLoader(WithIds(dataset)), or say where ids are in a batch (ids=)"
            )
        if check:
            caching.check_repeatable(dataset)
        return ActivationCache(num_samples, *self.budgets(), self.folder)

    def _discard(self) -> None:
        if self.cache is not None:
            self.cache.close()
        self.cache = self._dataset = None

    @override
    def restore(self) -> None:
        """Discard the cache, and put everything back; twice is fine."""
        super().restore()
        self._on_host = self._trainer = None
        if isinstance(self._dataset, WithIds):
            self._dataset.read_from(None)
        self._discard()

    # While the fit lasts

    @property
    def trainer(self) -> Trainer:
        """The trainer of this fit."""
        assert self._trainer is not None
        return self._trainer

    @property
    def opened(self) -> ActivationCache:
        """The cache, where it is there."""
        assert self.cache is not None
        return self.cache

    def ids_of(self, batch: Any) -> Any:
        """The sample ids of a batch, on the host: a tensor, or as they are.

        Ids that were moved to a device are remembered: reading them from there would block the host
        until all work launched before has run.

        Raises:
            ConfigurationError: The batch has none.
        """
        found = ids_of(batch, self.ids)
        if not isinstance(found, Tensor) or found.device.type == "cpu":
            return found
        values, version = self._on_host.get(found, (None, None))
        return values if version == found._version else found.cpu()  # noqa: SLF001 - they changed

    def let_skip(self) -> None:
        """Inputs of samples that are cached need no longer be loaded.

        The first process of each machine that reads data tells the datasets.
        """
        pipelined = pipelined_of(self.trainer)
        self.is_verified = True
        if self.trainer.local_rank == (0 if pipelined is None else pipelined.data_rank):
            self.opened.let_skip(self.segments)

    @property
    def how(self) -> Any:
        """Keyword arguments for measuring how long reading takes."""
        return {"dtype": self.dtype, "disk": self.disk != 0, "folder": self.folder}

    def decide(self, measured: Callable[[], Worth], rank: int = 0) -> None:
        """Cache where reading is faster than computing; every rank calls it.

        Without measuring, it caches where decisions must not depend on measured times, or where
        activations are rounded: then the result depends on whether they are cached.

        Args:
            measured: Measures both, on one rank.
            rank: That rank.
        """
        pipelined = pipelined_of(self.trainer)
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if pipelined is not None:
            is_deterministic = not pipelined.decides_by_times
        if self.always or self.dtype is not None or is_deterministic:
            self.is_on = True
            return
        worth = decided_on(
            self.trainer, lambda: replace(measured(), load=self._seconds_saved), rank
        )
        self.worth = worth
        self.opened.use(memory=worth.by_memory, disk=worth.by_disk)
        self.is_on = worth.by_memory or (worth.by_disk and self.disk != 0)
        if self.trainer.is_global_zero:
            log.info("activations are %s: %s", "cached" if self.is_on else "not cached", worth)

    def divide(
        self, atoms: Sequence[Atom], function: Callable[[int, int], Callable[[Any], Any]]
    ) -> None:
        """Make segments of the frozen atoms: one for each step of freezing.

        Args:
            atoms: Those that are frozen now.
            function: Runs the atoms from the first number up to the second.
        """
        number = len(atoms)
        self.cuts = [cut for cut in self.cuts if cut < number] + [number]
        spans = list(pairwise(self.cuts))
        prints = caching.fingerprints([tensors_of(atoms[start:stop]) for start, stop in spans])
        self.segments = [
            Segment(Boundary(f"{self.name}, {stop} atoms", text, self.dtype), function(start, stop))
            for (start, stop), text in zip(spans, prints, strict=True)
        ]
        if self.is_verified:
            self.let_skip()

    def reads_first(self, behind: Numbers, inputs: Any) -> bool:
        """Whether cached activations are read for the first time, and can be compared.

        From then on inputs need not be loaded.

        Args:
            behind: The numbers of segments behind which the samples of a batch are cached.
            inputs: Their inputs, which another process may have let datasets leave out.
        """
        if self.is_verified or not behind.any():
            return False
        self.let_skip()
        return all(map(is_loaded, tensors_in(inputs)))

    def check_deterministic(self, run: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        """Run frozen layers twice and compare.

        Args:
            run: Runs the layers on some inputs.
            tensors: Their parameters and buffers.

        Raises:
            ConfigurationError: They are random, or change when they run.
        """
        versions = versions_of(tensors)
        with torch.no_grad():
            first, second = run(), run()
        if versions != versions_of(tensors):
            why = "change their buffers when they run (BatchNorm in train mode)"
        elif not all(map(torch.equal, tensors_in(first), tensors_in(second))):
            why = "return something different each time (dropout)"
        else:
            return
        raise ConfigurationError(
            f"the frozen layers of {self.name!r} {why}: put them into eval mode (module.eval() in "
            "on_train_epoch_start), or train without AutoCache (FreezeAndRepack(cache=None))"
        )

    def check_unchanged(self, kept: Any, fresh: Any) -> None:
        """Compare cached outputs of samples with what their inputs give now.

        Raises:
            ConfigurationError: They differ.
        """
        for one, other in zip(tensors_in(kept), tensors_in(fresh), strict=True):
            if not _is_close(one, other, self.dtype):
                raise ConfigurationError(
                    f"the frozen layers of {self.name!r} get different inputs for the same sample "
                    "than in the previous epoch: random augmentation in training_step or a hook, "
                    "or ids that now belong to other samples. Augment after the frozen layers, or "
                    "train without AutoCache (FreezeAndRepack(cache=None))"
                )

    def take_hit_rate(self, trainer: Trainer) -> float:
        """The share of this epoch's samples that were read from the cache; resets the counts.

        Of the samples of this rank, or under a pipeline of all ranks.
        """
        if self.cache is None:
            return 0.0
        cache, pipelined = self.cache, pipelined_of(trainer)
        cache.settle()  # before another process looks for them in the next epoch
        if pipelined is not None:
            cache.counts = Counts(*map(int, pipelined.sums(astuple(cache.counts))))
        if trainer.is_global_zero:
            log.info("epoch %d: %s", trainer.current_epoch, repr(cache))
        counts, cache.counts = cache.counts, Counts()
        if counts.refused and (pipelined is None or trainer.is_global_zero):
            log.warning(
                "epoch %d: %d samples did not fit into the cache and are computed in every epoch. "
                "Give AutoCache more memory, or a disk budget",
                trainer.current_epoch, counts.refused,
            )  # fmt: skip
        return counts.hit_rate


def _seconds_to_load(loader: Any) -> float:
    """Seconds to load a sample, if cached samples are not loaded; else 0."""
    dataset = loader.dataset
    if not (isinstance(dataset, WithIds) and dataset.inputs):
        return 0.0
    num = min(4, len(dataset))
    started = time.perf_counter()
    for index in range(num):
        dataset[index]
    workers = max(1, getattr(loader, "num_workers", 0))
    return (time.perf_counter() - started) / num / workers


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = dtype
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), dtype)
    if found is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise ConfigurationError(f"AutoCache(dtype={dtype!r}): give a floating-point type")


def tensors_of(atoms: Sequence[Atom]) -> list[Tensor]:
    """The parameters and buffers of some atoms."""
    return [tensor for atom in atoms for tensor in atom.tensors()]


def versions_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Identity of each tensor, and how often it was changed in place."""
    return [(id(tensor), tensor._version) for tensor in tensors]  # noqa: SLF001 - no other way


def _is_close(one: Tensor, other: Tensor, kept: torch.dtype | None) -> bool:
    """Equal up to rounding: other batches may be computed by other kernels."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = _TOLERANCE.get(one.dtype if kept is None else kept, 2e-2)
    distance = (one.double() - other.double()).norm()
    return bool(distance <= tolerance * other.double().norm() + 1e-12)
