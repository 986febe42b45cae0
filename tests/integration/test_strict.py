"""Real Trainers over processes whose tensors travel by NCCL's rules.

The tests are those of other files: what they compare must be equal whatever carries the tensors.
Each rank of theirs ends with as few communicators as it has neighbours, and leaves none open.
"""

# ruff: noqa: F401 - what is imported is collected here once more

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import strict_backend
from tests.faults import test_killed
from tests.integration.test_asynchronous import (
    test_a_run_goes_on_with_the_batches_in_flight,
    test_a_trainer_trains_as_the_emulation,
)
from tests.integration.test_data_parallel import test_replicas_train_what_one_device_trains
from tests.integration.test_evaluation import test_a_fit_evaluates_parts_of_its_networks
from tests.integration.test_exact import test_a_strategy_by_name
from tests.integration.test_fanout import (
    test_a_resumed_run_gives_what_one_gives_that_went_through,
    test_each_head_over_two_ranks_is_as_if_it_were_alone,
)
from tests.integration.test_freezing import (
    test_a_frozen_part_runs_ahead_and_a_shorter_pipeline_trains_the_rest,
    test_replicas_from_the_start_and_a_run_that_goes_on,
)
from tests.integration.test_language import (
    test_a_language_model_is_that_of_one_device,
    test_each_rank_reads_its_part_of_pretrained_weights,
)
from tests.integration.test_relay import (
    test_modes_on_two_ranks,
    test_rounds_alternate_on_all_ranks,
    test_shared_stages_on_four_ranks,
)
from tests.integration.test_teacher_ahead import (
    test_it_is_that_of_one_device,
    test_loaders_without_a_length_and_ends_on_the_way,
)
from tests.integration.test_windows import test_a_window_is_that_of_one_device

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _over_the_strict_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(strict_backend.VARIABLE, "8")


@pytest.mark.parametrize("train", [
    test_each_head_over_two_ranks_is_as_if_it_were_alone,
    test_modes_on_two_ranks,
    test_shared_stages_on_four_ranks,
])  # fmt: skip
def test_what_is_not_connected_passes_through_the_host(
    train: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neighbours are, but for the norms: so all activations and fields pass through the host."""
    monkeypatch.setenv(strict_backend.VARIABLE, "2")
    train(tmp_path)


@pytest.mark.parametrize(
    ("num_ranks", "where", "rank"),
    [(2, "train", 0), (2, "validate", 1), (3, "train", 1), (4, "train", 3)],
)
def test_a_killed_rank_ends_the_others(
    num_ranks: int, where: str, rank: int, tmp_path: Path
) -> None:
    """Within 20 s, and the cause is named, though no transfer of the others notices its end."""
    test_killed.test_it_ends_the_others(num_ranks, where, rank, tmp_path)
