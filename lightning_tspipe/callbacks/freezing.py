"""What freezes: the layers of a network in forward order, and policies that say how many.

A layer is a child of a container: of a ``Sequential``, of a ``ModuleList``, and of any module that
has a container of blocks somewhere inside. So the blocks of a ViT or a ResNet are layers, and their
parts are not::

    backbone ─┬─ conv1                     layer 0: conv1, bn1, ...
              ├─ layer1 ─┬─ BasicBlock     layer 1
              │          └─ BasicBlock     layer 2
              └─ fc                        layer 3

Policies decide between epochs. The rule of PipeTransformer (He et al., ICML 2021, section 3.1,
equation 1): with ``L`` layers, of which ``L_before`` are frozen, at the beginning of an epoch

    L_now = min(L_before + alpha (L - L_before), argmin_{l >= L_before} |g_l|)

freeze, where ``|g_l|`` is the gradient norm of layer l in the epoch before: at most a share
``alpha`` of the active layers, and only layers before the one with the smallest gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_tspipe.errors import ConfigurationError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass
class Layer:
    """Modules that freeze together.

    Attributes:
        name: Name of the first module.
        modules: The modules.
        parameters: Names of their parameters in the LightningModule.
    """

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)


def layers_of(
    module: nn.Module, networks: Sequence[str], given: Sequence[str] | None = None
) -> list[Layer]:
    """The layers of a network.

    Args:
        module: The LightningModule.
        networks: Dotted names of the submodules that are the network, in the order of the forward.
        given: Dotted names of its layers, if the user names them; modules between two of them
            belong to the earlier one.

    Raises:
        ConfigurationError: A layer that does not exist, or shares a parameter with another one.
    """
    pieces = [piece for name in networks for piece in _pieces(module.get_submodule(name), name)]
    if given is None:
        names = [piece.name if piece.modules and piece.parameters else "" for piece in pieces]
    else:
        names = _as_given(pieces, given)
    # What lies between two starts belongs to the earlier one, all before the first one to it.
    layers = [Layer("")]
    for piece, name in zip(pieces, names, strict=True):
        if name and layers[-1].name:
            layers.append(Layer(""))
        layer = layers[-1]
        layer.name = layer.name or name
        layer.modules += piece.modules
        layer.parameters += piece.parameters
    layers = [layer for layer in layers if layer.name]
    _check_ties(module, networks, layers)
    return layers


def freeze(module: nn.Module, layers: Iterable[Layer]) -> None:
    """Turn off the gradients of layers, and put their BatchNorm and dropout into eval mode."""
    for layer in layers:
        for name in layer.parameters:
            parameter = module.get_parameter(name)
            parameter.requires_grad_(False)
            parameter.grad = None
        for child in layer.modules:
            child.eval()


def _pieces(root: nn.Module, name: str) -> list[Layer]:
    """The modules that are not divided, with their parameters; a container's own come first."""
    own = [f"{name}.{key}" for key, _ in root.named_parameters(recurse=False)]
    children = list(root.named_children())
    if not children:
        return [Layer(name, [root], own)]
    found = [Layer(name, [], own)] if own else []
    for key, child in children:
        path = f"{name}.{key}"
        if _is_divided(child):
            found += _pieces(child, path)
        else:
            found.append(Layer(path, [child], [f"{path}.{n}" for n, _ in child.named_parameters()]))
    return found


def _is_divided(module: nn.Module) -> bool:
    inside = (child for child in module.modules() if child is not module)
    return type(module) in _CONTAINERS or any(map(_has_blocks, inside))


def _has_blocks(module: nn.Module) -> bool:
    """Whether a module is a container of several blocks of one type."""
    if type(module) not in _CONTAINERS:
        return False
    kinds = [type(child) for child in module.children() if _is_block(child)]
    return len(kinds) > len(set(kinds))


def _is_block(module: nn.Module) -> bool:
    """Whether a module has children, and is not a subclass of Sequential (conv-norm-activation)."""
    is_row = isinstance(module, nn.Sequential) and type(module) not in _CONTAINERS
    return not is_row and any(True for _ in module.children())


def _as_given(pieces: list[Layer], given: Sequence[str]) -> list[str]:
    """For each piece, the name of the layer that begins there, or nothing."""
    names = []
    for piece in pieces:
        start = next((n for n in given if f"{piece.name}.".startswith(f"{n}.")), "")
        names.append("" if start in names else start)
    if list(filter(None, names)) != list(given):
        known = ", ".join(piece.name for piece in pieces)
        raise ConfigurationError(
            f"FreezeAndRepack(layers={list(given)}): name modules in the order in which they are "
            f"registered; the smallest that can be named are: {known}"
        )
    return names


def _check_ties(module: nn.Module, networks: Sequence[str], layers: Sequence[Layer]) -> None:
    """Refuse a parameter of two layers: frozen in one, it would not be trained in the other."""
    seen: dict[int, tuple[int, str]] = {}
    place = {name: i for i, layer in enumerate(layers) for name in layer.parameters}
    for network in networks:
        parameters = module.get_submodule(network).named_parameters(
            prefix=network, remove_duplicate=False
        )
        for name, parameter in parameters:
            index = place.get(name, len(layers))
            first, other = seen.setdefault(id(parameter), (index, name))
            if first != index:
                raise ConfigurationError(
                    f"{name!r} and {other!r} are the same parameter in two layers, so that neither "
                    "can freeze without the other. Untie them, or name larger layers: "
                    "FreezeAndRepack(layers=[...])"
                )


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
                f"GradientNormFreeze(start_epoch={self.start_epoch}): must be at least 1, because "
                "the rule needs the gradients of an epoch"
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
    name = getattr(policy, "__name__", type(policy).__name__)
    said = policy(observed)
    decision = said if isinstance(said, Decision) else Decision(said, f"decided by {name}")
    number: Any = decision.num_frozen
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigurationError(
            f"{name} returned {number!r}, not the number of frozen layers from now on"
        )
    if number > observed.num_freezable:
        raise ConfigurationError(
            f"{name} freezes {number} of {len(observed.layers)} layers, but at most "
            f"{observed.num_freezable} may freeze, since something must be trained. Freeze fewer, "
            "or choose FreezeAndRepack(num_active=...)"
        )
    if number < observed.num_frozen:
        raise ConfigurationError(
            f"{name} freezes {number} layers in all, but {observed.num_frozen} are already "
            "frozen: a frozen layer stays frozen, because it has left the pipeline"
        )
    return decision
