"""A teacher that is one update late, as in the pipeline, on ordinary strategies.

TSPipe (Lim et al., ICML 2022, section 4.2) runs the teacher forward of batch n during step n-1,
with the weights of the teacher at that time. This is the same mathematics on one device or under
DDP::

    batch          n-1                           n
    student        F(n-1) B(n-1) O(n-1)          F(n) B(n) O(n)
    teacher             ^ snapshot     ^ EMA     ^ forward reads the snapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.callbacks.common import (
    Names,
    Restoring,
    as_names,
    pipelined_of,
    refuse_sharding,
    submodules,
)
from lightning_tspipe.callbacks.weights_snapshot import WeightsSnapshot
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class DelayedTeacherUpdate(Restoring):
    """Lets the teacher forward of batch n read the weights at the end of batch n-1's backward.

    So an EMA inside step n-1 is included, and one in a hook at the end of batch n-1 is not: the
    teacher is exactly one update late, as in the pipeline. The first batch of an epoch, for which a
    pipeline cannot run ahead, uses the newest teacher. Delayed are the parameters, and the buffers
    of teacher modules in eval mode, which are only read; buffers of modules in train mode are
    current. If a batch has several backwards (manual optimization), the last one counts.

    Under a pipelining strategy the callback is a declaration that the strategy reads: ``delay=1``
    lets the teacher run ahead, ``delay=0`` asks for the newest teacher at the price of bubbles.
    There it also holds the late teacher of a checkpoint that another strategy saved mid-epoch.

    Args:
        delay: 1, or 0 to change nothing on ordinary strategies.
        start_step: Before this global step there is no delay.
        teacher: Dotted name of the teacher, or several.

    Raises:
        ConfigurationError: Another delay; a teacher that is missing or would be trained; several
            closures per step; a strategy that shards parameters.
    """

    def __init__(self, delay: int = 1, start_step: int = 0, teacher: Names = "teacher") -> None:
        if delay not in {0, 1}:
            raise ConfigurationError(
                f"delay={delay!r}: a teacher is 1 update late (the pipeline) or 0 (none)"
            )
        if start_step < 0:
            raise ConfigurationError(f"start_step={start_step} is negative")
        super().__init__()
        self.delay = delay
        self.start_step = start_step
        self.teacher = as_names(teacher)
        self._weights: WeightsSnapshot | None = None
        self._restored: dict[str, Tensor] = {}
        self._num_backwards = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.delay == 0 or pipelined_of(trainer) is not None:
            return
        refuse_sharding(trainer, "DelayedTeacherUpdate")
        self._weights = WeightsSnapshot(submodules(pl_module, self.teacher, "teacher"))
        self._weights.install()
        self.undo.append(self._weights.remove)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._weights is None:
            return
        self._weights.check_unchanged(submodules(pl_module, self.teacher, "teacher"))
        self._num_backwards = 0
        if batch_idx == 0:
            self._weights.drop()
        elif self._restored:
            self._weights.load(self._restored)
        self._restored = {}
        self._weights.open(use_snapshot=trainer.global_step >= self.start_step)

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self._weights is None:
            return
        self._num_backwards += 1
        if not pl_module.automatic_optimization:
            return  # more forwards and backwards of this batch may follow
        self._weights.close()
        if self._num_backwards > 1:
            raise ConfigurationError(
                "the optimizer runs training_step several times per batch (LBFGS, SAM): 'one "
                "update late' is not defined then; use another optimizer, or delay=0"
            )

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._weights is None:
            return
        if pl_module.automatic_optimization:
            self._weights.take()
        else:
            self._weights.set_aside()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._weights is None:
            return
        self._weights.close()
        settled = self._weights.settle()
        if self._num_backwards == 0 and not settled:  # no backward to wait for
            self._weights.take()
        if trainer.is_last_batch:  # the next epoch starts with the newest teacher
            self._weights.drop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._weights is not None:  # for a checkpoint that is saved after the fit
            self._restored = self._weights.state()
        self._weights = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """The late teacher by name, needed to resume mid-epoch; empty between epochs."""
        snapshot = self._restored
        if self._weights is not None and not snapshot:
            snapshot = self._weights.state()
        return {"snapshot": snapshot} if snapshot else {}

    def take_restored(self) -> dict[str, Tensor]:
        """The late teacher of the checkpoint that is resumed, the first time; empty otherwise."""
        restored, self._restored = self._restored, {}
        return restored

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict.get("snapshot", {}))
