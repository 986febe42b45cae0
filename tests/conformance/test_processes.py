"""What the strategy is to hooks and callbacks of a running job, on every rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from tests.integration.comparing import both, labelled
from tests.integration.jobs import run
from tests.integration.trainings import (
    CLOSE,
    RESUMING,
    Session,
    Training,
    delayed,
    train,
)

BYOL = Training(
    "Byol-group-2-by hand", "instance", {"num_microbatches": 1}, callbacks=delayed,
    sizes=((4, 4, 3), (4, 4, 3)),
)  # fmt: skip


def current_rank() -> int:
    """As Lightning's decorators know it; from the environment before they do."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


class Probe(Callback):
    """Asks the strategy in the middle of a training."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.facts["connected in setup"] = dist.is_initialized()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.facts["whole at the start"] = not any(p.is_meta for p in module.parameters())
        self.facts["is the module"] = trainer.strategy.lightning_module is module

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0:
            self.facts |= self._ask(trainer, module)

    def _ask(self, trainer: Any, module: Any) -> dict[str, Any]:
        strategy, rank = trainer.strategy, trainer.global_rank
        optimized = {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]}
        state = module.state_dict()
        module.print("said once")
        strategy.barrier("somewhere")
        return {
            "ranks": (trainer.global_rank, trainer.local_rank, trainer.node_rank),
            "zero": (trainer.is_global_zero, strategy.is_global_zero, current_rank()),
            "sizes": (trainer.world_size, trainer.num_devices, trainer.num_nodes),
            "device": (strategy.root_device, module.device),
            "broadcast": (strategy.broadcast({"from": rank}), strategy.broadcast(rank, src=1)),
            "tensor": strategy.broadcast(torch.full((2,), float(rank))),
            "reduced": [float(strategy.reduce(torch.tensor(2.0), reduce_op=op))
                        for op in ("mean", "sum")],
            "gathered": strategy.all_gather(torch.ones(2)),
            "decisions": [strategy.reduce_boolean_decision(rank == 1, all=every)
                          for every in (True, False)],
            "optimized": optimized == {id(p) for p in module.parameters()},
            "whole": copy.deepcopy(strategy.lightning_module_state_dict()),
            "own": {name: value.clone() for name, value in state.items() if not value.is_meta},
            "names": list(state),
            "log_dir": trainer.log_dir,
            "precision": trainer.precision,
        }  # fmt: skip


def probe(training: Training) -> tuple[dict[str, Any], str, bool, list[str]]:
    asked = Probe()
    it = Session(training, asked, logger=CSVLogger("."), enable_checkpointing=True)
    it.module.save_hyperparameters({"width": 6})
    trainer = it.fit().trainer
    devices = {str(v.device) for s in trainer.optimizers[0].state.values() for v in s.values()
               if isinstance(v, Tensor)}  # fmt: skip
    kept = [name for name in vars(it.module) if name.startswith("_on_before")]
    path = str(trainer.checkpoint_callback.best_model_path)
    return asked.facts, path, devices <= {"cpu"}, kept


def test_what_the_strategy_answers(tmp_path: Path) -> None:
    facts, paths, on_cpu, kept = zip(*run(probe, BYOL, folder=tmp_path), strict=True)
    for rank, fact in enumerate(facts):
        assert fact["connected in setup"]
        assert fact["whole at the start"]
        assert fact["is the module"]
        assert fact["ranks"] == (rank, rank, 0)
        assert fact["zero"] == (rank == 0, rank == 0, rank)
        assert fact["sizes"] == (1, 2, 1)
        assert fact["device"] == (torch.device("cpu"), torch.device("cpu"))
        assert fact["broadcast"] == ({"from": 0}, 1)
        assert fact["tensor"].tolist() == [0.0, 0.0]
        assert fact["reduced"] == [2.0, 2.0]
        assert fact["gathered"].tolist() == [1.0, 1.0]
        assert fact["decisions"] == [False, True]
        assert fact["optimized"]
        assert fact["names"] == facts[0]["names"]
        assert fact["precision"] == "32-true"
    assert facts[0]["log_dir"] == facts[1]["log_dir"]
    assert paths[0] == paths[1]
    assert Path(tmp_path / paths[0]).is_file()
    assert all(on_cpu)
    assert kept == ([], [])
    # The ranks hold parts; together, and on rank 0 when all ask for it, they are the whole.
    whole, parts = facts[0]["whole"], [fact["own"] for fact in facts]
    assert facts[1]["whole"] == {}
    assert list(whole) == facts[0]["names"]
    torch.testing.assert_close({**parts[0], **parts[1]}, whole, rtol=0, atol=0)
    assert all(set(part) < set(whole) for part in parts)
    output = [(tmp_path / f"output-{rank}.txt").read_text() for rank in (0, 1)]
    assert [text.count("said once") for text in output] == [1, 0]
    assert "width: 6" in (tmp_path / facts[0]["log_dir"] / "hparams.yaml").read_text()


CALLBACK_HOOKS = {name for name in vars(Callback) if not name.startswith("_")} - {"state_key"}


def noting(calls: list[str]) -> Callback:
    def note(name: str) -> Callable[..., Any]:
        def noted(*_args: Any, **_kwargs: Any) -> Any:
            calls.append(name)
            return {"calls": len(calls)} if name == "state_dict" else None

        return noted

    return type("Noting", (Callback,), {name: note(name) for name in CALLBACK_HOOKS})()


class LeftError(Exception):
    """All ranks are to leave the training."""


def leave(epoch: int) -> Callable[[Any, Any], None]:
    def on_train_epoch_start(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == epoch:
            raise LeftError

    return on_train_epoch_start


def evaluate_both(module: Any) -> None:
    module.validation_step = lambda batch, batch_idx: module.log(
        "v", module.teacher(batch[0]).sum()
    )
    module.test_step = module.validation_step
    module.predict_step = lambda batch, batch_idx: module.student(batch[0])


def note_everything(training: Training) -> list[str]:
    """A fit that saves, and one that goes on from there and is left in the middle."""
    calls: list[str] = []
    saving = ModelCheckpoint(dirpath="saved", monitor="v", save_top_k=1)
    first = Session(training, noting(calls), saving, change=evaluate_both, ignored=[RESUMING])
    first.fit(validation=labelled(50))
    last = LambdaCallback(on_train_epoch_start=leave(3))
    second = Session(
        training, noting(calls), last, module=first.module, ignored=[RESUMING], max_epochs=5
    )
    with contextlib.suppress(LeftError):
        second.fit(first.loader, labelled(50), ckpt_path=saving.best_model_path)
    return calls


def evaluate_noting(training: Training) -> list[str]:
    calls: list[str] = []
    it = Session(training, noting(calls), change=evaluate_both)
    it.validate(labelled(50))
    it.test(labelled(50))
    it.predict(labelled(50))
    return calls


@pytest.mark.slow
def test_callbacks_are_called_on_every_rank_in_the_same_order(tmp_path: Path) -> None:
    arguments = {
        "enable_checkpointing": True, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1,
    }  # fmt: skip
    training = replace(BYOL, trainer=arguments)
    expected, results = both(note_everything, training, tmp_path / "fits")
    evaluated, others = both(evaluate_noting, training, tmp_path / "evaluations")
    assert {*expected, *evaluated} == CALLBACK_HOOKS
    assert results == [expected, expected]
    assert others == [evaluated, evaluated]


class Order(Callback):
    """In which order Lightning sets things up."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._calls.append("setup hook")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._calls.append("on_fit_start")


