"""From runs to figures: means, deviations, and how far an arm is from the vanilla one."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, stdev

from lightning_tspipe.plots import Curve

Points = list[tuple[int, float]]
"""(update, value) pairs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        task: Name of the task.
        arm: Name of the arm.
        seed: Of weights, batches and augmentations.
        curves: The loss and the task's metric.
        metric: Which of the curves is compared.
        measured: The metric at the end over more samples than the curve's, where there are any.
    """

    task: str
    arm: str
    seed: int
    curves: dict[str, Points]
    metric: str
    measured: float | None = None

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.measured if self.measured is not None else self.curves[self.metric][-1][1]


def figures(runs: list[Run]) -> dict[str, float]:
    """``{task}.{arm}.{mean,deviation}``, and ``{task}.{arm}_minus_vanilla``.

    Arms are compared over the seeds that both have.
    """
    found: dict[str, float] = {}
    finals = {(run.task, run.arm, run.seed): run.final for run in runs}
    for task, arm in sorted({(run.task, run.arm) for run in runs}):
        own = {seed: value for (a, b, seed), value in finals.items() if (a, b) == (task, arm)}
        found[f"{task}.{arm}.seeds"] = len(own)
        found[f"{task}.{arm}.mean"] = mean(own.values())
        if len(own) > 1:
            found[f"{task}.{arm}.deviation"] = stdev(own.values())
        pairs = [
            (value, finals[task, "vanilla", seed])
            for seed, value in own.items()
            if arm != "vanilla" and (task, "vanilla", seed) in finals
        ]
        if pairs:
            found[f"{task}.{arm}_minus_vanilla"] = mean(ours - theirs for ours, theirs in pairs)
    return found


def mean_curves(runs: list[Run]) -> dict[str, dict[str, Curve]]:
    """The metric of each task against updates, by arm: the mean over the seeds."""
    found: dict[str, dict[str, Curve]] = {}
    for task, arm in dict.fromkeys((run.task, run.arm) for run in runs):
        own = [run.curves[run.metric] for run in runs if (run.task, run.arm) == (task, arm)]
        points = [
            (steps[0], mean(values))
            for steps, values in (zip(*at, strict=True) for at in zip(*own, strict=True))
        ]
        metric = next(run.metric for run in runs if run.task == task)
        steps, values = zip(*points, strict=True)
        found.setdefault(f"{task}: {metric}", {})[arm] = Curve(tuple(steps), (), tuple(values))
    return found


def table(runs: list[Run]) -> str:
    """A line per task and arm: seeds, mean and deviation of the final metric, seed by seed."""
    lines = [f"{'task':8} {'arm':15} {'metric':13} {'mean':>6}  {'deviation':>9}  seed by seed"]
    known = figures(runs)
    for task, arm in dict.fromkeys((run.task, run.arm) for run in runs):
        own = sorted((run for run in runs if (run.task, run.arm) == (task, arm)), key=_seed)
        deviation = known.get(f"{task}.{arm}.deviation")
        lines.append(
            f"{task:8} {arm:15} {own[0].metric:13} {known[f'{task}.{arm}.mean']:6.3f}  "
            f"{'' if deviation is None else format(deviation, '9.3f'):>9}  "
            + " ".join(f"{run.final:.3f}" for run in own)
        )
    return "\n".join(lines)


def _seed(run: Run) -> int:
    return run.seed
