"""Files of weights: safetensors that say in their header what their checksum is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hplm.errors import Broken

CHECKSUM = "crc32"  # of names and tensors, in order of the names


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Through our own file: the library's is readable by its owner alone, and a server is often another user."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(stored, {CHECKSUM: checksum_of(stored)}))


def load_weights(path: Path, way_out: str = "build or copy it again") -> dict[str, Tensor]:
    """Against their checksum; files that were written before there was one have none."""
    try:
        with safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            promised = (stored.metadata() or {}).get(CHECKSUM)
    except FileNotFoundError:
        raise Broken(f"{path} is missing: {way_out}") from None
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise Broken(f"{path} cannot be read ({error}): {way_out}") from None
    if promised not in (None, checksum_of(tensors)):
        raise Broken(f"{path} does not match its checksum: {way_out}")
    return tensors


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"
