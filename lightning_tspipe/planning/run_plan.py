"""Plans in checkpoints: stored as text, so that a resumed run can follow them.

The placement determines more than the step time: in asynchronous schedules, a stage's place decides
which version of its weights it reads; a micro-batch has the batch statistics of its own samples;
and dropout draws from the generator of the rank that runs it. Measured costs differ from run to
run, and so may plans that are made from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_tspipe.errors import CheckpointError, ConfigurationError
from lightning_tspipe.planning.pieces import Pieces
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.relay import RelayPlan
from lightning_tspipe.simulation.cost import CostTable

Source = Literal["times", "flops", "given"]
"""The basis of a plan: measured times, counted operations, or the user's partition."""

PLAN, PLACED = "plan", "placed"
"""Keys in a checkpoint: the planner's result, if it searched; and what was carried out."""


@dataclass(frozen=True)
class RunPlan:
    """The placement of a run, and the conditions that it was made for.

    Attributes:
        made_for: By name, what another run must have in common with this one to use its plan:
            numbers of devices and atoms, and the user's options. Plain values.
        source: The basis of the plan.
        placement: The placement that an engine carries out; None if blocks are relayed.
        plan: The planner's result, with the costs that order actions; None if nothing was searched.
        blocks: The distribution of blocks, if they are relayed.
    """

    made_for: Mapping[str, Any]
    source: Source
    placement: Placement | None = None
    plan: Plan | None = None
    blocks: RelayPlan | None = None

    @property
    def costs(self) -> CostTable | None:
        """Costs of the stages, which determine the order of actions."""
        return None if self.plan is None else self.plan.costs

    def carries_out(self, other: RunPlan) -> bool:
        """Whether another plan has the same placement, and the same order of actions."""
        mine, others = (self.placement, self.blocks), (other.placement, other.blocks)
        return mine == others and self.costs == other.costs

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """The differences between another run and this one, in words.

        Args:
            wanted: The other run's conditions, as in :attr:`made_for`.

        >>> RunPlan({"devices": 4, "schedule": "tspipe"}, "times").differences({"devices": 2})
        ['devices (4 then, 2 now)', "schedule ('tspipe' then, None now)"]
        """
        names = dict.fromkeys([*self.made_for, *wanted])
        pairs = [(name, self.made_for.get(name), wanted.get(name)) for name in names]
        return [f"{name} ({then!r} then, {now!r} now)" for name, then, now in pairs if then != now]

    def to_entries(self) -> dict[str, str | None]:
        """Texts for a checkpoint, by key; the first one is what ``tspipe plan`` saves."""
        placement = None if self.placement is None else _as_dict(self.placement)
        blocks = None if self.blocks is None else asdict(self.blocks)
        placed = {
            "made_for": dict(self.made_for),
            "source": self.source,
            "placement": placement,
            "blocks": blocks,
        }
        return {
            PLAN: None if self.plan is None else self.plan.to_json(),
            PLACED: json.dumps(placed),
        }

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> RunPlan | None:
        """Read what :meth:`to_entries` returned; None for older versions, which stored no plan.

        Raises:
            CheckpointError: The texts are something else.
        """
        text, plan = entries.get(PLACED), entries.get(PLAN)
        if text is None:
            return None
        try:
            data = json.loads(text)
            return cls(
                data["made_for"],
                data["source"],
                None if data["placement"] is None else _placement(data["placement"]),
                None if plan is None else Plan.from_json(plan),
                None if data["blocks"] is None else _blocks(data["blocks"]),
            )
        except (ValueError, KeyError, TypeError, ConfigurationError) as error:
            raise CheckpointError(
                f"the checkpoint's plan can't be read ({type(error).__name__}: {error}): it was "
                "changed, or written by a newer version. Remove "
                f"checkpoint['lightning_tspipe'][0][{PLACED!r}] to plan anew"
            ) from error


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever options hold
    """A value after a round trip through JSON, for comparison with one from a checkpoint."""
    return json.loads(json.dumps(value, default=_as_list))


def _as_list(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)


def _as_dict(placement: Placement) -> dict[str, Any]:
    data = asdict(placement)
    return data | {name: sorted(data[name]) for name in ("split", "recomputed")}


_Reader = Callable[[Any], Any]
_READERS: dict[str, _Reader] = {
    **dict.fromkeys(("student_cuts", "student_ranks", "teacher_cuts", "teacher_ranks"), tuple),
    **dict.fromkeys(("split", "recomputed"), frozenset),
    **dict.fromkeys(("student_holders", "teacher_holders"), lambda ranks: tuple(map(tuple, ranks))),
    "pieces": lambda data: Pieces(**data),
}


def _placement(data: dict[str, Any]) -> Placement:
    return Placement(**{name: _READERS.get(name, _same)(value) for name, value in data.items()})


def _same(value: Any) -> Any:  # noqa: ANN401 - a number
    return value


def _blocks(data: dict[str, Any]) -> RelayPlan:
    return RelayPlan(**{name: tuple(values) for name, values in data.items()})
