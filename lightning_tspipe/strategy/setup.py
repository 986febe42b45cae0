"""The first batch: find the networks, trace the step, measure, plan, and place the stages."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_tspipe.capture.rebinding import refuse_rebinding
from lightning_tspipe.capture.trace import Networks, Step
from lightning_tspipe.errors import ConfigurationError, PartitionError
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.planning.placement import Placement, default_ranks
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.profiling import is_paired, profile_step
from lightning_tspipe.runtime.engine import Engine
from lightning_tspipe.runtime.frozen import with_frozen
from lightning_tspipe.runtime.programs import Captured
from lightning_tspipe.runtime.replicas import Replicas
from lightning_tspipe.runtime.transport import Transport
from lightning_tspipe.runtime.weights import LOSS_RANK
from lightning_tspipe.simulation.cost import CostTable
from lightning_tspipe.strategy.asynchronous import check_options, policy_for, use_optimizers
from lightning_tspipe.strategy.fanout import (
    fanout_networks,
    fanout_of,
    heads_of,
    place_heads,
)
from lightning_tspipe.strategy.freezing import Freezing, of_plan, place_frozen
from lightning_tspipe.strategy.origin import Origin, share_weights
from lightning_tspipe.strategy.support import refuse_compiled

log = logging.getLogger("lightning_tspipe")

_MICROBATCHES = (1, 2, 4, 8)
HOST_LINK = (1.5e-4, 4.0e9)
"""Seconds per message and bytes per second between processes of one machine."""
_ACTION_SECONDS = 1.0e-4
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class SetupOptions:
    """What the user chose; see ``TSPipeStrategy``."""

    student: str | Sequence[str] | None = None
    teacher: str | Sequence[str] | None = None
    num_microbatches: Literal["auto"] | int = "auto"
    schedule: str = "tspipe"
    partition: Literal["auto"] | Sequence[int] | Mapping[str, Sequence[int]] = "auto"
    split_backward: Literal["auto"] | bool = "auto"
    memory_limit: int | str | None = None
    state_limit: int | float | str | None = None
    plan: Plan | None = None
    activation_checkpointing: Literal["auto"] | bool | Sequence[str] = False
    compile: bool | Mapping[str, Any] = False
    queue_depth: Literal["auto"] | int = "auto"
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.schedule not in {"tspipe", "gpipe", "sequential", "1f1b"}:
            raise ConfigurationError(
                f"schedule={self.schedule!r}: choose 'tspipe', 'gpipe', 'sequential' or '1f1b'"
            )
        check_options(self)
        number = self.num_microbatches
        is_count = isinstance(number, int) and number >= 1
        if number != "auto" and not is_count:
            raise ConfigurationError(f"num_microbatches={number!r}: 'auto' or a number from 1 on")
        if isinstance(self.partition, str) and self.partition != "auto":
            raise ConfigurationError(
                f"partition={self.partition!r}: 'auto', or the number of atoms of each stage"
            )
        depth = self.queue_depth
        if depth != "auto" and depth < 0:
            raise ConfigurationError(f"queue_depth={depth!r}: 'auto' or a number from 0 on")
        parse_bytes(self.memory_limit)
        self._check_execution()

    def _check_execution(self) -> None:
        again = self.activation_checkpointing
        if isinstance(again, str) and again != "auto":
            raise ConfigurationError(
                f"activation_checkpointing={again!r}: 'auto', True, or a list of patterns"
            )
        if self.split_backward is True and (again is True or not isinstance(again, bool | str)):
            raise ConfigurationError(
                "split_backward=True with activation_checkpointing: each half would run the stage "
                "again. Leave one of them out"
            )
        if self.split_backward is True and self.compile is not False:
            raise ConfigurationError(
                "split_backward=True with compile: the backward of a compiled stage is one piece. "
                "Leave one of them out"
            )

    @property
    def compiler(self) -> Compiler | None:
        """What compiles the stages."""
        if self.compile is False:
            return None
        return Compiler({} if self.compile is True else self.compile)

    def recomputed(self, atom_names: Sequence[str]) -> frozenset[int]:
        """The atoms of the student that run again in the backward, as far as the user says so.

        Raises:
            ConfigurationError: A pattern is that of no atom.
        """
        again = self.activation_checkpointing
        if again == "auto" or isinstance(again, bool):
            return frozenset(range(len(atom_names)) if again is True else ())
        found: set[int] = set()
        for pattern in again:
            matches = {i for i, name in enumerate(atom_names) if fnmatchcase(name, pattern)}
            if not matches:
                raise ConfigurationError(
                    f"activation_checkpointing: {pattern!r} is the name of no atom; there are "
                    f"{', '.join(atom_names)}"
                )
            found |= matches
        return frozenset(found)

    @property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches whose sizes are worth measuring."""
        if self.num_microbatches != "auto":
            return (self.num_microbatches,)
        return (1,) if self.schedule in {"sequential", "1f1b"} else _MICROBATCHES


