"""Bad input ends in one clear error that names the remedy, on every rank and without a hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_tspipe import DelayedTeacherUpdate, TSPipeStrategy
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.schedules.registry import SCHEDULES
from lightning_tspipe.strategy.setup.refusals import refuse_fused
from tests.exactness.modules import make_epochs
from tests.integration.by_hand import ByHand, body_and_tail
from tests.integration.jobs import Job, run_job
from tests.integration.trainings import Epochs, Session, Training, train
from tests.unit.cli.profiles import step_profile

BYOL = Training(sizes=((5, 5, 5),), strategy="instance", options={"num_microbatches": 2})


def refused(training: Training, folder: Path, function: Any = train) -> Job:
    """All ranks end soon, not well, and one of them says why."""
    job = run_job(function, training, num_ranks=training.num_ranks, folder=folder, seconds=60)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    if training.num_ranks > 1:
        assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "updated" not in job.output
    return job


class Tell(lightning.pytorch.Callback, pytorch_lightning.Callback):
    """Says that there was an update."""

    def on_train_batch_end(self, *_: Any) -> None:
        print("updated", flush=True)  # noqa: T201


def tell() -> list[Any]:
    return [Tell()]


class Finetuning(lightning.pytorch.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        """Nothing."""

    def finetune_function(self, *_: Any) -> None:
        """Nothing."""


def finetuning() -> list[Any]:
    return [Finetuning(), Tell()]


def by_hand(step: Callable[[Any, Any, int], Any]) -> ByHand:
    return ByHand(step, body_and_tail)


def call_after_step(module: Any, batch: Any, batch_idx: int) -> None:
    first, second = module.optimizers()
    module.manual_backward(module.student(batch["views"][0]).mean())
    first.step()
    module.manual_backward(module.student(batch["views"][1]).mean())
    second.step()


def backward_after_step(module: Any, batch: Any, batch_idx: int) -> None:
    output = module.student(batch["views"][0])
    module.manual_backward(output.mean(), retain_graph=True)
    module.optimizers()[0].step()
    module.manual_backward(output.square().mean())


def toggle_both(module: Any, batch: Any, batch_idx: int) -> None:
    for optimizer, view in zip(module.optimizers(), batch["views"], strict=True):
        with module.toggled_optimizer(optimizer):
            module.manual_backward(module.student(view).mean())
    module.optimizers()[0].step()


def step_with_closure(module: Any, batch: Any, batch_idx: int) -> None:
    def closure() -> Tensor:
        loss: Tensor = module.student(batch["views"][0]).mean()
        module.manual_backward(loss)
        return loss

    module.student(batch["views"][0])
    module.optimizers()[0].step(closure)


def clip_past_lightning(module: Any, batch: Any, batch_idx: int) -> None:
    module.manual_backward(module.student(batch["views"][0]).mean())
    nn.utils.clip_grad_norm_(module.optimizers()[0].param_groups[0]["params"], 1.0)


def delayed_later() -> list[Any]:
    return [DelayedTeacherUpdate(start_step=3), Tell()]


def no_student(module: Any) -> None:
    module.body, module.student = module.student, None
    module.student_names = None
    module.training_step = lambda batch, batch_idx: batch["views"][0].mean().requires_grad_()


def shared_trunk(module: Any) -> None:
    module.teacher = module.student[0]


def tied(module: Any) -> None:
    first, second = (m for m in module.net.modules() if isinstance(m, nn.Conv2d) and m.in_channels)
    second.weight = first.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    module.net.insert(0, nn.Conv2d(3, 4, 1))


def other_teacher(module: Any) -> None:
    further = (nn.Linear(6, 7, bias=False), nn.Linear(7, 6, bias=False))
    module.teacher = nn.Sequential(module.teacher, nn.ReLU(), *further)
    module.teacher.requires_grad_(requires_grad=False)

    def after_step() -> None:
        with torch.no_grad():
            for name, parameter in module.teacher[0].named_parameters():
                other = module.student[0].get_parameter(name)
                parameter.mul_(0.5).add_(other, alpha=0.5)

    module.after_step = after_step


def two_atoms(module: Any) -> None:
    module.net = nn.Sequential(nn.Flatten(), nn.Linear(75, 4))


def step_of(function: Callable[[Any, Any], Tensor]) -> Callable[[Any], None]:
    return _NewStep(function)


class _NewStep:
    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self._function = function

    def __call__(self, module: Any) -> None:
        function = self._function
        module.training_step = lambda batch, batch_idx: function(module, batch)


def decide_by_output(module: Any, batch: Any) -> Tensor:
    first = module.student(batch["views"][0])
    if first.sum() > 0:
        return first.mean()
    return module.student(batch["views"][1]).mean()


def bypass_forward(module: Any, batch: Any) -> Tensor:
    x = module.student(batch["views"][0])
    return nn.functional.linear(x, module.student[2].weight).mean()


def edit_late(module: Any, batch: Any) -> Tensor:
    loss = module.student(batch["views"][0]).mean()
    with torch.no_grad():
        for parameter in module.student.parameters():
            parameter.clamp_(-1, 1)
    return loss


def nothing(module: Any, batch: Any) -> Any:
    module.student(batch["views"][0])


def lbfgs(module: Any) -> None:
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())


def zero(module: Any) -> None:
    module.configure_optimizers = lambda: ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=0.1
    )


def no_calls(module: Any, batch: Any) -> Tensor:
    return (batch["views"][0].mean() * module.student[2].bias.new_ones(())).requires_grad_()


CASES: dict[str, tuple[Training, str, str]] = {
    "fewer atoms than stages": (
        Training("Classifier-group", "instance", {"partition": [1] * 30}, sizes=((5, 5),)),
        "PartitionError", "partition",
    ),
    "fewer atoms than devices": (
        Training("Classifier-group", num_ranks=3, change=two_atoms, sizes=((5, 5),),
                 strategy="instance"),
        "PartitionError", "devices",
    ),
    "student not found": (
        replace(BYOL, strategy="tspipe", change=no_student),
        "ConfigurationError", "none was found that its step calls with a batch. Name the trained",
    ),
    "declared student not found": (
        replace(BYOL, options={"student": ["studemt"]}),
        "ConfigurationError", "has no submodule 'studemt' (its submodules: teacher, student)",
    ),
    "declared teacher not found": (
        replace(BYOL, options={"teacher": "teacher.nine"}),
        "ConfigurationError", "has no submodule 'teacher.nine'",
    ),
    "named twice": (
        replace(BYOL, options={"student": ["student", "student"]}),
        "ConfigurationError", "names a submodule twice",
    ),
    "a network in a network": (
        replace(BYOL, options={"student": ["student", "student.0"]}),
        "ConfigurationError", "declare the whole or its parts, not both",
    ),
    "student is teacher": (
        replace(BYOL, change=shared_trunk),
        "ConfigurationError", "copy.deepcopy makes one",
    ),
    "a tied parameter, and several versions": (
        Training("Classifier-group", "instance", {"partition": [3, 8], "schedule": "1f1b"},
                 sizes=((5, 5),), change=tied),
        "PartitionError", "net.1.weight",
    ),
    "control flow": (
        replace(BYOL, change=step_of(decide_by_output)),
        "CaptureError", "Move that line behind the last call",
    ),
    "a weight of a network in the loss, and several versions": (
        replace(BYOL, change=step_of(bypass_forward), options={"schedule": "1f1b"}),
        "PartitionError", "both read 'student.2.weight'",
    ),
    "a late edit": (
        replace(BYOL, change=step_of(edit_late)),
        "CaptureError", "Move the line before the last call",
    ),
    "no calls": (
        replace(BYOL, change=step_of(no_calls)),
        "NoCallError", "TSPipeStrategy(student=[...]",
    ),
    "no loss": (
        replace(BYOL, change=step_of(nothing)),
        "ConfigurationError", "return a loss of zero",
    ),
    "a pair is cut apart": (
        replace(BYOL, options={"partition": {"student": [2, 8], "teacher": [4, 4]}}),
        "PartitionError", "Give one partition=[...] for both",
    ),
    "no memory": (
        replace(BYOL, options={"memory_limit": 2000}),
        "PartitionError", "Use more devices, smaller batches or a smaller network",
    ),
    "no memory for state": (
        replace(BYOL, options={"state_limit": "1KB"}),
        "PartitionError", "atom 'student.0.0' alone needs",
    ),
    "finetuning": (
        replace(BYOL, callbacks=finetuning),
        "ConfigurationError", "add_param_group",
    ),
    "a call after a step by hand": (
        replace(BYOL, change=by_hand(call_after_step)),
        "CaptureError", "Make all calls before the first optimizer.step",
    ),
    "a backward after a step by hand": (
        replace(BYOL, change=by_hand(backward_after_step)),
        "ConfigurationError", "Call manual_backward for all losses first",
    ),
    "several toggled optimizers": (
        replace(BYOL, change=by_hand(toggle_both)),
        "ConfigurationError", "Toggle one optimizer per batch",
    ),
    "a step with a closure": (
        replace(BYOL, change=by_hand(step_with_closure)),
        "ConfigurationError", "Move the closure's lines before it",
    ),
    "clipping past Lightning": (
        replace(BYOL, change=by_hand(clip_past_lightning)),
        "CaptureError", "Clip with self.clip_gradients(optimizer, ...)",
    ),
    "a delay from a step on, by hand": (
        replace(BYOL, change=by_hand(call_after_step), callbacks=delayed_later),
        "ConfigurationError", "Leave start_step out",
    ),
    "LBFGS": (replace(BYOL, change=lbfgs), "ConfigurationError", "such as SGD or AdamW"),
    "ZeRO": (
        replace(BYOL, change=zero),
        "ConfigurationError", "Use the optimizer that it wraps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, tmp_path: Path) -> None:
    training, kind, remedy = CASES[case]
    if not training.callbacks():
        training = replace(training, callbacks=tell)
    job = refused(training, tmp_path)
    told = [error for error in job.errors if error.startswith(kind)]
    assert told, job.output
    print(told[0])  # noqa: T201
    assert remedy in told[0]


def fit_two_loaders(training: Training) -> None:
    it = Session(training)
    it.fit([it.loader, it.loader])


def test_several_training_loaders(tmp_path: Path) -> None:
    job = refused(replace(BYOL, callbacks=tell), tmp_path, fit_two_loaders)
    assert any("Combine the datasets in one loader" in error for error in job.errors)


def fit_shorter_epoch(training: Training) -> None:
    it = Session(training)
    first, second = make_epochs(it.module, training.sizes)
    it.fit(Epochs([first, second[:-1]]))


def test_a_loader_that_ends_early(tmp_path: Path) -> None:
    training = replace(BYOL, sizes=((5, 5, 5),) * 2)
    job = run_job(fit_shorter_epoch, training, num_ranks=2, folder=tmp_path, seconds=60)
    assert any("ended after 2 batches, and its length said 3" in e for e in job.errors), job.output


def fit_by_iterator(training: Training) -> None:
    it = Session(training)

    def training_step(dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss: Tensor = it.module.student(batch["views"][0]).mean()
        return loss

    it.module.training_step = training_step
    it.fit()


def test_a_step_that_reads_the_loader(tmp_path: Path) -> None:
    job = refused(replace(BYOL, callbacks=tell), tmp_path, fit_by_iterator)
    assert any("training_step(self, batch, batch_idx)" in error for error in job.errors)


def test_loss_scaling_with_a_fused_optimizer() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    with pytest.raises(ConfigurationError, match="Use fused=False"):
        refuse_fused([optimizer])


def test_a_teacher_that_cannot_follow(tmp_path: Path) -> None:
    training = replace(BYOL, case="HookEma-group-2", change=other_teacher)
    job = run_job(train, training, folder=tmp_path)
    assert all(rank.exit_code == 1 for rank in job.ranks), job.output
    assert any("built differently" in error for error in job.errors), job.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "gpip"},
            (
                f"schedule='gpip': choose {', '.join(map(repr, SCHEDULES))}, '1f1b', "
                "'interleaved' or 'zbv'"
            ),
        ),
        ({"num_microbatches": 0}, "num_microbatches=0: must be 'auto' or at least 1"),
        ({"num_microbatches": "two"}, "num_microbatches='two': must be 'auto' or at least 1"),
        (
            {"partition": "even"},
            "partition='even': must be 'auto' or the number of atoms of each stage",
        ),
        ({"memory_limit": "lots"}, "'lots' is not an amount of memory; write '16GiB' or '800MB'"),
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        TSPipeStrategy(**options)


def test_a_plan_for_something_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for plan, message in (
        (
            step_profile().plan(3),
            "the plan was made for 3 devices, but this run has 2 devices: use",
        ),
        (
            step_profile().plan(2),
            "the plan was made for a student of 8 atoms that is called 2 times",
        ),
        (
            replace(step_profile().plan(2), num_replicas=4),
            "the plan was made for 4 replicas of 2 devices, but this run has 2 devices: use",
        ),
    ):
        path.write_text(plan.to_json())
        job = refused(replace(BYOL, options={"plan": str(path)}), tmp_path)
        assert message in job.output
    with pytest.raises(ConfigurationError, match=r"`tspipe plan --save nowhere\.json` writes it"):
        TSPipeStrategy(plan="nowhere.json")
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match="not a plan"):
        TSPipeStrategy(plan=path)
