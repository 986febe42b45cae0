from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.throughput.memory import count
from benchmarks.throughput.tiny import HalfOfTiny, Tiny
from benchmarks.throughput.torch_gpipe import LOSSES, Targets, halves
from benchmarks.throughput.workloads import (
    WORKLOADS,
    byol_loss,
    contrastive_loss,
    distillation_loss,
)


def trained_module() -> tuple[nn.ModuleDict, SGD]:
    module = nn.ModuleDict({"student": nn.Linear(8, 4), "teacher": nn.BatchNorm1d(4)})
    module["teacher"].requires_grad_(requires_grad=False)
    optimizer = SGD(module["student"].parameters(), lr=0.1, momentum=0.9)
    module["student"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_count_splits_bytes_by_purpose() -> None:
    gc.collect()
    # Other tests' parameters may still live in this process.
    others = count(nn.Identity(), SGD([torch.zeros(1)], lr=0.1))
    module, optimizer = trained_module()
    held = count(module, optimizer)
    parameters = 4 * (8 * 4 + 4)
    assert held.gradients - others.gradients == held.optimizer == parameters
    assert held.student - others.student == parameters
    assert held.fixed >= 4 * 4 * 4 + 8  # weight, bias, mean, variance; the counter of batches


def test_count_leaves_out_what_other_ranks_hold() -> None:
    module, optimizer = trained_module()
    before = count(module, optimizer).student
    torch.utils.swap_tensors(
        module["student"].weight, nn.Parameter(torch.empty(4, 8, device="meta"))
    )
    assert count(module, optimizer).student == before - 4 * 8 * 4


def test_count_finds_a_copy_outside_of_the_module() -> None:
    module, optimizer = trained_module()
    before = count(module, optimizer).student
    copy = nn.Parameter(torch.empty(100))
    assert count(module, optimizer).student == before + copy.nbytes


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("network", ["student", "teacher"])
def test_halves_are_the_network(name: str, network: str) -> None:
    torch.manual_seed(0)
    module = WORKLOADS[name].module()
    images = torch.randn(2, 3, 64, 64)
    whole = module.get_submodule(network).eval()
    first, second = halves(whole)
    with torch.no_grad():
        torch.testing.assert_close(second(first(images)), whole(images))
    assert {id(p) for p in (*first.parameters(), *second.parameters())} == {
        id(p) for p in whole.parameters()
    }


def test_an_unknown_network_has_no_halves() -> None:
    with pytest.raises(TypeError, match="Linear"):
        halves(nn.Linear(2, 2))


def whole_loss(name: str, outputs: Tensor, targets: Targets) -> Tensor:
    if name == "kd":
        return distillation_loss(outputs, targets.teacher, targets.labels)
    (output0, output1), (target0, target1) = outputs.chunk(2), targets.teacher.chunk(2)
    if name == "byol":
        return (byol_loss(output0, target1) + byol_loss(output1, target0)) / 2
    rows = torch.arange(len(output0))
    return contrastive_loss(output0, target1, rows) + contrastive_loss(output1, target0, rows)


@pytest.mark.parametrize("name", LOSSES)  # of the workloads that torch's GPipe takes part in
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_losses_of_microbatches_average_to_the_loss_of_the_batch(
    name: str, num_microbatches: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    targets = Targets(
        torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 3] * 2)
    )
    parts = zip(
        outputs.chunk(num_microbatches), torch.arange(8).chunk(num_microbatches), strict=True
    )
    losses = [LOSSES[name](output, rows, targets) for output, rows in parts]
    torch.testing.assert_close(torch.stack(losses).mean(), whole_loss(name, outputs, targets))


@pytest.mark.parametrize("name", WORKLOADS)
def test_batches_differ_from_each_other_and_not_from_run_to_run(name: str) -> None:
    first, again = (WORKLOADS[name].batches(2, seed=1) for _ in range(2))
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_of_every_workload_moves_the_student_only(name: str) -> None:
    torch.manual_seed(0)
    module = WORKLOADS[name].module()
    module.log = lambda *_: None  # type: ignore[method-assign]  # no Trainer here
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    loss = module.training_step(WORKLOADS[name].batches(4, seed=0)[0], 0)
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = {n for n, p in module.named_parameters() if p.grad is not None}
    assert gradients == {n for n, _ in module.named_parameters() if n.startswith("student.")}


def test_half_of_tiny_runs_the_backward_of_every_microbatch() -> None:
    batch = (torch.randn(16, 16), torch.randn(16, 16))
    half = HalfOfTiny()
    half.training_step(batch, 0).backward()
    gradients = [parameter.grad for parameter in half.student.parameters()]
    whole = Tiny(num_layers=len(half.student))
    whole.load_state_dict(half.state_dict())
    with torch.no_grad():
        targets = torch.cat([whole.teacher(view) for view in batch])
    outputs = torch.cat([whole.student(view) for view in batch])
    (outputs - targets).square().mean().backward()
    for gradient, parameter in zip(gradients, whole.student.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
