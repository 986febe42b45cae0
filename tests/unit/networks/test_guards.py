"""A network that has changed since it was recorded is recorded again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.guards import one_moment
from lightning_tspipe.runtime.stages.batchnorm import DeferredStatistics
from tests.unit.networks.cutting import cut


class Settings:
    """Not a module: an object that modules hold, with a default in its class."""

    gain = 1.0

    def __init__(self) -> None:
        self.offset = 0.5


class Head(nn.Module):
    factor = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = 0.5
        self.scales = [1.0, 2.0]
        self.nested = {"a": {"b": 1.0}}
        self.settings = Settings()
        self.names = SimpleNamespace(power=2)
        self.activations = [torch.tanh]
        self.shift = nn.Buffer(torch.zeros(4))
        self.added = nn.ParameterList()
        self._uses_gelu = False
        self.late: Tensor | None
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) / self.temperature + self.settings.offset * self.nested["a"]["b"]
        x = x * self.settings.gain * self.factor + self.shift
        x = x**self.names.power if self.late is None else x * self.late
        for activation in self.activations:
            x = activation(x)
        for parameter in self.added:
            x = x * parameter
        return nn.functional.gelu(x) if self._uses_gelu else x * self.scales[-1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.head = Head()
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x if self.skips else self.head(x)


def set_(name: str, value: Any) -> Callable[[Net], object]:
    return lambda net: setattr(net.head, name, value)


CHANGES: dict[str, Callable[[Net], object]] = {
    "temperature": set_("temperature", 0.25),
    "list": lambda net: net.head.scales.append(3.0),
    "list in a list": lambda net: net.head.nested["a"].update(b=3.0),
    "list of functions": lambda net: net.head.activations.append(torch.sin),
    "object": lambda net: setattr(net.head.settings, "offset", 3.0),
    "default in an object's class": lambda net: setattr(net.head.settings, "gain", 3.0),
    "object of C": lambda net: setattr(net.head.names, "power", 3),
    "default in the class": set_("factor", 3.0),
    "values of a buffer": lambda net: net.head.shift.fill_(3.0),
    "buffer that was none": set_("late", torch.full((4,), 3.0)),
    "branch": set_("_uses_gelu", True),
    "module": set_("linear", nn.Linear(4, 4)),
    "hook": lambda net: net.stem.register_forward_hook(lambda *args: args[2] + 1),
    "weights": lambda net: nn.init.zeros_(net.head.linear.weight),
    "mode": lambda net: net.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    for _ in range(2):
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, net(x))
        CHANGES[change](net)
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, net(x))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda net: setattr(net, "skips", True), "`skips` was False and is True now"),
        (
            lambda net: net.head.added.append(nn.Parameter(torch.ones(4))),
            r"`head\.added\._size` was 0 and is 1 now",
        ),
        (lambda net: net.head.register_forward_hook(print), "a hook was registered"),
        (lambda net: setattr(net, "head", nn.Identity()), "`head` is another module now"),
    ],
)
def test_what_cannot_be_served_by_the_same_cut_says_what_has_changed(
    change: Callable[[Net], object], why: str
) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    change(net)
    with pytest.raises(PartitionError, match=why):
        chain.run((x,), 0, len(chain.atoms))


def test_a_change_back_is_found_and_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)
    net.head.temperature = 2.0
    (hot,) = chain.run((x,), 0, len(chain.atoms))[0]
    monkeypatch.setattr("lightning_tspipe.networks.program.record", None)
    for temperature in (0.5, 2.0):
        net.head.temperature = temperature
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        assert torch.equal(found, hot) == (temperature == 2.0)
        assert torch.equal(found, net(x))


def test_within_a_moment_it_is_looked_once() -> None:
    net, x = Net(), torch.randn(3, 4)
    chain = cut(net, x)

    def run() -> Tensor:
        (found,) = chain.run((x,), 0, len(chain.atoms))[0]
        return found

    cold = run()
    with one_moment() as begin_another:
        assert torch.equal(run(), cold)
        net.head.temperature = 2.0
        assert torch.equal(run(), cold)
        with one_moment():
            assert torch.equal(run(), net(x))
        begin_another()
        assert torch.equal(run(), net(x))
    net.head.temperature = 0.5
    assert torch.equal(run(), cold)


class Choosing(nn.Module):
    """What is read behind both layers decides what passes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.negates = False

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        other = -one
        return self.second(other if self.negates else one)


