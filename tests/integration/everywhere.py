"""Trainings that are stopped after every batch, as functions that run on every rank of a job.

One job does it all, so that processes start once for each training::

    whole run   |0 s 1 s 2 v s 3 s e|4 s 5 s ...     s: saved behind a batch, v: behind a
    from s 0       |1   2 v   3    e|4   5   ...        validation, e: behind an epoch
    from s 1           |2 v   3    e|4   5   ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.integration.trainings import quiet_trainer, strict

CLOSE = 1e-12
"""How far a resumed run may be off, absolute and relative, in float64."""


@dataclass(frozen=True)
class Mode:
    """A way of training.

    Attributes:
        module: Makes the LightningModule.
        sample: A training sample, by its index; it may draw random numbers.
        strategy: Makes the strategy, from the module.
        callbacks: Makes the callbacks.
        with_ids: Changes the data set, for a cache.
        num_ranks: Devices.
        num_samples: Of an epoch.
        batch_size: Of the loader.
        epochs: Epochs.
        trainer: Further arguments of the Trainer.
        validates: Whether there is a validation; it draws random numbers too.
        loader: Makes another loader than a shuffling one.
        decides: Whether something decides by a validation. Lightning leaves one out when a run
            goes on from a checkpoint of just before it.
    """

    module: Callable[[], Any]
    sample: Callable[[int], Any]
    strategy: Callable[[Any], Any]
    callbacks: Callable[[], list[Any]] = list
    with_ids: Callable[[Any], Any] = lambda dataset: dataset
    num_ranks: int = 2
    num_samples: int = 14
    batch_size: int = 4
    epochs: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)
    validates: bool = False
    loader: Callable[..., Any] = DataLoader
    decides: bool = False


class Samples(Dataset[Any]):
    """What a function says, read at that moment."""

    def __init__(self, number: int, sample: Callable[[int], Any]) -> None:
        self._number, self._sample = number, sample

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Any:
        return self._sample(index)


class Saver(Checkpoint):
    """Saves behind each batch, validation and epoch, as the last of all callbacks.

    Args:
        folder: Where to.
        num_batches: That were trained before.
    """

    def __init__(self, folder: str, num_batches: int = 0) -> None:
        self.files: list[str] = []
        self.num_batches = num_batches
        self._folder = folder

    def _save(self, trainer: Any, name: str) -> None:
        self.files.append(f"{self._folder}/{self.num_batches}-{name}.ckpt")
        trainer.save_checkpoint(self.files[-1])

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.num_batches += 1
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._save(trainer, "epoch")


class Watch(Callback):
    """Keeps losses and metrics; draws random numbers of its own, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.drawn: list[Tensor] = []
        self.metrics: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.drawn.append(torch.rand(2))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float((outputs or {}).get("loss", 0.0)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        # Each rank has the losses of its own part: heads may be placed elsewhere next time.
        pipelined, has_all = trainer.strategy.pipelined, trainer.strategy._parts.results._tells
        if has_all and not pipelined.is_loss_rank:
            self.losses = [0.0] * len(self.losses)
        self.losses = trainer.strategy.pipelined.sums(self.losses)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        # Not what probes logged where an epoch ended, perhaps before this run.
        known = {k: v for k, v in trainer.callback_metrics.items() if "top" not in k}
        self.metrics.append({k: v.detach().clone() for k, v in known.items() if "val" in k})


@dataclass
class Went:
    """What a run did, on one rank; ``end`` is the last checkpoint, on rank 0."""

    losses: list[float]
    drawn: list[Tensor]
    metrics: list[dict[str, Tensor]]
    end: dict[str, Any]


def go(mode: Mode, path: str | None = None, saver: Saver | None = None) -> Went:
    """Fit, from the beginning or from a checkpoint."""
    strict("Your `val_dataloader`'s sampler has shuffling", ".*sync_dist=True.*",
           "You.re resuming from a checkpoint that ended",
           "You defined a `validation_step` but have no")  # fmt: skip
    module = mode.module()
    watch = Watch()
    trainer = quiet_trainer(
        devices=mode.num_ranks, strategy=mode.strategy(module), enable_checkpointing=bool(saver),
        callbacks=[*mode.callbacks(), watch, *filter(None, [saver])],
        **{"max_epochs": mode.epochs, **mode.trainer},
    )  # fmt: skip
    # A run that goes on does so whatever its own seed is.
    torch.manual_seed(3 if path is None else 99)
    dataset = mode.with_ids(Samples(mode.num_samples, mode.sample))
    loaders = [mode.loader(dataset, batch_size=mode.batch_size, shuffle=True)]
    if mode.validates:
        loaders.append(DataLoader(Samples(6, mode.sample), batch_size=3, shuffle=True))
    trainer.fit(module, *loaders, ckpt_path=path, weights_only=False)
    trainer.save_checkpoint("end.ckpt")
    end: dict[str, Any] = {}
    if trainer.is_global_zero:
        end = torch.load("end.ckpt", weights_only=False)
    return Went(watch.losses, watch.drawn, watch.metrics, end)


COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "global_step", "epoch")
OF_ONE_RUN = {"seconds", "hit_rate"}
"""What a run that goes on takes longer for, and computes that the whole one had kept."""


