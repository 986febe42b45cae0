"""Between two epochs: what froze leaves the pipeline, which gets shorter, and has more replicas.

A transition is a checkpoint that never leaves the processes. All ranks go through it together::

    4 ranks x 1 replica                                2 ranks x 2 replicas
    stages 3 2 1 0  ── whole module, optimizer,   ──►  stages 1 0 | 1 0
    data on rank 3     random states on every rank     data on ranks 1 and 3
                    ── new groups, new loaders    ──►  each its part of every batch
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.batches.global_batches import share_batches
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.stages.frozen import Front, num_frozen_atoms, parameter_names
from lightning_tspipe.runtime.transport.replicas import Replicas
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.deciding import planning_constraints
from lightning_tspipe.strategy.setup.declared import find_networks, relay_of
from lightning_tspipe.strategy.setup.fanout import fanout_of
from lightning_tspipe.strategy.setup.freezing import Choices, Freezing, choose, possible_meshes
from lightning_tspipe.strategy.setup.machine import link_of
from lightning_tspipe.strategy.setup.weight_source import InitialWeights, share_weights
from lightning_tspipe.strategy.training import progress
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.optimizers import plain_optimizer

# ruff: noqa: SLF001 - a part of the strategy, which also makes Lightning's loops begin anew

if TYPE_CHECKING:
    from lightning_tspipe.runtime.execution.engine import Engine
_MANY = 2**30


class Repacking:
    """Changes what is frozen, and the mesh, while a fit goes on.

    Args:
        run: The run.
        data: Its batches.
        evaluator: Evaluations, which follow the stages.
        resumption: Where the next engine goes on.
        reconnect: Called with the number of ranks of a pipeline, to make new groups.

    Attributes:
        freezing: What is frozen, and what is known about the step.
        repacks: Whether the mesh may change; then each replica reads its part of a global batch.
    """

    def __init__(
        self,
        run: Run,
        data: Data,
        evaluator: Evaluator,
        resumption: progress.Resumption,
        reconnect: Callable[[int], None],
    ) -> None:
        self._run = run
        self._data = data
        self._evaluator = evaluator
        self._resumption = resumption
        self._reconnect = reconnect
        self.freezing = Freezing()
        self.repacks = False
        self._wanted: int | None = None
        self._shares = False
        self._has_begun = False
        self._begun: float | None = None
        self._told: Callable[[float], None] | None = None

    @property
    def _trainer(self) -> Any:
        return self._run.trainer

    def enable(self, *, repack: bool) -> None:
        """A callback will freeze layers; before the training loader is made.

        Raises:
            ConfigurationError: A way of training in which the mesh can't change.
        """
        run = self._run
        if fanout_of(run.module) is not None or relay_of(run.trainer) is not None:
            raise ConfigurationError(
                "FreezeAndRepack freezes the layers of one network that is trained as a whole, and "
                "here heads or blocks are trained apart, each behind what is frozen. Leave it out"
            )
        if run.options.schedule == "1f1b":
            raise ConfigurationError(
                "FreezeAndRepack with asynchronous training: several versions of the weights are "
                "under way where stages would move. Use schedule='tspipe' or 'gpipe'"
            )
        self.freezing, self._shares, self._has_begun = Freezing(is_on=True), False, False
        self.freezing.read(run.plan.freezing)
        if not self.freezing.is_shared:
            self.freezing.num_joined = run.num_replicas
        # One device divides nothing, but may go on with the global batches of several.
        self.repacks = repack and max(run.total_ranks, self.freezing.num_joined) > 1
        self.freezing.is_shared = self.repacks
        if self.repacks and not run.module.automatic_optimization:
            raise ConfigurationError(
                "FreezeAndRepack(repack=True) with automatic_optimization = False: replicas that "
                "come and go can't weigh a loss that the module runs backward itself. Set "
                "repack=False"
            )

    def run_begins(self) -> None:
        """Callbacks know by now that the training begins; its first epoch follows."""
        self._has_begun = True

    def use_front(self, front: Front) -> None:
        """Something will know what the frozen part returns for a sample."""
        self.freezing.front = front

    def freeze(
        self,
        names: frozenset[str],
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
        run = self._run
        engine = run.engine
        if engine is not None and engine.shards.stays_spread:
            raise ConfigurationError(
                "FreezeAndRepack under a pipeline needs a module that a host can hold: this one "
                "was built on the meta device. Build it in __init__"
            )
        self.freezing.names, self.freezing.num_stages = names, mesh[0]
        self._wanted = mesh[1]
        self.freezing.plan = None
        with waiting("moving the stages"):
            self.freezing.plan = run.broadcast(self._choose(engine))
            num_ranks = self._num_ranks()
            if engine is not None:
                self._collect(engine, moves=num_ranks != run.num_ranks)
            if num_ranks != run.num_ranks:
                self._change(num_ranks)
                if self._has_begun:  # else this follows, when it begins
                    self._data.restore_random()
        self._begun, self._told = started, told

    def begun(self) -> None:
        """The first step on the new mesh is about to run."""
        if self._begun is not None and self._told is not None:
            self._told(time.perf_counter() - self._begun)
            self._begun = self._told = None

    def _num_ranks(self) -> int:
        """Ranks of a pipeline from now on."""
        plan = self.freezing.plan
        if plan is not None:
            return plan.pipeline.num_ranks
        return self._meshes()[-1]

    def _meshes(self) -> tuple[int, ...]:
        run = self._run
        if self._wanted is not None and run.total_ranks % self._wanted == 0:
            return (self._wanted,)
        if not self.repacks:
            return (run.num_ranks,)
        return possible_meshes(
            run.total_ranks, run.num_ranks, min(self._batch()), self.freezing.num_stages
        )

    def _choose(self, engine: Engine | None) -> Plan | None:
        run = self._run
        if not run.is_global_zero:
            return None
        parameters = self.freezing.parameters  # of the run that this one goes on with
        if engine is not None:
            parameters = parameter_names(engine.captured.networks["student"])
        number = num_frozen_atoms(parameters, self.freezing.names)
        if run.plan.has_frozen(number):
            return None
        constraints = planning_constraints(run.options, run.root_device)
        link = link_of(run.transport, by_flops=run.options.plans_by_flops)
        choices = Choices(run.total_ranks, self._meshes(), link, constraints)
        return choose(self.freezing, number, choices)

    # What moves

    def _collect(self, engine: Engine, *, moves: bool) -> None:
        """Everything on every rank, in host memory or where it is; then the engine is gone."""
        run = self._run
        transport, replicas = run.transport, run.replicas
        engine.drain()
        by_hand = not run.module.automatic_optimization
        mine = progress.collect(engine, self._data.loader, epoch_ended=True, with_gradients=by_hand)
        found: Any = replicas.gather(mine) if run.is_loss_rank else None
        found = transport.broadcast_object(found, LOSS_RANK)
        optimizers = [plain_optimizer(optimizer) for optimizer in run.optimizers]
        states = [engine.shards.optimizer_state(one, transport) for one in optimizers]
        engine.shards.restore(engine.rank, transport)
        # Replicas that stay keep what is their own, such as statistics of BatchNorm.
        sources = replicas if moves else Replicas()
        networks = find_networks(engine.module, run.options)
        share_weights(engine.module, networks, transport, sources, InitialWeights())
        states = transport.broadcast_object(states, LOSS_RANK)
        for optimizer, state in zip(optimizers, states, strict=True):
            _put_state(optimizer, state)
        # With the next batch others come, and go on where these were.
        self._resumption.here = self._progress(found, moves=moves)
        self._resumption.replicas = run.engine = None
        self._evaluator.release()
        self._data.prepared = {}

    def _progress(self, found: list[dict[str, Any]], *, moves: bool) -> dict[str, Any]:
        """Where the next engine goes on: the number of the step, and the order of the data."""
        mine = dict(found[self._run.replica])
        if not moves:
            # The loaders and the generators of this process go on by themselves.
            return {**mine, "loader": None}
        return progress.between_epochs(found[0])

    # The mesh

    def _change(self, num_ranks: int) -> None:
        """New groups, new connections, new loaders."""
        self._reconnect(num_ranks)
        trainer = self._trainer
        loop: Any = trainer.fit_loop
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
            _set_epoch(loader, trainer.current_epoch)
        if trainer.enable_validation:
            # Now, as Lightning does where a fit starts: a run that goes on may ask for them while
            # it trains, and they would be taken for training loaders.
            trainer.validating = True
            validation.setup_data()
            trainer.training = True

    # The data

    def _batch(self) -> tuple[int, int]:
        """Samples of a global batch, and of the last one; very many if nobody knows."""
        source = self._trainer.fit_loop._combined_loader
        loader = source.flattened[0] if source is not None else None
        size = getattr(loader, "batch_size", None)
        length = sized_len(getattr(loader, "dataset", None))
        if not size or length is None:
            return _MANY, _MANY
        size *= self.freezing.num_joined
        last = length % size or size
        return size, size if getattr(loader, "drop_last", False) else last

    def share(self, loader: Any) -> Any:
        """A training loader that gives this replica its part of every global batch.

        Raises:
            ConfigurationError: Its batches can't be divided before they are read.
        """
        run = self._run
        self._shares = self.repacks and max(run.num_replicas, self.freezing.num_joined) > 1
        if not self._shares:
            return loader
        return share_batches(loader, run.replicas, self.freezing.num_joined)

    def weight(self, num_samples: int) -> float:
        """How much more a replica's mean counts than the others', for its number of samples.

        Among loss ranks, in each step whose samples can't be divided evenly.
        """
        replicas = self._run.replicas
        if not self._shares or replicas.number == 1 or self._is_even():
            return 1.0
        total = torch.tensor(num_samples)
        dist.all_reduce(total, group=replicas.peers)
        return num_samples * replicas.number / int(total)

    def _is_even(self) -> bool:
        number, (size, _) = self._run.num_replicas, self._batch()
        if size == _MANY or size % number:
            return False
        return not self._trainer.is_last_batch


def _put_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer what was collected, as it is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        found = state["state"].get(index)
        if found is not None:
            optimizer.state[parameter] = dict(found)


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(owner, "sampler", None)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
