"""Pretrained models whose weights each rank reads for its own stages only.

``from_pretrained`` reads all weights into each process. Here a model is built from its
configuration, and its weights are read from the same files: at once, or, inside of
``configure_model`` under this package's strategy, when the stages have been cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.weight_files import WeightFiles, unknown, write_weights

_BESIDE = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "generation_config")
"""Beginnings of the names of files that belong to a model and don't change with its weights."""

Model = TypeVar("Model", bound=nn.Module)


def pretrained(
    model_class: Any, name: str | Path, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Build a model of Hugging Face's transformers with the weights of a folder, or of the hub.

    Like ``model_class.from_pretrained(name)``; but inside of ``configure_model`` under the strategy
    "tspipe" each rank reads only what its stages keep, and only then. It is in eval mode, as there:
    call ``train()`` on what is trained with dropout.

    Args:
        model_class: Such as ``AutoModelForCausalLM``, or the class of a model.
        name: A folder that ``save_pretrained`` wrote, or a name on the hub.
        dtype: Of the parameters; None: as the configuration says.
        options: For the configuration, such as ``attn_implementation="sdpa"``.

    Raises:
        ConfigurationError: transformers is not installed; or the weights are not those of the
            model, or not in safetensors files.
        CheckpointError: A file is missing or damaged.
    """
    folder = folder_of(name)
    config, build = _configured(folder, model_class, **options)
    if dtype is not None:
        config.dtype = dtype
    model = build(config)
    model.tie_weights()
    return load_pretrained(model, folder).eval()


def load_pretrained(model: Model, folder: str | Path) -> Model:
    """Read a model's parameters and buffers from a folder's safetensors files.

    What is on the meta device inside of ``configure_model`` is read later, by the rank that keeps
    it. Parameters keep their data type and device.

    Args:
        model: A model; a head, say, that shares the weight of an embedding may be missing there.
        folder: What ``save_pretrained`` wrote.

    Returns:
        The model.

    Raises:
        ConfigurationError: Some of its weights aren't there, have other shapes, or are too many.
        CheckpointError: A file is missing or damaged.
    """
    files = WeightFiles.of(folder_of(folder))
    wanted = model.state_dict(keep_vars=True)
    names = _names(model, wanted, files)
    shared = {id(tensor) for name, tensor in wanted.items() if name in names}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in shared]
    if missing:
        raise ConfigurationError(
            f"{files.folder} has no weights for {unknown(missing)} of {type(model).__name__}. "
            "Build the model of the configuration that lies there; a layout that from_pretrained "
            "converts, load once with it, and write it with save_pretrained"
        )
    for name, stored in names.items():
        shape = tuple(wanted[name].shape)
        if files.shapes[stored] != shape:
            raise ConfigurationError(
                f"{stored!r} in {files.folder} has shape {files.shapes[stored]}, and {name!r} of "
                f"the model {shape}: it is the model of another configuration"
            )
    with torch.no_grad():
        for name, stored in names.items():
            files.read(stored, wanted[name])
    return model


def save_pretrained(weights: Mapping[str, Tensor], like: str | Path, folder: Path) -> list[Path]:
    """Write weights as a folder that ``from_pretrained`` loads.

    Args:
        weights: Of a model, by name, on the CPU; their data type is kept.
        like: A folder with the model's configuration, or a name on the hub; its tokenizer, if it
            has one, is copied too.
        folder: Where to.

    Returns:
        The files with weights.

    Raises:
        ConfigurationError: The weights are not those of the model.
    """
    source = folder_of(like)
    config, build = _configured(source)
    with torch.device("meta"):
        model = build(config)
    model.tie_weights()
    wanted = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name in filter(
        weights.__contains__, wanted
    ):  # of those that share a weight, one is written
        first.setdefault(id(wanted[name]), name)
    wrong = {
        f"has no weight {{}} of the {type(model).__name__} of {like}": [
            name for name, tensor in wanted.items() if id(tensor) not in first
        ],
        f"has {{}}, which is not in the {type(model).__name__} of {like}": weights.keys() - wanted,
        f"has {{}} in another shape than the {type(model).__name__} of {like}": [
            name for name in wanted.keys() & weights if wanted[name].shape != weights[name].shape
        ],
    }
    for reason, names in wrong.items():
        if names:
            raise ConfigurationError(f"the part {reason.format(unknown(names))}")
    kept = {name: weights[name] for name in first.values()}
    files = write_weights(kept, folder)
    types = {tensor.dtype for tensor in kept.values() if tensor.is_floating_point()}
    config.dtype = types.pop() if len(types) == 1 else torch.float32
    config.save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith(_BESIDE) and file.is_file():
            shutil.copyfile(file, folder / file.name)
    return files


def _configured(folder: Path, model_class: Any = None, **options: Any) -> tuple[Any, Any]:
    """A folder's configuration, and what builds a model of one without drawing weights.

    Args:
        folder: With a ``config.json``.
        model_class: None: the class that the configuration names.
        options: For the configuration.

    Raises:
        ConfigurationError: transformers is not installed, or does not know the model.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra
        from transformers.initialization import no_init_weights  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "pretrained models need Hugging Face's transformers: "
            "pip install 'lightning-tspipe[text]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} has no configuration of a model: {error}") from error
    if model_class is None:
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
    if model_class is None:
        raise ConfigurationError(
            f"config.json of {folder} names no model of transformers: {config.architectures}"
        )
    made = getattr(model_class, "from_config", None) or model_class._from_config  # noqa: SLF001

    def build(config: Any) -> Any:
        with no_init_weights():
            return made(config)

    return config, build


def _names(model: nn.Module, wanted: Any, files: WeightFiles) -> dict[str, str]:
    """For each weight of the model its name in the files, where bare models lack a prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = {}
    for name in wanted:
        for stored in (name, name.removeprefix(prefix), prefix + name):
            if stored in files.shapes:
                found[name] = stored
                break
    return found


def folder_of(name: str | Path, *, download: bool = True) -> Path:
    """The folder of a name, downloaded if it is none here, and may be."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(f"there is no folder {name}") from error
    try:
        patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model"]
        found = snapshot_download(str(name), allow_patterns=patterns, local_files_only=not download)
        return Path(found)
    except (OSError, ValueError, HFValidationError) as error:
        raise ConfigurationError(
            f"there is no folder {name}, and no model of that name could be downloaded: {error}"
        ) from error
