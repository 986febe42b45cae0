"""Plans in checkpoints: stored as text, so that a resumed run can follow them.

Which rank has what decides more than how long a step takes: where updates don't wait for batches, a
stage's place says which version of its weights it reads, a micro-batch has the batch statistics of
its own samples, and dropout draws from the generator of the rank that runs it. Costs that are
measured differ from run to run, and so may the plans that are made from them.
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
"""What a plan was made from: measured times, counted operations, or what the user said."""

PLAN, PLACED = "plan", "placed"
"""Keys in a checkpoint: what the planner found, if it searched; and what was carried out."""


@dataclass(frozen=True)
class RunPlan:
    """Who has what in a run, and for what that was decided.

    Attributes:
        made_for: By name, what a run must have in common with this one to go by its plan: numbers
            of devices, of atoms, and what the user said. Plain values.
        source: What it was made from.
        placement: What an engine carries out; None where blocks are relayed.
        plan: What the planner found, with the costs that order actions; None if nothing was
            searched.
        blocks: Who has which blocks, where they are relayed.
    """

    made_for: Mapping[str, Any]
    source: Source
    placement: Placement | None = None
    plan: Plan | None = None
    blocks: RelayPlan | None = None

    @property
    def costs(self) -> CostTable | None:
        """Costs of the stages, for the order of actions."""
        return None if self.plan is None else self.plan.costs

    def carries_out(self, other: RunPlan) -> bool:
        """Whether another plan gives the same to everybody, to be done in the same order."""
        mine, others = (self.placement, self.blocks), (other.placement, other.blocks)
        return mine == others and self.costs == other.costs

    def differences(self, wanted: Mapping[str, Any]) -> list[str]:
        """What another run has not in common with this one, in words.

        Args:
            wanted: What that run is, as in :attr:`made_for`.

        >>> RunPlan({"devices": 4, "schedule": "tspipe"}, "times").differences({"devices": 2})
        ['devices (4 then, 2 now)', "schedule ('tspipe' then, None now)"]
        """
        names = dict.fromkeys([*self.made_for, *wanted])
        pairs = [(name, self.made_for.get(name), wanted.get(name)) for name in names]
        return [f"{name} ({then!r} then, {now!r} now)" for name, then, now in pairs if then != now]

    def to_entries(self) -> dict[str, str | None]:
        """Texts for a checkpoint, by their keys; the first one is what ``tspipe plan`` saves."""
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
        """What :meth:`to_entries` gave; None of an older version, which kept no plan.

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
    """A value as it is after a way through text, so that it can be compared with one that was."""
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
