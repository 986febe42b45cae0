"""What a recording must not lose of a forward, and what can be read of it."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lightning_tspipe
from lightning_tspipe.networks.program import OutputRef
from tests.unit.networks.cutting import cut


class Counted(torch.autograd.Function):
    """Returns its argument, has a backward of its own, and counts its forwards."""

    count = 0

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        Counted.count += not isinstance(x, torch._subclasses.FakeTensor)
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return 3.0 * gradient


class Between(nn.Module):
    """Does something between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def in_pieces(network: nn.Module, x: Tensor) -> tuple[list[Tensor], list[int]]:
    """The output and the gradients, each atom run by itself; how many tensors each passes on."""
    chain = cut(network, x[:3])
    values: tuple[Tensor, ...] = (x,)
    counts = []
    for atom in range(len(chain.atoms)):
        values, _ = chain.run(values, atom, atom + 1)
        counts.append(len(values))
    (output,) = values
    return with_gradients(network, output), counts


def whole(network: nn.Module, x: Tensor) -> list[Tensor]:
    return with_gradients(network, network(x))


def with_gradients(network: nn.Module, output: Tensor) -> list[Tensor]:
    output.square().sum().backward()
    found = [output, *(p.grad for p in network.parameters() if p.grad is not None)]
    network.zero_grad(set_to_none=True)
    return found


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sigmoid()
    return x * scale


def under_enable_grad(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.enable_grad():
        return x.tanh()


TRAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "custom function": Counted.apply,
    "no_grad": under_no_grad,
    "enable_grad": under_enable_grad,
    "detach": lambda x: x * x.detach(),
    "checkpoint": lambda x: checkpoint(
        lambda y: (Counted.apply(y) + x).tanh(), x * 2, use_reentrant=False
    ),
    "reentrant checkpoint": lambda x: checkpoint(Counted.apply, x, use_reentrant=True),
    "compiled": torch.compile(torch.tanh, backend="eager"),
}

NUM_FORWARDS = {"custom function": 1, "checkpoint": 2, "reentrant checkpoint": 2}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("trap", TRAPS)
def test_outputs_and_gradients_at_another_batch_size(trap: str) -> None:
    torch.manual_seed(0)
    network, x = Between(TRAPS[trap]), torch.randn(5, 4)
    counts = [Counted.count]
    expected = whole(network, x)
    counts.append(Counted.count)
    chain = cut(network, x[:3])
    as_one = with_gradients(network, chain.run((x,), 0, len(chain.atoms))[0][0])
    counts.append(Counted.count)
    for found in (as_one, in_pieces(network, x)[0]):
        assert len(found) == len(expected) == 5
        assert all(map(torch.equal, found, expected))
    # A checkpointed region runs again in the backward.
    assert counts[2] - counts[1] == counts[1] - counts[0] == NUM_FORWARDS.get(trap, 0)


class Around(nn.Module):
    """Calls a part within a context, which notes what holds there whenever it runs."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.context = context
        self.part.register_forward_hook(note)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with self.context():
            x = self.part(x.float())
        return self.last(x.float())  # type: ignore[no-any-return]


NOTES: list[Any] = []


def note(*_: Any) -> None:
    kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    NOTES.append((torch.is_grad_enabled(), kind, _cur_sdpa_kernel_backends()))


autocast = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("outside", [torch.enable_grad, autocast])
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        autocast,
        partial(autocast, enabled=False),
        partial(torch.autocast, "cpu", torch.float16),
        partial(sdpa_kernel, SDPBackend.MATH),
    ],
)
def test_what_holds_around_a_call_belongs_to_it(
    context: Callable[[], AbstractContextManager[Any]],
    outside: Callable[[], AbstractContextManager[Any]],
) -> None:
    network, x = Around(context), torch.randn(3, 4)
    chain = cut(network, x)
    with outside():
        NOTES.clear()
        note()
        expected = network(x)
        found = chain.run((x,), 0, len(chain.atoms))[0][0]
        note()
    before, plain, *_, recorded, after = NOTES  # it is recorded again under autocast
    assert recorded == plain
    assert before == after
    assert torch.equal(found, expected)


class Attending(nn.Module):
    """Layers with attention, which share a mask and tables of a rotary embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(0, 1, 0.25))
        table = torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            turned = torch.view_as_complex(layer(x).unflatten(-1, (4, 2)).contiguous()) * table
            heads = torch.view_as_real(turned).flatten(-2)
            x = x + functional.scaled_dot_product_attention(heads, heads, x, mask)
        return x


