from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tspipe.callbacks import DelayedTeacherUpdate, MomentumEMA
from lightning_tspipe.errors import CaptureError, ConfigurationError


class Trainable(Protocol):
    student: nn.Module
    teacher: nn.Module
    losses: list[float]

    def configure_optimizers(self) -> torch.optim.Optimizer: ...

    def state_dict(self) -> dict[str, Any]: ...


@torch.no_grad()
def average(module: Trainable, momentum: float = 0.5) -> None:
    students = dict(module.student.named_parameters())
    for name, parameter in module.teacher.named_parameters():
        parameter.copy_(momentum * parameter + (1 - momentum) * students[name])


def train_stale(
    module: Trainable,
    epochs: list[list[Tensor]],
    *,
    ema: str,
    accumulate: int = 1,
    start_step: int = 0,
) -> None:
    """Training with the teacher one update late, in plain lines."""
    optimizer = module.configure_optimizers()
    step = 0
    for batches in epochs:
        late: dict[str, Tensor] = {}
        for index, batch in enumerate(batches):
            prediction = module.student(batch)
            if ema == "in_step":
                average(module)
            with torch.no_grad():
                versions = late if step >= start_step else {}
                target = functional_call(module.teacher, versions, batch)
            loss = (prediction - 1 - target).square().mean()
            module.losses.append(loss.item())
            (loss / accumulate).backward()
            late = read_by_forward(module.teacher)
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if ema == "callback":
                    average(module)


def read_by_forward(network: nn.Module) -> dict[str, Tensor]:
    """Copies of what a forward reads and does not write."""
    tensors: dict[str, Tensor] = dict(network.named_parameters())
    if not network.training:
        tensors |= dict(network.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def callbacks_for(ema: str, **options: Any) -> list[Callback]:
    delayed = DelayedTeacherUpdate(**options)
    return [MomentumEMA(0.5), delayed] if ema == "callback" else [delayed]


def hook_for(ema: str) -> Callable[[Trainable], None] | None:
    return average if ema == "in_step" else None


@pytest.mark.parametrize("ema", ["in_step", "callback"])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(("accumulate", "start_step"), [(1, 0), (2, 0), (1, 3)])
def test_equals_a_stale_loop(
    ema: str, batch_norm: bool, accumulate: int, start_step: int, lab: SimpleNamespace
) -> None:
    loader = lab.loader(6)
    reference = lab.module(batch_norm=batch_norm)
    train_stale(
        reference, [loader.batches] * 2, ema=ema, accumulate=accumulate, start_step=start_step
    )
    module = lab.module(batch_norm=batch_norm, after_student=hook_for(ema))
    trainer = lab.trainer(
        callbacks=callbacks_for(ema, start_step=start_step), accumulate_grad_batches=accumulate
    )
    trainer.fit(module, loader)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


def test_by_hand_the_last_backward_of_a_batch_counts(lab: SimpleNamespace) -> None:
    class ByHand(lab.module):  # type: ignore[misc, name-defined]
        automatic_optimization = False

        def training_step(self, batch: Tensor) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):  # with the same late teacher
                self.manual_backward(super().training_step(batch) / 2)
            optimizer.step()

    loader = lab.loader(5)
    reference, module = lab.module(), ByHand()
    train_stale(reference, [loader.batches] * 2, ema="callback")
    lab.trainer(callbacks=callbacks_for("callback")).fit(module, loader)
    assert module.losses[::2] == module.losses[1::2]
    assert module.losses[::2] == pytest.approx(reference.losses, rel=1e-12)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ema", ["in_step", "callback"])
def test_the_delay_matters_and_zero_is_none(ema: str, lab: SimpleNamespace) -> None:
    loader = lab.loader(4)
    losses = {}
    for delay in (None, 0, 1):
        module = lab.module(after_student=hook_for(ema))
        callbacks = callbacks_for(ema, delay=delay or 0)
        if delay is None:
            callbacks.pop()
        lab.trainer(callbacks=callbacks, max_epochs=1).fit(module, loader)
        losses[delay] = module.losses
    assert losses[0] == losses[None]
    assert losses[1][0] == losses[0][0]  # nothing to run ahead of
    assert losses[1][1:] != losses[0][1:]


