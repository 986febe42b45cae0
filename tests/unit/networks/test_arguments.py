"""Calls with several tensors, whose constants are part of the network that is cut."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_tspipe.networks.arguments import Arguments, tensors_in
from lightning_tspipe.networks.program import OutputRef, Program

IDS = torch.tensor([[5, 2, 8, 0], [1, 7, 3, 4], [9, 6, 0, 0]])


def run(atomized: Program, *values: Tensor) -> list[Tensor]:
    """Atom by atom; the leaves of the return value."""
    found: dict[OutputRef, Tensor] = {}
    for index in range(len(atomized.atoms)):
        values, new = atomized.run(values, index, index + 1)
        found |= new
    return [found[output] for output in atomized.outputs]


def test_tensors_may_have_other_shapes_and_types_later() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
            words = self.words(ids) * mask[..., None]
            return self.head((words * weights[:, :1, None]).sum(1))  # type: ignore[no-any-return]

    network = Weighted()
    calls = [
        (torch.arange(6).reshape(3, 2), torch.randn(3, 4), torch.ones(3, 2)),
        (torch.arange(8).reshape(2, 4).int(), torch.randn(2, 3).double(), torch.ones(2, 4).bool()),
    ]
    arguments = Arguments.of(calls[0][:2], {"mask": calls[0][2]})
    atomized = Program(network.double(), "network", arguments)
    assert arguments.match(calls[1], {}) is None
    for call in calls:
        found = arguments.match(call[:2], {"mask": call[2]})
        assert found is not None
        assert all(map(operator.is_, found, call))
        assert torch.equal(run(atomized, *call)[0], network(*call))


def test_constants_are_part_of_a_call() -> None:
    arguments = Arguments.of((IDS,), {"both": True})
    assert arguments.match((IDS[:2],), {"both": True}) is not None
    assert arguments.match((IDS,), {"both": False}) is None


def test_a_call_prints_its_constants() -> None:
    arguments = Arguments.of((IDS, 2), {"mask": IDS, "both": True})
    assert str(arguments) == "(*, 2, mask=*, both=True)"


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("Llama", "sdpa"),
        ("DistilBert", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("Llama", "eager"), ("DistilBert", "sdpa"), ("Bert", "sdpa")]
        ),
        pytest.param("Bert", "eager", marks=pytest.mark.exhaustive),
    ],
)
def test_models_of_transformers_are_cut(kind: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra `text`)")
    sizes: dict[str, Any] = {"vocab_size": 10, "max_position_embeddings": 8}
    if kind == "DistilBert":
        sizes |= {"dim": 8, "hidden_dim": 16, "n_layers": 2, "n_heads": 2}
    else:
        sizes |= {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation=attention)
    task = "CausalLM" if kind == "Llama" else "MaskedLM"
    model = getattr(transformers, f"{kind}For{task}")(config).eval()
    kwargs = {"attention_mask": (IDS > 0).long(), "output_hidden_states": True, "use_cache": False}
    if kind == "DistilBert":
        del kwargs["use_cache"]
    arguments = Arguments.of((IDS,), kwargs)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    atomized = Program(model, "model", arguments)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert len(atomized.atoms) > 6
    expected = pytree.tree_leaves(model(IDS, **kwargs))
    assert len(expected) == 4  # logits, and hidden states in front of and behind each layer
    actual = run(atomized, *tensors_in((IDS, kwargs)))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)
    assert len(Program(model, "model", arguments).atoms) == len(atomized.atoms)  # hooks are there


def test_attention_maps_are_returned_too() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra `text`)")
    config = transformers.DistilBertConfig(
        vocab_size=10, dim=8, hidden_dim=16, n_layers=1, n_heads=2, attn_implementation="eager"
    )
    model = transformers.DistilBertForMaskedLM(config).eval()
    atomized = Program(model, "model", Arguments.of((IDS,), {"output_attentions": True}))
    expected = pytree.tree_leaves(model(IDS, output_attentions=True))
    assert len(expected) == 2
    assert all(map(torch.equal, expected, run(atomized, IDS)))


def test_a_network_that_is_called_by_keyword_is_cut() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return self.last(self.first(x) * gate)  # type: ignore[no-any-return]

    network, x, gate = Gated(), torch.randn(4, 3), torch.randn(4, 3)
    arguments = Arguments.of((), {"x": x, "gate": gate})
    atomized = Program(network, "network", arguments)
    assert [atom.parameter_names for atom in atomized.atoms if atom.parameter_names] == [
        ("first.weight", "first.bias"), ("last.weight", "last.bias"),
    ]  # fmt: skip
    assert torch.equal(run(atomized, x, gate)[0], network(x, gate))
