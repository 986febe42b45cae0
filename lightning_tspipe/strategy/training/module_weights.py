"""Weights of a module before its stages are placed: built without values, loaded in parts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.moving import put
from lightning_tspipe.runtime.execution.engine import Engine, Rank
from lightning_tspipe.runtime.weights.construction import Construction
from lightning_tspipe.runtime.weights.materializing import Materializer, Source, is_on_meta
from lightning_tspipe.runtime.weights.ownership import named_tensors
from lightning_tspipe.runtime.weights.rebinding import keep_networks
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.resumption import gradients_of_replica
from lightning_tspipe.strategy.training.optimizers import (
    optimizer_names,
    parameters_of,
    plain_optimizer,
)


class ModuleWeights:
    """Knows where the weights of the module come from.

    Args:
        run: The run.

    Attributes:
        source: A checkpoint of which each rank reads its part when its stages are placed.
        restores_optimizers: Whether the optimizers' state is read from it too.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._construction = Construction()
        self._known: nn.Module | None = None
        self._keeping = contextlib.ExitStack()
        self.source: Source | None = None
        self.restores_optimizers = False

    # Building

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """While inside, modules are built without values, and how is noted."""
        try:
            with (
                warnings.catch_warnings(),
                self._run.precision_plugin.tensor_init_context(),
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

    @property
    def is_configuring(self) -> bool:
        """Whether Lightning is about to call ``configure_model``."""
        module = self._run.lightning_module
        running = module is not None and module._trainer is not None  # noqa: SLF001
        return running and self._run.trainer.state.status == "running"

    def convert(self, module: nn.Module) -> nn.Module:
        """Give the module the precision of the Trainer, and an only rank all values."""
        converting = self._construction.record() if is_on_meta(module) else contextlib.nullcontext()
        with converting:
            converted = self._run.precision_plugin.convert_module(module)
        if self._run.num_ranks == 1 and is_on_meta(self._run.module):
            self._fill(lambda _: True).done()
        return converted

    def _fill(self, keep: Callable[[str], bool]) -> Materializer:
        """Give values to what all ranks keep; what is returned has those of the rest."""
        run = self._run
        materializer = Materializer(run.module, self._construction, self.source)
        materializer.agree(run.transport, run.replicas)
        materializer.fill(keep)
        materializer.fill_attributes()
        return materializer

    def complete(self) -> None:
        """When a run begins, every rank has the whole module, as its hooks and callbacks expect.

        After a fit only the first one has. Of a module without values, or whose stages stay spread,
        nobody has. Every rank calls it.
        """
        run = self._run
        if run.num_ranks == 1 or run.engine is not None:
            return
        lacks = is_on_meta(run.module)
        if run.broadcast(lacks) or not run.reduce_boolean_decision(lacks, all=False):
            return
        here = Rank(
            run.module, Networks(()), run.transport, run.root_device, replicas=run.replicas,
            followers=run.followers,
        )  # fmt: skip
        share_weights(here)

    # Placing

    def keep(self, networks: Networks) -> None:
        """Until :meth:`let_go`, what is put in the place of a network goes into it."""
        self.let_go()
        kept = keep_networks(self._run.module, networks.student, networks.teacher)
        self._keeping.callback(kept.remove)

    def let_go(self) -> None:
        """The run is over: networks may be replaced."""
        self._keeping.close()

    def share(self, here: Rank) -> Materializer | None:
        """Every rank gets the weights of the loss rank, whatever its own random numbers were.

        Args:
            here: This rank, before its stages are placed.

        Returns:
            Where the values of the pipelined networks come from, if the loss rank has none.
        """
        inside = tuple(f"{name}." for _, name in here.networks.items())
        is_spread = self._run.spread is not None
        share_weights(here, inside if is_spread else ())
        if is_spread or not is_on_meta(here.module):
            return None
        return self._fill(lambda name: not name.startswith(inside))

    def forget_others(self, engine: Engine) -> None:
        """The stages are placed: let go of what only their placement needed."""
        if engine.materializer is not None:
            engine.materializer.done()
        engine.shards.stays_spread |= self._run.spread is not None
        for optimizer in map(plain_optimizer, self._run.optimizers):
            engine.shards.forget_optimizer_state(optimizer)

    # Restoring

    def forget_other_modules(self) -> None:
        """What was kept of another module that this Trainer had before is of no use to this one."""
        if self._known is not self._run.module:
            self._run.spread = self.source = None
            self.restores_optimizers = False
        self._known = self._run.module

    def placed(self, engine: Engine) -> None:
        """Each rank has its stages: it reads what belongs to them and is not there yet."""
        run = self._run
        if self.source is not None and self.restores_optimizers:
            self._restore_optimizers(self.source)
            mine = engine.shards.names(run.pipeline_rank)
            gradients = gradients_of_replica(
                self.source.gradients(mine), run.replica, run.num_replicas
            )
            engine.shards.put_gradients(gradients, run.pipeline_rank)
        self.source = None
        self.restores_optimizers = False
        if engine.shards.stays_spread:
            run.spread = engine

    def restore_optimizers(self) -> None:
        """If no batch came, for whose stages each rank would have read its part: read all of it."""
        is_known = self.restores_optimizers and not is_on_meta(self._run.module)
        if self.source is not None and is_known:
            self._restore_optimizers(self.source)

    def _restore_optimizers(self, source: Source) -> None:
        """Load what the optimizers keep for the parameters that are here."""
        for index, optimizer in enumerate(map(plain_optimizer, self._run.optimizers)):
            names = optimizer_names(self._run.module, optimizer)
            here = zip(names, parameters_of(optimizer), strict=True)
            wanted = {name for name, parameter in here if not parameter.is_meta}
            found = source.optimizer_state(index, names, wanted)
            state = {place: found[name] for place, name in enumerate(names) if name in found}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def share_weights(here: Rank, spread: tuple[str, ...] = ()) -> None:
    """Every rank gets the values of the loss rank, of all that has values there; copies too.

    Args:
        here: This rank; its replicas are the pipelines that are to have the first one's weights.
        spread: Beginnings of names: what is spread over the ranks already is not sent around.
    """
    transport, replicas = here.transport, here.replicas
    if transport.num_ranks * replicas.number == 1:
        return
    modules = (here.module, *(each.module for each in here.followers))
    shared = {
        (place, name): tensor
        for place, module in enumerate(modules)
        for name, tensor in named_tensors(module)
        if not name.startswith(spread)
    }
    mine = transport.rank == LOSS_RANK and replicas.is_first
    state = None
    if mine:
        state = {key: t.detach().cpu() for key, t in shared.items() if not t.is_meta}
    if transport.rank == LOSS_RANK:
        state = replicas.broadcast(state)
    state = transport.broadcast_object(state, LOSS_RANK)
    if mine:
        return
    for (place, name), value in state.items():
        tensor = shared[place, name]
        if tensor.is_meta:
            put(modules[place], tensor, value)
        else:
            with torch.no_grad():
                tensor.copy_(value)
