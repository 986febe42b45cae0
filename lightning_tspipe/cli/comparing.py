"""``tspipe plan --compare``: DDP and FSDP2 beside the best pipeline, and which of them to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_tspipe.cli.plan_options import Options
from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.planning.cluster import Cluster
from lightning_tspipe.planning.data_parallel import (
    METHODS,
    DataParallelPlan,
    Method,
    plan_data_parallel,
)
from lightning_tspipe.planning.overlap import Collectives
from lightning_tspipe.planning.plan import Plan
from lightning_tspipe.planning.step_profile import StepProfile
from lightning_tspipe.planning.table import aligned, megabytes

_WORTH_IT = 1.1
"""What is less plain must be faster by this factor: plans are no more exact."""

_TITLES: Mapping[Method, str] = {"ddp": "DDP", "fsdp2": "FSDP2"}


@dataclass(frozen=True)
class Comparison:
    """The ways to train one step on the same devices.

    Attributes:
        pipeline: The best pipeline; None: none fits.
        others: Data parallelism by method, or why it is impossible.
        batch: Samples of a batch.
        options: Options of the command.
    """

    pipeline: Plan | None
    others: Mapping[Method, DataParallelPlan | str]
    batch: int
    options: Options

    @property
    def fitting(self) -> Sequence[DataParallelPlan | Plan]:
        """What fits, the plainest first."""
        plans = [plan for plan in self.others.values() if not isinstance(plan, str) and plan.fits]
        return plans if self.pipeline is None else [*plans, self.pipeline]

    @property
    def choice(self) -> DataParallelPlan | Plan | None:
        """The plainest of the fastest; None: nothing fits."""
        fastest = min((plan.step_seconds for plan in self.fitting), default=0.0)
        near = (plan for plan in self.fitting if plan.step_seconds <= fastest * _WORTH_IT)
        return next(near, None)

    def __str__(self) -> str:
        lines = ["the same devices with data parallelism:", *aligned(self._rows())]
        lines += [
            f"{_TITLES[method]}: {plan}"
            for method, plan in self.others.items()
            if isinstance(plan, str)
        ]
        return "\n".join([*lines, *self._about_batches(), self.advice])

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("", "way", "batch of a device", "step", "samples/s", "computes", "memory", "fits")
        ]
        ways: list[DataParallelPlan | Plan | str | None] = [*self.others.values(), self.pipeline]
        for plan in ways:
            if plan is None or isinstance(plan, str):
                continue
            mark = "*" if plan is self.choice else ""
            step = format_seconds(plan.step_seconds / self.options.speed)
            rate = f"{plan.samples_per_second * self.options.speed:.0f}"
            if isinstance(plan, Plan):
                share = self.batch // plan.num_replicas
                together = f"{share} through {plan.pipeline.num_ranks}"
                memory = megabytes(max(plan.memory_bytes))
                busy = 1 - plan.bubble_ratio
                rows.append(
                    (mark, plan.schedule, together, step, rate, f"{busy:.0%}", memory, "yes")
                )
                continue
            busy = plan.computing_seconds / plan.step_seconds if plan.step_seconds else 1.0
            passes = f"{plan.num_passes} x " if plan.num_passes > 1 else ""
            fits = "yes" if plan.fits else f"no, {megabytes(plan.excess)} too much"
            rows.append((
                mark, _TITLES[plan.method], f"{passes}{plan.samples}", step, rate, f"{busy:.0%}",
                megabytes(plan.memory_bytes), fits,
            ))  # fmt: skip
        return rows

    def _about_batches(self) -> list[str]:
        """What a smaller batch on each device means."""
        plans = [plan for plan in self.others.values() if not isinstance(plan, str)]
        if not plans or plans[0].num_devices == 1:
            return []
        plan = next((plan for plan in plans if plan.fits), plans[0])
        each = plan.samples
        text = (
            f"with {_TITLES[plan.method]} a device runs {_samples(each)} at once: BatchNorm "
            f"normalises over {each}, and a loss that compares samples sees {each}"
        )
        if self.pipeline is not None:
            whole = self.batch // self.pipeline.num_replicas
            unit = max(1, whole // self.pipeline.num_microbatches)
            text += f"; in this pipeline {unit}, and the loss all {whole}"
        if any(plan.is_extrapolated for plan in plans):
            text += f". Calls of {_samples(each)} are extrapolated from larger ones"
        return [text]

    @property
    def advice(self) -> str:
        """One sentence: what to use, and why."""
        choice = self.choice
        if choice is None:
            return (
                "neither a pipeline nor DDP nor FSDP2 fits: take more devices, a smaller --batch, "
                "or --activation-checkpointing auto"
            )
        return f"{self._why(choice)}: use {self._how(choice)}"

    def _why(self, choice: DataParallelPlan | Plan) -> str:
        ddp, fsdp2 = (self._fitting_one(method) for method in METHODS)
        if choice is ddp:
            return f"DDP fits{_beside(choice, self.pipeline, 'and no pipeline does')}"
        reason = self._why_not_ddp(choice)
        if isinstance(choice, Plan):
            return f"{reason} {choice.schedule} fits{_beside(choice, fsdp2, 'and FSDP2 does not')}"
        return f"{reason} FSDP2 fits{_beside(choice, self.pipeline, 'and no pipeline does')}"

    def _why_not_ddp(self, choice: DataParallelPlan | Plan) -> str:
        ddp = self.others["ddp"]
        if isinstance(ddp, str):
            return "DDP cannot divide the batch;"
        if ddp.fits:
            ratio = ddp.step_seconds / choice.step_seconds
            return f"DDP fits, but takes {ratio:.2f} times as long;"
        held, limit = megabytes(ddp.memory_bytes), megabytes(ddp.memory_limit)
        return f"no device holds the whole of it (DDP: {held} of {limit});"

    def _fitting_one(self, method: Method) -> DataParallelPlan | None:
        plan = self.others[method]
        return None if isinstance(plan, str) or not plan.fits else plan

    def _how(self, choice: DataParallelPlan | Plan) -> str:
        """What a user writes."""
        if isinstance(choice, Plan):
            return _pipeline_arguments(choice, self.options.weights)
        text = 'Trainer(strategy="ddp")'
        if choice.has_views:
            text = "Trainer(strategy=DDPStrategy(gradient_as_bucket_view=True))"
        if choice.method == "fsdp2":
            text = "ModelParallelStrategy(), with fully_shard of each block in configure_model"
        text += f", and batch_size={choice.samples} for each device"
        if choice.num_passes > 1:
            text += f" with accumulate_grad_batches={choice.num_passes}"
        if choice.recomputed:
            text += ", with activation checkpointing of each block"
        return text


def _samples(number: int) -> str:
    return f"{number} sample{'s' * (number != 1)}"


def _beside(
    choice: DataParallelPlan | Plan, other: DataParallelPlan | Plan | None, without: str
) -> str:
    """How fast the choice is, beside another way."""
    if other is None:
        return f", {without}"
    name = other.schedule if isinstance(other, Plan) else _TITLES[other.method]
    ratio = other.step_seconds / choice.step_seconds if choice.step_seconds else 1.0
    if ratio < _WORTH_IT and isinstance(other, Plan):
        return f" and is about as fast as {name} ({ratio:.2f}), and plainer"
    return f" and is {ratio:.2f} times as fast as {name}"


def _pipeline_arguments(plan: Plan, weights: str) -> str:
    """How a pipeline is asked for."""
    is_asynchronous = plan.schedule == "1f1b" and not plan.window
    name = weights if is_asynchronous else plan.schedule
    text = "strategy=" + (f'"{name}"' if name == "tspipe" else f'"tspipe_{name}"')
    if plan.num_replicas > 1:
        named = f"schedule={plan.schedule!r}" + f", weights={weights!r}" * is_asynchronous
        text = f"TSPipeStrategy({named}, num_stages={plan.pipeline.num_ranks})"
    if plan.window:
        text += f" with accumulate_grad_batches={plan.window}"
    if plan.recomputed:
        text += ", with activation_checkpointing=True"
    return text


def compare(
    profile: StepProfile,
    cluster: Cluster,
    pipeline: Plan | None,
    options: Options,
    collectives: Collectives | None = None,
) -> Comparison:
    """Plan DDP and FSDP2 for what a pipeline was planned for.

    Args:
        profile: The step.
        cluster: The devices.
        pipeline: The best pipeline; None: none fits.
        options: Options of the command.
        collectives: Speed of communication, if it was measured.
    """
    others: dict[Method, DataParallelPlan | str] = {}
    for method in METHODS:
        try:
            others[method] = plan_data_parallel(
                profile,
                cluster,
                method,
                window=options.window or 1,
                collectives=collectives,
                memory_limit=options.memory,
                state_limit=options.state,
                may_recompute=options.activation_checkpointing == "auto",
            )
        except ConfigurationError as error:
            others[method] = str(error)
    return Comparison(pipeline, others, max(profile.batch_sizes), options)
