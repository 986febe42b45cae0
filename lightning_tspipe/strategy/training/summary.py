"""What is pipelined, for people: networks, their stages, and what each rank has of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from torch import Tensor, nn

from lightning_tspipe.capture.plan import NetworkName
from lightning_tspipe.ir.pipeline import LOSS_RANK
from lightning_tspipe.networks.program import Atom
from lightning_tspipe.planning.placement import Placement
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.table import aligned, megabytes
from lightning_tspipe.runtime.execution.engine import Engine
from lightning_tspipe.runtime.stages.captured import Captured
from lightning_tspipe.runtime.weights.ownership import named_tensors
from lightning_tspipe.strategy.lightning.run import Run

Rows = list[tuple[str, ...]]
"""Of words; the first row is a head."""


def summarize(run: Run, engine: Engine, plan: Plan | None = None) -> None:
    """The run can say what is pipelined, and how.

    Args:
        run: Gets its ``table`` and its ``summary``.
        engine: It has its stages.
        plan: With the memory that is expected of each rank; None: it is not known.
    """
    run.table = "\n".join(aligned(rows_of(engine)))
    tables = (run.table, *("\n".join(aligned(rows)) for rows in stages_of(engine, plan)))
    run.summary = "\n\n".join(tables)


def stages_of(engine: Engine, plan: Plan | None) -> tuple[Rows, Rows]:
    """A table of the stages, and one of the ranks.

    What several stages read counts for each of them, and for each rank that holds it.

    Args:
        engine: It has its stages.
        plan: As for :func:`summarize`.
    """
    named = dict(named_tensors(engine.module, remove_duplicate=False))
    stages: Rows = [("stage", "atoms", "parameters", "weights", "ranks")]
    captured, placement = engine.captured.whole, engine.whole
    for kind, network in captured.held.items():
        for stage, (start, stop) in enumerate(pairwise(placement.cuts[kind])):
            if start == stop:
                continue
            names = {n for atom in network.atoms[start:stop] for n in atom.tensor_names}
            holders = " ".join(map(str, placement.holders[kind][stage]))
            atoms = f"{start}-{stop - 1}"
            stages.append((f"{kind} {stage}", atoms, *_amounts(named, names), holders))
    ranks: Rows = [("rank", "parameters", "weights", "memory as planned")]
    own = dict(named_tensors(engine.module))
    for rank in range(engine.pipeline.num_ranks):
        held = [name for name in own if engine.shards.holds(name, rank)]
        planned = "-" if plan is None else megabytes(plan.memory_bytes[rank])
        ranks.append((str(rank), *_amounts(own, held), planned))
    return stages, ranks


def _amounts(named: Mapping[str, Tensor], names: Iterable[str]) -> tuple[str, str]:
    """The number of parameters, and the bytes of them and of buffers."""
    tensors = {id(named[name]): named[name] for name in names}.values()
    number = sum(each.numel() for each in tensors if isinstance(each, nn.Parameter))
    return f"{number:,}", megabytes(sum(each.numel() * each.element_size() for each in tensors))


def rows_of(engine: Engine) -> Rows:
    """A table of what is pipelined and what is not: rows of words, of which the first is a head."""
    rows: Rows = [("network", "kind", "called as", "parameters", "ranks")]
    captured, placement, module = engine.captured.whole, engine.whole, engine.module
    known: list[str] = []
    for kind, name in engine.names.items():
        known += [path for path, _ in module.get_submodule(name).named_parameters(prefix=name)]
        routes = captured.plan.routes.get(kind, ())
        called = dict.fromkeys(
            entry.title for route in routes for entry in route.entries
            if f"{entry.name}.".startswith(f"{name}.")
        )  # fmt: skip
        ranks = dict.fromkeys(
            rank
            for atom, rank in _placed_atoms(captured, placement, kind)
            if any(each.startswith(f"{name}.") for each in atom.tensor_names)
        )
        rows.append((
            name, "trained" if kind == "student" else "forward-only", ", ".join(called) or "-",
            f"{_size(module.get_submodule(name)):,}", " ".join(map(str, ranks)) or "-",
        ))  # fmt: skip
    rest = [parameter for path, parameter in module.named_parameters() if path not in set(known)]
    if rest:
        number = sum(parameter.numel() for parameter in rest)
        rows.append(("the rest", "beside the loss", "-", f"{number:,}", str(LOSS_RANK)))
    return rows


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _placed_atoms(
    captured: Captured, placement: Placement, kind: NetworkName
) -> Iterator[tuple[Atom, int]]:
    """The atoms of a network, and the rank that holds each."""
    network = captured.held.get(kind)
    cuts = placement.cuts[kind] if network is not None else ()
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        for atom in network.atoms[start:stop] if network is not None else ():
            yield atom, placement.holders[kind][stage][0]
