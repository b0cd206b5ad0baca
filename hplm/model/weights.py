"""Files of weights: safetensors that say in their header what their checksum is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

CHECKSUM = "crc32"  # of names and tensors, in order of the names


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Through our own file: the library's is readable by its owner alone, and a server is often another user."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(stored, {CHECKSUM: checksum_of(stored)}))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy(), zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"
