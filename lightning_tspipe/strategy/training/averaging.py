"""Averages of the whole module that Lightning's ``WeightAveraging`` keeps, spread as it is.

The callback copies the module before there are stages. Once these are placed, of the copy too each
rank has what it has of the module, and averages that alone::

             student.0  student.1        student.0  student.1
    module   ████████   ████████         ████████   ░░░░░░░░
    average  ████████   ████████   ──►   ████████   ░░░░░░░░        ░░ on the meta device
             first batch                 from then on, on rank 1

So no update, validation or end of a training sends weights that the pipeline alone would not send.
Checkpoints are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_tspipe.replacing import attributes_replaced, entries_replaced
from lightning_tspipe.runtime.faults.failures import waiting
from lightning_tspipe.runtime.weights.materializing import is_on_meta
from lightning_tspipe.runtime.weights.ownership import Follower, named_tensors
from lightning_tspipe.strategy.lightning.run import Run
from lightning_tspipe.strategy.setup.declared import fanout_of, relay_of
from lightning_tspipe.strategy.setup.refusals import refuse

_COPY = "module."
"""Where an ``AveragedModel`` has the copy, in names of its tensors."""
_INSTEAD = "Use lightning_tspipe.MomentumEMA, with a copy of the student in the module"


class Averages:
    """Has the copies that callbacks average follow the module.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._undo = ExitStack()

    def begin(self) -> None:
        """Before such a callback copies the module; every rank calls it.

        Raises:
            ConfigurationError: No rank can hold all of it.
        """
        run = self._run
        fits = run.trainer.state.fn == "fit"
        if fits and any(_callbacks(run.trainer)):
            refuse({
                "WeightAveraging copies the module, but it was built on the meta device, and no "
                f"rank holds all of it. {_INSTEAD}": run.broadcast(is_on_meta(run.module)),
            })  # fmt: skip
        # In a fit there will be another copy.
        run.followers = () if fits else tuple(_followers(run.trainer))

    def set_up(self) -> None:
        """The callbacks have made their copies, if any: these follow the module from now on.

        Raises:
            ConfigurationError: One can't, or not under this schedule.
        """
        run = self._run
        self.end()
        run.followers = tuple(_followers(run.trainer))
        if run.trainer.state.fn == "fit":
            self._refuse()
        for callback in _callbacks(run.trainer):
            average = _average_of(callback)
            if average is not None and run.num_ranks > 1:
                self._follow(average)

    def _refuse(self) -> None:
        run, policy = self._run, self._run.options.policy
        averages = [a for c in _callbacks(run.trainer) if (a := _average_of(c)) is not None]
        names = [name for name, _ in named_tensors(run.module)]
        is_late = policy is not None and not policy.is_synchronous
        is_apart = fanout_of(run.module) is not None or relay_of(run.trainer) is not None
        refuse({
            "WeightAveraging with heads or blocks that ranks train apart (StudentFanout, "
            "BlockwiseRelay): it isn't known to average there as on one device. Leave it out, or "
            "train on one device (strategy='auto')":
            is_apart and run.num_ranks > 1 and bool(averages),
            f"WeightAveraging with schedule={run.options.schedule!r} and updates that don't wait "
            "for each other: ranks would average weights of different updates. Use "
            "weights='synchronous', or schedule='tspipe' or 'gpipe'":
            is_late and run.num_ranks > 1 and bool(averages),
            "WeightAveraging(multi_avg_fn=): it would get the tensors of one rank, and may compute "
            "with all of them. Use avg_fn, which gets one at a time, or one of torch's "
            "(get_ema_multi_avg_fn)":
            run.num_ranks > 1 and any(map(_averages_together, averages)),
            "WeightAveraging averages other tensors than the module has: something has replaced "
            f"layers since the callback has copied it (a precision plugin, say). {_INSTEAD}":
            any([n for n, _ in named_tensors(a.module)] != names for a in averages),
        })  # fmt: skip

    def _follow(self, average: AveragedModel) -> None:
        """Average what is here; a state dict has all on the rank that saves."""
        # Torch marks what it calls, which methods don't let it do.
        hook = average.register_state_dict_post_hook(partial(self._complete_state))
        self._undo.callback(hook.remove)
        update = partial(_update_held, average)
        self._undo.enter_context(attributes_replaced([(average, "update_parameters", update)]))

    def _complete_state(self, _module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        run, engine = self._run, self._run.placed
        if engine is None or run.is_failing:
            return
        start = f"{prefix}{_COPY}"
        inner = {key.removeprefix(start): state[key] for key in state if key.startswith(start)}
        with waiting("collecting the averaged weights"):
            found = engine.shards.completed(inner, run.pipeline_rank, run.transport)
        for key in inner:
            if key in found:
                state[start + key] = found[key]
            else:
                del state[start + key]

    def end(self) -> None:
        """The run is over."""
        self._undo.close()
        self._run.followers = ()


def _callbacks(trainer: Any) -> Iterator[Any]:
    """Those that average the module, of either copy of Lightning; older versions have none."""
    for callback in trainer.callbacks:
        bases = type(callback).__mro__
        if any(b.__name__ == "WeightAveraging" and "callbacks" in b.__module__ for b in bases):
            yield callback


def _average_of(callback: Any) -> AveragedModel | None:
    """What a callback averages into; None before its first fit."""
    average: AveragedModel | None = callback._average_model  # noqa: SLF001 - no public way
    return average


def _followers(trainer: Any) -> Iterator[Follower]:
    for callback in _callbacks(trainer):
        average = _average_of(callback)
        if average is not None:
            yield Follower(average.module, average.n_averaged.device)


def _averages_together(average: AveragedModel) -> bool:
    """Whether a function that is not torch's gets many tensors at once."""
    function = average.multi_avg_fn
    return function is not None and getattr(function, "__module__", "") != AveragedModel.__module__


def _update_held(average: AveragedModel, module: nn.Module) -> None:
    """``average.update_parameters(module)``, of the tensors that this rank holds."""
    here = _held(average.module)
    with entries_replaced([(average._modules, "module", here)]):  # noqa: SLF001 - of torch's own
        AveragedModel.update_parameters(average, _held(module))


def _held(module: nn.Module) -> nn.Module:
    """The parameters and buffers of a module that are here, in their order."""
    found = nn.Module()
    for place, parameter in enumerate(module.parameters()):
        if not parameter.is_meta:
            found.register_parameter(f"parameter_{place}", parameter)
    for place, buffer in enumerate(module.buffers()):
        if not buffer.is_meta:
            found.register_buffer(f"buffer_{place}", buffer)
    return found