def parse_bytes(amount: int | str | None) -> int | None:
    """Bytes from a number or a text.

    >>> parse_bytes("1.5GiB"), parse_bytes(1000), parse_bytes(None)
    (1610612736, 1000, None)
    """
    if amount is None or isinstance(amount, int):
        return amount
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)?\s*", amount, re.IGNORECASE)
    if match is None:
        raise ConfigurationError(f"{amount!r} is not an amount of memory; write '16GiB' or '800MB'")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def find_networks(module: nn.Module, options: SetupOptions) -> Networks:
    """The pipelined submodules: as declared, else the attributes ``student`` and ``teacher``.

    Raises:
        ConfigurationError: Not found, or found twice.
    """
    if options.student is None and fanout_of(module) is not None:
        return fanout_networks(module, options)
    student = _names(module, options.student, "student")
    teacher = _names(module, options.teacher, "teacher")
    if not student:
        children = ", ".join(name for name, _ in module.named_children()) or "none"
        raise ConfigurationError(
            f"{type(module).__name__} has no submodule `student`. Name the trained submodules in "
            "the order in which training_step calls them: TSPipeStrategy(student=[...], "
            f"teacher=[...]) (its submodules: {children})"
        )
    refuse_compiled(module, (*student, *teacher))
    refuse_rebinding(module, (*student, *teacher))
    seen: dict[int, str] = {}
    for name in (*student, *teacher):
        for path, child in module.get_submodule(name).named_modules():
            full = f"{name}.{path}".rstrip(".")
            other = seen.setdefault(id(child), full)
            if other != full:
                raise ConfigurationError(
                    f"{full!r} and {other!r} are the same submodule: student and teacher, and "
                    "their parts, must be modules of their own (copy.deepcopy makes one)"
                )
            if full in {*student, *teacher} and full != name:
                raise ConfigurationError(
                    f"{full!r} is declared and lies inside {name!r}, which is declared too: "
                    "declare the whole or its parts, not both"
                )
    return Networks(student, teacher)


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


def set_up(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    module: nn.Module,
    options: SetupOptions,
    transport: Transport,
    device: torch.device,
    context: Callable[[], AbstractContextManager[None]],
    step: Step,
    batch: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    replicas: Replicas,
    origin: Origin,
    freezing: Freezing,
) -> Engine:
    """Make this rank ready to train; all ranks of its pipeline have the same first batch.

    Raises:
        CaptureError: The step can't be captured.
        PartitionError: The networks can't be cut as wished.
    """
    networks = find_networks(module, options)
    seed = transport.broadcast_object(torch.initial_seed() % 2**31, LOSS_RANK)
    engine = Engine(
        module, networks, transport, device, seed, context, replicas, options.compiler,
        heads_of(module, networks, device, replicas),
    )  # fmt: skip
    materializer = share_weights(module, networks, transport, replicas, origin)
    front = freezing.front if transport.num_ranks == 1 else None
    captured, num_frozen = with_frozen(engine.capture(step, batch), freezing.names, front)
    costs = None
    if engine.heads is not None:
        limit = _memory_limit(options, device)
        placement = place_heads(engine, captured, options, step, batch, optimizers, limit)
    else:
        placement, costs = _agree(
            captured, options, transport, device, optimizers, replicas, origin, freezing, num_frozen
        )
        placement = _executed_as_wished(placement, captured, options)
    engine.place(captured, placement, options.schedule, costs, materializer, policy_for(options))
    if engine.weights is not None:
        use_optimizers(engine.weights, optimizers)
    if materializer is not None:
        materializer.done()
    engine.shards.stays_spread |= origin.placement is not None
    for optimizer in optimizers:
        engine.shards.forget_optimizer_state(optimizer)
    return engine


