"""Files of weights: safetensors with a checksum in their header."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hplm.errors import Broken
from hplm.model.tensors import array_of

CHECKSUM = "crc32"  # of names and tensors, in order of the names
BUILD_AGAIN = "build or copy it again"


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Saves weights in a file that other users can read, because a server often runs as another user.

    The library's own function makes files that only the owner can read.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(stored, {CHECKSUM: checksum_of(stored)}))


def load_weights(path: Path, way_out: str = BUILD_AGAIN) -> dict[str, Tensor]:
    """Loads weights and compares them with their checksum."""
    try:
        file: Any = safe_open(path, "pt")  # the library has no types
        with file as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            metadata: dict[str, str] = stored.metadata() or {}
    except FileNotFoundError:
        raise Broken(f"{path} is missing: {way_out}") from None
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise Broken(f"cannot read {path} ({error}): {way_out}") from None
    if metadata.get(CHECKSUM) != checksum_of(tensors):
        raise Broken(f"{path} does not match its checksum: {way_out}")
    return tensors


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(array_of(tensors[name].reshape(-1).view(torch.uint8)).data, zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"
