"""Prediction of a late teacher, one update ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_tspipe.callbacks.common import Callback, log_at_epoch_end, pipelined_of
from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class WeightPrediction(Callback):
    """Lets forwards that run ahead read an averaged teacher predicted one update ahead.

    Under ``schedule="tspipe"`` a teacher is one update late. It changes slowly, so its last change
    predicts the next one. At the end of each epoch two means over its steps are logged, over all
    parameters: the distance of the late teacher from the current one (``teacher_distance``), and
    the distance of the predicted teacher (``teacher_distance_predicted``).

    It needs memory for two copies of the teacher, which checkpoints contain too.

    Raises:
        ConfigurationError: No teacher is late here, or it does not change in every step.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is None or not pipelined.delay:
            raise ConfigurationError(
                "WeightPrediction: no teacher is late here. It belongs to strategy='tspipe'; "
                "remove it"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                "WeightPrediction with accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}: the teacher changes in some steps only, and "
                "its last change does not predict the next. Remove one of them"
            )
        pipelined.predicts_teacher = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = pipelined_of(trainer)
        prediction = None if pipelined is None else pipelined.teacher_prediction
        if pipelined is None or prediction is None:
            return
        own = {d.step: d.squares.tolist() for d in prediction.distances}
        prediction.distances.clear()
        ranks = pipelined.gather(own) or []
        steps = set.intersection(*(set(rank) for rank in ranks)) if ranks else set()
        if steps:
            means = [
                sum(sum(rank[step][kind] for rank in ranks) ** 0.5 for step in steps) / len(steps)
                for kind in (0, 1)
            ]
            names = ("teacher_distance", "teacher_distance_predicted")
            log_at_epoch_end(trainer, pl_module, dict(zip(names, means, strict=True)))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pipelined = pipelined_of(trainer)
        if pipelined is not None:  # the next fit may be without this callback
            pipelined.predicts_teacher = False
