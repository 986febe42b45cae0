"""Names, flags and plugins: what a Trainer makes of ``strategy=``, without starting anything."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import (
    DoublePrecision,
    MixedPrecision,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
)
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)

from lightning_tspipe import TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.strategy.setup.refusals import refuse_trainer

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
NAMES = ("tspipe", "tspipe_gpipe", "tspipe_sequential")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def make_trainer(**arguments: Any) -> Any:
    return Trainer(**{"accelerator": "cpu", "devices": 2, **QUIET, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("package", NAMESPACES)
def test_names_are_registered_in_both_namespaces(package: str) -> None:
    registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
    assert set(NAMES) <= set(registry.available_strategies())
    assert registry["tspipe_gpipe"]["init_params"] == {"schedule": "gpipe"}
    assert "schedule" in registry["tspipe"]["description"]


class Own(TSPipeStrategy):
    """A user's."""


@pytest.mark.parametrize("package", NAMESPACES)
def test_a_users_subclass_stays_what_it_is(package: str) -> None:
    strategy = Own(num_microbatches=2)
    trainer = importlib.import_module(package).Trainer
    made = trainer(strategy=strategy, accelerator="cpu", devices=2, **QUIET).strategy
    assert type(made) is Own
    assert made.namespace.name == package


@pytest.mark.parametrize("package", NAMESPACES)
def test_inherited_methods_are_those_of_the_trainers_namespace(package: str) -> None:
    library = importlib.import_module(package)
    strategy = TSPipeStrategy()
    library.Trainer(strategy=strategy, accelerator="cpu", devices=2, **QUIET)
    strategy.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)]
    (wrapped,) = strategy._lightning_optimizers
    core = importlib.import_module(f"{package}.core.optimizer")
    assert isinstance(wrapped, core.LightningOptimizer)


def test_no_attribute_comes_after_construction() -> None:
    """An object is complete when it exists, and so are its components."""
    strategy = TSPipeStrategy()
    parts = {**vars(strategy), **vars(strategy._parts)}
    objects = [strategy, *(part for part in parts.values() if _is_own(part))]
    assert len(objects) > 15
    for each in objects:
        found = {name for kind in type(each).__mro__ if _is_own(kind) for name in _assigned(kind)}
        assert found <= {*vars(each), *dir(type(each))}, type(each).__name__


def _is_own(thing: Any) -> bool:
    kind = thing if isinstance(thing, type) else type(thing)
    return kind.__module__.startswith("lightning_tspipe.strategy.")


def _assigned(kind: type) -> set[str]:
    """The attributes of ``self`` that a class sets anywhere in its methods."""
    if kind.__name__ == "LightningStrategy":  # made when the package is imported
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in targets
        if isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
    }


