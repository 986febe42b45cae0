"""Which models are emulated, and what the paper measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Row:
    """One model.

    Attributes:
        name: In the figures.
        kind: What is trained: ``moco``, ``byol`` or ``kd``.
        arguments: Which size.
        paper: By number of GPUs, how many times as fast as inter-layer model parallelism TSPipe was
            in its paper (Lim et al., ICML 2022).
        num_devices: On how many it is emulated: on 16 what the paper ran there, and the largest of
            the others.
    """

    name: str
    kind: str
    arguments: tuple[str | int, ...]
    paper: Mapping[int, float] = field(default_factory=dict, hash=False)
    num_devices: tuple[int, ...] = (8, 16)


ROWS = (
    *(Row(f"mocov3_vit_{size}", "moco", (size,)) for size in "sbl"),
    Row("mocov3_vit_h", "moco", ("h",), {8: 6.42, 16: 12.15}),
    Row("byol_resnet18", "byol", (18,), {8: 2.10}, num_devices=(8,)),
    *(Row(f"byol_resnet{depth}", "byol", (depth,), num_devices=(8,)) for depth in (34, 50, 101)),
    Row("byol_resnet152", "byol", (152,), {8: 3.78}),
    Row("kd_vit_l_resnet101", "kd", ("l", 101), num_devices=(8,)),
    Row("kd_vit_h_resnet152", "kd", ("h", 152), {8: 4.68}),
)