def everywhere(
    mode: Callable[[], Mode], again: str = "", only: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Train, go on from every checkpoint, and tell what was different.

    Args:
        mode: Makes the mode; module-level.
        again: A checkpoint from which a run goes on that saves everywhere too, to be gone on from.
        only: Checkpoints to go on from; all if empty.

    Returns:
        All checkpoints, and where this rank found a difference, and which.
    """
    made, saver = mode(), Saver("first")
    whole = go(made, saver=saver)
    files = going_on(made, saver.files)
    if again:
        second = Saver("second", number_of(again))
        go(made, f"first/{again}.ckpt", second)
        files += going_on(made, second.files)
    found: list[str] = []
    for file in files:
        if not only or file in only:
            left = len(whole.losses) - number_of(file)
            found += [f"{file}: {each}" for each in differences(whole, go(made, file), left)]
    return files, found


def number_of(file: str) -> int:
    """Batches before a checkpoint."""
    return int(file.rsplit("/", maxsplit=1)[-1].split("-", maxsplit=1)[0])


def going_on(mode: Mode, files: Sequence[str]) -> list[str]:
    """The checkpoints from which a run goes on as the whole one went."""
    pairs = zip(files, [*files[1:], ""], strict=True)
    leaves_out = {file for file, behind in pairs if "batch" in file and "validation" in behind}
    return [file for file in files if not (mode.decides and file in leaves_out)]


def differences(whole: Went, again: Went, left: int) -> Iterator[str]:
    """Where a resumed run, which has ``left`` batches, is not the whole one."""
    skipped = len(whole.losses) - left
    yield from unequal(whole.losses[skipped:], again.losses, "loss")
    yield from unequal(whole.drawn[skipped:], again.drawn, "drawn")
    number = len(again.metrics)
    if number:
        yield from unequal(whole.metrics[-number:], again.metrics, "validation")
    # Lightning counts an epoch that max_steps ended only if it goes through its end.
    for key in COMPARED if left else COMPARED[:-1]:
        yield from unequal(whole.end.get(key), again.end.get(key), key)


def unequal(one: Any, other: Any, place: str) -> Iterator[str]:
    """Where two nested values differ, and by how much."""
    ones, others = dict(leaves(one, place)), dict(leaves(other, place))
    for path in sorted(ones.keys() ^ others.keys()):
        yield f"{path}: in one of them only"
    for path, value in ones.items():
        if path in others and (found := difference(value, others[path])):
            yield f"{path}: {found}"


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """What is in nested dicts and lists, with the way to it."""
    if isinstance(value, Mapping):
        pairs = [(str(key), each) for key, each in value.items() if key not in OF_ONE_RUN]
    elif isinstance(value, list | tuple):
        pairs = [(str(index), each) for index, each in enumerate(value)]
    else:
        yield place, value
        return
    for name, each in pairs:
        yield from leaves(each, f"{place}.{name}")


def difference(one: Any, other: Any) -> str:
    """Between two leaves; "" for none."""
    if not isinstance(one, Tensor | float) or not isinstance(other, Tensor | float):
        return "" if one == other else f"{one!r}, {other!r}"
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    if a.shape != b.shape:
        return f"{tuple(a.shape)}, {tuple(b.shape)}"
    close = torch.allclose(a, b, CLOSE, CLOSE, equal_nan=True)
    return "" if close else f"{float((a - b).abs().max()):.1e}"
