from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_tspipe.errors import PartitionError
from lightning_tspipe.networks.program import OutputRef, Program
from lightning_tspipe.random_states import other_random_state, random_stream
from tests.unit.networks.cutting import cut

IMAGES = (2, 3, 64, 64)


def vision_transformer() -> nn.Module:
    network: nn.Module = torchvision.models.VisionTransformer(
        64, 16, 3, 4, 32, 64, dropout=0.1, attention_dropout=0.1
    )
    return network


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)


def convolutions() -> nn.Module:
    layers: nn.Module = torchvision.models.vgg.make_layers([8, "M", 16, 16], batch_norm=True)
    return layers


def projection_head() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


NETWORKS: list[Any] = [  # makes it, its input's shape, its atoms
    (torchvision.models.resnet18, IMAGES, 14),
    (torchvision.models.resnet50, IMAGES, 22),
    (convolutions, (2, 3, 16, 16), 5),
    pytest.param(torchvision.models.mobilenet_v2, IMAGES, 55, marks=pytest.mark.slow),
    pytest.param(torchvision.models.efficientnet_b0, IMAGES, 60, marks=pytest.mark.slow),
    pytest.param(torchvision.models.densenet121, IMAGES, 20, marks=pytest.mark.slow),
    pytest.param(torchvision.models.swin_t, IMAGES, 41, marks=pytest.mark.slow),
    (vision_transformer, IMAGES, 13),
    (transformer_encoder, (2, 5, 16), 4),
    (projection_head, (4, 8), 4),
]


def run(chain: Program, x: Tensor) -> Tensor:
    (y,), _ = chain.run((x,), 0, len(chain.atoms))
    return y