def test_masks_and_rotary_tables_are_made_again_in_each_part() -> None:
    network, x = Attending(), torch.randn(5, 6, 8)
    expected = whole(network, x)
    found, counts = in_pieces(network, x)
    assert len(counts) > 3
    assert max(counts) <= 2  # what is skipped, and what was made of it
    assert all(map(torch.equal, found, expected))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.fpn = torchvision.ops.FeaturePyramidNetwork([4, 8], 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = self.first(x)
        maps = OrderedDict(one=one, two=self.second(one.relu()))
        return self.fpn(maps)  # type: ignore[no-any-return]


def test_a_feature_pyramid_is_cut() -> None:
    network, x = Pyramid(), torch.randn(5, 3, 8, 8)
    chain = cut(network, x[:3])
    assert len([atom for atom in chain.atoms if atom.parameter_names]) > 3
    expected = network(x)
    values: tuple[Tensor, ...] = (x,)
    found: dict[OutputRef, Tensor] = {}
    for atom in range(len(chain.atoms)):
        values, given = chain.run(values, atom, atom + 1)
        found |= given
    for ref, other in zip(chain.outputs, expected.values(), strict=True):
        assert torch.equal(found[ref], other)


@functools.lru_cache
def positions(number: int) -> Tensor:
    return torch.arange(float(number))


def test_cached_functions_keep_no_tensors_without_values() -> None:
    network, x = Between(lambda x: x + positions(4)), torch.randn(3, 4)
    chain = cut(network, x)
    assert positions(4).tolist() == [0, 1, 2, 3]
    assert torch.equal(chain.run((x,), 0, len(chain.atoms))[0][0], network(x))


def halved_by_number(x: Tensor) -> Tensor:
    return x / 2 if len(x) > 4 else x + int(x.shape[0])


def test_a_forward_that_decides_by_the_number_of_samples_is_recorded_for_each() -> None:
    network = Between(halved_by_number)
    chain = cut(network, torch.randn(3, 4))
    for number in (3, 5, 2, 6, 1):
        x = torch.randn(number, 4)
        assert torch.equal(chain.run((x,), 0, len(chain.atoms))[0][0], network(x))


def test_a_tape_is_printed_with_paths_of_modules_and_lines() -> None:
    network = nn.Sequential(nn.Linear(4, 4), Between(torch.relu))
    text = str(cut(network, torch.randn(3, 4)).first.tape)
    for line in (
        r"1.first:",
        r"  1 +v\d+ += Linear\(v\d+\)  # .*test_recording\.py:\d+ \(return self\.last",
        r"1:",
        r"  2 +v\d+ += relu\(v\d+\)  # .*test_recording\.py:\d+ \(return self\.last",
        r"return v\d+",
    ):
        assert re.search(rf"(?m)^{line}", text), f"{line}\n{text}"


def test_nothing_else_traces_networks() -> None:
    for file in Path(lightning_tspipe.__file__).parent.rglob("*.py"):
        used = set(re.findall(r"torch\.(?:fx|jit|export)[\w.]*", file.read_text(encoding="utf-8")))
        # The second is for a setting of meta tensors.
        assert used <= {"torch.fx.experimental.symbolic_shapes", "torch.fx.experimental"}, file


def test_nobody_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without one that has asked can't be forked any more."""

    def asked() -> bool:
        pytest.fail("asked for a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    cut(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.randn(2, 3, 4, 4))