@pytest.mark.parametrize("package", NAMESPACES)
@pytest.mark.parametrize("name", [*NAMES, "TSPipe"])
def test_a_name_gives_a_strategy_of_the_trainers_namespace(name: str, package: str) -> None:
    trainer = importlib.import_module(package).Trainer(
        strategy=name, accelerator="cpu", devices=2, **QUIET
    )
    base = importlib.import_module(f"{package}.strategies").ParallelStrategy
    assert isinstance(trainer.strategy, TSPipeStrategy)
    assert isinstance(trainer.strategy, base)
    expected = name.lower().removeprefix("tspipe").removeprefix("_") or "tspipe"
    assert trainer.strategy.options.schedule == expected


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='tspipe_fast'`"):
        make_trainer(strategy="tspipe_fast")


def test_devices_become_ranks() -> None:
    strategy = make_trainer(strategy="tspipe", devices=3).strategy
    assert strategy.parallel_devices == [torch.device("cpu")] * 3
    assert (strategy.num_processes, strategy.num_ranks) == (3, 3)
    shared = make_trainer(strategy=TSPipeStrategy(ranks_per_device=2)).strategy
    assert (shared.num_processes, shared.num_ranks) == (4, 4)


def test_the_accelerator_is_found() -> None:
    trainer: Any = Trainer(strategy="tspipe", devices=2, **QUIET)  # type: ignore[arg-type]
    found = "cuda" if torch.cuda.is_available() else "cpu"
    assert {device.type for device in trainer.strategy.parallel_devices} == {found}


@pytest.mark.parametrize("devices", [0, []])
def test_no_devices(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match="is not a valid input"):
        make_trainer(strategy="tspipe", devices=devices)


def test_learning_rate_rules_see_replicas() -> None:
    strategy = make_trainer(strategy="tspipe").strategy
    assert strategy.world_size == 1
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ({"accelerator": "cpu"}, {"accelerator": "cpu"}, "accelerator set through both"),
        ({"precision_plugin": DoublePrecision()}, {"plugins": [DoublePrecision()]},
         "precision set through both"),
        ({"checkpoint_io": TorchCheckpointIO()}, {"plugins": [TorchCheckpointIO()]},
         "checkpoint_io set through both"),
        ({"cluster_environment": LightningEnvironment()}, {"plugins": [LightningEnvironment()]},
         "cluster_environment set through both"),
        ({"parallel_devices": [torch.device("cuda", 0)]}, {"accelerator": "cpu"},
         "choose one device type"),
        ({}, {"plugins": [TSPipeStrategy()]}, "invalid type for plugin"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)  # fmt: skip
def test_contradictions(options: Any, arguments: Any, words: str) -> None:
    if "accelerator" in options:
        options = {
            "accelerator": importlib.import_module(
                "lightning.pytorch.accelerators"
            ).CPUAccelerator()
        }
    with pytest.raises(MisconfigurationException, match=words):
        make_trainer(strategy=TSPipeStrategy(**options), **arguments)


def test_plugins_of_the_trainer_are_taken() -> None:
    files = TorchCheckpointIO()
    strategy = make_trainer(strategy="tspipe", plugins=[files], precision="bf16-mixed").strategy
    assert strategy.checkpoint_io is files
    assert isinstance(strategy.precision_plugin, MixedPrecision)
    own = make_trainer(strategy=TSPipeStrategy(precision_plugin=DoublePrecision())).strategy
    assert isinstance(own.precision_plugin, DoublePrecision)


def test_arguments_of_other_strategies_are_not_swallowed() -> None:
    with pytest.raises(TypeError, match="find_unused_parameters"):
        TSPipeStrategy(find_unused_parameters=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "devices", "launcher"),
    [
        ({}, 2, _SubprocessScriptLauncher),
        ({"start_method": "spawn"}, 2, _MultiProcessingLauncher),
        ({"start_method": "fork"}, 2, _MultiProcessingLauncher),
        ({}, 1, type(None)),
    ],
)
def test_launchers(options: Any, devices: int, launcher: type) -> None:
    trainer = make_trainer(strategy=TSPipeStrategy(**options), devices=devices)
    assert isinstance(trainer.strategy.launcher, launcher)


@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        ({}, LightningEnvironment),
        ({"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "GROUP_RANK": "0", "LOCAL_RANK": "1",
          "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, TorchElasticEnvironment),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "job", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
          "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2"}, SLURMEnvironment),
    ],
)  # fmt: skip
def test_cluster_environments(
    variables: dict[str, str], environment: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = make_trainer(strategy="tspipe").strategy
    assert type(strategy.cluster_environment) is environment
    if variables:
        assert strategy.launcher is None
        assert (strategy.local_rank, strategy.node_rank) == (1, 0)


def trainer_with(**attributes: Any) -> Any:
    strategy = SimpleNamespace(_layer_sync=attributes.pop("layer_sync", None))
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(**{"strategy": strategy, "callbacks": [], "state": state, **attributes})


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_other_accelerators(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"accelerator='cpu' and 'cuda', not on '{kind}'"):
        refuse_trainer(trainer_with(), torch.device(kind))
    refuse_trainer(trainer_with(), torch.device("cpu"))


def test_synchronised_batch_normalisation() -> None:
    for arguments in ({"sync_batchnorm": True}, {"plugins": [TorchSyncBatchNorm()]}):
        trainer = make_trainer(strategy="tspipe", **arguments)
        with pytest.raises(ConfigurationError, match="has nothing to synchronise"):
            refuse_trainer(trainer, torch.device("cpu"))