def run_staged(chain: Program, x: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Forward and backward with every atom a stage of its own."""
    received: list[tuple[Tensor, ...]] = []
    passed: list[tuple[Tensor, ...]] = []
    values: tuple[Tensor, ...] = (x,)
    for k in range(len(chain.atoms)):
        received.append(tuple(value.detach().requires_grad_(k > 0) for value in values))
        values, _ = chain.run(received[-1], k, k + 1)
        passed.append(values)
    gradients: list[Tensor | None] = list(torch.autograd.grad(head(*values), values))
    for k in reversed(range(len(passed))):
        pairs = [(v, g) for v, g in zip(passed[k], gradients, strict=True) if g is not None]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        gradients = [tensor.grad for tensor in received[k]]


@pytest.mark.parametrize(("build", "shape", "num_atoms"), NETWORKS)
def test_a_chain_computes_what_the_network_computes(
    build: Callable[[], nn.Module], shape: tuple[int, ...], num_atoms: int
) -> None:
    torch.manual_seed(0)
    reference = build()
    network = copy.deepcopy(reference)
    x = torch.randn(shape)
    chain = cut(network, x)
    assert len(chain.atoms) >= num_atoms
    for mode in (True, False, True):
        reference.train(mode)
        network.train(mode)
        torch.manual_seed(1)
        expected = reference(x)
        torch.manual_seed(1)
        assert torch.equal(run(chain, x), expected)
    assert_state_equal(network, reference)


@pytest.mark.parametrize(("build", "shape", "num_atoms"), NETWORKS)
def test_gradients_through_single_atom_stages(
    build: Callable[[], nn.Module], shape: tuple[int, ...], num_atoms: int
) -> None:
    del num_atoms
    torch.manual_seed(0)
    reference = build().double()
    network = copy.deepcopy(reference)
    x = torch.randn(shape, dtype=torch.float64)
    torch.manual_seed(1)
    reference(x).square().mean().backward()
    torch.manual_seed(1)
    run_staged(cut(network, x), x, lambda y: y.square().mean())
    for (name, mine), theirs in zip(
        network.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
    assert_state_equal(network, reference)


def assert_state_equal(network: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(network.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("build", "shape", "num_atoms"), NETWORKS)
def test_atoms_name_all_parameters_and_buffers(
    build: Callable[[], nn.Module], shape: tuple[int, ...], num_atoms: int
) -> None:
    del num_atoms
    network = build()
    before = list(network.state_dict())
    atoms = cut(network, torch.randn(shape)).atoms
    assert {n for atom in atoms for n in atom.parameter_names} == {
        n for n, _ in network.named_parameters()
    }
    assert {n for atom in atoms for n in atom.buffer_names} == {
        n for n, _ in network.named_buffers()
    }
    assert list(network.state_dict()) == before


class Residual(nn.Module):
    """Between the fork and the sum there is one product; the ReLU writes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.second(x)
        return self.last(F.relu_(x))  # type: ignore[no-any-return]


def test_cuts_spare_skip_connections_and_writes_in_place() -> None:
    atoms = cut(Residual(), torch.randn(3, 4)).atoms
    assert [atom.name for atom in atoms] == ["first", "second..relu_", "last"]
    assert atoms[1].parameter_names == ("second.weight", "second.bias")


class Bottleneck(nn.Module):
    """Three products beside the skip connection, of which the last is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Linear(4, 2)
        self.middle = nn.Linear(2, 2)
        self.expand = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce(x))
        y = F.relu(self.middle(y))
        return self.expand(y).add_(x)  # type: ignore[no-any-return]


def test_cuts_between_the_products_of_a_block_pass_on_the_skip_connection_too() -> None:
    network = nn.Sequential(Bottleneck(), Bottleneck())
    chain = cut(network, torch.randn(3, 4))
    block = ["reduce..relu", "middle..relu", "expand..add_"]
    assert [atom.name for atom in chain.atoms] == [f"{k}.{name}" for k in (0, 1) for name in block]
    x = torch.randn(3, 4)
    passed, _ = chain.run((x,), 0, 2)
    assert [value.shape for value in passed] == [(3, 4), (3, 2)]
    assert torch.equal(passed[0], x)
    (y,), _ = chain.run(passed, 2, 6)
    assert torch.equal(y, network(x))


def test_a_write_through_a_view_is_in_the_atom_that_owns_the_memory() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Dropout(), nn.ReLU(inplace=True))
    assert len(cut(network, torch.randn(3, 4)).atoms) == 1


@dataclass
class Features:
    logits: Tensor
    maps: list[Tensor]
    name: str = "features"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Features:
        a = self.stem(x)
        b = self.body(a)
        return Features(self.head(b), [a, b.tanh()])


def test_a_structured_return_value_is_emitted_where_nothing_reads_it_any_more() -> None:
    network = Structured()
    x = torch.randn(3, 4)
    expected = network(x)
    found = cut(network, x)
    values, first = found.run((x,), 0, 2)
    end, rest = found.run(values, 2, len(found.atoms))
    assert end == ()
    value = tree_unflatten([(first | rest)[ref] for ref in found.outputs], found.output_spec)
    assert (value.name, type(value)) == ("features", Features)
    assert torch.equal(value.logits, expected.logits)
    assert all(map(torch.equal, value.maps, expected.maps))
    assert list(first) == [OutputRef(1, 0)]  # the body reads what the stem gives


class TokenMixer(nn.Module):
    """Reads a parameter, makes a random tensor and a constant, and stops gradients, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.register_buffer("scale", torch.tensor(2.0))
        self.inner = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(1, 4)
        batch, _, _ = x.shape
        x = torch.cat([self.token.expand(batch, -1, -1), x], 1)
        x = self.inner(x) * self.scale + noise
        with torch.no_grad():
            x = self.frozen(x) + torch.arange(4)
        return F.dropout(self.inner(x), 0.5, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_what_plain_tracing_would_bake_in_is_computed_anew(training: bool) -> None:
    torch.manual_seed(0)
    network = TokenMixer().train(not training)
    chain = cut(network, torch.randn(4, 3, 4))
    network.train(training)
    for _ in range(2):
        x = torch.randn(5, 3, 4)
        with torch.no_grad():
            network.scale.mul_(1.5)  # type: ignore[operator]
        state = torch.get_rng_state()
        expected = network(x)
        torch.set_rng_state(state)
        assert torch.equal(run(chain, x), expected)
        network.zero_grad()
        run(chain, x).sum().backward()
        assert network.frozen.weight.grad is None
        assert network.token.grad is None
        assert network.inner.weight.grad is not None


def test_parameters_are_read_from_their_owner_at_run_time() -> None:
    network = TokenMixer().eval()
    other = TokenMixer().eval()
    x = torch.randn(5, 3, 4)
    chain = cut(network, x)
    for name, parameter in other.named_parameters():
        torch.utils.swap_tensors(network.get_parameter(name), nn.Parameter(parameter.detach()))
    torch.manual_seed(0)
    expected = other(x)
    torch.manual_seed(0)
    assert torch.equal(run(chain, x), expected)
    network._parameters["token"] = nn.Parameter(torch.zeros(1, 1, 4))
    other.token.data.zero_()
    torch.manual_seed(0)
    expected = other(x)
    torch.manual_seed(0)
    assert torch.equal(run(chain, x), expected)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 0 else self.right(x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        return self.layer(x)  # type: ignore[no-any-return]


class Keeping(Counting):
    """Puts what it is given where something else was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor | None] = {"x": None}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["x"] = x
        return self.layer(x)  # type: ignore[no-any-return]


class Skipping(nn.Module):
    """Now and then passes on what it is given, as layers of stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * float(np.random.rand())  # noqa: NPY002 - users do
        return x if random.random() < 0.5 else self.layer(x)  # type: ignore[no-any-return] # noqa: S311


class Wrapper(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.middle = middle
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("middle", [Branching, Counting, Keeping])
def test_a_submodule_that_cannot_be_traced_is_called_as_a_whole(
    middle: type[Branching | Counting],
) -> None:
    network = Wrapper(middle())
    x = torch.randn(3, 4)
    chain = cut(network, x)
    assert [atom.name for atom in chain.atoms] == ["stem", "middle", "head"]
    assert torch.equal(run(chain, x), network(x))
    if middle is Counting:
        assert network.middle.num_calls == 2
    if middle is Keeping:
        assert torch.equal(vars(network.middle)["kept"]["x"], network.stem(x))


def test_a_submodule_that_draws_from_other_generators_draws_anew_whenever_it_runs() -> None:
    network, x = Wrapper(Skipping()), torch.randn(3, 4)
    before = other_random_state()
    chain = cut(network, x)
    assert other_random_state() == before
    assert [atom.name for atom in chain.atoms] == ["stem", "middle", "head"]
    found = []
    for seed in range(6):
        found.append(seeded(seed, lambda: run(chain, x)))
        assert torch.equal(found[-1], seeded(seed, lambda: network(x)))
    assert not torch.equal(found[0], found[1])


def seeded(seed: int, function: Callable[[], Tensor]) -> Tensor:
    with random_stream(seed):
        return function()


def test_hooks_on_submodules_run() -> None:
    network = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    network.middle.register_forward_hook(lambda _module, _args, output: output * 2)
    x = torch.randn(3, 4)
    assert torch.equal(run(cut(network, x), x), network(x))


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


class Packing(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.sum = nn.Linear(4, 4), Sum()
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(self.pack(self.stem(x), x), scale=x.shape[0])  # type: ignore[no-any-return]


class Sum(nn.Module):
    def forward(self, pair: Any, scale: int) -> Tensor:
        values = pair.values() if isinstance(pair, dict) else pair
        return sum(values, torch.zeros(())) * scale


@pytest.mark.parametrize(
    "pack",
    [Pair, lambda a, b: OrderedDict(a=a, b=b), lambda a, b: {"a": a, "b": b}, lambda *x: [*x]],
    ids=["named tuple", "ordered dict", "dict", "list"],
)
def test_whole_calls_take_containers_of_any_kind(pack: Callable[[Tensor, Tensor], Any]) -> None:
    network, x = Packing(pack), torch.randn(3, 4)
    network.sum.register_forward_hook(lambda _module, _args, output: output * 2)
    chain = cut(network, x)
    for given in (x, torch.randn(5, 4)):
        assert torch.equal(run(chain, given), network(given))


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Branching(), ["Branching", "control flow", "pipeline_blocks"]),
        (Counting(), ["Counting", "attributes", "pipeline_blocks"]),
        (Skipping(), ["Skipping", "draws from `random`", "pipeline_blocks"]),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_remedy(network: nn.Module, words: list[str]) -> None:
    before = {name: vars(child).copy() for name, child in network.named_modules()}
    with pytest.raises(PartitionError) as caught:
        cut(network, torch.randn(3, 4))
    assert all(word in str(caught.value) for word in words)
    assert before == {name: vars(child) for name, child in network.named_modules()}


class Blocks(Branching):
    def pipeline_blocks(self) -> list[nn.Module]:
        return [self.left, self.right]


@pytest.mark.parametrize("wrap", [False, True])
def test_pipeline_blocks_replace_tracing(wrap: bool) -> None:
    blocks = Blocks()
    atoms = cut(Wrapper(blocks) if wrap else blocks, torch.randn(3, 4)).atoms
    assert len(atoms) == (4 if wrap else 2)
    names = [name for atom in atoms for name in atom.parameter_names]
    assert ("middle.left.weight" if wrap else "left.weight") in names


def test_pipeline_blocks_that_are_no_submodules_are_refused() -> None:
    blocks = Blocks()
    blocks.pipeline_blocks = lambda: [nn.Linear(4, 4)]  # type: ignore[method-assign]
    with pytest.raises(PartitionError, match="must return submodules"):
        cut(blocks, torch.randn(3, 4))


class ModeDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.noise = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.noise(x) if self.training else x


def test_modes_with_different_atoms_are_refused() -> None:
    network = ModeDependent()
    chain = cut(network, torch.randn(3, 4))
    network.eval()
    with pytest.raises(PartitionError, match="`training` was True and is False now"):
        run(chain, torch.randn(3, 4))


def test_a_frozen_submodule_keeps_its_mode() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.layer(x), 0.5, self.training)

    network = Wrapper(Noisy())
    x = torch.randn(3, 4)
    chain = cut(network, x)
    network.middle.eval()
    assert torch.equal(run(chain, x), network(x))


def test_a_recurrent_layer_and_what_reads_its_result_are_one_atom() -> None:
    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, object]) -> Tensor:
            return pair[0]

    network = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4), First(), nn.Linear(4, 4))
    x = torch.randn(2, 3, 4)
    chain = cut(network, x)
    assert [atom.name for atom in chain.atoms] == ["0", "1", "3"]
    assert torch.equal(run(chain, x), network(x))


