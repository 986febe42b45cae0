"""Options of the strategy, checked; and the rates, links and memory that they mean for plans."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Link
from lightning_tspipe.planning.plan import PLAN, Plan, Source
from lightning_tspipe.runtime.stages.compiling import Compiler
from lightning_tspipe.runtime.transport.base import NOMINAL, Transport
from lightning_tspipe.runtime.weights.policies import WeightPolicy, policy_of
from lightning_tspipe.schedules.registry import ASYNCHRONOUS, SCHEDULES
from lightning_tspipe.schedules.windows import ACROSS_STEPS, WINDOWS
from lightning_tspipe.strategy.setup.refusals import refuse

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_MICROBATCHES = (1, 2, 4, 8)
_ACTION_SECONDS = 1.0e-4
_ENTRY, _META_FILE = "lightning_tspipe", "meta.pt"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class SetupOptions:
    """Options that the user chose; see ``TSPipeStrategy``.

    Attributes:
        averages: From callbacks: a teacher's submodules, and what of the student each averages.
        ranks_per_device: Ranks that share a device.
        start_method: How the other processes start.
    """

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
    drain_epochs: bool = True
    costs: Literal["auto", "measured", "flops"] = "auto"
    averages: Mapping[str, str] = field(default_factory=dict)
    zero_stage: Literal[0, 1] = 0
    ranks_per_device: int = 1
    start_method: StartMethod = "popen"

    def __post_init__(self) -> None:
        if self.weights is not None:
            policy_of(self.weights)
        parse_bytes(self.memory_limit)
        refuse(self._wrong())

    def _wrong(self) -> dict[str, bool]:
        """Values that an option does not have, and options that can't be had together.

        With schedule='1f1b', updates may come while batches are under way. In CUDA graphs, a
        replay overwrites outputs that are saved, or on their way.
        """
        number, depth = self.num_microbatches, self.queue_depth
        is_late, again = self.schedule in WINDOWS, self.activation_checkpointing
        halves = self.schedule == "zbv"
        may_halve = halves or (self.schedule == ASYNCHRONOUS and self.weights == "synchronous")
        is_count = isinstance(number, int) and number >= 1
        arguments = self.compile if isinstance(self.compile, Mapping) else {}
        chosen = arguments.get("options") or {}
        known = (*SCHEDULES, *WINDOWS)
        return {
            f"schedule={self.schedule!r}: choose {', '.join(map(repr, known[:-1]))} or "
            f"{known[-1]!r}": self.schedule not in known,
            f"num_microbatches={number!r}: must be 'auto' or at least 1":
            number != "auto" and not is_count,
            f"partition={self.partition!r}: must be 'auto' or the number of atoms of each stage":
            isinstance(self.partition, str) and self.partition != "auto",
            f"costs={self.costs!r}: must be 'measured', 'flops', or 'auto' ('flops' where torch "
            "is to be deterministic)": self.costs not in {"auto", "measured", "flops"},
            f"queue_depth={depth!r}: must be 'auto' or at least 0": depth != "auto" and depth < 0,
            f"activation_checkpointing={again!r}: must be 'auto', True, or a list of patterns":
            isinstance(again, str) and again != "auto",
            f"weights={self.weights!r} is for schedule='1f1b'; with schedule={self.schedule!r} the "
            "student always reads its newest weights": self.schedule != ASYNCHRONOUS
            and self.weights not in {None, *["synchronous"] * is_late},
            f"drain_epochs=False is for schedule='1f1b'; with schedule={self.schedule!r} no batch "
            "is in flight at the end of an epoch. Remove it":
            self.schedule != ASYNCHRONOUS and not self.drain_epochs,
            "drain_epochs=False with weights='synchronous': no batch is in flight when weights are "
            "updated. Remove it": self.weights == "synchronous" and not self.drain_epochs,
            f"num_microbatches={number} with schedule={self.schedule!r}: a batch is one unit "
            "there. Leave it out, and give the loader a smaller batch_size":
            is_late and number not in {"auto", 1},
            f"split_backward=True with schedule={self.schedule!r}: its backwards are whole. Leave "
            "it out, or use schedule='zbv', or '1f1b' with weights='synchronous'":
            is_late and not may_halve and self.split_backward is True,
            "split_backward=False with schedule='zbv', which fills gaps with halves of backwards. "
            "Leave it out, or use schedule='interleaved'": halves and self.split_backward is False,
            "activation_checkpointing with schedule='zbv': each half of a backward would run the "
            "stage again. Leave one of them out, or use schedule='interleaved'":
            halves and again is not False,
            f"compile with schedule={self.schedule!r}: a compiled backward can't be given another "
            "version of the weights. Leave one of them out":
            is_late and self.compile is not False,
            "split_backward=True with activation_checkpointing: each half would run the stage "
            "again. Leave one of them out":
            self.split_backward is True and (again is True or not isinstance(again, bool | str)),
            f"zero_stage={self.zero_stage!r}: must be 0, or 1 (optimizer state is divided among "
            "replicas)": self.zero_stage not in {0, 1},
            f"zero_stage=1 with weights={self.policy_name!r}: forwards predict weights from the "
            "optimizer's state, most of which other replicas have. Leave one of them out":
            bool(self.zero_stage) and self.policy is not None and self.policy.predicts,
            "split_backward=True with compile: the backward of a compiled stage is one piece. "
            "Leave one of them out": self.split_backward is True and self.compile is not False,
            f"compile={self.compile!r} runs CUDA graphs, which overwrite each result with the "
            "next: a pipeline still needs it, for a backward or while it is being sent to another "
            "device. Use mode='max-autotune-no-cudagraphs', or no mode":
            arguments.get("mode") in {"reduce-overhead", "max-autotune"}
            or bool(chosen.get("triton.cudagraphs")),
        }  # fmt: skip

    @property
    def policy(self) -> WeightPolicy | None:
        """The weight policy of a training; None where there is only one version of the weights."""
        return policy_of(self.policy_name) if self.schedule in WINDOWS else None

    @property
    def policy_name(self) -> str:
        """The name of the weight policy that a schedule with several versions has."""
        return "synchronous" if self.schedule in ACROSS_STEPS else self.weights or "pipeoptim"

    @property
    def given_microbatches(self) -> int:
        """Micro-batches per call where nothing chooses them: as the user said, else 1."""
        return 1 if self.num_microbatches == "auto" else self.num_microbatches

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
                    f"activation_checkpointing: {pattern!r} matches no atom; there are "
                    f"{', '.join(atom_names)}"
                )
            found |= matches
        return frozenset(found)

    @property
    def plans_by_flops(self) -> bool:
        """Whether plans are made from operations, and nothing is decided by times."""
        return self.costs == "flops" or (
            self.costs == "auto" and torch.are_deterministic_algorithms_enabled()
        )

    @property
    def source(self) -> Source:
        """The basis of plans that are searched."""
        return "flops" if self.plans_by_flops else "times"

    @property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches whose sizes are worth measuring."""
        if self.num_microbatches != "auto":
            return (self.num_microbatches,)
        return (1,) if self.schedule in {"sequential", *WINDOWS} else _MICROBATCHES

    # What the options mean on a machine

    def rate(self, device: torch.device) -> float | None:
        """Operations per second by which plans are made without measuring; None to measure.

        The same for each device of a kind, so that each of them gives the same plan.
        """
        if not self.plans_by_flops:
            return None
        return 5.0e13 if device.type == "cuda" else 5.0e10

    def link(self, transport: Transport) -> Link:
        """What is between two ranks: as measured, unless plans are to be the same in each run."""
        return NOMINAL if self.plans_by_flops or transport.link is None else transport.link

    def bytes_on(self, device: torch.device) -> int | None:
        """Bytes that a rank may hold: as said, else most of what is free on a GPU, fairly shared.

        One part in ten is left for what plans don't count: what kernels need for a while, and gaps
        between tensors. Connections between neighbours are there already, and their buffers with
        them. If plans are to be the same in each run, a GPU counts as empty.
        """
        if self.memory_limit is not None or device.type != "cuda":
            return parse_bytes(self.memory_limit)
        # What other ranks only hold in reserve is theirs; this rank's is free.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int((total if self.plans_by_flops else free) * 0.9 / self.ranks_per_device)

    def constraints(self, device: torch.device, transport: Transport) -> dict[str, Any]:
        """Constraints of the user and the machine on every plan of a run."""
        return {
            "link": self.link(transport),
            "memory_limit": self.bytes_on(device),
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "split": False if self.compile else self.split_backward,
            "action_overhead": _ACTION_SECONDS,
            "weights": self.policy_name,
        }


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


