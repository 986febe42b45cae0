from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_tspipe.caching import ActivationCache, WithIds, check_repeatable, ids_of
from lightning_tspipe.errors import ConfigurationError
from tests.unit.caching.networks import Layer, inputs, segments


class Pictures(Dataset[Any]):
    """Counts what is decoded, in shared memory."""

    def __init__(self, num: int = 12, kind: str = "tuple") -> None:
        self.data = inputs(num)
        self.kind = kind
        self.num_decoded = torch.zeros(1, dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.num_decoded += 1
        if self.kind == "dict":
            return {"picture": self.data[index], "label": index % 3}
        return (self.data[index], index % 3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_inputs_are_loaded_until_their_activations_are_cached(kind: str, num_workers: int) -> None:
    pictures, layer = Pictures(kind=kind), Layer(5, 3, seed=0)
    expected = Layer(5, 3, seed=0)(pictures.data)
    cache = ActivationCache(12, memory=10**6)
    dataset = WithIds(pictures, inputs="picture" if kind == "dict" else 0)
    dataset.read_from(cache)
    cache.let_skip(segments(layer))
    loader = DataLoader(
        dataset, 5, shuffle=True, generator=torch.Generator(), num_workers=num_workers
    )
    for number in range(3):
        seen = []
        for batch in loader:
            values, labels, ids = batch.values() if kind == "dict" else batch
            assert torch.equal(ids_of(batch), ids)
            assert torch.equal(labels, ids % 3)
            assert bool(values.isnan().any()) == bool(number)
            assert torch.equal(cache.outputs(ids, values, segments(layer)), expected[ids])
            seen += ids.tolist()
        assert sorted(seen) == list(range(12))
        assert int(pictures.num_decoded) == 12
    assert layer.num_rows == 12


def test_nothing_is_left_out_before_it_is_allowed() -> None:
    pictures, layer = Pictures(), Layer(5, 3, seed=0)
    cache = ActivationCache(12, memory=10**6)
    dataset = WithIds(pictures, inputs=0)
    dataset.read_from(cache)
    for _ in range(2):
        for values, _, ids in DataLoader(dataset, 4):
            assert not values.isnan().any()
            cache.outputs(ids, values, segments(layer))
    assert cache.counts.hits == 12


def test_tokens_that_were_not_loaded_are_out_of_range() -> None:
    tokens = torch.arange(20).view(4, 5)
    cache = ActivationCache(4, memory=10**6)
    parts = segments(lambda batch: batch.double())  # type: ignore[arg-type]
    dataset = WithIds(TensorDataset(tokens, torch.arange(4)), inputs=0)
    dataset.read_from(cache)
    cache.let_skip(parts)
    for _ in range(2):
        for values, _, ids in DataLoader(dataset, 4):
            result = cache.outputs(ids, values, parts)
            assert torch.equal(result, tokens.double())
    with pytest.raises(IndexError):
        torch.nn.Embedding(20, 2)(next(iter(DataLoader(dataset, 4)))[0])


def test_without_a_cache_samples_only_get_an_id() -> None:
    assert WithIds(Pictures(), ids=[f"{n}.jpg" for n in range(12)])[3][1:] == (0, "3.jpg")
    assert WithIds(Pictures(kind="dict"))[4]["id"] == 4
    assert WithIds(torch.arange(5) * 2)[4] == (torch.tensor(8), 4)
    assert WithIds([[1, 2], [3, 4]])[1] == [3, 4, 1]
    assert WithIds(Pictures(kind="dict")).kind == "dict"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WithIds(Stream()), "__getitem__"),
        (lambda: WithIds(Pictures(), ids=range(3)), "3 ids for 12 samples"),
        (lambda: WithIds(Pictures(), ids=[*range(11), 4]), "duplicate sample id 4"),
        (lambda: WithIds(Pictures(), views=0), r"views=0\): the number of fixed random views"),
        (lambda: WithIds([{"id": 3}])[0], "a key 'id' already"),
        (lambda: ids_of((torch.ones(3, 4), torch.ones(3))), r"at -1: train on WithIds\(dataset\)"),
        (lambda: ids_of({"picture": torch.ones(3)}), r"at 'id': train on WithIds\(dataset\)"),
        (lambda: ids_of(torch.ones(3), 2), r"at 2: train on WithIds\(dataset\)"),
    ],
    ids=lambda case: "" if callable(case) else case,
)
def test_errors_name_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_an_input_that_is_not_there_is_named() -> None:
    dataset = WithIds(Pictures(), inputs="pixels")
    dataset.read_from(ActivationCache(12, memory=10**5))
    with pytest.raises(ConfigurationError, match="pixels"):
        dataset[0]


class Changing(Pictures):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def __getitem__(self, index: int) -> Any:
        picture, label = super().__getitem__(index)
        return self.change(picture), label


OWN = torch.Generator()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + torch.randn(5),
        lambda x: x * random.random(),  # noqa: S311
        lambda x: x.numpy() + np.random.rand(5),  # noqa: NPY002
        lambda x: x + torch.rand(5, generator=OWN),
        lambda x: x.flip(0) if torch.rand(1) < 1e-6 else x,
    ],
    ids=["torch", "python", "numpy", "generator", "rare"],
)
def test_random_augmentation_is_refused_with_the_remedy(change: Any) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=r"random augmentation.*centre crop"):
        check_repeatable(Changing(change))
    assert torch.equal(before, torch.get_rng_state())


def test_fixed_inputs_are_fine() -> None:
    def same(picture: Tensor) -> Any:
        return {"picture": picture * 2, "array": np.ones(2), "name": "a", "nan": torch.nan}

    check_repeatable(Changing(same))
    check_repeatable(WithIds(Pictures(num=1)))


@pytest.mark.parametrize("ids", [None, list("abcdefghijkl")], ids=["numbered", "named"])
def test_fixed_views_are_augmented_once_and_for_all(ids: Any) -> None:
    def augment(picture: Tensor) -> Tensor:
        return picture + torch.randn(5) + random.random() + np.random.rand()  # noqa: NPY002, S311

    dataset = WithIds(Changing(augment), ids, views=3)
    assert len(dataset) == 36
    check_repeatable(dataset)
    state = torch.get_rng_state()
    pictures, labels, names = zip(*(dataset[index] for index in range(36)), strict=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert labels == tuple(index % 12 % 3 for index in range(36))
    assert len(set(names)) == 36
    # Each view of a sample is another picture, and the same in a worker and in the next epoch.
    assert len({picture.sum().item() for picture in pictures}) == 36
    again = [dataset[index][0] for index in reversed(range(36))]
    assert all(map(torch.equal, reversed(again), pictures))
