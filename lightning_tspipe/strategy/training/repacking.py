"""Between two epochs: what froze leaves the pipeline, which gets shorter, and has more replicas.

A transition is a checkpoint that never leaves the processes. All ranks go through it together::

    4 ranks x 1 replica                                2 ranks x 2 replicas
    stages 3 2 1 0  ── whole module, optimizer,   ──►  stages 1 0 | 1 0
    data on rank 3     random states on every rank     data on ranks 1 and 3
                    ── new groups, new loaders    ──►  each its part of every batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len

from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.batches.global_batches import share_batches
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.stages.frozen import num_frozen_atoms, parameter_names
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.runtime.weights.state_sharding import StateSharding
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import fanout_of, relay_of
from lightning_tspipe.strategy.setup.freezing import Freezing, choose, possible_meshes
from lightning_tspipe.strategy.setup.refusals import refuse
from lightning_tspipe.strategy.setup.resumption import FROZEN, between_epochs, collect
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.module_weights import share_weights
from lightning_tspipe.strategy.training.optimizers import parameters_of, plain_optimizer

# ruff: noqa: SLF001 - a part of the strategy, which also makes Lightning's loops begin anew

_MANY = 2**30


@dataclass(eq=False)
class Repacking:
    """Changes what is frozen, and the mesh, while a fit goes on.

    Attributes:
        run: The run.
        data: Its batches.
        evaluator: Evaluations, which follow the stages.
        sharding: Divides what optimizers keep among replicas.
    """

    run: Run
    data: Data
    evaluator: Evaluator
    sharding: StateSharding
    _wanted: int | None = None
    _has_begun: bool = False
    _tell: Callable[[], None] | None = None

    def enable(self, *, repack: bool) -> None:
        """A callback will freeze layers; before the training loader is made.

        Raises:
            ConfigurationError: A way of training in which the mesh can't change.
        """
        run = self.run
        refuse({
            "FreezeAndRepack freezes the layers of one network that is trained as a whole, but "
            "here heads or blocks are trained separately, on frozen layers. Leave it out":
            fanout_of(run.module) is not None or relay_of(run.trainer) is not None,
            "FreezeAndRepack with asynchronous training: several versions of the weights are in "
            "flight when stages would move. Use schedule='tspipe' or 'gpipe'":
            run.options.schedule in WINDOWS,
            "FreezeAndRepack with WeightAveraging, which validates with averages in the place of "
            "layers that are frozen, and taken to be unchanged. Use MomentumEMA, whose average is "
            "a network beside them": bool(run.followers),
        })  # fmt: skip
        run.freezing, self._has_begun = Freezing(is_on=True), False
        run.freezing.read(run.resumption.freezing)
        if not run.freezing.is_shared:
            run.freezing.num_joined = run.num_replicas
        # One device divides nothing, but may go on with the global batches of several.
        shared = repack and max(run.total_ranks, run.freezing.num_joined) > 1
        run.freezing.is_shared = shared
        refuse({
            "FreezeAndRepack(repack=True) with automatic_optimization = False: if replicas change, "
            "a loss that the module runs backward itself can't be weighted. Set repack=False":
            shared and not run.module.automatic_optimization,
        })  # fmt: skip

    def run_begins(self) -> None:
        """Callbacks know by now that the training begins; its first epoch follows."""
        self._has_begun = True

    def freeze(
        self,
        names: Collection[str],
        mesh: tuple[int | None, int | None],
        told: Callable[[float], None],
    ) -> None:
        """Take frozen layers out of the pipeline; between two epochs, and every rank calls it.

        Args:
            names: All parameters that are frozen now.
            mesh: Stages of what is trained, and ranks of a pipeline, as far as they are decided.
            told: Called with the seconds that it took, when the next step is about to run.
        """
        started = time.perf_counter()
        run = self.run
        engine = run.engine
        refuse({
            "FreezeAndRepack under a pipeline needs a module that a host can hold: this one was "
            "built on the meta device. Build it in __init__":
            engine is not None and engine.shards.stays_spread,
        })  # fmt: skip
        run.freezing.names, run.freezing.num_stages = frozenset(names), mesh[0]
        self._wanted = mesh[1]
        run.freezing.plan = None
        with waiting("moving the stages"):
            plan = run.freezing.plan = run.broadcast(self._choose(engine))
            num_ranks = self._meshes()[-1] if plan is None else plan.pipeline.num_ranks
            if engine is not None:
                self.gather(engine, moves=num_ranks != run.num_ranks, epoch_ended=True)
            if num_ranks != run.num_ranks:
                self._change(num_ranks)
                if self._has_begun:  # else this follows, when it begins
                    self.data.restore_random()
        self._tell = lambda: told(time.perf_counter() - started)

    def begun(self) -> None:
        """The first step on the new mesh is about to run."""
        if self._tell is not None:
            self._tell()
            self._tell = None

    def _meshes(self) -> tuple[int, ...]:
        run = self.run
        if self._wanted is not None and run.total_ranks % self._wanted == 0:
            return (self._wanted,)
        if not run.freezing.is_shared:
            return (run.num_ranks,)
        return possible_meshes(
            run.total_ranks, run.num_ranks, min(self._batch()), run.freezing.num_stages
        )

    def _choose(self, engine: Engine | None) -> Plan | None:
        run = self.run
        if not run.is_global_zero:
            return None
        parameters = run.freezing.parameters  # of the run that this one goes on with
        if engine is not None:
            parameters = parameter_names(engine.captured.networks["student"])
        number = num_frozen_atoms(parameters, run.freezing.names)
        kept = run.resumption.found  # of a checkpoint, and not carried out yet
        if kept is not None and kept.made_for.get(FROZEN) == number:
            return None
        constraints = run.options.constraints(run.root_device, run.transport)
        return choose(run.freezing, number, run.total_ranks, self._meshes(), constraints)

    # What moves

    def gather(self, engine: Engine, *, moves: bool = False, epoch_ended: bool = False) -> None:
        """Everything on every rank, in host memory or where it is; then the engine is gone.

        Every rank calls it, between two steps.

        Args:
            engine: The engine.
            moves: Whether the mesh changes.
            epoch_ended: Whether batches that were read are not trained; else those to come stay.
        """
        run = self.run
        transport, replicas = run.transport, run.replicas
        engine.drain()
        by_hand = not run.module.automatic_optimization
        loader = self.data.loader if epoch_ended else None
        mine = collect(
            engine, loader, epoch_ended=epoch_ended, with_gradients=by_hand or not epoch_ended
        )
        found: Any = replicas.gather(mine) if run.is_loss_rank else None
        found = transport.broadcast_object(found, LOSS_RANK)
        self.take_back(engine, moves=moves)
        # With the next batch others come, and go on where these were.
        if moves:
            run.resumption.here = between_epochs(found[0])
        else:  # the loaders and the generators of this process go on by themselves
            run.resumption.here = {**found[run.replica], "loader": None}
        run.resumption.replicas = None
        self.evaluator.release()
        if epoch_ended:
            self.data.prepared = {}

    def stay(self, engine: Engine) -> None:
        """The engine is gone; another one goes on with the same stages. Every rank calls it."""
        engine.drain()
        seed, step = engine.position
        self.run.resumption.here = {
            "seed": seed, "step": step, "gradients": {}, "teacher_ahead": None,
            "teacher_late": engine.late,
        }  # fmt: skip
        self.evaluator.release()
        self.run.engine = None

    def take_back(self, engine: Engine, *, moves: bool = False) -> None:
        """The whole module, and the optimizers' states, on every rank; then the engine is gone.

        Args:
            engine: The engine.
            moves: Whether the mesh changes.
        """
        run, transport, replicas = self.run, self.run.transport, self.run.replicas
        optimizers = [plain_optimizer(optimizer) for optimizer in run.optimizers]
        for optimizer in optimizers:
            self.sharding.complete(optimizer)
        states = [engine.shards.optimizer_state(one, transport) for one in optimizers]
        engine.shards.restore(engine.rank, transport)
        # Replicas that stay keep what is their own, such as statistics of BatchNorm.
        here = replace(engine.here, replicas=replicas if moves else Replicas())
        share_weights(here)
        states = transport.broadcast_object(states, LOSS_RANK)
        for optimizer, state in zip(optimizers, states, strict=True):
            for index, parameter in enumerate(parameters_of(optimizer)):
                if index in state["state"]:
                    optimizer.state[parameter] = dict(state["state"][index])
        self.sharding.forget()
        run.engine = None

    # The mesh

    def _change(self, num_ranks: int) -> None:
        """New groups, new connections, new loaders."""
        self.run.reconnect(num_ranks)
        trainer: Any = self.run.trainer
        loop = trainer.fit_loop
        validation = loop.epoch_loop.val_loop
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()
        # There is no public way to have loaders made anew.
        loop._combined_loader = validation._combined_loader = None
        # What is logged remembers the group over which it is reduced.
        loop.epoch_loop._results.clear()
        validation._results.clear()
        loop.setup_data()
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, trainer.current_epoch)
        if trainer.enable_validation:
            # Now, as Lightning does where a fit starts: a run that goes on may ask for them while
            # it trains, and they would be taken for training loaders.
            trainer.validating = True
            validation.setup_data()
            trainer.training = True

    # The data

    def _batch(self) -> tuple[int, int]:
        """Samples of a global batch, and of the last one; very many if nobody knows."""
        source = self.run.trainer.fit_loop._combined_loader
        loader = source.flattened[0] if source is not None else None
        size = getattr(loader, "batch_size", None)
        length = sized_len(getattr(loader, "dataset", None))
        if not size or length is None:
            return _MANY, _MANY
        size *= self.run.freezing.num_joined
        last = length % size or size
        return size, size if getattr(loader, "drop_last", False) else last

    def share(self, loader: Any) -> Any:
        """A training loader that gives this replica its part of every global batch.

        Raises:
            ConfigurationError: Its batches can't be divided before they are read.
        """
        replicas, joined = self.run.replicas, self.run.freezing.num_joined
        if not self.run.freezing.is_shared or max(replicas.number, joined) == 1:
            return loader
        return share_batches(loader, replicas, joined)

    def weight(self, num_samples: int) -> float:
        """How much more a replica's mean counts than the others', for its number of samples.

        Among loss ranks, in each step whose samples can't be divided evenly.
        """
        replicas = self.run.replicas
        size, _ = self._batch()
        is_even = size != _MANY and size % replicas.number == 0
        is_even = is_even and not self.run.trainer.is_last_batch
        if not self.run.freezing.is_shared or replicas.number == 1 or is_even:
            return 1.0
        total = torch.tensor(num_samples)
        dist.all_reduce(total, group=replicas.peers)
        return num_samples * replicas.number / int(total)
