"""Checkpoints of which a rank reads only its part: a folder of shards, or one file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_tspipe.errors import CheckpointError
from lightning_tspipe.strategy.checkpoints.files import others_beside
from lightning_tspipe.strategy.checkpoints.folders import CONTENTS_FILE, META_FILE, Folder
from lightning_tspipe.strategy.training.optimizers import optimizer_names

if TYPE_CHECKING:
    from torch.optim import Optimizer

GRADIENTS = "lightning_tspipe_gradients"
"""Accumulated gradients, by replica; each rank writes its own."""

Group = dict[str, Any]


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder of shards.

    Raises:
        CheckpointError: It is a folder in which something is missing.
    """
    if not path.is_dir():
        return False
    missing = [name for name in (CONTENTS_FILE, META_FILE) if not (path / name).is_file()]
    if missing:
        found = sorted(entry.name for entry in path.iterdir())
        raise CheckpointError(
            f"{str(path)!r} is a folder, but not a whole checkpoint of shards: "
            f"{' and '.join(missing)} is missing (it holds {', '.join(found[:5]) or 'nothing'}). "
            f"Give ckpt_path another one{others_beside(path)}"
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
    """The path of a checkpoint while its replacement takes its place."""
    return path.with_name(f".{path.name}.old")


class FolderSource:
    """A folder of shards.

    Args:
        path: The folder.
        verify: Whether what is read is compared with its checksums.
        trusts: Whether values are read of which reading may run code.

    Attributes:
        shapes: Of the parameters and buffers.
        num_optimizers: Optimizers whose state it holds.
        has_checksums: Whether there are any, to compare with.

    Raises:
        CheckpointError: The folder is damaged, or of another kind.
    """

    def __init__(self, path: Path, *, verify: bool = True, trusts: bool = False) -> None:
        self._folder = Folder(path, verify=verify, trusts=trusts)
        self._places = self._folder.places
        self.shapes = {
            str(place[1]): entry.shape
            for place, entry in self._places.items()
            if place[0] == "model" and entry.dtype is not None
        }
        self.num_optimizers = len(
            {place[0] for place in self._places if str(place[0]).startswith("optimizer_")}
        )
        self.has_checksums = self._folder.has_checksums

    def rest(self) -> dict[str, Any]:
        """What Lightning keeps beside the weights and the optimizers.

        Raises:
            CheckpointError: It is damaged, or holds what may run code.
        """
        return self._folder.rest()

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some parameters and buffers, on the CPU."""
        return {name: self._folder.read(("model", name)) for name in names}

    def optimizer_groups(self, index: int, groups: Sequence[Group]) -> list[Group]:
        """The parameter groups of an optimizer, in the form of its own."""
        own = f"optimizer_{index}"
        places = {place[2:]: place for place in self._places if place[:2] == (own, "param_groups")}
        return [
            {
                key: value
                if key == "params" or (number, key) not in places
                else self._folder.read(places[number, key])
                for key, value in group.items()
            }
            for number, group in enumerate(groups)
        ]

    def optimizer_state(
        self, index: int, names: Sequence[str], wanted: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """What an optimizer kept for some parameters."""
        del names
        own = f"optimizer_{index}"
        found: dict[str, dict[str, Any]] = {}
        for place in self._places:
            if place[:2] == (own, "state") and place[2] in wanted:
                found.setdefault(place[2], {})[place[3]] = self._folder.read(place)
        return found

    def gradients(self, wanted: Collection[str]) -> list[dict[str, Tensor]]:
        """What each replica had accumulated for some parameters."""
        found: dict[str, dict[str, Any]] = {}
        for place in self._places:
            if place[0] == GRADIENTS and place[2] in wanted:
                found.setdefault(place[1], {})[place[2]] = self._folder.read(place)
        return [found[replica] for replica in sorted(found, key=int)]


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