@pytest.mark.filterwarnings("ignore:Found 4 module.s. in eval mode")  # as it should be
def test_eval_mode_buffers_are_late_too(lab: SimpleNamespace) -> None:
    class CopyBuffers(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
            copy_buffers(pl_module)

    def copy_buffers(module: Trainable) -> None:
        sources = dict(module.student.named_buffers())
        for name, buffer in module.teacher.named_buffers():
            buffer.copy_(sources[name])

    loader = lab.loader(4)
    reference = lab.module(batch_norm=True)
    reference.teacher.eval()
    optimizer = reference.configure_optimizers()
    late: dict[str, Tensor] = {}
    for batch in loader.batches:
        with torch.no_grad():
            target = functional_call(reference.teacher, late, batch)
        loss = (reference.student(batch) - 1 - target).square().mean()
        reference.losses.append(loss.item())
        loss.backward()
        late = read_by_forward(reference.teacher)
        optimizer.step()
        optimizer.zero_grad()
        copy_buffers(reference)

    module = lab.module(batch_norm=True)
    module.teacher.eval()
    callbacks = [CopyBuffers(), DelayedTeacherUpdate()]
    lab.trainer(callbacks=callbacks, max_epochs=1).fit(module, loader)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ema", ["in_step", "callback"])
def test_resumes_within_an_epoch(ema: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    path = tmp_path / "late.ckpt"
    whole = lab.module(after_student=hook_for(ema))
    lab.trainer(callbacks=callbacks_for(ema), max_epochs=1).fit(whole, lab.loader(6))

    first = lab.module(after_student=hook_for(ema))
    callbacks = [*callbacks_for(ema), Save()]
    trainer = lab.trainer(callbacks=callbacks, max_steps=3, max_epochs=1)
    trainer.fit(first, lab.loader(6))

    second = lab.module(after_student=hook_for(ema))
    trainer = lab.trainer(callbacks=callbacks_for(ema), max_epochs=1)
    trainer.fit(second, lab.loader(6), ckpt_path=path, weights_only=True)
    assert first.losses + second.losses == whole.losses
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_nothing_is_saved_between_epochs(lab: SimpleNamespace) -> None:
    delayed = DelayedTeacherUpdate()
    lab.trainer(callbacks=[delayed]).fit(lab.module(), lab.loader(3))
    assert delayed.state_dict() == {}


def test_calls_of_the_teachers_parts(lab: SimpleNamespace) -> None:
    class Parts(lab.module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor) -> Tensor:
            target = batch
            for part in self.teacher:
                target = part(target)
            loss: Tensor = (self.student(batch) - 1 - target).square().mean()
            self.losses.append(loss.item())
            return loss

    loader = lab.loader(5)
    reference = lab.module()
    train_stale(reference, [loader.batches], ema="callback")
    module = Parts()
    lab.trainer(callbacks=callbacks_for("callback"), max_epochs=1).fit(module, loader)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)


def test_methods_of_the_teacher_look_as_they_are(lab: SimpleNamespace) -> None:
    """transformers asks how many arguments one takes."""

    class Asks(nn.Sequential):
        def own(self, x: Tensor) -> Tensor:
            assert len(signature(self.own).parameters) == 1
            made: Tensor = self(x)
            return made

    class Calling(lab.module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = (self.student(batch) - 1 - self.teacher.own(batch)).square().mean()
            self.losses.append(loss.item())
            return loss

    loader, reference, module = lab.loader(5), lab.module(), Calling()
    train_stale(reference, [loader.batches], ema="callback")
    module.teacher = Asks(*module.teacher)
    lab.trainer(callbacks=callbacks_for("callback"), max_epochs=1).fit(module, loader)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)


def test_a_failing_forward_leaves_the_live_weights(lab: SimpleNamespace) -> None:
    class Failing(lab.module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.teacher(batch[:, : 4 if batch_idx < 2 else 3])
            loss: Tensor = super().training_step(batch)
            return loss

    module = Failing()
    storages = [parameter.data_ptr() for parameter in module.teacher.parameters()]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        lab.trainer(callbacks=callbacks_for("callback")).fit(module, lab.loader(4))
    assert [parameter.data_ptr() for parameter in module.teacher.parameters()] == storages
    assert not any(part._forward_hooks for part in module.teacher.modules())


def test_works_in_the_other_lightning_world(lab: SimpleNamespace, tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            twin = lab.module()
            self.student, self.teacher, self.losses = twin.student, twin.teacher, twin.losses

        training_step = lab.module.training_step
        configure_optimizers = lab.module.configure_optimizers
        after_student = None

    assert all(isinstance(callback, other.Callback) for callback in callbacks_for("callback"))
    loader = lab.loader(5)
    reference = lab.module()
    train_stale(reference, [loader.batches] * 2, ema="callback")
    module = Other()
    trainer = other.Trainer(
        accelerator="cpu",
        callbacks=callbacks_for("callback"),
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=2,
    )
    trainer.fit(module, loader)
    assert module.losses == pytest.approx(reference.losses, rel=1e-12)


def test_under_a_pipeline_it_only_declares(lab: SimpleNamespace) -> None:
    trainer = lab.trainer(callbacks=callbacks_for("callback"), max_epochs=1)
    trainer.strategy.pipelined = SimpleNamespace(is_loss_rank=True, averages=dict)
    module = lab.module()
    trainer.fit(module, lab.loader(4))
    plain = lab.module()
    lab.trainer(callbacks=[MomentumEMA(0.5)], max_epochs=1).fit(plain, lab.loader(4))
    assert module.losses == plain.losses


@pytest.mark.parametrize("options", [{"delay": 2}, {"delay": -1}, {"start_step": -1}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigurationError, match=f"^{name}={value}( must be 1| is negative)"):
        DelayedTeacherUpdate(**options)


def test_refusals(lab: SimpleNamespace) -> None:
    def fit(module: LightningModule, **options: Any) -> None:
        callbacks = [DelayedTeacherUpdate(**options)]
        lab.trainer(callbacks=callbacks, max_epochs=1).fit(module, lab.loader(3))

    class Trained(lab.module):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = (self.student(batch) - self.teacher(batch)).square().mean()
            return loss

    class Rebound(lab.module):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: object) -> None:
            self.teacher = nn.Linear(5, 5)

    class Repeated(lab.module):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.student.parameters())

    with pytest.raises(ConfigurationError, match="autograd records the teacher's forward"):
        fit(Trained())
    with pytest.raises(CaptureError, match="in the place of the network 'teacher'"):
        fit(Rebound())
    with pytest.raises(ConfigurationError, match="several times per batch"):
        fit(Repeated())
    with pytest.raises(ConfigurationError, match="no submodule 'mentor'"):
        fit(lab.module(), teacher="mentor")
