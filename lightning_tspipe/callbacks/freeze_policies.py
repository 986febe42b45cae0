"""Policies that decide between epochs how many layers freeze.

The rule of PipeTransformer (He et al., ICML 2021, section 3.1, equation 1): with ``L`` layers, of
which ``L_before`` are frozen, at the beginning of an epoch

    L_now = min(L_before + alpha (L - L_before), argmin_{l >= L_before} |g_l|)

freeze, where ``|g_l|`` is the gradient norm of layer l in the epoch before: at most a share
``alpha`` of the active layers, and only layers before the one with the smallest gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_tspipe.errors import ConfigurationError


@dataclass(frozen=True)
class Observed:
    """Observations at the beginning of an epoch.

    Attributes:
        epoch: Number of the epoch that begins; in epoch 0 no gradients have been seen.
        layers: Names of the layers, in the order of the forward.
        num_frozen: Number of layers that are frozen already.
        num_freezable: Largest number of layers that may freeze; the last ones never do.
        norms: Gradient norm of each layer in the epoch before: the root of the mean square over
            the optimizer steps; 0 for a frozen layer. Empty in epoch 0.
    """

    epoch: int
    layers: tuple[str, ...]
    num_frozen: int
    num_freezable: int
    norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The number of frozen layers from now on, and the reason."""

    num_frozen: int
    reason: str


Policy = Callable[[Observed], "Decision | int"]


@dataclass(frozen=True)
class GradientNormFreeze:
    """PipeTransformer's rule: freezes the layers whose gradients have become small.

    Attributes:
        alpha: Share of the active layers that may freeze at a time, between 0 and 1; the paper's
            conservative value is 1/3.
        start_epoch: No layer freezes before this epoch.

    Raises:
        ConfigurationError: ``alpha`` outside of (0, 1), or ``start_epoch`` below 1.
    """

    alpha: float = 1 / 3
    start_epoch: int = 1

    def __post_init__(self) -> None:
        alpha: Any = self.alpha
        if not isinstance(alpha, int | float) or not 0 < alpha < 1:
            raise ConfigurationError(
                f"GradientNormFreeze(alpha={self.alpha!r}): the share of the active layers that "
                "may freeze at a time must be greater than 0 and less than 1, such as 1/3"
            )
        if self.start_epoch < 1:
            raise ConfigurationError(
                f"GradientNormFreeze(start_epoch={self.start_epoch}): at least 1, because the rule "
                "needs the gradients of an epoch"
            )

    def __call__(self, observed: Observed) -> Decision:
        """Decide the number of frozen layers from now on."""
        before = observed.num_frozen
        if not observed.norms or observed.epoch < self.start_epoch:
            return Decision(before, "no gradients to decide by yet")
        num_layers = len(observed.layers)
        most = before + int(self.alpha * (num_layers - before))
        least = min(range(before, num_layers), key=observed.norms.__getitem__)
        found = min(most, least, observed.num_freezable)
        return Decision(
            found,
            f"layer {least} ({observed.layers[least]}) has the smallest gradient norm, "
            f"{observed.norms[least]:.3g}; alpha={self.alpha:.3g} allows {most}, and "
            f"{observed.num_freezable} of {num_layers} may freeze",
        )


class ScheduledFreeze:
    """Freezes given numbers of layers from given epochs on.

    Args:
        layers: Number of frozen layers by epoch, such as ``{2: 4, 5: 8}``.

    Raises:
        ConfigurationError: Epochs or numbers below 0, or fewer layers in a later epoch.
    """

    def __init__(self, layers: Mapping[int, int]) -> None:
        self.layers = dict(sorted(layers.items()))
        numbers = list(self.layers.values())
        if not numbers or min(*numbers, *self.layers, 0) < 0 or numbers != sorted(numbers):
            raise ConfigurationError(
                f"ScheduledFreeze({dict(layers)}): give the number of frozen layers from each "
                "epoch on, such as {2: 4, 5: 8}; a frozen layer stays frozen"
            )

    def __call__(self, observed: Observed) -> Decision:
        """Decide the number of frozen layers from now on."""
        due = [epoch for epoch in self.layers if epoch <= observed.epoch]
        if not due:
            return Decision(observed.num_frozen, "nothing is scheduled yet")
        number = max(observed.num_frozen, self.layers[due[-1]])
        return Decision(number, f"scheduled for epoch {due[-1]}")


def decide(policy: Any, observed: Observed) -> Decision:
    """Ask a policy, and check its decision.

    Raises:
        ConfigurationError: It freezes layers that must stay active, or unfreezes one.
    """
    said = policy(observed)
    decision = said if isinstance(said, Decision) else Decision(said, f"decided by {_name(policy)}")
    number: Any = decision.num_frozen
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigurationError(
            f"{_name(policy)} returned {number!r}, not the number of frozen layers from now on"
        )
    if number > observed.num_freezable:
        raise ConfigurationError(
            f"{_name(policy)} freezes {number} layers, and of {len(observed.layers)} at most "
            f"{observed.num_freezable} may freeze, since something must be trained. Freeze fewer, "
            "or choose FreezeAndRepack(num_active=...)"
        )
    if number < observed.num_frozen:
        raise ConfigurationError(
            f"{_name(policy)} freezes {number} layers, and {observed.num_frozen} are frozen "
            "already: a frozen layer stays frozen, because it has left the pipeline"
        )
    return decision


def _name(policy: Any) -> str:
    return str(getattr(policy, "__name__", type(policy).__name__))
