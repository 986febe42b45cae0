"""The components of the strategy, built in order, and set up and torn down together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from lightning_tspipe.runtime.batches.host_memory import keep_freed_memory
from lightning_tspipe.runtime.faults.phases import HERE
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.runtime.weights.scaling import shared_scaler
from lightning_tspipe.strategy.checkpoints.loading import CheckpointReader
from lightning_tspipe.strategy.checkpoints.saving import CheckpointWriter
from lightning_tspipe.strategy.lightning.processes import Processes, StartMethod
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.asynchronous import policy_for, refuse_training
from lightning_tspipe.strategy.setup.declared import find_networks
from lightning_tspipe.strategy.setup.refusals import (
    refuse_callbacks,
    refuse_delay,
    refuse_fused,
    refuse_loaders,
    refuse_module,
    refuse_optimizers,
    refuse_trainer,
)
from lightning_tspipe.strategy.shutdown.shutdown import Shutdown
from lightning_tspipe.strategy.training.data import Data
from lightning_tspipe.strategy.training.driving import Parts
from lightning_tspipe.strategy.training.evaluating import Evaluator
from lightning_tspipe.strategy.training.head_logs import HeadsHere
from lightning_tspipe.strategy.training.manual import ManualOptimization
from lightning_tspipe.strategy.training.module_weights import ModuleWeights
from lightning_tspipe.strategy.training.pipelined import Pipelined
from lightning_tspipe.strategy.training.progress import Resumption, leave_ended_epoch
from lightning_tspipe.strategy.training.repacking import Repacking
from lightning_tspipe.strategy.training.step_results import StepResults
from lightning_tspipe.strategy.training.steps import Training


class Components:
    """The components of a strategy; each knows those that come before it.

    Args:
        run: What they share.
        start_method: How the other processes start.
        saves_shards: Whether a checkpoint is a folder to which each rank writes what it holds.
        verifies: Whether a checkpoint is compared with its checksums when it is loaded.

    Attributes:
        weights: Of a module that is built without values.
        results: What steps leave behind, and metrics.
        data: Loaders, batches ahead, transfer.
        evaluator: Validation, test and prediction.
        repacking: What is frozen, and the mesh.
        pipelined: What callbacks may ask.
        training: Training steps.
        saving: Checkpoints that are written.
        reading: Checkpoints that are loaded.
        shutdown: Failures and signals.
        processes: Launchers, groups, transport.
    """

    def __init__(
        self,
        run: Run,
        start_method: StartMethod,
        *,
        saves_shards: bool | Literal["auto"],
        verifies: bool,
    ) -> None:
        self._run = run
        self._resumption = Resumption()
        self.weights = ModuleWeights(run)
        self._heads = HeadsHere(run)
        self.results = StepResults(run, self._heads)
        self.data = Data(run, self._resumption, self.results)
        self.evaluator = Evaluator(run, self.data, self.weights, self.results, self._heads)
        self._manual = ManualOptimization(run)
        self.repacking = Repacking(run, self.data, self.evaluator, self._resumption, self.reconnect)
        self.pipelined = Pipelined(run, self.data, self.evaluator, self._heads, self.repacking)
        parts = Parts(
            run, self.data, self.weights, self._manual, self._heads, self.repacking, self.pipelined
        )
        self.training = Training(parts, self.evaluator, self._resumption)
        self.saving = CheckpointWriter(
            run, self.data, self.weights, self._resumption, self.evaluator, self._manual,
            self.repacking, self._heads, saves_shards,
        )  # fmt: skip
        self.reading = CheckpointReader(run, self.weights, self._resumption, verifies=verifies)
        self.shutdown = Shutdown(
            run, self.saving, self.evaluator, starts_scripts=start_method == "popen"
        )
        self.processes = Processes(run, start_method, self.shutdown.watch)

    # The beginning and the end of a run

    def begin(self, trainer: Any) -> None:
        """Set up a run: refuse what a pipeline can't follow, and insert callbacks."""
        run, module, lightning = self._run, self._run.module, self._run.lightning
        assert lightning.accelerator is not None
        self.weights.forget_other_modules()
        lightning.accelerator.setup(trainer)
        if run.root_device.type == "cpu":
            keep_freed_memory()
        lightning.model = self.weights.convert(module)
        if run.num_ranks == 1:
            self.weights.fill_whole()
        if run.num_replicas == 1:
            # One rank logs for all: there is nothing to reduce.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)
        # Not for placeholders, and once for each batch.
        vars(module)["_on_before_batch_transfer"] = _function(self.data.before_transfer)
        refuse_trainer(trainer, run.root_device)
        refuse_callbacks(trainer)
        self.saving.begin(fits=trainer.state.fn == "fit")
        if run.num_ranks > 1:
            # Lightning tells them the rank only if the world is larger than one, and there it means
            # replicas: the ranks would write the same file.
            trainer.profiler.setup(trainer.state.fn, lightning.local_rank, trainer.log_dir)
        self.results.set_up(trainer)
        if trainer.state.fn == "fit":
            self._set_up_fit(trainer)
        self.shutdown.prepare(trainer)
        lightning.setup_precision_plugin()
        if run.num_ranks > 1:
            self._share_gradients(run.precision_plugin)

    def _set_up_fit(self, trainer: Any) -> None:
        run, module, lightning = self._run, self._run.module, self._run.lightning
        self.evaluator.begin_fit()
        student = find_networks(module, run.options).student
        refuse_module(module)
        refuse_delay(trainer, module)
        lightning.setup_optimizers(trainer)
        refuse_optimizers(run.optimizers)
        policy = policy_for(run.options)
        if policy is not None:
            refuse_training(policy, trainer, module, student, run.num_ranks)

    def _share_gradients(self, plugin: Any) -> None:
        """Scale and clip by the gradients of all ranks."""
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            refuse_fused(self._run.optimizers)
            plugin.scaler = shared_scaler(scaler, self._run.root_device)
        plugin.clip_grad_by_norm = self.training.clip_by_norm
        plugin.clip_grad_by_value = self.training.clip_by_value

    def begin_training(self) -> None:
        """The loops begin, with the training loader."""
        refuse_loaders(self._run.trainer)
        # Before every batch it would ask rank 0 of all others whether a SIGTERM came, and no rank
        # could begin a step before rank 0 has ended the last one.
        loop = self._run.trainer.fit_loop
        loop.epoch_loop._broadcast_sigterm_tensor = _say_nothing  # type: ignore[method-assign] # noqa: SLF001
        leave_ended_epoch(loop)
        self.data.restore_random()
        self.repacking.run_begins()

    def reconnect(self, num_ranks: int) -> None:
        """Divide the ranks into other pipelines; every rank calls it, and nothing is under way."""
        HERE.interrupt("moving to another mesh")
        self.processes.reconnect(num_ranks)
        if self._resumption.replicas is not None and self._run.engine is None:
            self._resumption.go_on(
                self._resumption.replicas, self._run.replica, self._run.num_replicas,
                shares_batches=True,
            )  # fmt: skip
        self.shutdown.reconnected()
        HERE.go_on()
        self.data.reconnected()
        self.results.reconnected()

    def end(self) -> None:
        """Tear down a run, however it ended."""
        run, lightning = self._run, self._run.lightning
        module = lightning.lightning_module
        assert lightning.cluster_environment is not None
        assert lightning.accelerator is not None
        if module is not None:
            vars(module).pop("_on_before_batch_transfer", None)
        self.shutdown.end_of_run()
        if not run.is_failing:
            self.saving.end_without_batches()
        self._heads.release()
        run.options = replace(run.options, averages={})
        run.engine = None
        self._resumption.forget()
        run.plan.forget()
        self.weights.restores_optimizers = False
        self.data.release()
        self.evaluator.release()
        self.results.release()
        lightning.cluster_environment.teardown()
        if module is not None and not is_on_meta(module):
            module.cpu()
        lightning.namespace.optimizers_to_device(run.optimizers, torch.device("cpu"))
        run.precision_plugin.teardown()
        lightning.accelerator.teardown()


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function, which copies of a module share: copies of a method would copy its object."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def _say_nothing() -> None:
    """Replaces a broadcast from rank 0 that every rank would wait for."""
