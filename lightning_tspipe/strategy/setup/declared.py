"""The submodules that are to be pipelined, as declared or by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_tspipe.capture.trace import Networks
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.heads import FanoutTraining, StudentFanout
from lightning_tspipe.heads.training import refuse_trained_trunk
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.setup.options import SetupOptions
from lightning_tspipe.strategy.setup.refusals import refuse, refuse_compiled


def find_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The pipelined submodules: as declared, else the attributes ``student`` and ``teacher``.

    A teacher may also be named by a callback that averages into it.

    Raises:
        ConfigurationError: Not found, or found twice.
    """
    if options.student is None and fanout_of(module) is not None:
        return fanout_networks(module, options)
    student = _names(module, options.student, "student")
    teacher = _names(module, options.teacher, "teacher") or _averages(module, options, student)
    if not student:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        own = [f"self.{name}" for name, _ in module.named_parameters(recurse=False)]
        held = (
            f". What is given {' or '.join(own)}, a parameter of the LightningModule itself, is "
            "none: let a module hold it that is called before"
        )
        raise ConfigurationError(
            f"{type(module).__name__} has no submodule `student`, and none was found that its step "
            "calls with a batch. Name the trained submodules in the order in which training_step "
            f"calls them: TSPipeStrategy(student=[...], teacher=[...]) (its submodules: {children})"
            f"{held if own else ''}"
        )
    averages = {name: options.averages[name] for name in teacher if name in options.averages}
    return checked(module, Networks(student, teacher, averages=averages))


def declared_delay(trainer: Any) -> Any:
    """The callback in which the user says how late the teacher is; None without one."""
    callbacks = getattr(trainer, "callbacks", ())
    return next((c for c in callbacks if hasattr(c, "delay") and hasattr(c, "start_step")), None)


def are_named(module: nn.Module, options: SetupOptions) -> bool:
    """Whether names say what the networks are, and not the first step."""
    if options.student is not None or options.teacher is not None:
        return True
    student, teacher = (getattr(module, name, None) for name in ("student", "teacher"))
    if not isinstance(student, nn.Module):
        return False
    # A frozen copy of another name, an average say, belongs to the pipeline too.
    others = [child for child in module.children() if child is not student]
    return isinstance(teacher, nn.Module) or not any(_is_copy(o, student) for o in others)


def _is_copy(module: nn.Module, network: nn.Module) -> bool:
    """Whether a module is a frozen copy of a network, in another one perhaps (AveragedModel)."""
    is_average = isinstance(module, AveragedModel)
    own = [*(module.get_submodule("module") if is_average else module).parameters()]
    is_still = is_average or not any(p.requires_grad for p in own)
    return (
        bool(own) and is_still and [p.shape for p in own] == [p.shape for p in network.parameters()]
    )


def checked(module: nn.Module, networks: Networks) -> Networks:
    """The networks of a module, if they can be pipelined.

    Raises:
        ConfigurationError: They are compiled, or one is found twice.
    """
    student, teacher = networks.student, networks.teacher
    refuse_compiled(module, (*student, *teacher))
    seen: dict[int, str] = {}
    for name in (*student, *teacher):
        for path, child in module.get_submodule(name).named_modules():
            full = f"{name}.{path}".rstrip(".")
            other = seen.setdefault(id(child), full)
            if other != full:
                raise ConfigurationError(
                    f"{full!r} and {other!r} are the same submodule: student and teacher, and "
                    "their parts, must be separate modules (copy.deepcopy makes one)"
                )
            if full in {*student, *teacher} and full != name:
                raise ConfigurationError(
                    f"{full!r} is declared and lies inside {name!r}, which is declared too: "
                    "declare the whole or its parts, not both"
                )
    return networks


def _averages(module: nn.Module, options: SetupOptions, student: Sequence[str]) -> tuple[str, ...]:
    """Teachers that callbacks average parts of the student into; used if none is declared."""
    known = {name for name, _ in module.named_modules()}
    inside = tuple(f"{name}." for name in student)
    return tuple(
        copy
        for copy, original in options.averages.items()
        if copy in known and f"{original}.".startswith(inside)
    )


def _names(
    module: nn.Module, declared: str | Sequence[str] | None, default: str
) -> tuple[str, ...]:
    if declared is None:
        return (default,) if isinstance(getattr(module, default, None), nn.Module) else ()
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    for name in names:
        try:
            module.get_submodule(name)
        except AttributeError:
            children = ", ".join(child for child, _ in module.named_children()) or "none"
            raise ConfigurationError(
                f"TSPipeStrategy({default}={declared!r}): {type(module).__name__} has no submodule "
                f"{name!r} (its submodules: {children})"
            ) from None
    if len(set(names)) < len(names):
        raise ConfigurationError(f"TSPipeStrategy({default}={declared!r}) names a submodule twice")
    return names


def relay_of(trainer: Any) -> Any:
    """The callback ``BlockwiseRelay``, if there is one."""
    callbacks = getattr(trainer, "callbacks", ())
    return next((c for c in callbacks if type(c).__name__ == "BlockwiseRelay"), None)


def fanout_of(module: nn.Module) -> StudentFanout | None:
    """The heads of a module; None if its student is something else."""
    student = getattr(module, "student", None)
    return student if isinstance(student, StudentFanout) else None


def fanout_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The trunk goes through the pipeline; heads run where they are.

    Raises:
        ConfigurationError: No trunk, a trunk that is trained, or options that heads don't have.
    """
    name, trunk, own = type(module).__name__, getattr(module, "teacher", None), cast("Any", module)
    beside = "does not work with heads on a trunk:"
    refuse({
        f"{name}.student is a StudentFanout: derive {name} from FanoutTraining first, as in class "
        "Tasks(FanoutTraining, LightningModule), which runs its steps for each head":
        not isinstance(module, FanoutTraining),
        f"{name} has heads and no trunk: give it a submodule `teacher`":
        not isinstance(trunk, nn.Module),
        f"schedule={options.schedule!r} {beside} heads never wait for other ranks anyway. Use "
        "schedule='tspipe'": options.schedule in WINDOWS,
        f"plan {beside} heads are measured when they are placed. Give partition= and "
        "num_microbatches=": options.plan is not None,
        f"activation_checkpointing {beside} a trunk has no backward. In a head, use "
        "torch.utils.checkpoint in its forward":
        options.activation_checkpointing != "auto" and bool(options.activation_checkpointing),
        f"automatic_optimization=False {beside} each rank has an optimizer for its own heads. "
        "Write head_optimizer(name, parameters)": not getattr(own, "automatic_optimization", True),
    })  # fmt: skip
    refuse_trained_trunk(own.teacher)
    return Networks((), ("teacher",), ("student",))
