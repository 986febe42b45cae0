"""Which models are emulated, and what the paper measured of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One model.

    Attributes:
        name: In the figures.
        kind: What is trained: ``moco``, ``byol`` or ``kd``.
        arguments: Which size.
    """

    name: str
    kind: str
    arguments: tuple[str | int, ...]


ROWS = (
    *(Row(f"mocov3_vit_{size}", "moco", (size,)) for size in "sblh"),
    *(Row(f"byol_resnet{depth}", "byol", (depth,)) for depth in (18, 34, 50, 101, 152)),
    Row("kd_vit_l_resnet101", "kd", ("l", 101)),
    Row("kd_vit_h_resnet152", "kd", ("h", 152)),
)
PAPER_BEST = {8: 6.42, 16: 12.15}
"""The TSPipe paper's best ratios to inter-layer model parallelism (Lim et al., ICML 2022), by
number of GPUs."""
PAPER_KD_UTILIZATION = 0.80
"""What the paper's order reaches with one view."""
