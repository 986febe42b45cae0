"""Models that no host can hold: built without values, saved and loaded in shards.

A checkpoint of shards is a folder in the layout of Lightning's ``FSDPStrategy``: what
``torch.distributed.checkpoint`` writes (``model``, ``optimizer_0``, ...), and ``meta.pt`` with the
rest. ``python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` makes one file of it.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from lightning_tspipe.capture.trace import Step
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.construction import Construction
from lightning_tspipe.runtime.weights.materializing import Materializer, Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import Shards
from lightning_tspipe.strategy.checkpoints.files import (
    innermost,
    is_usual,
    load_mapped,
    verify_file,
)
from lightning_tspipe.strategy.checkpoints.progress import gradients_of_replica
from lightning_tspipe.strategy.checkpoints.shards import (
    GRADIENTS,
    FileSource,
    FolderSource,
    aside,
    is_sharded,
    newest,
    optimizer_names,
    own_optimizer_state,
)
from lightning_tspipe.strategy.checkpoints.writing import ShardWriter
from lightning_tspipe.strategy.lightning.namespaces import world_of
from lightning_tspipe.strategy.setup.weight_source import Origin
from lightning_tspipe.strategy.training.evaluating import EvaluationHooks
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lightning_tspipe.runtime.execution.engine import Engine


class ShardedHooks(EvaluationHooks):
    """The part of the strategy for modules that are never whole."""

    _save_distributed: bool | Literal["auto"]
    _verify_checkpoint: bool
    _construction: Construction
    _source: Source | None
    _restores_optimizers: bool
    _kept_of: nn.Module | None
    _left_shards: Shards | None
    _writer: ShardWriter | None
    _accumulates: bool

    # Building

    @contextlib.contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        if not empty_init and not self._is_configuring():
            with super().tensor_init_context(empty_init):
                yield
            return
        try:
            with (
                warnings.catch_warnings(),
                self.precision_plugin.tensor_init_context(),
                self._construction.record(),
            ):
                # Copying into a tensor without values is noted, and done later.
                warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
                yield
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise ConfigurationError(
                f"the module is built without values (on the meta device), and its constructor "
                f"needs some: {error}. Build that part in __init__ of the LightningModule"
            ) from error

    def _is_configuring(self) -> bool:
        """Whether Lightning is about to call ``configure_model``."""
        module = self.lightning_module
        running = module is not None and module._trainer is not None  # noqa: SLF001
        return running and self._trainer.state.status == "running"

    def convert_module(self, module: nn.Module) -> None:
        """Give the module the precision of the Trainer."""
        converting = self._construction.record() if is_on_meta(module) else contextlib.nullcontext()
        with converting:
            self.model = self.precision_plugin.convert_module(module)

    def fill_whole(self) -> None:
        """Give the only rank all values."""
        if is_on_meta(self._module):
            materializer = Materializer(self._module, self._construction, self._source)
            materializer.agree(self.transport, self.replicas)
            materializer.fill(lambda _: True)
            materializer.fill_attributes()
            materializer.done()

    @override
    def _origin(self) -> Origin:
        placement = self._spread.placement if self._spread is not None else None
        return Origin(self._construction, self._source, placement)

    @override
    def _begin(self, batch: Any, step: Step, batch_idx: int) -> Engine:
        engine = super()._begin(batch, step, batch_idx)
        if self._source is not None and self._restores_optimizers:
            for index, optimizer in enumerate(self.optimizers):
                self._restore(plain_optimizer(optimizer), index, self._source)
            mine = engine.shards.names(self.pipeline_rank)
            gradients = gradients_of_replica(
                self._source.gradients(mine), self.replica, self.num_replicas
            )
            engine.shards.put_gradients(gradients, self.pipeline_rank)
        self._source = None
        self._restores_optimizers = False
        if engine.shards.stays_spread:
            self._spread = engine
        return engine

    def restore_optimizers(self) -> None:
        """If no batch came, for whose stages each rank would have read its part: read all of it."""
        if self._source is not None and self._restores_optimizers and not is_on_meta(self._module):
            for index, optimizer in enumerate(self.optimizers):
                self._restore(plain_optimizer(optimizer), index, self._source)

    def _restore(self, optimizer: Optimizer, index: int, source: Source) -> None:
        """Load what an optimizer keeps for the parameters that are here."""
        names = optimizer_names(self._module, optimizer)
        here = [p for group in optimizer.param_groups for p in group["params"]]
        wanted = {name for name, p in zip(names, here, strict=True) if not p.is_meta}
        found = source.optimizer_state(index, names, wanted)
        state = {place: found[name] for place, name in enumerate(names) if name in found}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def forget_other_modules(self) -> None:
        """What was kept of another module that this Trainer had before is of no use to this one."""
        if self._kept_of is not self._module:
            self._spread = self._source = None
            self._restores_optimizers = False
        self._kept_of = self._module

    # Saving

    @property
    def _saves(self) -> bool:
        """Whether this rank's pipeline is the one that is saved."""
        return self.replicas.is_first

    @property
    def saves_shards(self) -> bool:
        """Whether a checkpoint is a folder to which each rank writes what it holds."""
        if self._save_distributed == "auto":
            return self._placed is not None and self._placed.shards.stays_spread
        return self._save_distributed

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        engine = self._placed
        if engine is not None:
            if self.saves_shards:
                return engine.shards.own_state_dict(self.pipeline_rank) if self._saves else {}
            return engine.shards.state_dict(self.pipeline_rank, self.transport)
        if self.is_loss_rank and is_on_meta(self._module):
            raise ConfigurationError(
                "the module was built on the meta device and has no weights yet: they come with "
                "the first training batch. Save after it"
            )
        return self._module.state_dict() if self.is_global_zero or not self.saves_shards else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        engine, plain = self._placed, plain_optimizer(optimizer)
        if engine is None:
            self.restore_optimizers()
        # After a fit the module is whole again; of the optimizers each rank still has its part.
        shards = self._left_shards if engine is None else engine.shards
        if not self.saves_shards:
            if shards is None:
                return plain.state_dict()
            return shards.optimizer_state(plain, self.transport)

        def is_mine(name: str) -> bool:
            owner = LOSS_RANK if shards is None else shards.owner(name)
            return self._saves and owner == self.pipeline_rank

        return own_optimizer_state(self._module, plain, is_mine)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if self.saves_shards:
            self._save_shards(checkpoint, path, storage_options)
            return
        if self.is_global_zero and is_sharded(path):
            shutil.rmtree(aside(path), ignore_errors=True)
            path.rename(aside(path))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            shutil.rmtree(aside(path), ignore_errors=True)

    def _save_shards(self, checkpoint: dict[str, Any], path: Path, storage_options: Any) -> None:
        if storage_options is not None or ":/" in str(path):  # Path makes one of two slashes
            raise ConfigurationError(
                f"{str(path)!r}: a checkpoint of shards goes into a folder that all ranks see, and "
                "takes no storage_options"
            )
        states = {"model": checkpoint.pop("state_dict")}
        if "optimizer_states" in checkpoint:
            states[GRADIENTS] = self._own_gradients()
            for index, state in enumerate(checkpoint["optimizer_states"]):
                states[f"optimizer_{index}"] = state
            checkpoint["optimizer_states"] = []  # that there is no state yet is one too
        if self._writer is None:
            self._writer = ShardWriter(self._timeout, is_connected=self.total_ranks > 1)
        waits = not self._writes_meanwhile
        self._writer.write(states, checkpoint, path, waits=waits)
        if waits:
            self.barrier()

    def _own_gradients(self) -> dict[str, Any]:
        """What this rank has accumulated, by replica; each has its own."""
        shards = self._left_shards if self._placed is None else self._placed.shards
        if shards is None or not self._accumulates:
            return {}
        return {str(self.replica): shards.gradients(self.pipeline_rank)}

    @property
    def _writes_meanwhile(self) -> bool:
        """Whether the training goes on while a checkpoint is written."""
        return self._engine is not None and isinstance(
            self._checkpoint_io, world_of(self).async_checkpoint_io
        )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        remove = super().remove_checkpoint
        if self._writer is not None and self._writer.is_busy:
            # Not before the one that replaces it is complete.
            self._writer.do(lambda: remove(filepath))
        else:
            remove(filepath)

    @override
    def on_train_end(self) -> None:
        if self._writer is not None:
            self._writer.wait()
        super().on_train_end()

    def end_writing(self, *, waits: bool) -> None:
        """Write no more; wait for what is being written, unless ranks may be gone."""
        writer, self._writer = self._writer, None
        if writer is not None and waits:
            writer.close()
        elif writer is not None:
            writer.abandon()

    def refuse_other_io(self) -> None:
        """Refuse a plugin that would be ignored.

        Raises:
            ConfigurationError: Shards are to be written, and a plugin writes checkpoints its way.
        """
        writes_shards = self._save_distributed
        if writes_shards == "auto":
            writes_shards = self.num_ranks > 1 and is_on_meta(self._module)
        plugin = innermost(self.checkpoint_io)
        if writes_shards and not is_usual(plugin):
            raise ConfigurationError(
                f"{type(plugin).__name__} would not be asked: a checkpoint of shards is written by "
                "torch.distributed.checkpoint. Leave the plugin out, or save one file through rank "
                "0's memory: TSPipeStrategy(save_distributed_checkpoint=False)"
            )

    # Loading

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self.forget_other_modules()
        path = newest(Path(checkpoint_path))
        if is_sharded(path):
            return self._load_folder(path, weights_only)
        if self._verify_checkpoint:
            self._tell_unverified(path, has_checksums=verify_file(path))
        self._source = None
        if self._spread is None and not is_on_meta(self._module):
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = None
        if is_usual(innermost(self.checkpoint_io)):
            checkpoint = load_mapped(path, weights_only)
        if checkpoint is None:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._source = FileSource(checkpoint)
        return checkpoint

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        trusts = weights_only is False
        source = FolderSource(path, verify=self._verify_checkpoint, trusts=trusts)
        checkpoint = source.rest()
        self._tell_unverified(path, has_checksums=source.has_checksums)
        checkpoint["state_dict"] = {}
        if source.num_optimizers:  # of an earlier version, which didn't say so otherwise
            checkpoint["optimizer_states"] = []
        self._source = source
        return checkpoint

    def _tell_unverified(self, path: Path, *, has_checksums: bool) -> None:
        if self._verify_checkpoint and not has_checksums and self.is_global_zero:
            warnings.warn(
                f"{str(path)!r} was written without checksums: it is loaded, and not verified. One "
                "that is saved by this run has them",
                stacklevel=2,
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        source = self._source
        if source is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        own = self._module.state_dict()
        _check_names({k: tuple(v.shape) for k, v in own.items()}, source, strict=strict)
        here = {name: tensor for name, tensor in own.items() if not tensor.is_meta}
        with torch.no_grad():
            for name in here.keys() & set(source.shapes):
                here[name].copy_(source.tensors([name])[name])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._source is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._restores_optimizers = True
        # What they keep for each parameter is loaded when it is known who has which.
        for index, optimizer in enumerate(map(plain_optimizer, self.optimizers)):
            state = optimizer.state_dict()
            groups = self._source.optimizer_groups(index, state["param_groups"])
            optimizer.load_state_dict({**state, "param_groups": groups})


def _check_names(own: dict[str, tuple[int, ...]], source: Source, *, strict: bool) -> None:
    missing = sorted(own.keys() - set(source.shapes))
    unexpected = sorted(set(source.shapes) - own.keys())
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"the checkpoint is one of another module: it lacks {missing[:5]} ({len(missing)} "
            f"names), and it has {unexpected[:5]} ({len(unexpected)} names), which the module "
            "lacks. Set strict_loading = False in the module to load what agrees"
        )
    for name, shape in source.shapes.items():
        if name in own and own[name] != shape:
            raise ConfigurationError(
                f"{name!r} has shape {shape} in the checkpoint and {own[name]} in the module"
            )