def test_a_device_read_while_tracing_stands_for_that_of_the_input() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            device = next(self.parameters()).device
            return self.layer(x) + torch.arange(4, device=device)  # type: ignore[no-any-return]

    network = Positions()
    chain = cut(network, torch.ones(2, 4))
    network.to_empty(device="cpu")
    nn.init.ones_(network.layer.weight)
    nn.init.zeros_(network.layer.bias)
    assert torch.equal(run(chain, torch.ones(2, 4)), torch.arange(4.0).expand(2, 4) + 4)


def test_tied_parameters_go_by_one_name() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    names = [atom.parameter_names for atom in cut(network, torch.randn(3, 4)).atoms]
    assert names == [("0.weight", "0.bias"), ("0.weight", "1.bias")]


def test_a_shape_read_early_and_used_late_forbids_no_cuts() -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            tokens = x.shape[1]
            x = self.layers(x.flatten(0, 1))
            return self.head(x.unflatten(0, (-1, tokens)))

    network = Flattening()
    x = torch.randn(2, 3, 4)
    chain = cut(network, x)
    assert torch.equal(run(chain, x), network(x))
    names = ["flatten", "layers.0", "layers.1", "unflatten", "head"]
    assert [atom.name for atom in chain.atoms] == names


def test_a_batch_size_read_early_is_read_where_it_is_used() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)
            self.second = nn.Conv2d(4, 4, 3)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Any:
            batch = x.shape[0]
            x = F.relu(self.second(F.relu(self.first(x))))
            return self.head(x.view(batch, -1))

    network = Convolutions()
    chain = cut(network, torch.randn(3, 3, 6, 6))
    assert [atom.name for atom in chain.atoms] == [
        "first",
        "relu",
        "second",
        "relu",
        "view",
        "head",
    ]
    for batch in (2, 5):
        x = torch.randn(batch, 3, 6, 6)
        assert torch.equal(run(chain, x), network(x))