def test_what_later_layers_read_decides_what_earlier_ones_pass_on() -> None:
    net, x = Choosing(), torch.randn(3, 4)
    chain = cut(net, x)
    for negates in (False, True):
        net.negates = negates
        values: tuple[Tensor, ...] = (x,)
        for atom in range(len(chain.atoms)):
            values, _ = chain.run(values, atom, atom + 1)
        assert torch.equal(values[0], net(x))


def test_inputs_of_another_type_are_recorded_again() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.float()).to(x.dtype)  # type: ignore[no-any-return]

    net, x = Casting(), torch.randn(3, 4)
    chain = cut(net, x)
    for given in (x, x.double(), x):
        (found,) = chain.run((given,), 0, len(chain.atoms))[0]
        assert found.dtype == given.dtype
        assert torch.equal(found, net(given))


def test_hooks_that_only_note_what_comes_out_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def note(*_args: Any) -> None:
        pass

    note.__module__ = "transformers.utils.output_capturing"
    net, x = Net(), torch.randn(3, 4)
    net.head.register_forward_hook(note)
    chain = cut(net, x)
    monkeypatch.setattr("lightning_tspipe.networks.program.record", None)
    assert torch.equal(chain.run((x,), 0, len(chain.atoms))[0][0], net(x))


def test_a_recording_within_a_call_counts_no_statistics() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 4))
    reference, chain = copy.deepcopy(network), cut(network, torch.randn(3, 4))
    statistics, inputs = DeferredStatistics([network]), torch.randn(2, 3, 4)
    for module in (network, reference):
        module[1].eval()  # which is recorded anew
    for x in inputs:
        reference(x)
        with statistics.accumulate():
            chain.run((x,), 0, len(chain.atoms))
        statistics.commit()
    torch.testing.assert_close(network[0].running_mean, reference[0].running_mean)
    torch.testing.assert_close(network[0].running_var, reference[0].running_var)


class Keeper:
    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}


class Keeping(nn.Module):
    """Reads what its own hook has kept, of this call or of the one before."""

    def __init__(self, *, earlier: bool) -> None:
        super().__init__()
        self.stem, self.head, self.keeper = nn.Linear(4, 4), nn.Linear(4, 4), Keeper()
        self.stem.register_forward_hook(self.keep)
        self.earlier = earlier

    def keep(self, _module: nn.Module, _args: Any, made: Tensor) -> None:
        self.keeper.kept["stem"] = made

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        earlier = self.keeper.kept.get("stem", x) if self.earlier else x
        return self.head(self.stem(x)) + earlier, self.keeper.kept["stem"]


def test_what_a_forward_keeps_for_itself_is_no_reason_to_record_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Keeping(earlier=False)
    reference = copy.deepcopy(network)
    network.keeper.kept["stem"] = before = torch.zeros(())
    chain = cut(network, torch.randn(3, 4))
    assert network.keeper.kept["stem"] is before
    monkeypatch.setattr("lightning_tspipe.networks.program.record", None)
    for size in (3, 5):
        x = torch.randn(size, 4)
        _, found = chain.run((x,), 0, len(chain.atoms))
        assert all(map(torch.equal, map(found.get, chain.outputs), reference(x)))


class CountingKeeper(Keeper):
    count = 0


class Counting(Keeping):
    def __init__(self) -> None:
        super().__init__(earlier=False)
        self.keeper: CountingKeeper = CountingKeeper()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.keeper.count += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Keeping(earlier=True), r"what a call keeps in `keeper\.kept` is read by the next one"),
        (Counting(), r"forward writes `keeper\.count`"),
    ],
)
def test_what_a_forward_keeps_for_its_next_call_is_refused(network: nn.Module, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        cut(network, torch.randn(3, 4))
