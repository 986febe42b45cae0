"""The emulated world: a step's costs, made as long and as light as the machine can carry."""

from __future__ import annotations

from dataclasses import replace

from lightning_tspipe.planning.profile import AtomProfile, NetworkProfile, Seconds
from lightning_tspipe.planning.step_profile import StepProfile

ACTION_SECONDS = 3e-4
"""What the executor needs for an action while as many processes as there are share the cores."""


def work_seconds(profile: StepProfile) -> float:
    """Seconds that one device needs for a step: both networks, there and back, and the loss."""
    own, other = profile.num_calls
    samples = profile.batch_sizes[0]
    seconds = own * sum(profile.student.sums(kind, samples)[-1] for kind in ("forward", "backward"))
    if profile.teacher is not None:
        seconds += other * profile.teacher.sums("forward", samples)[-1]
    return seconds + profile.loss_seconds_per_sample * samples


def emulated(profile: StepProfile, seconds: float, fraction: float) -> StepProfile:
    """The same proportions at another size.

    Args:
        profile: A step, priced for the real device.
        seconds: What :func:`work_seconds` shall be.
        fraction: Of the bytes that travel between stages.
    """
    factor = seconds / work_seconds(profile)

    def atom(real: AtomProfile) -> AtomProfile:
        def scaled(times: Seconds) -> Seconds:
            return {size: factor * time for size, time in times.items()}

        return replace(
            real,
            forward=scaled(real.forward),
            backward=scaled(real.backward),
            input_backward=scaled(real.input_backward),
            weight_backward=scaled(real.weight_backward),
            output_bytes_per_sample=round(fraction * real.output_bytes_per_sample),
            result_bytes_per_sample=round(fraction * real.result_bytes_per_sample),
        )

    def network(real: NetworkProfile) -> NetworkProfile:
        return NetworkProfile(tuple(map(atom, real.atoms)))

    return replace(
        profile,
        student=network(profile.student),
        teacher=None if profile.teacher is None else network(profile.teacher),
        input_bytes_per_sample=4,
        loss_seconds_per_sample=factor * profile.loss_seconds_per_sample,
    )
