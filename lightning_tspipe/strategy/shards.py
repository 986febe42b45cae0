"""Checkpoints of which a rank reads only its part: a folder of shards, or one file."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_tspipe.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

META_FILE = "meta.pt"
GRADIENTS = "lightning_tspipe_gradients"
"""Accumulated gradients, by replica; each rank writes its own."""

Group = dict[str, Any]
_Stored = TensorStorageMetadata


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder of shards.

    Raises:
        ConfigurationError: It is a folder in which something is missing.
    """
    if not path.is_dir():
        return False
    if not (path / ".metadata").is_file() or not (path / META_FILE).is_file():
        raise ConfigurationError(
            f"{path} is a folder, but not a whole checkpoint: .metadata or {META_FILE} is missing"
        )
    return True


def take_place_of(part: Path, path: Path) -> None:
    """Put a finished folder where an older checkpoint may be.

    A folder can't replace another one at once: should the process end between the two renames,
    :func:`newest` finds the older one.
    """
    old = aside(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def newest(path: Path) -> Path:
    """The checkpoint of a path, also when its replacement was cut short."""
    old = aside(path)
    return old if old.exists() and not path.exists() else path


def aside(path: Path) -> Path:
    """Where the checkpoint of a path is while its replacement takes its place."""
    return path.with_name(f".{path.name}.old")


@contextmanager
def alone() -> Iterator[None]:
    """Without the warning that a single process reads: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class FolderSource:
    """A folder of shards.

    Args:
        path: The folder.

    Attributes:
        shapes: Of the parameters and buffers.
        num_optimizers: Optimizers whose state it holds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata = FileSystemReader(path).read_metadata()
        self._metadata = metadata.state_dict_metadata
        self._paths: dict[tuple[Any, ...], str] = {p: k for k, p in metadata.planner_data.items()}
        self.shapes = {
            str(place[1]): tuple(entry.size)
            for place, key in self._paths.items()
            if place[0] == "model" and isinstance(entry := self._metadata[key], _Stored)
        }
        self.num_optimizers = len(
            {place[0] for place in self._paths if str(place[0]).startswith("optimizer_")}
        )

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some parameters and buffers, on the CPU."""
        state: dict[str, dict[str, Any]] = {"model": {}}
        for name in names:
            state["model"][name] = self._empty(("model", name))
        if names:
            self._load(state)
        return state["model"]

    def optimizer_groups(self, index: int, groups: Sequence[Group]) -> list[Group]:
        """The parameter groups of an optimizer, in the form of its own."""
        name = f"optimizer_{index}"
        known = {place[2:] for place in self._paths if place[:2] == (name, "param_groups")}
        template = [
            {key: value for key, value in group.items() if (place, key) in known}
            for place, group in enumerate(groups)
        ]
        state = {name: {"param_groups": template}}
        self._load(state)
        loaded = state[name]["param_groups"]
        return [
            {**group, **saved, "params": group["params"]}
            for group, saved in zip(groups, loaded, strict=True)
        ]

    def optimizer_state(
        self, index: int, names: Sequence[str], wanted: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """What an optimizer kept for some parameters."""
        del names
        own = f"optimizer_{index}"
        found: dict[str, dict[str, Any]] = {}
        for place in self._paths:
            if place[:2] == (own, "state") and place[2] in wanted:
                found.setdefault(place[2], {})[place[3]] = self._empty(place)
        state = {own: {"state": found}}
        if found:
            self._load(state)
        return state[own]["state"]

    def gradients(self, wanted: Collection[str]) -> list[dict[str, Tensor]]:
        """What each replica had accumulated for some parameters."""
        found: dict[str, dict[str, Any]] = {}
        for place in self._paths:
            if place[0] == GRADIENTS and place[2] in wanted:
                found.setdefault(place[1], {})[place[2]] = self._empty(place)
        state = {GRADIENTS: found}
        if found:
            self._load(state)
        return [found[replica] for replica in sorted(found, key=int)]

    def _empty(self, place: tuple[Any, ...]) -> Tensor | None:
        entry = self._metadata[self._paths[place]]
        if not isinstance(entry, _Stored):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def _load(self, state: dict[str, Any]) -> None:
        with alone():
            load(state, storage_reader=FileSystemReader(self._path), no_dist=True)


class FileSource:
    """An ordinary Lightning checkpoint, of which tensors may be mapped to its file.

    Those that are taken are copied: the file may be replaced while the training goes on.

    Args:
        checkpoint: The checkpoint. Hooks may change it before it is asked.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters and buffers."""
        state = self._checkpoint["state_dict"]
        return {name: tuple(tensor.shape) for name, tensor in state.items()}

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some parameters and buffers."""
        return {name: self._checkpoint["state_dict"][name].clone() for name in names}

    def optimizer_groups(self, index: int, groups: Sequence[Group]) -> list[Group]:
        """The parameter groups of an optimizer, in the form of its own."""
        saved = self._checkpoint["optimizer_states"][index]["param_groups"]
        return [
            {**old, "params": group["params"]} for group, old in zip(groups, saved, strict=True)
        ]

    def optimizer_state(
        self, index: int, names: Sequence[str], wanted: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """What an optimizer kept for some parameters."""
        states = self._checkpoint.get("optimizer_states", [])
        if index >= len(states):
            return {}
        saved = states[index]
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        return {
            name: {
                what: value.clone() if isinstance(value, Tensor) else value
                for what, value in saved["state"][key].items()
            }
            for name, key in zip(names, keys, strict=True)
            if name in wanted and key in saved["state"]
        }

    def gradients(self, wanted: Collection[str]) -> list[dict[str, Tensor]]:
        """None: where the pipeline was, tells them."""
        del self, wanted
        return []


def optimizer_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in its order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"parameter {place}") for place, p in enumerate(parameters)]


def own_optimizer_state(
    module: nn.Module, optimizer: Optimizer, is_mine: Callable[[str], bool]
) -> dict[str, Any]:
    """An optimizer's state for some parameters, keyed by their names.

    Torch's optimizers load it as it is: they take the names of ``param_groups`` for keys.
    """
    own = optimizer.state_dict()
    names = optimizer_names(module, optimizer)
    rest: Iterator[str] = iter(names)
    groups = [{**g, "params": [next(rest) for _ in g["params"]]} for g in own["param_groups"]]
    state = {
        name: own["state"][place]
        for place, name in enumerate(names)
        if place in own["state"] and is_mine(name)
    }
    return {"state": state, "param_groups": groups}
