"""A fit that goes on by itself from the newest whole checkpoint, after a restart."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_tspipe.callbacks.common import Restoring, decided_on
from lightning_tspipe.errors import CheckpointError, ConfigurationError
from lightning_tspipe.replacing import attributes_replaced
from lightning_tspipe.strategy.checkpoints.finding import Choice, checkpoints_in, newest_whole
from lightning_tspipe.strategy.lightning.namespaces import installed_namespaces

_ADVICE = "ModelCheckpoint(dirpath='runs/mine', every_n_train_steps=100)"
_NEWS_SECONDS = 10.0
"""How long a network file system may take to show a node what another one has written."""


class _Place(NamedTuple):
    """Where checkpoints are written.

    Attributes:
        folder: The folder.
        suffix: What their names end with.
        depth: So many folders further down.
    """

    folder: Path
    suffix: str = ".ckpt"
    depth: int = 0


@dataclass(eq=False, repr=False)
class AutoResume(Restoring):
    """Resumes ``fit`` from the newest whole checkpoint, if there is one; else it begins.

    For jobs whose launcher starts them again, such as ``torchrun --max-restarts 3``: the script is
    the same for the first start and for all others. Checkpoints are those that ``ModelCheckpoint``
    and ``OnExceptionCheckpoint`` write, files or folders of shards. Rank 0 looks for them, for all
    ranks; the log says which one was chosen, and which were skipped and why. Newer is what has more
    steps. A checkpoint that is cut off, damaged, half written or of weights only is skipped.

    A ``ckpt_path`` that is given to ``fit`` wins. One that Lightning finds by itself (of SLURM's
    requeue, or because of ``OnExceptionCheckpoint``) is one among the others. A second ``fit`` goes
    on from what is in memory, as without the callback.

    Works under every strategy whose checkpoints are files.

    Args:
        dirpath: The folder of the checkpoints; None: those of the Trainer's checkpoint callbacks.
        verify: Whether the chosen checkpoint is read once and compared with its checksums, on
            rank 0, before all ranks load it.

    Raises:
        ConfigurationError: Nothing is saved from which a run could go on, or each start has
            another folder, or the nodes of the job see different checkpoints.
        CheckpointError: There are checkpoints, and none of them is whole.
    """

    dirpath: str | Path | None = None
    verify: bool = True
    _has_begun: bool = field(default=False, init=False)
    _unnamed: set[Any] = field(default_factory=set, init=False)
    """Callbacks whose folder the user has not named; Lightning does, at the first stage of any."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unnamed |= {each for each in _saving(trainer) if each.dirpath is None}
        if stage != "fit" or self._has_begun or getattr(trainer, "fast_dev_run", False):
            return
        places, files = self._places(trainer), _on_exception(trainer)
        if not places and not files:
            raise ConfigurationError(_refusal(trainer))
        connector = trainer._checkpoint_connector  # noqa: SLF001 - a fit's path can't be set otherwise when ranks can agree
        load = connector.resume_start

        def resume_start(path: Any = None, *args: Any, **kwargs: Any) -> None:
            self.restore()
            self._has_begun = True
            weights_only = args[0] if args else kwargs.get("weights_only")
            if not path or _is_lightnings(trainer, path, places):
                path = self._choose(trainer, places, [*files, *filter(None, [path])], weights_only)
            else:
                rank_zero_info(
                    f"AutoResume: ckpt_path={str(path)!r} was given, and is taken at each start; "
                    "leave it out to go on from the newest checkpoint"
                )
            load(path, *args, **kwargs)

        self.undo.enter_context(attributes_replaced([(connector, "resume_start", resume_start)]))

    def _places(self, trainer: Trainer) -> list[_Place]:
        """The folders to look into that are the same for each start.

        Raises:
            ConfigurationError: One is not a folder of this machine.
        """
        if self.dirpath is not None:
            return [_Place(_local(self.dirpath))]
        # As Lightning does where no folder is named.
        usual = None if trainer.loggers else Path(trainer.default_root_dir) / "checkpoints"
        places = []
        for saves in _saving(trainer):
            folder = usual if saves in self._unnamed else saves.dirpath
            if folder is not None and not saves.save_weights_only:
                depth = len(Path(saves.filename or "").parts[:-1])
                places.append(_Place(_local(folder), saves.FILE_EXTENSION, depth))
        return places

    def _choose(
        self, trainer: Trainer, places: list[_Place], files: list[Any], weights_only: bool | None
    ) -> str | None:
        """The path of the checkpoint to go on from, on all ranks; None: there is none."""

        def paths() -> list[Path]:
            found = [path for place in places for path in checkpoints_in(*place)]
            return found + [path for path in map(Path, files) if path.exists()]

        def decide() -> tuple[Choice, list[Path]]:
            seen = paths()
            choice = newest_whole(seen, weights_only=weights_only, verify=self.verify)
            if choice.found is None and _can_be_resumed(choice):
                raise CheckpointError(
                    f"AutoResume: none of {len(seen)} checkpoints is whole:\n{choice.reasons}\n"
                    "Move them away to begin anew, or give fit a ckpt_path"
                )
            return choice, sorted(seen)

        choice, seen = decided_on(trainer, decide)
        _compare_nodes(trainer, seen, paths)
        where = ", ".join(str(place.folder) for place in places) or ", ".join(map(str, files))
        _tell(choice, where)
        return None if choice.found is None else str(choice.found.path)