def set_up_in_order(training: Training) -> list[str]:
    calls: list[str] = []
    it = Session(training, Order(calls))

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if name not in calls:
                calls.append(name)
            return function(*args, **kwargs)

        setattr(owner, name, noted)

    for name in ("connect", "setup_environment", "setup", "model_to_device", "teardown"):
        note(it.trainer.strategy, name)
    for name in ("configure_model", "configure_optimizers", "training_step"):
        note(it.module, name)
    it.fit()
    return calls


def test_the_order_of_the_set_up(tmp_path: Path) -> None:
    orders = run(set_up_in_order, BYOL, folder=tmp_path)
    expected = ["connect", "setup_environment", "setup hook", "configure_model", "setup",
                "configure_optimizers", "on_fit_start", "training_step", "teardown"]  # fmt: skip
    for calls in orders:
        assert [call for call in calls if call != "model_to_device"] == expected


class Unused(nn.Module):
    """A network with parameters that its forward doesn't read."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.spare = net, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def leave_some_unused(module: Any) -> None:
    module.net = Unused(module.net)
    module.nowhere = nn.Linear(2, 2)
    module.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def start_differently(module: Any) -> None:
    """Each rank has weights of its own; those of rank 0 count."""
    torch.manual_seed(current_rank())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter), alpha=0.01)


def build_late(module: Any) -> None:
    """The network is made in ``configure_model``, when all ranks have the same seed."""
    net, module.net = module.net, None

    def configure_model() -> None:
        module.net = module.net or net

    module.configure_model = configure_model


CLASSIFIER = replace(BYOL, case="Classifier-batch", callbacks=list)


@pytest.mark.parametrize("change", [leave_some_unused, start_differently, build_late])
def test_modules_as_under_ddp(change: Any, tmp_path: Path) -> None:
    expected, results = both(train, replace(CLASSIFIER, change=change), tmp_path)
    torch.testing.assert_close(results[0].losses, expected.losses, **CLOSE)
    torch.testing.assert_close(results[0].weights, expected.weights, **CLOSE)
    assert results[0].meta == []


def fit_then_take_the_best(training: Training) -> Any:
    """The best checkpoint, not the last weights, when no module is given."""
    best = ModelCheckpoint(dirpath="saved", monitor="score", mode="max")
    it = Session(training, best)
    module, trainer = it.module, it.trainer

    def step(batch: Any, batch_idx: int) -> None:
        module.log("score", module.net(batch[0]).square().mean())

    module.validation_step = module.test_step = step
    module.predict_step = lambda batch, batch_idx: module.net(batch[0])
    last = it.fit(validation=labelled(50)).trained.metrics
    from_best = {"ckpt_path": "best", "verbose": False, "weights_only": False}
    tested = trainer.test(dataloaders=labelled(50), **from_best)
    validated = trainer.validate(dataloaders=labelled(50), **from_best)
    predicted = trainer.predict(
        module, labelled(50), ckpt_path=best.best_model_path, weights_only=False
    )
    assert validated == tested
    return last["score"], tested[0]["score"], predicted


def test_evaluating_the_best_checkpoint(tmp_path: Path) -> None:
    arguments = {"enable_checkpointing": True, "max_epochs": 3}
    expected, results = both(
        fit_then_take_the_best, replace(CLASSIFIER, trainer=arguments, optimizer="adamw"), tmp_path
    )
    assert expected[0] != expected[1]
    for last, tested, predicted in results:
        assert (last, tested) == pytest.approx(expected[:2], rel=1e-9)
        torch.testing.assert_close(predicted, expected[2], **CLOSE)
