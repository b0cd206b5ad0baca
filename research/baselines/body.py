"""The body of a model: the words and layers that each tenant owns in a scheme without sharing."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hplm.errors import Broken
from hplm.model.attention import PackedAttention
from hplm.model.config import BackboneConfig
from hplm.model.layer import activation
from hplm.model.stacks import UpperStack

STORED = torch.float32  # dtype of files; a slot may compute in another one


class Body(nn.Module):
    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.hidden)
        self.upper = UpperStack(config)

    def forward(self, tokens: Tensor, segments: Tensor, lengths: Sequence[int], rows: Tensor) -> Tensor:
        """Returns the vectors of the tokens in `rows`: rows x hidden. The texts lie end to end."""
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        attend = PackedAttention(lengths, self.upper.heads, tokens.device)
        return self.upper(self.words(tokens), positions, segments, attend, rows=rows)


def weights_of_linear(body: Body) -> set[str]:
    """Returns the names of weights stored as inputs x outputs. As in the engine, small products run up to 3 times as fast."""
    return {f"{name}.weight" for name, module in body.named_modules() if isinstance(module, nn.Linear)}


@dataclass(frozen=True)
class BodyFile:
    """The positions of all tensors in a safetensors file of one dtype."""

    start: int  # byte at which the numbers begin
    count: int
    places: dict[str, tuple[tuple[int, ...], int, int]]  # shape, first and last number

    @classmethod
    def of(cls, path: Path) -> BodyFile:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        if any(tensor["dtype"] != "F32" for tensor in header.values()):
            raise Broken(f"{path} contains other numbers than fp32: export the scheme again")
        width = STORED.itemsize
        places = {
            name: (tuple(tensor["shape"]), tensor["data_offsets"][0] // width, tensor["data_offsets"][1] // width)
            for name, tensor in header.items()
        }
        return cls(8 + size, max(stop for _, _, stop in places.values()), places)


class Slot:
    """The memory of one body. It is allocated once, and each next model is read over the one before.

    A change of models costs only one read from the file: no allocation, no second copy, no new process.
    """

    def __init__(self, config: BackboneConfig, file: BodyFile, device: torch.device, dtype: torch.dtype) -> None:
        self._file = file
        self._flat = torch.zeros(file.count, device=device, dtype=dtype)
        direct = device.type == "cpu" and dtype == STORED
        self._read = self._flat if direct else torch.empty(file.count, dtype=STORED, pin_memory=device.type == "cuda")
        with torch.device("meta"):
            self.body = Body(config)
        linear = weights_of_linear(self.body)
        views = {name: self._flat[first:stop].view(shape) for name, (shape, first, stop) in file.places.items()}
        views = {name: view.t() if name in linear else view for name, view in views.items()}
        self.body.load_state_dict(views, assign=True)
        self.body.eval().requires_grad_(False)
        self.head: dict[str, Tensor] = {}

    def fill(self, body: Path, head: Path) -> None:
        """Reads a model into the slot."""
        room = self._read.numpy().view(np.uint8).data
        with open(body, "rb", buffering=0) as file:
            file.seek(self._file.start)
            read = 0
            while read < len(room):
                got = file.readinto(room[read:])
                if not got:
                    raise Broken(f"{body} ends too early: export the scheme again")
                read += got
        if self._read is not self._flat:
            self._flat.copy_(self._read)
        self.head = {name: tensor.to(self._flat) for name, tensor in load_file(head).items()}

    def logits(self, x: Tensor, function: str | None) -> Tensor:
        if function is not None:
            x = activation(function)(x @ self.head["dense"].T + self.head["dense_bias"])
        return x @ self.head["weight"].T + self.head["bias"]
