"""A teacher that is one update late: on ordinary strategies too, and predicted in the pipeline.

TSPipe (Lim et al., ICML 2022, section 4.2) runs the teacher forward of batch n during step n-1,
with the weights of the teacher at that time. This is the same mathematics on one device or under
DDP::

    batch          n-1                           n
    student        F(n-1) B(n-1) O(n-1)          F(n) B(n) O(n)
    teacher             ^ snapshot     ^ EMA     ^ forward reads the snapshot
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe.callbacks import common
from lightning_tspipe.callbacks.common import Names, Place, Restoring
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.arguments import tensors_in
from lightning_tspipe.networks.modules import methods_of
from lightning_tspipe.runtime.weights.rebinding import keep_networks


class _LateWeights:
    """Earlier weights of some modules, which their forwards read while it is open.

    The forwards of all submodules are hooked, and what else they do with tensors, since a step may
    call ``teacher.backbone`` and ``teacher.encode`` rather than ``teacher``; the outermost call
    swaps in the earlier weights.

    Args:
        modules: The modules by name.

    Attributes:
        earlier: Copies by name, which are never changed; None: there are none.
        is_open: Whether forwards read them.

    Raises:
        ConfigurationError: Modules without a single parameter.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.earlier: dict[str, Tensor] | None = None
        self._places: dict[str, Place] = {}
        seen: set[int] = set()
        # All parameters of a forward-only network count, whatever their role in the student.
        for prefix, module in modules.items():
            for name, place in (
                *common.places_of(module),
                *common.places_of(module, is_buffer=True),
            ):
                if id(place.tensor) not in seen:
                    seen.add(id(place.tensor))
                    self._places[f"{prefix}.{name}"] = place
        if not self._places:
            raise ConfigurationError(f"the teacher {', '.join(modules)} has no parameters")
        self._live: list[tuple[Tensor, Tensor]] = []
        self._entered: list[nn.Module] = []
        self.is_open = False
        self._handles: list[Any] = []
        self._methods: list[tuple[nn.Module, str]] = []
        for part in {part for module in modules.values() for part in module.modules()}:
            self._handles.append(part.register_forward_pre_hook(self._enter))
            self._handles.append(part.register_forward_hook(self._leave, always_call=True))
            for name in methods_of(part):
                self._methods.append((part, name))
                own = getattr(part, name)
                made = partial(self._run, part, own)
                vars(part)[name] = update_wrapper(made, own)  # some look at signatures

    def remove(self) -> None:
        """Remove the hooks; the modules are as before."""
        for handle in self._handles:
            handle.remove()
        for part, name in self._methods:
            del vars(part)[name]
        self._methods.clear()
        self.is_open = False

    @torch.no_grad()
    def copies(self) -> dict[str, Tensor]:
        """Copies of the current weights by name."""
        return {name: place.tensor.detach().clone() for name, place in self._places.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Make the weights of a checkpoint the earlier ones.

        Raises:
            ConfigurationError: They belong to another model.
        """
        if state.keys() != self._places.keys():
            differing = ", ".join(sorted(state.keys() ^ self._places.keys())[:5])
            raise ConfigurationError(
                f"the checkpoint's late teacher belongs to another model ({differing}, ...); "
                f"resume with the same modules"
            )
        self.earlier = {n: state[n].to(place.tensor.device) for n, place in self._places.items()}

    def _run(
        self, part: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a method with the earlier weights, unless it is one that changes weights."""
        tensors = tensors_in((args, kwargs))
        if not tensors or any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            return function(*args, **kwargs)
        output = None
        self._enter(part, ())
        try:
            output = function(*args, **kwargs)
        finally:
            self._leave(part, (), output)
        return output

    def _enter(self, module: nn.Module, _args: object) -> None:
        if not self._entered and self.is_open and self.earlier is not None:
            for name, place in self._places.items():
                tensor = place.tensor
                # Buffers that a forward updates must be current.
                if isinstance(tensor, nn.Parameter) or not place.module.training:
                    self._live.append((tensor, tensor.data))
                    tensor.data = self.earlier[name]
        self._entered.append(module)

    def _leave(self, module: nn.Module, _args: object, output: Any) -> None:
        # Called after an exception too, even of a hook that ran before ``_enter`` could.
        if not self._entered or self._entered[-1] is not module:
            return
        self._entered.pop()
        if self._entered:
            return
        while self._live:
            tensor, data = self._live.pop()
            tensor.data = data
        if self.is_open:
            apply_to_collection(output, Tensor, _check_forward_only)


def _check_forward_only(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise ConfigurationError(
            "autograd records the teacher's forward, so its weights cannot be one update late; "
            "set teacher.requires_grad_(False) and call it under torch.no_grad()"
        )
    return tensor


@dataclass(eq=False, repr=False)
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
        windows: Whether all batches between two updates (``accumulate_grad_batches``) read the
            teacher as it was before the update ahead of them, as in pipelines that hold such a
            window at once (``tspipe_1f1b``). Otherwise only the first of them does, as under
            ``schedule="tspipe"``.

    Raises:
        ConfigurationError: Another delay; a teacher that is missing or would be trained; several
            closures per step; a strategy that shards parameters.
    """

    delay: int = 1
    start_step: int = 0
    teacher: Names = "teacher"
    windows: bool = False

    def __post_init__(self) -> None:
        if self.delay not in {0, 1}:
            raise ConfigurationError(
                f"delay={self.delay!r} must be 1 (update, as in the pipeline) or 0 (no delay)"
            )
        if self.start_step < 0:
            raise ConfigurationError(f"start_step={self.start_step} is negative")
        self.teacher = common.as_names(self.teacher)
        self._weights: _LateWeights | None = None
        self._coming: dict[str, Tensor] | None = None  # what is read from the next batch on
        self._restored: dict[str, Tensor] = {}
        self._num_backwards = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.delay == 0 or common.pipelined_of(trainer) is not None:
            return
        common.refuse_sharding(trainer, "DelayedTeacherUpdate")
        self._weights = _LateWeights(common.submodules(pl_module, self.teacher, "teacher"))
        self.undo.callback(self._weights.remove)
        # Another teacher's forwards would not be hooked.
        self.undo.callback(keep_networks(pl_module, (), self.teacher).remove)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._weights is None:
            return
        self._num_backwards = 0
        if batch_idx == 0:
            self._weights.earlier = None
        elif self._restored:
            self._weights.load(self._restored)
        self._restored = {}
        if trainer.global_step < self.start_step:
            self._weights.earlier = None
        self._weights.is_open = True

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._weights is None:
            return
        self._num_backwards += 1
        if not pl_module.automatic_optimization:
            return  # more forwards and backwards of this batch may follow
        self._weights.is_open = False
        if self._num_backwards > 1:
            raise ConfigurationError(
                "the optimizer runs training_step several times per batch (LBFGS, SAM): 'one "
                "update late' is not defined then; use another optimizer, or delay=0"
            )

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._weights is not None and not self._goes_on(trainer):
            if pl_module.automatic_optimization:
                self._weights.earlier = None  # free its memory first: nothing reads it any more
            self._coming = self._weights.copies()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._weights is None:
            return
        self._weights.is_open = False
        if self._goes_on(trainer):
            return
        if self._num_backwards == 0:  # none to wait for
            self._coming = self._weights.copies()
        # The next epoch starts with the newest teacher.
        self._weights.earlier = None if trainer.is_last_batch else self._coming
        self._coming = None

    def _goes_on(self, trainer: Trainer) -> bool:
        """Whether more batches of a window read what this one has read."""
        return self.windows and trainer.fit_loop._should_accumulate()  # noqa: SLF001

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if self._weights is not None:  # for a checkpoint that is saved after the fit
            self._restored = self._coming or self._weights.earlier or {}
        self._weights = self._coming = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """The late teacher by name, needed to resume mid-epoch; empty between epochs."""
        snapshot = self._restored or self._coming or (self._weights and self._weights.earlier)
        return {"snapshot": snapshot} if snapshot else {}

    def take_restored(self) -> dict[str, Tensor]:
        """The late teacher of the checkpoint that is resumed, the first time; empty otherwise."""
        restored, self._restored = self._restored, {}
        return restored

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict.get("snapshot", {}))


class WeightPrediction(Restoring):
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
        pipelined = common.pipelined_of(trainer)
        if pipelined is None or not pipelined.delay:
            raise ConfigurationError(
                "WeightPrediction has nothing to predict: no teacher is late here. Use it with "
                "strategy='tspipe', or remove it"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                "WeightPrediction with accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}: the teacher changes in some steps only, and "
                "its last change does not predict the next. Remove one of them"
            )
        pipelined.predicts_teacher = True
        self.undo.callback(setattr, pipelined, "predicts_teacher", False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipelined = common.pipelined_of(trainer)
        if pipelined is None or (prediction := pipelined.teacher_prediction) is None:
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
            common.log_at_epoch_end(trainer, pl_module, dict(zip(names, means, strict=True)))