def _agree(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    captured: Captured,
    options: SetupOptions,
    transport: Transport,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    replicas: Replicas,
    origin: Origin,
    freezing: Freezing,
    num_frozen: int,
) -> tuple[Placement, CostTable | None]:
    """Who gets what, on all ranks."""
    num_ranks = transport.num_ranks
    if origin.placement is not None:
        return origin.placement, None
    if num_frozen and (freezing.plan is not None or _needs_no_measuring(options, num_ranks)):
        number = 1 if options.num_microbatches == "auto" else options.num_microbatches
        num_atoms = len(captured.networks["student"].atoms)
        return place_frozen(freezing, num_atoms, num_frozen, num_ranks, number)
    if options.plan is not None:
        _check_plan(options.plan, captured, num_ranks, replicas.number)
        return options.plan.placement, options.plan.costs
    if num_ranks == 1:
        return _single(captured, options), None
    decided = None
    if replicas.is_first:
        if transport.rank == num_ranks - 1:
            decided = _decide(captured, options, num_ranks, device, optimizers, num_frozen)
        decided = transport.broadcast_object(decided, num_ranks - 1)
    # Measured apart, they would not agree, and peers would hold different stages.
    decision: _Decision = replicas.broadcast(decided)
    freezing.learn(decision.profile, decision.plan, replicas.number)
    if transport.rank == LOSS_RANK and replicas.is_first:
        log.info("%s", decision.summary)
    return decision.placement, decision.costs


def _needs_no_measuring(options: SetupOptions, num_ranks: int) -> bool:
    """Whether there is nothing to decide, or the user has decided it."""
    return num_ranks == 1 or options.plan is not None or isinstance(options.partition, Mapping)


@dataclass(frozen=True)
class _Decision:
    """Who gets what, why, and what it was decided by."""

    placement: Placement
    costs: CostTable | None
    summary: str
    profile: StepProfile | None = None
    plan: Plan | None = None


def _executed_as_wished(
    placement: Placement, captured: Captured, options: SetupOptions
) -> Placement:
    """The placement with the atoms that run again; what runs again or is compiled is not split."""
    again = options.recomputed([atom.name for atom in captured.networks["student"].atoms])
    if again:
        placement = replace(placement, recomputed=again)
    if again or options.compile:
        placement = replace(placement, split=frozenset())
    return placement


def load_plan(plan: Plan | str | Path | None) -> Plan | None:
    """A plan, also from its file.

    Raises:
        ConfigurationError: There is no such file, or something else is in it.
    """
    if plan is None or isinstance(plan, Plan):
        return plan
    path = Path(plan)
    if not path.is_file():
        raise ConfigurationError(
            f"plan={str(plan)!r}: there is no such file; `tspipe plan --save {path.name}` writes it"
        )
    return Plan.from_json(path.read_text(encoding="utf-8"))


def _check_plan(plan: Plan, captured: Captured, num_ranks: int, num_replicas: int) -> None:
    """Refuse a plan that was made for something else.

    Raises:
        PartitionError: Says what differs.
    """
    planned, found = (plan.pipeline.num_ranks, plan.num_replicas), (num_ranks, num_replicas)
    if planned != found:
        raise PartitionError(
            f"the plan is one for {_devices(*planned)}, and this run has {_devices(*found)}: use "
            f"num_stages={planned[0]} and devices={planned[0] * planned[1]}, or plan again with "
            f"--devices {found[0] * found[1]} --replicas {found[1]}"
        )
    cuts = {"student": plan.student_cuts, "teacher": plan.teacher_cuts}
    layouts = {"student": plan.pipeline.student, "teacher": plan.pipeline.teacher}
    for name in ("student", "teacher"):
        network, layout = captured.networks.get(name), layouts[name]
        found = (0, 0)
        if network is not None:
            found = len(network.atoms), len(captured.plan.calls_of(name))
        planned = (cuts[name][-1], layout.num_calls) if layout is not None else (0, 0)
        if planned != found:
            raise PartitionError(
                f"the plan is one for a {name} of {planned[0]} atoms that is called {planned[1]} "
                f"times per step; this one has {found[0]} atoms and {found[1]} calls. Plan again: "
                "the module or its step has changed"
            )


def _devices(num_ranks: int, num_replicas: int) -> str:
    if num_replicas == 1:
        return f"{num_ranks} devices"
    return f"{num_replicas} replicas of {num_ranks} devices"


