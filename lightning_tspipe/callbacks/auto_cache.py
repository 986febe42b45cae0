"""Activation cache for frozen layers: read what they returned in an earlier epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_tspipe.caching import measure
from lightning_tspipe.callbacks import fit_cache
from lightning_tspipe.callbacks.cached_pipelines import CachedFeatures
from lightning_tspipe.callbacks.common import pipelined_of, submodules
from lightning_tspipe.callbacks.fit_cache import FitCache, versions_of
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import StudentFanout
from lightning_tspipe.networks.arguments import Arguments
from lightning_tspipe.networks.program import Program
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.runtime.stages.frozen import num_frozen

Middle = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""What passes on between two atoms, and the parts of the return value that are known there."""


class CachedForward:
    """A network's ``forward`` that reads what its frozen atoms returned.

    Args:
        shared: The cache of this fit.
        network: The network, before it gets this ``forward``.

    Attributes:
        batch: The batch of samples that the network runs on, while a training step lasts.
        num_calls: Number of calls in this training step; None outside of one.
    """

    def __init__(self, shared: FitCache, network: nn.Module) -> None:
        self.batch: Any = None
        self.num_calls: int | None = None
        self._shared = shared
        self._program: Program | None = None
        self._versions: list[tuple[int, int]] = []
        self._measured_at = 0
        self._network = network
        self._forward = network.forward
        self._own = {name: value for name, value in vars(network).items() if name == "forward"}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's ``forward``; while it runs, the network has its own, to be traced."""
        attributes = vars(self._network)
        above = attributes.pop("forward")  # perhaps a wrapper of this one, by heads for instance
        attributes |= self._own
        try:
            return self._run(*args, **kwargs)
        finally:
            attributes["forward"] = above

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        shared = self._shared
        is_trained = all(p.requires_grad for p in self._network.parameters())
        if shared.cache is None or self.num_calls is None or is_trained:
            return self._forward(*args, **kwargs)
        program = self._program
        if program is None:
            program = Program(self._network, shared.name, Arguments.of(args, kwargs))
            self._program = program
        number = num_frozen([not p.requires_grad for p in a.parameters()] for a in program.atoms)
        if number == 0:
            return self._forward(*args, **kwargs)
        self.num_calls += 1
        if self.num_calls > 1:
            raise ConfigurationError(
                f"training_step calls {shared.name!r} several times, and AutoCache has one entry "
                "per sample: several views usually mean random augmentation. Train without it"
            )
        middle = self._start(program.arguments, args, kwargs)
        tensors = fit_cache.tensors_of(program.atoms[:number])
        # Between epochs weights may change in ways that leave no trace.
        versions = [(shared.trainer.current_epoch, 0), *versions_of(tensors)]
        if versions != self._versions or number != shared.cuts[-1]:
            self._versions = versions
            shared.divide(program.atoms[:number], partial(_piece, program))
        # What was worth it for fewer layers is so for more.
        if not shared.is_on and self._measured_at != number:
            self._measured_at = number
            shared.check_deterministic(lambda: self._whole(middle), tensors)
            shared.decide(lambda: measure(self._whole, middle, **shared.how))
        if not shared.is_on:
            return self._forward(*args, **kwargs)
        _, known = _piece(program, number, len(program.atoms))(self._read(middle))
        leaves = [known[str(ref)] for ref in program.outputs]
        return pytree.tree_unflatten(leaves, program.output_spec)

    def _start(self, traced: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Middle:
        """What is in front of the first atom in a call."""
        tensors = traced.match(args, kwargs)
        if tensors is None:
            raise ConfigurationError(
                f"{self._shared.name} was called with {traced} and now with "
                f"{Arguments.of(args, kwargs)}: cached layers must be called in one way"
            )
        return tuple(tensors), {}

    def _whole(self, middle: Middle) -> Middle:
        for segment in self._shared.segments:
            middle = segment.function(middle)
        return middle

    def _read(self, middle: Middle) -> Middle:
        shared, cache = self._shared, self._shared.opened
        ids = shared.ids_of(self.batch)
        is_compared = shared.reads_first(cache.behind(ids, shared.segments), middle)
        cached: Middle = cache.outputs(ids, middle, shared.segments)
        if is_compared:
            with torch.no_grad():
                shared.check_unchanged(cached, self._whole(middle))
        return cached


def _piece(program: Program, start: int, stop: int) -> Callable[[Middle], Middle]:
    """The atoms from ``start`` up to, not including, ``stop``, as one function."""

    def run(middle: Middle) -> Middle:
        values, known = middle
        if start == stop:
            return middle
        passed, found = program.run(values, start, stop)
        return passed, known | {str(ref): tensor for ref, tensor in found.items()}

    return run


class AutoCache(FitCache):
    """Caches the activations of a network's frozen first layers by sample; trains the rest on them.

    Frozen layers are those at the beginning of the network whose ``requires_grad`` is False,
    however and whenever that happened: by hand, by ``FreezeAndRepack``, by Lightning's finetuning
    callbacks. From the next epoch on their activations are read. The mathematics does not change,
    so the inputs must be the same in every epoch and the frozen layers must be in eval mode; random
    augmentation and dropout raise an error.

    The samples need ids: ``DataLoader(WithIds(dataset))``. With ``WithIds(dataset, inputs=0)``,
    inputs whose activations are cached are not even loaded.

    The first batch with frozen layers measures whether reading is faster than computing; if it is
    not, nothing is cached. ``cache_hit_rate`` is logged at the end of each epoch.

    Args:
        network: Dotted name of the network; None: the trunk ``teacher`` of heads
            (``StudentFanout``), else ``student``.
        memory: Bytes of memory on each machine, or a text such as ``"4GiB"``; ``"auto"``: a quarter
            of the free memory.
        disk: Bytes on disk, or a text, or ``"auto"``: a quarter of the free space.
        folder: A folder on the file system to use; None: the system's temporary folder.
        dtype: Type in which activations are stored, such as ``torch.bfloat16`` or ``"bfloat16"``;
            None: their own. With a type, all activations are rounded to it, whether read or
            computed, so that the result does not depend on what was cached; and nothing is
            measured, as with ``always``.
        ids: Number or key of the sample ids in a batch; None: where ``WithIds`` puts them.
        always: Cache without measuring, as with ``Trainer(deterministic=True)``.

    Attributes:
        worth: The measured times of this fit, or of the last one; None before.
        is_on: Whether activations are cached; None before that is decided.

    Raises:
        ConfigurationError: There is no such network; samples have no ids; inputs or layers are
            random; a budget exceeds what is free.
    """

    @property
    @override
    def state_key(self) -> str:
        return f"{type(self).__qualname__}({self.network})"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        has_heads = isinstance(getattr(pl_module, "student", None), StudentFanout)
        pipelined = pipelined_of(trainer)
        if pipelined is not None and not (has_heads and self.network in {None, "teacher"}):
            raise ConfigurationError(
                "AutoCache works with ordinary strategies, and in a pipeline only on the trunk of "
                "a StudentFanout. For other pipelines use FreezeAndRepack(cache=...)"
            )
        if pipelined is not None and trainer.num_nodes > 1:
            raise ConfigurationError(
                "AutoCache stores features in the memory of one machine, and heads of a pipeline "
                f"over {trainer.num_nodes} machines could not read them. Remove the callback"
            )
        self.network = self.name = self.network or ("teacher" if has_heads else "student")
        network = submodules(pl_module, self.network, "network")[self.network]
        self.follow(trainer)
        if pipelined is not None:
            pipelined.use_features(CachedFeatures(self, network))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pipelined_of(trainer) is not None:
            return
        network = pl_module.get_submodule(self.name)
        reader = CachedForward(self, network)
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            with attributes_replaced([(reader, "batch", batch), (reader, "num_calls", 0)]):
                return step(batch, *args, **kwargs)

        replaced = (network, "forward", reader.forward), (pl_module, "training_step", training_step)
        self.undo.enter_context(attributes_replaced(replaced))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is not None:
            pipelined.look_at_trunk()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.cache is not None and self.is_on:
            rate = self.take_hit_rate(trainer)
            is_ordinary = pipelined_of(trainer) is None  # else all ranks know it
            pl_module.log("cache_hit_rate", rate, sync_dist=is_ordinary, batch_size=1)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The numbers of frozen atoms, one for each step of freezing."""
        return {"cuts": self.cuts}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cuts = list(state_dict["cuts"])
