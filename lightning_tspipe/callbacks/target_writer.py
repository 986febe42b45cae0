"""Keeps what a teacher says of each sample, while ``trainer.predict`` runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch.callbacks
import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.common import decided_on, refuse_sharding
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language.fingerprints import FINGERPRINTS
from lightning_tspipe.language.targets import Targets, TargetShards, begin, finish

if TYPE_CHECKING or find_spec("pytorch_lightning") is None:
    _Writer = lightning.pytorch.callbacks.BasePredictionWriter
else:
    from pytorch_lightning.callbacks import BasePredictionWriter as OtherWriter

    class _Writer(lightning.pytorch.callbacks.BasePredictionWriter, OtherWriter):
        """Base class for both Lightning namespaces."""


class TargetWriter(_Writer):
    """Writes the :class:`Targets` that a module's ``predict_step`` returns, for each sample.

    ``trainer.predict(module, DataLoader(dataset, ...))`` runs over the dataset once, in whatever
    order; a sample's id is its place in the dataset. Every loss rank writes shards, so replicas and
    DDP processes share the work; the index is written in the end. What an interrupted pass has left
    is no targets, and is written anew. Nothing is returned by ``predict``: it would not fit into
    memory.

    Args:
        folder: Where to; on several machines, one that they share.
        teacher: What ``pretrained`` got, a folder or a name on the hub. It is told apart from
            others by its files, which are here. None: runs can't compare it.
        tokenizer: The same for the tokenizer of the tokens.
        dtype: Of the numbers that are written; None: as they are.
        shard_bytes: Size of a file, and of what waits in memory.

    Raises:
        ConfigurationError: The folder has targets already; or there are several loaders.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        teacher: str | Path | None = None,
        tokenizer: str | Path | None = None,
        dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None,
        shard_bytes: int = 2**28,
    ) -> None:
        super().__init__("batch")
        self.folder = Path(folder)
        self.teacher, self.tokenizer = teacher, tokenizer
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.shard_bytes = shard_bytes
        self._known: dict[str, Any] = {}
        self._shards: TargetShards | None = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.num_predict_batches) > 1:
            raise ConfigurationError(
                f"predict has {len(trainer.num_predict_batches)} loaders, whose samples would have "
                "the same ids: keep targets of one at a time, in a folder each"
            )
        refuse_sharding(trainer, "TargetWriter")  # which would divide the head
        trainer.predict_loop.return_predictions = False
        self._known = decided_on(trainer, self._begin)
        self._shards = TargetShards(self.folder, trainer.global_rank, self.dtype, self.shard_bytes)

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        *_: Any,
    ) -> None:
        if prediction is None:  # another rank of the pipeline has it
            return
        if not isinstance(prediction, Targets):
            raise ConfigurationError(
                f"predict_step returned a {type(prediction).__name__}: it has to return what "
                "DistillationLoss.targets makes"
            )
        assert self._shards is not None
        self._shards.add(batch_indices or (), prediction)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._shards is not None
        self._shards.close()
        self._shards = None
        trainer.strategy.barrier()
        number = trainer.num_devices * trainer.num_nodes
        decided_on(trainer, lambda: finish(self.folder, number, self._known))

    def _begin(self) -> dict[str, Any]:
        begin(self.folder)
        given = {"teacher": self.teacher, "tokenizer": self.tokenizer}
        return {
            role: name and {"name": str(name), "fingerprint": FINGERPRINTS[role](name)}
            for role, name in given.items()
        }
