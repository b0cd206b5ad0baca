"""The files of a saved adapter: JSON beside tensors, in safetensors or in PyTorch's own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from builder.store import resumable
from hplm.errors import InvalidInput


def read_json(path: Path) -> dict[str, Any]:
    way_out = "give --from the folder that the library's own save function wrote, or save it again"
    return resumable.read_json(path, InvalidInput, way_out)


def required(config: Mapping[str, Any], option: str, path: Path) -> Any:
    if config.get(option) is None:
        raise InvalidInput(f"{path} lacks {option}: save the adapter again")
    return config[option]


def number(config: Mapping[str, Any], option: str, path: Path) -> float:
    """Returns an option that must be a number."""
    value = required(config, option, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{path}: {option} is {value!r}, which is no number: save the adapter again")
    return value


def tensor_file(folder: Path, names: Sequence[str]) -> Path:
    """Returns the first of these files that exists."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise InvalidInput(f"{folder} has neither {' nor '.join(names)}: give --from the folder with the adapter's weights")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads tensors as fp32. From a pickled `.bin` only tensors are read; no code in it runs."""
    try:
        read = load_file if path.suffix == ".safetensors" else _load_pickled
        tensors = read(path)
    except Exception as error:  # the libraries raise anything at a damaged file
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInput(f"{path} cannot be read ({first_line}): copy or save it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InvalidInput(f"{path} holds something else than tensors with names: save the adapter again")
    return {str(name): tensor.float() for name, tensor in tensors.items()}


def _load_pickled(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)
