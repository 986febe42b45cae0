"""``tspipe export``: a part of a checkpoint as weights that other programs load."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.language.pretrained import save_pretrained
from lightning_tspipe.strategy.checkpoints.files import explain_damage, verify_file
from lightning_tspipe.strategy.checkpoints.folders import FolderSource, is_sharded, newest

Shape = tuple[int, ...]

_SUFFIXES = (".pt", ".safetensors")
_COMPILED = "_orig_mod."  # added to names by torch.compile


@dataclass(frozen=True)
class Options:
    """Options of ``tspipe export``.

    Attributes:
        checkpoint: a checkpoint: a file, or a folder of shards; with several, a part is read from
            the first that has it
        part: the submodule to export, such as student.backbone; with several, the last part of
            each name is kept, such as backbone.conv1.weight
        output: where to write; without .pt or .safetensors both are written (by default beside
            the checkpoint, named after the part)
        like: rename the weights after the model that this function returns, whose weights are in
            the same order, such as torchvision.models.resnet18
        pretrained: write a folder that from_pretrained of Hugging Face's transformers loads, with
            the configuration and tokenizer of this one (or of this name on the hub)
        trust: read a checkpoint that contains more than tensors and plain values; reading it may
            run code of its author
        verify: verify the checksums of a checkpoint; without, a damaged one is read as it is
    """

    checkpoint: list[Path]
    part: list[str] | None = field(default=None, metadata={"metavar": "NAME", "action": "append"})
    output: Path | None = None
    like: str | None = field(default=None, metadata={"metavar": "FUNCTION"})
    pretrained: str | None = field(default=None, metadata={"metavar": "FOLDER"})
    trust: bool = False
    verify: bool = True


def run(options: Options) -> None:
    """Export a part of a checkpoint."""
    parts = options.part or [""]
    weights: dict[str, Tensor] = {}
    for part in parts:
        found = _first(options.checkpoint, part, trust=options.trust, verify=options.verify)
        prefix = f"{part.rpartition('.')[2]}." if len(parts) > 1 else ""
        weights |= {prefix + name: tensor for name, tensor in found.items()}
    missing: list[str] = []
    if options.like is not None:
        ordered = not any(is_sharded(newest(path)) for path in options.checkpoint)
        weights, missing = renamed(weights, _shapes_of(options.like), ordered=ordered)
    beside = newest(options.checkpoint[0]).with_name("+".join(parts) or "module")
    output = options.output or beside
    if options.pretrained is not None:
        files = save_pretrained(weights, options.pretrained, output)
        print(f"{output}: {', '.join(file.name for file in files)}")  # noqa: T201
        return
    suffixes = (output.suffix,) if output.suffix in {*_SUFFIXES, ".pth"} else _SUFFIXES
    number = sum(tensor.numel() for tensor in weights.values())
    for suffix in suffixes:
        path = output if output.suffix == suffix else output.with_name(output.name + suffix)
        _write(weights, path)
        print(f"{path}: {len(weights)} tensors, {number:,} numbers")  # noqa: T201
    if missing:
        print(f"not in the checkpoint: {', '.join(missing)}")  # noqa: T201


def _first(paths: Sequence[Path], part: str, **how: bool) -> dict[str, Tensor]:
    """Read a part from the first checkpoint that has it."""
    for path in paths[:-1]:
        with suppress(ConfigurationError):
            return read_part(path, part, **how)
    return read_part(paths[-1], part, **how)


def read_part(
    path: Path, part: str = "", *, trust: bool = False, verify: bool = True
) -> dict[str, Tensor]:
    """The parameters and buffers of a submodule, by their names in it, on the CPU.

    Args:
        path: A checkpoint of Lightning: a file, or a folder of shards.
        part: Dotted name of the submodule; all of the module without one.
        trust: Whether to read files whose reading may run code.
        verify: Whether to verify checksums.

    Raises:
        ConfigurationError: There is no such checkpoint, or it has no such part.
        CheckpointError: The file, or a part of the folder, is damaged.
    """
    path = newest(path)
    if not path.exists():
        raise ConfigurationError(f"there is no checkpoint {path}")
    if is_sharded(path):
        source = FolderSource(path, verify=verify)
        own_names = _inside(source.shapes, part)
        found = source.tensors(own_names)
    else:
        if verify:
            verify_file(path)
        found = _state_dict(path, trust=trust)
        own_names = _inside(found, part)
    prefix = f"{part}." if part else ""
    return {name.removeprefix(prefix).replace(_COMPILED, ""): found[name] for name in own_names}


def _state_dict(path: Path, *, trust: bool) -> dict[str, Tensor]:
    with explain_damage(path):
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=not trust, mmap=True)
        except pickle.UnpicklingError as error:
            raise ConfigurationError(
                f"{path} contains more than tensors and plain values, and reading it may run code. "
                "If you trust its author, pass --trust"
            ) from error
    found = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{path} is not a Lightning checkpoint: it has no state_dict")
    return dict(found)


def _inside(names: Collection[str], part: str) -> list[str]:
    found = [name for name in names if not part or name.startswith(f"{part}.")]
    if not found:
        parts = sorted({name.rpartition(".")[0] for name in names if "." in name})
        roots = sorted({name.partition(".")[0] for name in parts})
        inner = part.partition(".")[0]
        near = [name for name in parts if name.startswith(f"{inner}.")][:8] or roots
        raise ConfigurationError(
            f"the checkpoint has no part {part!r}; it has {', '.join(near) or 'none'}"
        )
    return found


def renamed(
    weights: Mapping[str, Tensor], wanted: Mapping[str, Shape], *, ordered: bool = True
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename weights after another model that begins with the same layers.

    A backbone is often made of the first children of a model
    (``nn.Sequential(*list(resnet18().children())[:-1])``), in the model's order.

    Args:
        weights: By name, in the module's order.
        wanted: Shapes by name, in the model's order.
        ordered: Whether the weights really are in the module's order.

    Returns:
        The renamed weights, and the model's names without a weight.

    Raises:
        ConfigurationError: The numbers or shapes of weights don't match.
    """
    if weights.keys() <= wanted.keys():
        names = list(weights)
    elif not ordered:
        raise ConfigurationError(
            "a folder of shards does not keep the module's order, which --like needs to rename the "
            "weights. Load it into the module and save it as one file"
        )
    elif len(weights) <= len(wanted):
        names = list(wanted)[: len(weights)]
    else:
        raise ConfigurationError(
            f"the part has {len(weights)} tensors, but the --like model has {len(wanted)}"
        )
    for (name, tensor), other in zip(weights.items(), names, strict=True):
        if tuple(tensor.shape) != wanted[other]:
            raise ConfigurationError(
                f"{name!r} has shape {tuple(tensor.shape)}, but {other!r}, at the same position in "
                f"the --like model, has {wanted[other]}"
            )
    missing = [name for name in wanted if name not in set(names)]
    return dict(zip(names, weights.values(), strict=True)), missing


def _shapes_of(target: str) -> dict[str, Shape]:
    try:
        function: Callable[[], nn.Module] = pkgutil.resolve_name(target)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"--like {target}: {error}") from error
    with torch.device("meta"):
        model = function()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _write(weights: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copies: tied weights, and views of larger tensors, are written as what they are alone.
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    part = path.with_name(f".{path.name}.part")
    if path.suffix == ".safetensors":
        save_file(copies, part, metadata={"format": "pt"})
    else:
        torch.save(copies, part)
    part.replace(path)
