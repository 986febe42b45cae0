"""Pretrained models whose weights each rank reads for its own stages only.

``from_pretrained`` reads all weights into each process. Here a model is built from its
configuration, and its weights are read from the same files: at once, or, inside of
``configure_model`` under this package's strategy, when the stages have been cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_tspipe.errors import ConfigurationError
from lightning_tspipe.weight_files import WeightFiles, unknown

Model = TypeVar("Model", bound=nn.Module)


def pretrained(
    model_class: Any, name: str | Path, *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """Build a model of Hugging Face's transformers with the weights of a folder, or of the hub.

    Like ``model_class.from_pretrained(name)``; but inside of ``configure_model`` under the strategy
    "tspipe" each rank reads only what its stages keep, and only then.

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
    try:
        from transformers import AutoConfig  # noqa: PLC0415 - an extra
        from transformers.initialization import no_init_weights  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "pretrained(...) needs Hugging Face's transformers: "
            "pip install 'lightning-tspipe[text]'"
        ) from error
    folder = _folder(name)
    config = AutoConfig.from_pretrained(folder, **options)
    if dtype is not None:
        config.dtype = dtype
    build = getattr(model_class, "from_config", None) or model_class._from_config  # noqa: SLF001
    with no_init_weights():  # all are read
        model = build(config)
    model.tie_weights()
    return load_pretrained(model, folder)


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
    files = WeightFiles.of(_folder(folder))
    wanted = model.state_dict(keep_vars=True)
    names = _names(model, wanted, files)
    shared = {id(tensor) for name, tensor in wanted.items() if name in names}
    missing = [name for name, tensor in wanted.items() if id(tensor) not in shared]
    if missing:
        raise ConfigurationError(
            f"{files.folder} has no weights for {unknown(missing, ())} of {type(model).__name__}. "
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


def _folder(name: str | Path) -> Path:
    """The folder of a name, downloaded if it is none here."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(f"there is no folder {name}") from error
    try:
        patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model"]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:
        raise ConfigurationError(
            f"there is no folder {name}, and no model of that name could be downloaded: {error}"
        ) from error