def _single(captured: Captured, options: SetupOptions) -> Placement:
    number = 1 if options.num_microbatches == "auto" else options.num_microbatches
    networks = captured.networks
    teacher = networks.get("teacher")
    return Placement(
        1,
        (0, len(networks["student"].atoms)),
        (0,),
        (0, len(teacher.atoms)) if teacher is not None else (),
        (0,) if teacher is not None else (),
        number,
    )


def _decide(  # noqa: PLR0913, PLR0917 - everything that decides who does what
    captured: Captured,
    options: SetupOptions,
    num_ranks: int,
    device: torch.device,
    optimizers: Sequence[torch.optim.Optimizer],
    num_frozen: int,
) -> _Decision:
    """Measure and plan."""
    captured = captured.whole
    plan, networks = captured.plan, captured.networks
    student, teacher = networks["student"], networks.get("teacher")
    paired = teacher is not None and is_paired(student, teacher)
    if plan.has_ema and not paired:
        raise PartitionError(
            "the step averages parameters of networks that are built differently, so that the "
            "parts of a pair could come to different ranks. Give the teacher the same structure "
            "as the beginning of the student"
        )
    partition = options.partition
    if isinstance(partition, Mapping):
        return _by_hand(partition, captured, options, num_ranks, paired=paired)
    profile = profile_step(captured, device, optimizers, options.microbatch_counts)
    profile = profile.recomputing(options.recomputed([atom.name for atom in profile.student.atoms]))

    def best(profile: StepProfile) -> Plan:
        return profile.freezing(num_frozen).plan(
            num_ranks,
            state_limit=_state_limit(options, profile),
            partition="auto" if isinstance(partition, str) else list(partition),
            link=HOST_LINK,
            **planning_wishes(options, device),
        )

    try:
        decided = best(profile)
    except PartitionError:
        if options.activation_checkpointing != "auto":
            raise
        profile = profile.recomputing(range(profile.student.num_atoms))
        decided = best(profile)
        note = "nothing fits otherwise: activation_checkpointing='auto' was switched on"
        return _Decision(
            of_plan(decided, num_frozen), decided.costs, f"{decided}\n{note}", profile, decided
        )
    return _Decision(of_plan(decided, num_frozen), decided.costs, str(decided), profile, decided)


def planning_wishes(options: SetupOptions, device: torch.device) -> dict[str, Any]:
    """What the user and the machine say about every plan of this run."""
    return {
        "memory_limit": _memory_limit(options, device),
        "schedule": options.schedule,
        "num_microbatches": options.num_microbatches,
        "split": False if options.compile else options.split_backward,
        "action_overhead": _ACTION_SECONDS,
    }


def _by_hand(
    partition: Mapping[str, Sequence[int]],
    captured: Captured,
    options: SetupOptions,
    num_ranks: int,
    *,
    paired: bool,
) -> _Decision:
    cuts: dict[str, tuple[int, ...]] = {}
    for name, network in captured.networks.items():
        counts = partition.get(name)
        if counts is None or len(counts) < 1 or sum(counts) != len(network.atoms):
            raise PartitionError(
                f"partition[{name!r}]={counts!r} must give the number of atoms of each stage, "
                f"together {len(network.atoms)}"
            )
        cuts[name] = (0, *accumulate(counts))
    teacher = cuts.get("teacher", ())
    if paired and tuple(cuts["student"][: len(teacher) - 1]) != teacher[:-1]:
        raise PartitionError(
            f"the student is cut at {cuts['student']} and the teacher at {teacher}: the parts of "
            "an EMA pair would lie on different ranks. Give one partition=[...] for both"
        )
    number = 1 if options.num_microbatches == "auto" else options.num_microbatches
    ranks = default_ranks(len(cuts["student"]) - 1, num_ranks)
    teacher_ranks = default_ranks(len(teacher) - 1, num_ranks) if teacher else ()
    if paired:
        teacher_ranks = ranks[: len(teacher) - 1]
    placement = Placement(num_ranks, cuts["student"], ranks, teacher, teacher_ranks, number)
    return _Decision(placement, None, f"partition by hand: {cuts}")


def _memory_limit(options: SetupOptions, device: torch.device) -> int | None:
    if options.memory_limit is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    return parse_bytes(options.memory_limit)


def _state_limit(options: SetupOptions, profile: StepProfile) -> int | None:
    limit = options.state_limit
    if not isinstance(limit, float):
        return parse_bytes(limit)
    return int(limit * profile.state_bytes)
