"""Options of ``tspipe plan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_tspipe.cli import language, quantities
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.runtime.weights.policies import POLICIES
from lightning_tspipe.schedules.registry import SCHEDULES
from lightning_tspipe.schedules.windows import WINDOWS
from lightning_tspipe.strategy.setup.options import parse_bytes


def _parsed(metavar: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - a field
    return field(default=None, metadata={"metavar": metavar, "parse": parse})


def _parse_replicas(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"--replicas {text}: give 'auto', or a number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe plan``.

    Attributes:
        target: FILE.py[:FUNCTION] that returns a LightningModule and its training data, or a
            profile that --save-profile wrote; nothing for a --student-model
        devices: all devices
        nodes: nodes, each with the same number of devices
        replicas: data-parallel pipelines, each with a part of the batch: 'auto' finds the
            fastest number (default: 1 on one node, auto on several)
        batch: samples per call, of all replicas together (default: those of the data; of a
            --student-model 1)
        student_model: instead of a file: a language model, of which only the configuration is
            read: a folder, a config.json, or a name on the Hugging Face hub; needs --flops
        teacher_model: the language model that it learns from, by DistillationLoss
        length: tokens of a sample, with --student-model
        precision: data type of models, gradients and optimizer state, with --student-model
        schedule: the schedule; all: compare them
        weights: weight policy of 1f1b
        window: batches of an accumulation window; compares the schedules of windows, too
        memory: of one device, for everything
        state: of one device, for weights, gradients, optimizer, teacher
        zero_stage: 1: replicas hold the optimizer state once together, not each of them
        memories: of each device, or of those of one node
        link: between two devices (default: measured between two of this machine, where costs are
            measured here too; else 4GB/s)
        latency: of one message (default: measured, else 150us)
        inter_node_link: between devices of two nodes, if not --link
        inter_node_latency: if not --latency
        speed: times as fast as the device that is measured
        speeds: of each device, or of those of one node
        flops: sustained speed of a device that is not here: costs are calculated from
            floating-point operations, nothing is measured
        microbatches: per call, instead of the best number
        activation_checkpointing: stages save only their inputs and are recomputed in the
            backward; auto: if that is faster within the memory
        student: trained submodules, if not `student`
        teacher: forward-only submodules, if not `teacher`
        accelerator: where to measure
        compare: put plain data parallelism beside the pipelines, DDP and FSDP2, and say which is
            the better choice
        save: write the best plan
        save_profile: write the costs
    """

    target: str | None = field(metadata={"nargs": "?"})
    devices: int = field(metadata={"required": True})
    nodes: int = 1
    replicas: int | Literal["auto"] | None = _parsed("auto|4", _parse_replicas)
    batch: int | None = None
    schedule: str = field(
        default="all", metadata={"choices": ("all", *SCHEDULES, *WINDOWS, "relay")}
    )
    weights: str = field(default="pipeoptim", metadata={"choices": POLICIES})
    window: int | None = None
    memory: int | None = _parsed("32GiB", parse_bytes)
    state: int | None = _parsed("8GiB", parse_bytes)
    zero_stage: int = field(default=0, metadata={"choices": (0, 1)})
    memories: tuple[float, ...] | None = _parsed("32GiB,16GiB", quantities.parse_memories)
    link: float | None = _parsed("50GB/s", quantities.parse_bandwidth)
    latency: float | None = _parsed("20us", quantities.parse_seconds)
    inter_node_link: float | None = _parsed("25GB/s", quantities.parse_bandwidth)
    inter_node_latency: float | None = _parsed("30us", quantities.parse_seconds)
    speed: float = 1.0
    speeds: tuple[float, ...] | None = _parsed("1,1,0.5,0.5", quantities.parse_speeds)
    flops: float | None = _parsed("60TFLOP/s", quantities.parse_flops)
    microbatches: int | None = None
    activation_checkpointing: str | None = field(
        default=None, metadata={"nargs": "?", "const": "always", "choices": ("always", "auto")}
    )
    student: list[str] | None = None
    teacher: list[str] | None = None
    student_model: str | None = field(default=None, metadata={"metavar": "NAME"})
    teacher_model: str | None = field(default=None, metadata={"metavar": "NAME"})
    length: int = 2048
    precision: language.Precision = field(
        default="32-true", metadata={"choices": tuple(language.PRECISIONS), "parse": str}
    )
    accelerator: str = "auto"
    compare: bool = False
    save: Path | None = field(default=None, metadata={"metavar": "plan.json"})
    save_profile: Path | None = field(default=None, metadata={"metavar": "profile.json"})

    @property
    def num_replicas(self) -> int | Literal["auto"]:
        """As given; by default 1 on one node, the fastest number on several."""
        return self.replicas or (1 if self.nodes == 1 else "auto")


def check_target(options: Options) -> None:
    """Refuse two things to plan, or none.

    Raises:
        ConfigurationError: There is not one; or a language model's costs would be measured.
    """
    if options.student_model is None:
        if options.teacher_model is not None:
            raise ConfigurationError("--teacher-model needs a --student-model that learns from it")
        if options.target is None:
            raise ConfigurationError("nothing to plan: give FILE.py, or a --student-model")
    elif options.target is not None:
        raise ConfigurationError(f"give {options.target} or --student-model, not both")
    elif options.flops is None:
        raise ConfigurationError(
            "--student-model has no weights to measure: say how fast a device is, as in --flops "
            "150TFLOP/s"
        )
    elif options.schedule == "relay":
        raise ConfigurationError(
            "--schedule relay distributes the blocks of a module: give FILE.py instead of "
            "--student-model"
        )
    if options.compare and options.schedule == "relay":
        raise ConfigurationError(
            "remove --compare: --schedule relay compares with data parallelism anyway"
        )
