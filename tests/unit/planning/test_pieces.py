from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_tspipe.planning.heads import choose_pieces, seconds_in_pieces
from lightning_tspipe.planning.placement import WHOLE, Pieces
from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile

MB = 10**6


def trunk(*atoms: tuple[float, float, int]) -> NetworkProfile:
    """Seconds of a batch of 8 whole, and in two pieces; bytes of a sample behind the atom."""
    return NetworkProfile(
        tuple(
            AtomProfile(f"atom{place}", {8: whole, 4: halves / 2}, output_bytes_per_sample=size)
            for place, (whole, halves, size) in enumerate(atoms)
        )
    )


def test_large_layers_go_first_in_pieces_and_slow_ones_whole() -> None:
    found = trunk((1.0, 0.9, 8 * MB), (1.0, 1.0, MB), (1.0, 1.4, MB), (1.0, 1.0, MB))
    assert choose_pieces(found, 8, MB, (1, 2, 3)) == Pieces(2, 2)
    assert choose_pieces(found, 8, MB, (2,)) == Pieces(2, 2)
    assert choose_pieces(found, 8, MB, ()) == WHOLE
    assert seconds_in_pieces(Pieces(2, 2), found, 8) == (0.9, 1.0, 1.0, 1.0)


def test_a_stage_has_what_it_can_have() -> None:
    assert Pieces(4, 8).within(3, (1, 2, 4)) == Pieces(2, 8)
    assert Pieces(4, 8).within(9, (1, 2, 4)) == Pieces(4, 8)
    assert Pieces(4, 8).within(1, (2, 4)) == WHOLE


def test_memory_is_worth_no_time() -> None:
    found = trunk((1.0, 1.2, 8 * MB), (1.0, 1.0, MB))
    assert choose_pieces(found, 8, MB, (1,)) == WHOLE
    # Nor is time that nobody notices worth memory: what comes out is there twice.
    found = trunk((1.0, 1.0, 8 * MB), (9.0, 9.0, 8 * MB))
    assert choose_pieces(found, 8, MB, (1,)) == WHOLE


@given(
    atoms=st.lists(
        st.tuples(st.floats(0.1, 2), st.floats(0.1, 2), st.integers(1, 4 * MB)), min_size=2
    )
)
def test_no_way_takes_longer_than_the_whole(atoms: list[tuple[float, float, int]]) -> None:
    found = trunk(*atoms)
    chosen = choose_pieces(found, 8, MB, range(1, len(atoms)))
    assert (
        sum(seconds_in_pieces(chosen, found, 8))
        <= 1.02 * sum(seconds_in_pieces(WHOLE, found, 8)) + 1e-9
    )
    assert chosen.number in {1, 2}
    assert sum(seconds_in_pieces(WHOLE, found, 8)) == pytest.approx(
        sum(whole for whole, _, _ in atoms)
    )