def _local(folder: str | Path) -> Path:
    if "://" in str(folder):
        raise ConfigurationError(
            f"AutoResume looks into folders of this machine, not into {str(folder)!r}: give fit a "
            "ckpt_path, or save to a folder that is mounted"
        )
    return Path(folder).expanduser().absolute()


def _saving(trainer: Trainer) -> list[Any]:
    """The callbacks that save while the training goes on."""
    kinds = tuple(each.callbacks.ModelCheckpoint for each in installed_namespaces())
    return [saves for saves in trainer.checkpoint_callbacks if isinstance(saves, kinds)]


def _on_exception(trainer: Trainer) -> list[str]:
    """The files of callbacks that save at a failure."""
    kinds = tuple(each.callbacks.OnExceptionCheckpoint for each in installed_namespaces())
    return [saves.ckpt_path for saves in trainer.checkpoint_callbacks if isinstance(saves, kinds)]


def _is_lightnings(trainer: Trainer, path: Any, places: list[_Place]) -> bool:
    """Whether Lightning may have found a path by itself, as it does without a ``ckpt_path``."""
    connector = trainer._checkpoint_connector  # noqa: SLF001 - only it knows
    requeued = connector._hpc_resume_path  # noqa: SLF001 - see above
    if str(path) == str(requeued):
        return True
    files = _on_exception(trainer)
    folders = {place.folder for place in places}
    is_last = Path(path).stem.startswith("last") and Path(path).absolute().parent in folders
    return bool(files) and (str(path) in files or is_last)


def _refusal(trainer: Trainer) -> str:
    saving = _saving(trainer)
    if any(not saves.save_weights_only for saves in saving):
        return (
            "AutoResume: each start of this job would save into a new folder, which the logger "
            f"numbers (version_0, version_1, ...). Name one: {_ADVICE}"
        )
    what = "only weights are saved" if saving else "nothing is saved"
    return f"AutoResume: {what}, so there is nothing to go on from. Add {_ADVICE}"


def _can_be_resumed(choice: Choice) -> bool:
    """Whether something was skipped that was written for a run to go on from."""
    return any("weights only" not in why for why in choice.skipped.values())


def _compare_nodes(trainer: Trainer, expected: list[Path], paths: Any) -> None:
    """Refuse nodes that don't see the same checkpoints; every rank calls it.

    Raises:
        ConfigurationError: They don't.
    """
    if trainer.num_nodes == 1:
        return
    own, deadline = sorted(paths()), time.monotonic() + _NEWS_SECONDS
    while trainer.local_rank == 0 and own != expected and time.monotonic() < deadline:
        time.sleep(0.5)
        own = sorted(paths())
    if trainer.strategy.reduce_boolean_decision(own == expected or trainer.local_rank > 0):
        return
    remedy = "All nodes need the same folder of checkpoints, on a file system that they share"
    host = os.uname().nodename
    if own == expected:
        raise ConfigurationError(f"AutoResume: other nodes see other checkpoints. {remedy}")
    missing = ", ".join(str(path) for path in expected if path not in own) or "none"
    more = ", ".join(str(path) for path in own if path not in expected) or "none"
    raise ConfigurationError(
        f"AutoResume: {host} sees other checkpoints than the node of rank 0: it lacks {missing}; "
        f"only it has: {more}. {remedy}"
    )


def _tell(choice: Choice, where: str) -> None:
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    start = f" (restart {again} of {of})" if again != "0" else ""
    if choice.skipped:
        rank_zero_warn(f"AutoResume skips what no training can go on from:\n{choice.reasons}")
    if choice.found is None:
        rank_zero_info(f"AutoResume{start}: no checkpoint in {where}: the training begins")
    else:
        rank_zero_info(
            f"AutoResume{start}: the training goes on from {str(choice.found.path)!r}, step "
            f"{choice.found.step}"
        )
