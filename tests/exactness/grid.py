"""Settings drawn with fixed seeds: every dimension of the grid, mixed."""

from __future__ import annotations

import random

from tests.exactness.modules import CASES
from tests.exactness.setting import OPTIMIZERS, Setting

# Two epochs each: even; not divisible by 2, 3 or 4; smaller than some micro-batch counts; with a
# short last batch, down to one sample.
EPOCHS = (
    ((4, 4, 4), (4, 4, 4)),
    ((5, 5, 5), (5, 5, 5)),
    ((3, 3, 3), (3, 3, 3)),
    ((2, 2, 2, 2), (2, 2)),
    ((6, 6, 1), (6, 6, 1)),
    ((7, 7, 2), (7, 7, 2)),
    ((4, 3, 2, 1), (1, 2, 3, 4)),
    ((1, 1, 1, 1), (1, 1, 1)),
    ((3,), (4,), (3,), (4,), (3,), (4,)),
    ((5, 5, 5, 5, 5, 5, 3),),
)


def draw(seed: int) -> Setting:
    """One setting."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    # Views and norms are in the names: even shares of the steps, then of their variants.
    kind = rng.choice(sorted({name.split("-")[0] for name in CASES}))
    case = rng.choice([name for name in CASES if name.split("-")[0] == kind])
    num_stages = rng.randint(1, 4)
    num_ranks = num_stages
    if num_stages > 1 and rng.random() < 0.25:
        num_ranks = rng.randint(1, num_stages - 1)
    return Setting(
        case,
        rng.choice(sorted(OPTIMIZERS)),
        rng.choice([sizes for sizes in EPOCHS if min(map(min, sizes)) >= CASES[case].min_size]),
        num_ranks,
        num_stages,
        rng.randint(1, 4),
        rng.choice(("tspipe", "tspipe", "tspipe", "gpipe", "sequential")),
        split=rng.random() < 0.3,
        accumulate=rng.choice((1, 1, 2)),
    )


def sample(first: int, count: int) -> list[Setting]:
    """Many settings, each from its own seed; what was drawn twice comes once."""
    return list(dict.fromkeys(draw(seed) for seed in range(first, first + count)))