def test_other_modes_are_traced_when_foreign_parameters_are_on_meta() -> None:
    network = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    x = torch.randn(3, 4)
    chain = cut(network, x)
    expected = network.stem(x)
    for name, parameter in network.named_parameters():
        if not name.startswith("stem"):
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to("meta")))
    network.eval()
    (value,), _ = chain.run((x,), 0, 1)
    assert torch.equal(value, expected)


def test_an_error_in_a_network_shows_the_line() -> None:
    class Mistaken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x.long() + 9, self.layer.weight)

    x = torch.zeros(3, 4)
    chain = cut(Mistaken(), x)
    with pytest.raises(IndexError) as caught:
        run(chain, x)
    assert any("return" not in str(entry.statement) for entry in caught.traceback)
    assert any("= g" in str(entry.statement) for entry in caught.traceback)


class Masked(nn.Module):
    """Gives its encoder masks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.stem, self.encoder = nn.Linear(16, 16), nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.encoder(self.stem(x), src_key_padding_mask=padding)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_gets_its_masks(training: bool) -> None:
    """In eval mode torch has a kernel of its own, which leaves zeros where nothing is."""
    network, x = Masked().train(training), torch.randn(3, 5, 16)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(run(cut(network, x), x), network(x))


class Pooled(nn.Module):
    """Returns features, and what it makes of a view of a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        first = features[:, 0]
        return features, self.head(first.view_as(first))


def test_what_is_returned_is_there_where_it_is_made() -> None:
    network, x = Pooled(), torch.randn(3, 5, 4)
    chain = cut(network, x)
    values: tuple[Tensor, ...] = (x,)
    found: dict[OutputRef, Tensor] = {}
    for index in range(len(chain.atoms)):
        values, new = chain.run(values, index, index + 1)
        found |= new
    assert len(chain.atoms) > 2
    torch.testing.assert_close(tuple(found[ref] for ref in chain.outputs), network(x))
