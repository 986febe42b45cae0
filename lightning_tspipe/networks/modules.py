"""What can be said of a module without looking into its ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_tspipe.networks.huggingface import is_recording


def names_in(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def title(module: nn.Module, name: str) -> str:
    """How messages call a network."""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its ``forward``."""
    return bool(
        # nn.Module has no public way to ask.
        any(not is_recording(hook) for hook in module._forward_hooks.values())  # noqa: SLF001
        or module._forward_pre_hooks  # noqa: SLF001
        or module._backward_hooks  # noqa: SLF001
        or module._backward_pre_hooks  # noqa: SLF001
    )


def returns_tuple(module: nn.Module | None) -> bool:
    """Whether it is one of torch's modules whose result is no single tensor."""
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention)


def blocks_of(module: nn.Module) -> list[nn.Module] | None:
    """The submodules that the module applies in turn, if it is of a kind that says so."""
    if type(module) is nn.TransformerEncoder:
        return [*module.layers, *([module.norm] if module.norm is not None else [])]
    blocks: Callable[[], Iterable[nn.Module]] | None = getattr(module, "pipeline_blocks", None)
    return None if blocks is None else list(blocks())


def is_leaf(module: nn.Module, *, ignore_hooks: bool = False) -> bool:
    """Whether a module is called as a whole instead of being looked into."""
    if not ignore_hooks and has_hooks(module):
        return True
    if type(module) is nn.Sequential or blocks_of(module) is not None:
        return False
    if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
        return True
    return not any(True for _ in module.children())


@contextmanager
def attributes_restored(root: nn.Module) -> Iterator[list[nn.Module]]:
    """Undo what ``forward`` writes to attributes; the list tells in which modules it did."""
    before = {
        module: {key: (value, _length(value)) for key, value in vars(module).items()}
        for module in root.modules()
    }
    written: list[nn.Module] = []
    try:
        yield written
    finally:
        for module, attributes in before.items():
            kept = {k: v for k, v in vars(module).items() if not k.startswith("_tensor_constant")}
            same = kept.keys() == attributes.keys() and all(
                value is attributes[key][0] and _length(value) == attributes[key][1]
                for key, value in kept.items()
            )
            if not same:
                written.append(module)
            vars(module).clear()
            vars(module).update({key: value for key, (value, _) in attributes.items()})


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | dict | set) else 0