def load_plan(plan: Plan | str | Path | None) -> Plan | None:
    """A plan, also from its file, or from a checkpoint or a folder of shards of a run that used it.

    Raises:
        ConfigurationError: There is no such file, or something else is in it.
    """
    if plan is None or isinstance(plan, Plan):
        return plan
    path = Path(plan)
    file = path / _META_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"plan={str(path)!r}: there is no such file; `tspipe plan --save {path.name}` writes it"
        )
    if not zipfile.is_zipfile(file):  # as torch.save writes them
        return Plan.from_json(file.read_text(encoding="utf-8"))
    return Plan.from_json(_text_in(file))


def _text_in(file: Path) -> str:
    """The plan in a checkpoint, of which nothing else comes into memory."""
    try:
        checkpoint = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"plan={str(file)!r} can't be read without running code from it "
            f"({str(error).splitlines()[0]}). Load it yourself, and give "
            f"plan=Plan.from_json(checkpoint[{_ENTRY!r}][0][{PLAN!r}])"
        ) from None
    entry: Any = checkpoint.get(_ENTRY) or [{}]
    text: str | None = entry[0].get(PLAN)
    if text is None:
        raise ConfigurationError(
            f"plan={str(file)!r}: the checkpoint has no plan. It is from another strategy, an "
            "older version, or a run that searched for none: with a given partition, heads or "
            "relayed blocks, or on one device"
        )
    return text
