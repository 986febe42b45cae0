from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.plain import from_plain, to_plain
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile, seconds_at


def test_between_sizes_and_beyond() -> None:
    times = {2: 1.0, 4: 1.5, 8: 3.5}
    assert seconds_at(times, 4) == 1.5
    assert seconds_at(times, 3) == 1.25
    assert seconds_at(times, 6) == 2.5
    assert seconds_at(times, 10) == 4.5
    assert seconds_at(times, 1) == 0.75
    assert seconds_at({4: 2.0}, 2) == 1.0
    assert seconds_at({}, 2) == 0.0
    with pytest.raises(ConfigurationError, match="micro-batch of 0 samples"):
        seconds_at(times, 0)


@given(
    times=st.dictionaries(st.integers(1, 64), st.floats(0.001, 10), min_size=1),
    size=st.integers(1, 128),
)
def test_never_negative_and_exact_where_measured(times: dict[int, float], size: int) -> None:
    seconds = seconds_at(times, size)
    assert seconds >= 0
    if size in times:
        assert seconds == times[size]
    elif min(times) < size < max(times):
        assert min(times.values()) <= seconds * (1 + 1e-9)
        assert seconds <= max(times.values()) * (1 + 1e-9)


def test_sums_over_atoms() -> None:
    network = NetworkProfile(
        (
            AtomProfile("a", {1: 1.0, 2: 1.5}, {1: 2.0, 2: 3.0}, parameter_bytes=10),
            AtomProfile("b", {2: 4.0, 4: 8.0}, {2: 8.0, 4: 9.0}, parameter_bytes=5),
        )
    )
    assert network.sizes == (2,)
    assert network.sums("forward", 2) == (0.0, 1.5, 5.5)
    assert network.sums("backward", 2) == (0.0, 3.0, 11.0)
    assert network.parameter_sums == (0, 10, 15)
    assert not network.can_split


def test_json() -> None:
    atom = AtomProfile("a", {1: 1.0}, {1: 2.0}, {1: 1.25}, {1: 0.75}, 3, 4, 5, 6, 7, joined=True)
    assert from_plain(AtomProfile, json.loads(json.dumps(to_plain(atom)))) == atom
