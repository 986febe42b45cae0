"""What ``tspipe plan --schedule relay`` prints: how each mode distributes blocks."""

from __future__ import annotations

from lightning_tspipe.cli.quantities import format_seconds
from lightning_tspipe.errors import PartitionError
from lightning_tspipe.planning import relay
from lightning_tspipe.planning.table import aligned


def explained(profile: relay.RelayProfile, num_devices: int, memory: int | None) -> str:
    """Compare all modes, and describe the distribution of the best mode that relays.

    Raises:
        PartitionError: The blocks fit in no mode.
    """
    rows = [("", "mode", "step", "samples/s", "devices of each stage")]
    plans, failures = {}, {}
    for mode in relay.MODES:
        try:
            plans[mode] = relay.plan_mode(mode, profile, num_devices, memory)
        except PartitionError as error:
            failures[mode] = str(error)
    relayed: list[relay.Mode] = [mode for mode in plans if mode in {"dpu", "ahd", "ir"}]
    if not relayed:
        raise PartitionError("; ".join(dict.fromkeys(failures.values())))
    seconds = {mode: relay.seconds_per_batch(mode, plan, profile) for mode, plan in plans.items()}
    best: relay.Mode = min((seconds[mode], mode) for mode in relayed)[1]
    for mode, plan in plans.items():
        each = " ".join(map(str, plan.widths))
        rate = profile.batch_size / seconds[mode]
        mark = "*" if mode == best else ""
        rows.append((mark, mode, format_seconds(seconds[mode]), f"{rate:.1f}", each))
    lines = [*aligned(rows), *(f"{mode}: {failure}" for mode, failure in failures.items())]
    blocks: list[tuple[str, ...]] = [("block", "teacher", "student", "gradients")]
    for block in profile.blocks:
        both = (block.teacher, block.student)
        times = (format_seconds(each[profile.batch_size]) for each in both)
        blocks.append((block.name, *times, f"{block.gradient_bytes / 1e6:.2f} MB"))
    return "\n".join(
        [*lines, "", *aligned(blocks), "", str(plans[best]), _reason(best, plans[best], profile)]
    )


def _reason(mode: relay.Mode, plan: relay.RelayPlan, profile: relay.RelayProfile) -> str:
    """The reason for the time of a step."""
    longest = max(range(plan.num_stages), key=lambda stage: plan.stage_seconds[stage])
    work = sum(block.seconds(profile.batch_size) + block.update for block in profile.blocks)
    return (
        f"mode={mode!r} is the fastest that relays. Its step takes as long as its slowest stage, "
        f"{longest}; the work of all blocks on whole batches, divided evenly, would take "
        f"{format_seconds(work / plan.num_devices)}."
    )
