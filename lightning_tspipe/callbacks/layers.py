"""Layers of a network in forward order: the units that freeze as a whole.

A layer is a child of a container: of a ``Sequential``, of a ``ModuleList``, and of any module that
has a container of blocks somewhere inside. So the blocks of a ViT or a ResNet are layers, and their
parts are not::

    backbone ─┬─ conv1                     layer 0: conv1, bn1, ...
              ├─ layer1 ─┬─ BasicBlock     layer 1
              │          └─ BasicBlock     layer 2
              └─ fc                        layer 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    layers = _with_parameters(pieces) if given is None else _as_given(pieces, given)
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


def _with_parameters(pieces: list[Layer]) -> list[Layer]:
    """Merge pieces without modules or parameters into the layer before, or into the first."""
    layers: list[Layer] = []
    waiting: list[Layer] = []
    for piece in pieces:
        is_layer = bool(piece.modules and piece.parameters)
        if is_layer:
            layers.append(_joined([*waiting, piece], piece.name))
            waiting = []
        elif layers:
            layers[-1] = _joined([layers[-1], piece], layers[-1].name)
        else:
            waiting.append(piece)
    return layers


def _as_given(pieces: list[Layer], given: Sequence[str]) -> list[Layer]:
    """Layers that begin at the named modules."""
    groups: list[list[Layer]] = []
    names = list(given)
    found: list[str] = []
    for piece in pieces:
        start = next((n for n in names if f"{piece.name}.".startswith(f"{n}.")), None)
        if start is not None and start not in found:
            found.append(start)
            groups.append([*(groups.pop() if found == [start] and groups else []), piece])
        elif groups:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    if found != names:
        known = ", ".join(piece.name for piece in pieces)
        raise ConfigurationError(
            f"FreezeAndRepack(layers={names}): name modules in the order in which they are "
            f"registered; the smallest that can be named are: {known}"
        )
    return [_joined(group, name) for group, name in zip(groups, found, strict=True)]


def _joined(pieces: Sequence[Layer], name: str) -> Layer:
    return Layer(
        name,
        [child for piece in pieces for child in piece.modules],
        [parameter for piece in pieces for parameter in piece.parameters],
    )


def _check_ties(module: nn.Module, networks: Sequence[str], layers: Sequence[Layer]) -> None:
    """Refuse a parameter of two layers: frozen in one, it would not be trained in the other."""
    seen: dict[int, tuple[int, str]] = {}
    place = {name: i for i, layer in enumerate(layers) for name in layer.parameters}
    for name, parameter in _all_parameters(module, networks):
        index = place.get(name, len(layers))
        first, other = seen.setdefault(id(parameter), (index, name))
        if first != index:
            raise ConfigurationError(
                f"{name!r} and {other!r} are the same parameter in two layers, so that neither can "
                "freeze without the other. Untie them, or name larger layers: "
                "FreezeAndRepack(layers=[...])"
            )


def _all_parameters(
    module: nn.Module, networks: Sequence[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    for network in networks:
        yield from module.get_submodule(network).named_parameters(
            prefix=network, remove_duplicate=False
        )
