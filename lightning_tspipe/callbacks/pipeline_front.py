"""The frozen beginning of a pipelined network: read where it is known, else computed.

Only where a pipeline has become one rank: the frozen part of a longer one lies where its bubbles
are, and what one rank would read, another would have to be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from typing_extensions import override

from lightning_tspipe.caching import ids_of
from lightning_tspipe.callbacks.frozen_front import FrozenFront
from lightning_tspipe.callbacks.shared_cache import SharedCache
from lightning_tspipe.networks.codegen import Tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_tspipe.networks.prefix import DividedNetwork, Middle
    from lightning_tspipe.runtime.frozen import FrozenPart


class PipelineFront(FrozenFront):
    """Reads and keeps what a pipeline's frozen part returns, by sample.

    Args:
        shared: The cache of this fit.
        trainer: The trainer.
        name: Of the network, for messages.
        always: Cache without asking whether it is worth it.
    """

    def __init__(self, shared: SharedCache, trainer: Trainer, name: str, *, always: bool) -> None:
        self._begin(shared, trainer, name, always=always)
        self._ids_of: dict[int, Any] = {}
        self._ids: Any = ()
        self._part: FrozenPart | None = None

    def see(self, number: int, batch: Any) -> None:
        """A batch whose frozen part will run: remember which samples it has."""
        where = self._shared.settings.ids
        self._ids_of = {n: ids for n, ids in self._ids_of.items() if n >= number - 2}
        self._ids_of[number] = ids_of(batch, where)

    def run(self, part: FrozenPart, number: int, rows: slice, inputs: Tensors) -> Tensors:
        """What the frozen part returns for some samples of a batch.

        Args:
            part: The frozen part.
            number: The batch.
            rows: The samples.
            inputs: Of these samples.
        """
        if part is not self._part:  # placed anew
            self._part, self._versions = part, []
            self._divided = cast("DividedNetwork", _Divided(part, self._trainer.lightning_module))
        self._ids = self._ids_of[number][rows]
        self._update(part.num_frozen)
        middle: Middle = (inputs, {})
        is_read = self._is_worth_it(part.num_frozen, middle)
        return (self._read(middle) if is_read else self._whole(middle))[0]

    @override
    def _sample_ids(self) -> Any:
        return self._ids


class _Divided:
    """A frozen part, as a network that is divided at any of its atoms."""

    def __init__(self, part: FrozenPart, module: LightningModule) -> None:
        self._part, self._module = part, module

    def tensors(self, number: int) -> list[Tensor]:
        """Parameters and buffers of the first atoms."""
        atoms = self._part.atoms[:number]
        names = [n for atom in atoms for n in (*atom.parameter_names, *atom.buffer_names)]
        own = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return [own[name] for name in names]

    def piece(self, start: int, stop: int) -> Callable[[Middle], Middle]:
        """Some atoms, without gradients."""
        part = self._part

        def run(middle: Middle) -> Middle:
            return part.compute(middle[0], start, stop), {}

        return run
