"""A cache of activations that a device computes: the host waits neither for ids nor for bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tspipe import AutoCache
from lightning_tspipe.caching import ActivationCache, Boundary, Segment, entries, store
from lightning_tspipe.late import Late
from tests.integration.host_reads import READS


class OnDevice(Tensor):
    """Stands for a tensor of a GPU: what is computed from it is one too, and can't be read."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        assert func not in READS, f"the host waits for the device in {func.__name__}"
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class SlowLate(Late):
    """A copy that isn't there until the host waits for it; counted."""

    waits: ClassVar[Counter[str]] = Counter()

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty(value.shape, dtype=value.dtype)
        self._copy.copy_(value)

    @property
    @override
    def is_there(self) -> bool:
        return False

    @override
    def on_host(self) -> Tensor:
        self.waits["all"] += 1
        return self._copy


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(values: Tensor, _: torch.device) -> Tensor:
        return values.as_subclass(OnDevice)

    monkeypatch.setattr(store, "Late", SlowLate)
    monkeypatch.setattr(entries, "sent", sent)
    SlowLate.waits.clear()


def on_device(*shape: int) -> Tensor:
    return torch.randn(*shape).as_subclass(OnDevice)


def segments(calls: list[int]) -> list[Segment]:
    layer = nn.Linear(3, 4)

    def function(value: Tensor) -> Tensor:
        calls.append(len(value))
        return layer(value)

    return [Segment(Boundary("first", "a"), function)]


def test_a_batch_is_put_away_when_the_next_one_is_computed() -> None:
    calls: list[int] = []
    frozen, inputs = segments(calls), [on_device(4, 3) for _ in range(3)]
    with_all = list(range(12))
    cache = ActivationCache(12, memory=2**16)
    try:
        made = []
        for number, batch in enumerate(inputs):
            ids = with_all[4 * number : 4 * number + 4]
            made.append(cache.outputs(ids, batch, frozen))
            assert SlowLate.waits["all"] == number  # for what was launched a step before
            with torch.no_grad():
                batch.zero_()  # what is under way was copied
        assert cache.behind(with_all[:8], frozen).all()
        assert SlowLate.waits["all"] == 2
        # Who asks for the last ones waits for them.
        again = cache.outputs(with_all[8:], inputs[2], frozen)
        assert SlowLate.waits["all"] == 3
        assert calls == [4, 4, 4]
        assert isinstance(again, OnDevice)
        assert np.array_equal(again.as_subclass(Tensor).detach(), made[2].as_subclass(Tensor))
        mixed = cache.outputs([0, 100, 5], on_device(3, 3), frozen)
        assert isinstance(mixed, OnDevice)
        assert torch.equal(mixed[0].as_subclass(Tensor), made[0][0].as_subclass(Tensor))
    finally:
        cache.close()


def test_inputs_are_looked_at_only_where_some_may_be_missing() -> None:
    frozen = segments([])
    cache = ActivationCache(4, memory=2**16)
    try:
        cache.outputs([0, 1], on_device(2, 3), frozen)
        cache.let_skip(frozen)
        cache.let_skip([])  # batches that lack some may be under way
        assert cache.may_lack_inputs
        with pytest.raises(AssertionError, match="the host waits for the device in __bool__"):
            cache.outputs([2, 3], on_device(2, 3), frozen)
    finally:
        cache.close()


def test_ids_are_remembered_where_they_are_moved() -> None:
    def move(batch: Any, *_: object) -> Any:
        return [part.to("meta") for part in batch]

    module = SimpleNamespace(transfer_batch_to_device=move)
    strategy = SimpleNamespace(process_dataloader=None)
    trainer: Any = SimpleNamespace(strategy=strategy, lightning_module=module)
    cache = AutoCache()
    cache.follow(trainer)
    pictures, ids = torch.ones(2, 3), torch.tensor([5, 7])
    module.transfer_batch_to_device([pictures], None, 0)  # of a loader without ids
    moved = module.transfer_batch_to_device([pictures, ids], None, 0)
    ids.zero_()  # a loader may use its memory again
    assert cache.ids_of(moved).tolist() == [5, 7]
    assert cache.ids_of([pictures, ids]) is ids
    for unknown in (moved[1] + 1, torch.ones(2, dtype=torch.long, device="meta"), moved[1].add_(1)):
        with pytest.raises(NotImplementedError):  # a copy from the device, which has no values
            cache.ids_of([pictures, unknown])
    cache.restore()
    assert module.transfer_batch_to_device is move
