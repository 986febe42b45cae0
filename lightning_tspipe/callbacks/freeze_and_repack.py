"""Freeze layers between epochs, and shrink the pipeline to the layers that are still trained.

PipeTransformer (He et al., ICML 2021). On one device and under DDP the layers only freeze, which is
the reference for the mathematics of the pipeline::

    epoch 0    | 1 2 3 4 5 6 7 8 |   everything is trained
    epoch 1    |.1.2.3 4 5 6 7 8 |   layers 1 to 3 run forward only, in eval mode
    epoch 2    |.1.2.3.4.5 6 7 8 |   under a pipeline, less and less is left to be cut into stages
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_tspipe.callbacks import common, freezing
from lightning_tspipe.callbacks.auto_cache import AutoCache
from lightning_tspipe.callbacks.cached_pipelines import CachedPrefix
from lightning_tspipe.callbacks.common import Names, Restoring
from lightning_tspipe.callbacks.freezing import Decision, Layer, Observed, Policy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.late import sent

log = logging.getLogger("lightning_tspipe")


class FreezeAndRepack(Restoring):
    """Freezes layers from the beginning of the network on, as a policy decides between epochs.

    A frozen layer gets no gradients, its BatchNorm and dropout are in eval mode, and its optimizer
    state is kept. The last layers never freeze, nor does anything outside of ``student``.

    Under a pipelining strategy the frozen layers become a forward-only network, which is scheduled
    like a teacher: it fills bubbles, and runs a batch ahead. With ``repack``, the active layers are
    cut again over as few devices as need no more memory than the fullest device did at the start,
    and the freed devices become replicas of this shorter pipeline. The global batch does not
    change: each replica reads its part of it.

    At the end of each epoch it logs ``frozen_layers``; under a pipeline, in an epoch with a
    transition, ``transition_seconds``; and ``cache_hit_rate`` where activations are cached.

    Args:
        policy: A function of :class:`~.freezing.Observed` that returns the number of frozen
            layers, or a :class:`~.freezing.Decision`.
        repack: Whether pipelines become shorter. A mapping from a number of frozen layers to the
            number of stages that the active layers are cut into from then on.
        student: Dotted name of the network, or of several in the order of the forward. None: what
            the strategy pipelines, else the attribute ``student``.
        layers: Dotted names of the layers, in order; None finds them.
        num_active: Number of layers at the end that never freeze.
        cache: Whether activations of frozen layers are read where that is measured to be faster
            than computing them. The samples need ids: ``DataLoader(WithIds(dataset))``.
            ``"auto"``: if that is possible; otherwise the log says why not. An ``AutoCache`` with
            its settings: it is an error if that is impossible. None: never.

    Raises:
        ConfigurationError: A policy that can't be called, or fewer than one active layer.
    """

    def __init__(  # noqa: PLR0913 - settings by keyword
        self,
        policy: Policy | None = None,
        *,
        repack: bool | Mapping[int, int] = True,
        student: Names | None = None,
        layers: Sequence[str] | None = None,
        num_active: int = 2,
        cache: Literal["auto"] | AutoCache | None = "auto",
    ) -> None:
        super().__init__()
        self.policy: Policy = freezing.GradientNormFreeze() if policy is None else policy
        if not callable(self.policy):
            raise ConfigurationError(
                f"FreezeAndRepack(policy={policy!r}) must be a function of what was observed, such "
                "as GradientNormFreeze(alpha=1/3) or ScheduledFreeze({2: 4})"
            )
        if num_active < 1:
            raise ConfigurationError(
                f"FreezeAndRepack(num_active={num_active}): at least 1 layer must stay active"
            )
        self.repack = repack if isinstance(repack, bool) else dict(sorted(repack.items()))
        if isinstance(self.repack, dict) and min([1, *self.repack, *self.repack.values()]) < 1:
            raise ConfigurationError(
                f"FreezeAndRepack(repack={repack}): map numbers of frozen layers to the number of "
                "stages from then on, both at least 1, such as {4: 2, 8: 1}"
            )
        if cache is not None and cache != "auto" and not isinstance(cache, AutoCache):
            raise ConfigurationError(
                f"FreezeAndRepack(cache={cache!r}): give 'auto', AutoCache(...) with its settings, "
                "or None to compute everything"
            )
        self.cache = AutoCache() if isinstance(cache, str) else cache
        if self.cache is not None and cache == "auto":
            self.cache.is_required = False
        self.student = None if student is None else common.as_names(student)
        self.num_active = num_active
        self.num_frozen = 0
        self.history: list[dict[str, Any]] = []
        self._given = layers
        self._layers: list[Layer] = []
        self._place: dict[str, int] = {}
        self._squares: Tensor | None = None
        self._restored: list[float] = []
        self._num_steps = 0
        self._num_ranks = 0
        self._epoch = 0
        self._has_ended = False

    @property
    def num_freezable(self) -> int:
        """The largest number of layers that may freeze."""
        return max(0, len(self._layers) - self.num_active)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        common.refuse_sharding(trainer, "FreezeAndRepack")
        if self.cache is None:
            return
        if common.pipelined_of(trainer) is not None:
            self.cache.follow(trainer)
            self.undo.callback(self.cache.restore)
            return
        if not self.cache.is_required:
            names = self.student or ("student",)
            others = [other for other in trainer.callbacks if isinstance(other, AutoCache)]  # type: ignore[attr-defined]
            if len(names) > 1 or any(other is not self.cache for other in others):
                return  # several networks, or the user's own
            self.cache.network = names[0]
        if self.cache not in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.append(self.cache)  # type: ignore[attr-defined] # follows this one

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = common.pipelined_of(trainer)
        names = self.student or ("student",)
        if self.student is None and pipelined is not None:
            names = pipelined.student_names
        common.submodules(pl_module, names, "student")
        self._layers = freezing.layers_of(pl_module, names, self._given)
        if self.num_freezable == 0:
            raise ConfigurationError(
                f"the network {', '.join(names)} has {len(self._layers)} layers, and "
                f"num_active={self.num_active} of them stay active: nothing can freeze. Name "
                "smaller layers (FreezeAndRepack(layers=[...])), or remove the callback"
            )
        if pipelined is not None:
            pipelined.freezes(repack=bool(self.repack))
            if self.cache is not None:
                self.cache.name = ", ".join(names)
                pipelined.use_front(CachedPrefix(self.cache))
        self._place = {name: i for i, layer in enumerate(self._layers) for name in layer.parameters}
        if self.num_frozen > self.num_freezable:
            raise ConfigurationError(
                f"the checkpoint has {self.num_frozen} frozen layers, and here at most "
                f"{self.num_freezable} may freeze: resume with the same layers and num_active"
            )
        if isinstance(
            self.policy, freezing.ScheduledFreeze
        ):  # now, rather than when its epoch begins
            freezing.decide(self.policy, self._observed(max(self.policy.layers)))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.num_frozen:
            self._apply(trainer, pl_module, Decision(self.num_frozen, "as in the checkpoint"))
        if self._has_ended and trainer.current_epoch > self._epoch and not common.is_over(trainer):
            # Lightning may leave out the start of the next epoch.
            self._begin_epoch(trainer, pl_module, self._epoch + 1)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._has_ended or trainer.current_epoch != self._epoch:
            self._begin_epoch(trainer, pl_module, trainer.current_epoch)
        self._has_ended = False

    def _begin_epoch(self, trainer: Trainer, pl_module: LightningModule, epoch: int) -> None:
        self._epoch = epoch
        decision = self._decide(trainer)
        self._squares, self._restored, self._num_steps = None, [], 0
        if decision.num_frozen > self.num_frozen:
            self._apply(trainer, pl_module, decision)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # module.train() is meant for the layers that are trained.
        for layer in self._layers[: self.num_frozen]:
            for module in layer.modules:
                if module.training:
                    module.eval()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self._squares is None:
            device = pl_module.device
            self._squares = torch.zeros(len(self._layers), dtype=torch.float64, device=device)
        names = {id(p): name for name, p in pl_module.named_parameters()}
        found = [
            (self._place[name], p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and (name := names.get(id(p))) in self._place
        ]
        if found:
            places, gradients = zip(*found, strict=True)
            squares = torch.stack(torch._foreach_norm(list(gradients))).double().square()  # noqa: SLF001
            # Not finite: the scaler skips the step.
            counted = squares.where(squares.isfinite().all(), squares.new_zeros(()))
            index = sent(torch.tensor(places), counted.device)  # nobody waits for the copy
            self._squares.index_add_(0, index, counted)
        self._num_steps += 1

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {"frozen_layers": float(self.num_frozen)}
        last = self.history[-1] if self.history else {"epoch": -1}
        if last["epoch"] == self._epoch and last["seconds"]:
            metrics["transition_seconds"] = last["seconds"]
        if common.pipelined_of(trainer) is not None and self.cache is not None and self.cache.is_on:
            metrics["cache_hit_rate"] = self.cache.take_hit_rate(trainer)
            self.history[-1]["hit_rate"] = metrics["cache_hit_rate"]
        if common.may_log(trainer):
            pl_module.log_dict(metrics, batch_size=1, rank_zero_only=True)

    def _decide(self, trainer: Trainer) -> Decision:
        """The policy's decision, made on rank 0 and known to all ranks."""
        squares = self._all_squares(trainer)

        def decision() -> Decision:
            steps = max(1, self._num_steps)
            norms = tuple((square / steps) ** 0.5 for square in squares) if any(squares) else ()
            return freezing.decide(self.policy, self._observed(self._epoch, norms))

        return common.decided_on(trainer, decision)

    def _observed(self, epoch: int, norms: tuple[float, ...] = ()) -> Observed:
        names = tuple(layer.name for layer in self._layers)
        return Observed(epoch, names, self.num_frozen, self.num_freezable, norms)

    def _all_squares(self, trainer: Trainer) -> list[float]:
        """Squared gradient norms, summed over the epoch; complete on a pipeline's loss rank."""
        own = [0.0] * len(self._layers) if self._squares is None else self._squares.tolist()
        pipelined = common.pipelined_of(trainer)
        parts = [own] if pipelined is None else pipelined.gather(own) or [own]
        if self._restored:
            parts = [*parts, self._restored]
        return [sum(values) for values in zip(*parts, strict=True)]

    def _apply(self, trainer: Trainer, pl_module: LightningModule, decision: Decision) -> None:
        """Freeze the layers on every rank, and tell the strategy."""
        before, self.num_frozen = self.num_frozen, decision.num_frozen
        frozen = self._layers[: self.num_frozen]
        freezing.freeze(pl_module, frozen)
        if common.derives_from(trainer, "DDPStrategy"):
            # A new DDP, which waits only for the gradients of what is trained now
            strategy: Any = trainer.strategy
            strategy.model = pl_module
            strategy.configure_ddp()
        if decision.num_frozen > before:
            entry = {"epoch": self._epoch, "num_frozen": self.num_frozen}
            self.history.append(entry | {"reason": decision.reason, "seconds": 0.0})
        self._move(trainer, goes_on=decision.num_frozen == before)
        if trainer.is_global_zero:
            log.info(
                "epoch %d: %d of %d layers are frozen, up to %s: %s",
                self._epoch, self.num_frozen, len(self._layers), frozen[-1].name,
                decision.reason,
            )  # fmt: skip

    def _move(self, trainer: Trainer, *, goes_on: bool) -> None:
        """Take the frozen layers out of the pipeline, if there is one.

        Args:
            trainer: The Trainer.
            goes_on: Whether a checkpoint says what is frozen, and on how many ranks.
        """
        pipelined = common.pipelined_of(trainer)
        if pipelined is None:
            return
        num_stages, num_ranks = None, None
        if isinstance(self.repack, dict):
            due = [stages for number, stages in self.repack.items() if number <= self.num_frozen]
            num_stages = due[-1] if due else None
            num_ranks = None if due else pipelined.num_ranks
        if goes_on and self.repack and self._num_ranks:
            num_ranks = self._num_ranks
        names = [name for layer in self._layers[: self.num_frozen] for name in layer.parameters]
        if self.cache is not None:
            self.cache.expect_loader()
        entry = self.history[-1]

        def told(seconds: float) -> None:
            if not goes_on:
                entry["seconds"] = seconds
            if trainer.is_global_zero:
                log.info(
                    "the pipelines are %d x %d ranks now; the change took %.2f s",
                    pipelined.data_parallel_size, pipelined.num_ranks, seconds,
                )  # fmt: skip

        pipelined.freeze(names, (num_stages, num_ranks), told)
        self._num_ranks = pipelined.num_ranks
        entry |= {"num_ranks": pipelined.num_ranks, "num_replicas": pipelined.data_parallel_size}

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if getattr(trainer.strategy, "is_failing", False):  # the other ranks may be gone
            return
        squares = self._all_squares(trainer)
        ended = bool(trainer.is_last_batch)
        checkpoint["callbacks"][self.state_key] |= {"squares": squares, "has_ended": ended}

    @override
    def state_dict(self) -> dict[str, Any]:
        """The frozen layers, the history of decisions, and the progress of the epoch."""
        return {
            "num_frozen": self.num_frozen,
            "epoch": self._epoch,
            "num_steps": self._num_steps,
            "num_ranks": self._num_ranks,
            "history": self.history,
            "cuts": [0] if self.cache is None else self.cache.cuts,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_frozen = state_dict["num_frozen"]
        self.history = list(state_dict["history"])
        self._num_steps = state_dict["num_steps"]
        self._num_ranks = state_dict["num_ranks"]
        self._epoch = state_dict["epoch"]
        self._restored = list(state_dict.get("squares", ()))
        self._has_ended = state_dict.get("has_ended", False)
        if self.cache is not None:
            self.cache.cuts = list(state_dict.get("cuts", (0,)))
