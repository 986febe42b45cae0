"""Options of the strategy, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.networks.compiling import Compiler
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.runtime.weights.policies import policy_of
from lightning_tspipe.strategy.setup.plan_files import read_plan

_MICROBATCHES = (1, 2, 4, 8)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class SetupOptions:
    """Options that the user chose; see ``TSPipeStrategy``.

    Attributes:
        averages: From callbacks: a teacher's submodules, and what of the student each averages.
        ranks_per_device: Ranks that share a device.
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
    ranks_per_device: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in {"tspipe", "gpipe", "sequential", "1f1b"}:
            raise ConfigurationError(
                f"schedule={self.schedule!r}: choose 'tspipe', 'gpipe', 'sequential' or '1f1b'"
            )
        self._check_asynchronous()
        number = self.num_microbatches
        is_count = isinstance(number, int) and number >= 1
        if number != "auto" and not is_count:
            raise ConfigurationError(f"num_microbatches={number!r}: 'auto' or a number from 1 on")
        if isinstance(self.partition, str) and self.partition != "auto":
            raise ConfigurationError(
                f"partition={self.partition!r}: 'auto', or the number of atoms of each stage"
            )
        if self.costs not in {"auto", "measured", "flops"}:
            raise ConfigurationError(
                f"costs={self.costs!r}: 'measured', 'flops', or 'auto': 'flops' where torch is to "
                "be deterministic"
            )
        depth = self.queue_depth
        if depth != "auto" and depth < 0:
            raise ConfigurationError(f"queue_depth={depth!r}: 'auto' or a number from 0 on")
        parse_bytes(self.memory_limit)
        self._check_execution()

    def _check_asynchronous(self) -> None:
        """Refuse what can't be had together with updates while batches are under way."""
        if self.weights is not None:
            policy_of(self.weights)
        if self.schedule != "1f1b":
            if self.weights is not None:
                raise ConfigurationError(
                    f"weights={self.weights!r} is for schedule='1f1b'; with "
                    f"schedule={self.schedule!r} the student always reads its newest weights"
                )
            if not self.drain_epochs:
                raise ConfigurationError(
                    "drain_epochs=False is for schedule='1f1b'; with "
                    f"schedule={self.schedule!r} no batch is under way where an epoch ends. Remove "
                    "it"
                )
            return
        refused = {
            f"num_microbatches={self.num_microbatches} with schedule='1f1b': a batch is one unit "
            "there. Leave it out, and give the loader a smaller batch_size":
            self.num_microbatches not in {"auto", 1},
            "split_backward=True with schedule='1f1b': no rank waits, so halves have nothing to "
            "fill. Leave it out": self.split_backward is True,
            "compile with schedule='1f1b': what a compiled backward reads of the weights can't be "
            "exchanged for another version. Leave one of them out": self.compile is not False,
        }  # fmt: skip
        for reason, is_so in refused.items():
            if is_so:
                raise ConfigurationError(reason)

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

        if isinstance(self.compile, Mapping):
            self._check_graphs(self.compile)

    def _check_graphs(self, arguments: Mapping[str, Any]) -> None:
        """Refuse CUDA graphs: a replay overwrites outputs that are saved, or on their way."""
        mode = arguments.get("mode")
        chosen = arguments.get("options") or {}
        if mode in {"reduce-overhead", "max-autotune"} or chosen.get("triton.cudagraphs"):
            raise ConfigurationError(
                f"compile={dict(arguments)!r} runs CUDA graphs, which write each result where the "
                "one before it was: a pipeline still needs that one, for a backward or since it "
                "is on its way to another device. Use mode='max-autotune-no-cudagraphs', or no mode"
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
    def plans_by_flops(self) -> bool:
        """Whether plans are made from operations, and nothing is decided by times."""
        return self.costs == "flops" or (
            self.costs == "auto" and torch.are_deterministic_algorithms_enabled()
        )

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


def load_plan(plan: Plan | str | Path | None) -> Plan | None:
    """A plan, also from its file, or from a checkpoint of a run that went by it.

    Raises:
        ConfigurationError: There is no such file, or something else is in it.
    """
    return plan if plan is None or isinstance(plan, Plan) else read_plan(Path(plan))
