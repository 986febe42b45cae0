"""A snapshot of some modules' weights, which their forwards can read instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class _Slot:
    """One tensor of one module, and its earlier version.

    The tensor is looked up in its module each time, so that a parameter may be replaced.
    """

    def __init__(self, owner: nn.Module, key: str, *, is_buffer: bool) -> None:
        self.owner = owner
        self.key = key
        self.is_buffer = is_buffer
        self.earlier = torch.empty_like(self.tensor)
        self.coming: Tensor | None = None
        self._live: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        table = self.owner._buffers if self.is_buffer else self.owner._parameters  # noqa: SLF001
        tensor = table[self.key]
        assert tensor is not None
        return tensor

    @property
    def is_delayed(self) -> bool:
        """Whether forwards read the snapshot; buffers that a forward updates must be current."""
        return not (self.is_buffer and self.owner.training)

    def swap_in(self) -> None:
        if self.is_delayed:
            self._live = self.tensor.data
            self.tensor.data = self.earlier

    def swap_out(self) -> None:
        if self._live is not None:
            self.tensor.data = self._live
            self._live = None


class WeightsSnapshot:
    """Holds one earlier version of modules, which their forwards read while it is open.

    The forwards of all submodules are hooked, since a step may call ``teacher.backbone`` and
    ``teacher.head`` rather than ``teacher``; the outermost call swaps in everything below it.

    Args:
        modules: Name -> module; names go into :meth:`state`.

    Raises:
        ConfigurationError: Modules without a single parameter.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._slots: dict[str, _Slot] = {}
        self._below: dict[nn.Module, list[_Slot]] = {}
        seen: dict[int, _Slot] = {}
        for prefix, module in modules.items():
            for path, owner in module.named_modules(prefix=prefix):
                self._add(path, owner, seen)
            for owner in module.modules():
                tensors = [*owner.parameters(), *owner.buffers()]
                self._below[owner] = [seen[id(tensor)] for tensor in tensors]
        if not self._slots:
            raise ConfigurationError(f"the teacher {', '.join(modules)} has no parameters")
        self._handles: list[RemovableHandle] = []
        self._swapped: list[_Slot] = []
        self._entered: list[nn.Module] = []
        self._is_open = False
        self._reads_earlier = False
        self._is_taken = False
        self._is_set_aside = False

    def _add(self, path: str, owner: nn.Module, seen: dict[int, _Slot]) -> None:
        # All parameters of a forward-only network count, whatever their role in the student.
        for is_buffer, table in ((False, owner._parameters), (True, owner._buffers)):  # noqa: SLF001
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    slot = _Slot(owner, key, is_buffer=is_buffer)
                    seen[id(tensor)] = slot
                    self._slots[f"{path}.{key}"] = slot

    def install(self) -> None:
        """Hook the forwards."""
        for module in self._below:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks; the modules are as before."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.close()

    @torch.no_grad()
    def take(self) -> None:
        """Overwrite the earlier version with the current weights."""
        slots = self._slots.values()
        torch._foreach_copy_([slot.earlier for slot in slots], [slot.tensor for slot in slots])
        self._is_taken = True

    @torch.no_grad()
    def set_aside(self) -> None:
        """Copy the current weights, for :meth:`settle` to make them the earlier version."""
        for slot in self._slots.values():
            if slot.coming is None:
                slot.coming = torch.empty_like(slot.earlier)
            slot.coming.copy_(slot.tensor)
        self._is_set_aside = True

    def settle(self) -> bool:
        """Make the weights that were set aside the earlier version; False if none were."""
        if not self._is_set_aside:
            return False
        for slot in self._slots.values():
            assert slot.coming is not None
            slot.earlier, slot.coming = slot.coming, slot.earlier
        self._is_set_aside, self._is_taken = False, True
        return True

    def drop(self) -> None:
        """Discard the earlier version (its memory is kept)."""
        self._is_taken = False

    def open(self, *, use_snapshot: bool) -> None:
        """Let forwards read the earlier version, if there is one and it is wanted."""
        self._is_open = True
        self._reads_earlier = use_snapshot and self._is_taken

    def close(self) -> None:
        """Let forwards read the current weights."""
        self._is_open = self._reads_earlier = False

    def state(self) -> dict[str, Tensor]:
        """A copy of the earlier version by name; empty if there is none."""
        if not self._is_taken:
            return {}
        return {name: slot.earlier.detach().clone() for name, slot in self._slots.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Load what :meth:`state` returned.

        Raises:
            ConfigurationError: It is the state of another model.
        """
        if state.keys() != self._slots.keys():
            differing = ", ".join(sorted(state.keys() ^ self._slots.keys())[:5])
            raise ConfigurationError(
                f"the checkpoint's late teacher belongs to another model ({differing}, ...); "
                f"resume with the same modules"
            )
        for name, slot in self._slots.items():
            slot.earlier.copy_(state[name])
        self._is_taken = True

    def check_unchanged(self, modules: dict[str, nn.Module]) -> None:
        """Refuse a module that was replaced, whose forwards are not hooked.

        Raises:
            ConfigurationError: A module is not the one of the start.
        """
        for name, module in modules.items():
            if module is not self._modules[name]:
                raise ConfigurationError(
                    f"{name} was replaced during training; update its weights in place instead "
                    f"(load_state_dict, or MomentumEMA)"
                )

    def _enter(self, module: nn.Module, _args: object) -> None:
        if not self._entered and self._reads_earlier:
            self._swapped = self._below[module]
            for slot in self._swapped:
                slot.swap_in()
        self._entered.append(module)

    def _leave(self, module: nn.Module, _args: object, output: Any) -> None:
        # Called after an exception too, even of a hook that ran before ``_enter`` could.
        if not self._entered or self._entered[-1] is not module:
            return
        self._entered.pop()
        if self._entered:
            return
        for slot in self._swapped:
            slot.swap_out()
        self._swapped = []
        if self._is_open:
            apply_to_collection(output, Tensor, _check_forward_only)


def _check_forward_only(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise ConfigurationError(
            "the teacher's forward is recorded for a backward, so its weights cannot be late; "
            "set teacher.requires_grad_(False) and call it under torch.no_grad()"
        )
    return tensor
