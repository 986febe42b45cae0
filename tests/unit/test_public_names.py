"""Public names stay: what is exported, registered and typed on a command line (docs/stability.md).

Whoever adds a name adds it here; whoever removes one follows the page first.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.cli.main import main
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.schedules.registry import SCHEDULES
from lightning_tspipe.schedules.windows import WINDOWS

REFERENCE = Path(__file__).parents[2] / "docs/reference.md"

CALLBACKS = [
    "AutoCache",
    "AutoResume",
    "BlockwiseDistillation",
    "BlockwiseRelay",
    "DelayedTeacherUpdate",
    "FreezeAndRepack",
    "GradientNormFreeze",
    "HeadCheckpoint",
    "HeadEarlyStopping",
    "KNNEvaluator",
    "MomentumEMA",
    "OnlineLinearProbe",
    "PipelineThroughputMonitor",
    "PipelineTimeline",
    "RunReport",
    "ScheduledFreeze",
    "TargetWriter",
    "WeightPrediction",
]
ERRORS = [
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "PartitionError",
    "ScheduleError",
    "TSPipeError",
    "TransportError",
]
HEADS = ["FanoutTraining", "HeadOptimizers", "StudentFanout"]
EVALUATION = ["knn_evaluation", "linear_evaluation"]
LANGUAGE = [
    "DistillationLoss",
    "DistillationOutput",
    "KeptTargets",
    "Targets",
    "WithTargets",
    "Perplexity",
    "load_pretrained",
    "pretrained",
]
PUBLIC = {
    "lightning_tspipe": [
        *CALLBACKS,
        *ERRORS,
        *HEADS,
        *EVALUATION,
        *LANGUAGE,
        "PredictsUpdate",
        "TSPipeStrategy",
    ],
    "lightning_tspipe.callbacks": CALLBACKS,
    "lightning_tspipe.caching": [
        "ActivationCache",
        "Boundary",
        "Segment",
        "WithIds",
        "Worth",
        "check_repeatable",
        "fingerprint",
        "fingerprints",
        "ids_of",
        "measure",
        "measure_reading",
    ],
    "lightning_tspipe.errors": ERRORS,
    "lightning_tspipe.evaluation": EVALUATION,
    "lightning_tspipe.heads": HEADS,
}
STRATEGIES = {
    "tspipe": {"schedule": "tspipe"},
    "tspipe_1f1b": {"schedule": "1f1b", "weights": "synchronous"},
    "tspipe_2bw": {"schedule": "1f1b", "weights": "2bw"},
    "tspipe_gpipe": {"schedule": "gpipe"},
    "tspipe_interleaved": {"schedule": "interleaved"},
    "tspipe_pipedream": {"schedule": "1f1b", "weights": "pipedream"},
    "tspipe_pipeoptim": {"schedule": "1f1b", "weights": "pipeoptim"},
    "tspipe_sequential": {"schedule": "sequential"},
    "tspipe_spectrain": {"schedule": "1f1b", "weights": "spectrain"},
    "tspipe_zbv": {"schedule": "zbv"},
}
ARGUMENTS = """
    student teacher num_stages num_microbatches schedule weights drain_epochs costs partition
    split_backward memory_limit state_limit plan activation_checkpointing compile queue_depth
    save_distributed_checkpoint verify_checkpoint zero_stage ranks_per_device timeout start_method
"""
PLAN = """
    schedule pipeline student_cuts teacher_cuts num_microbatches split costs step_seconds
    samples_per_second bubble_ratio memory_bytes state_bytes reason num_replicas speeds memory
    recomputed window teacher_runs
"""
COMMANDS = ["plan", "simulate", "check", "timeline", "plot", "evaluate", "export"]
NAMES = sorted({(module, name) for module, names in PUBLIC.items() for name in names})


@pytest.mark.parametrize("module", PUBLIC)
def test_a_module_exports_its_names_and_no_others(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(PUBLIC[module])


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_has_a_docstring_of_its_own(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    inherited = {base.__doc__ for base in getattr(value, "__mro__", ())[1:]}
    assert inspect.getdoc(value), f"{module}.{name} has no docstring"
    assert value.__doc__ not in inherited, f"{module}.{name} has the docstring of its base"


@pytest.mark.slow  # it imports Ray
def test_names_that_need_an_extra() -> None:
    module = importlib.import_module("lightning_tspipe.integrations.ray")
    assert sorted(module.__all__) == ["RayTSPipeStrategy", "prepare_trainer"]
    text = REFERENCE.read_text(encoding="utf-8")
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name))
        assert name in text


@pytest.mark.parametrize(
    "first",
    [
        "lightning_tspipe.language.pretrained",
        pytest.param("lightning_tspipe", marks=pytest.mark.slow),
        pytest.param("lightning_tspipe.cli.main", marks=pytest.mark.slow),
    ],
)
def test_names_are_what_they_are_whatever_is_imported_first(first: str) -> None:
    """A function has the name of its module, and modules are attributes without being imported."""
    script = (
        f"import {first}, lightning_tspipe, lightning_tspipe.language as language\n"
        "assert callable(lightning_tspipe.pretrained)\n"
        "assert language.pretrained is lightning_tspipe.pretrained\n"
        "assert callable(lightning_tspipe.evaluation.knn_evaluation)\n"
        "assert callable(lightning_tspipe.callbacks.MomentumEMA)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)  # noqa: S603 - ours


def test_every_public_name_is_in_the_reference() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    shown = set(re.findall(r"^(?:::: \S*?|### )(\w+)$", text, re.MULTILINE))
    for members in re.findall(r"members: \[([^]]+)\]", text):
        shown.update(member.strip() for member in members.split(","))
    assert not {name for _, name in NAMES} - shown


@pytest.mark.parametrize("lightning", ["lightning.pytorch", "pytorch_lightning"])
def test_strategies_by_name(lightning: str) -> None:
    registry = importlib.import_module(f"{lightning}.strategies").StrategyRegistry
    own = {name: entry["init_params"] for name, entry in registry.items() if "tspipe" in name}
    assert own == STRATEGIES


def test_arguments_of_the_strategy() -> None:
    parameters = inspect.signature(TSPipeStrategy.__init__).parameters
    assert [name for name in parameters if name not in {"self", "kwargs"}] == ARGUMENTS.split()
    assert {*SCHEDULES, *WINDOWS} == {options["schedule"] for options in STRATEGIES.values()}


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.MULTILINE)
    assert shown == COMMANDS


def test_entries_of_a_plan_file() -> None:
    # Files of earlier versions lack the later ones, which therefore have defaults.
    assert list(Plan.__dataclass_fields__) == PLAN.split()
