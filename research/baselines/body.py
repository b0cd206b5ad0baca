"""The body of a model: the words and layers that each tenant owns in a scheme without sharing.

A file has the weights of a body in fp32, in the order of `Body.state_dict`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @classmethod
    def without_weights(cls, config: BackboneConfig) -> Body:
        with torch.device("meta"):
            return cls(config)

    def forward(self, tokens: Tensor, segments: Tensor, lengths: Sequence[int], rows: Tensor) -> Tensor:
        """Returns the vectors of the tokens in `rows`: rows x hidden. The texts lie end to end."""
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        attend = PackedAttention(lengths, self.upper.heads, tokens.device)
        return self.upper(self.words(tokens), positions, segments, attend, rows=rows)

    @property
    def turned(self) -> set[str]:
        """The weights that are stored as inputs x outputs. As in the engine, small products run up to 3 times as fast."""
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear)}


def save_body(config: BackboneConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    body = Body.without_weights(config)
    turned = body.turned
    with open(path, "wb") as file:
        for name in body.state_dict():
            weight = weights[name].detach().to(STORED)
            (weight.t() if name in turned else weight).contiguous().numpy().tofile(file)


class Slot:
    """The memory of one body. It is allocated once, and each next model is read over the one before.

    A change of models costs only one read from the file: no allocation, no second copy, no new process.
    """

    def __init__(self, config: BackboneConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.body = Body.without_weights(config)
        weights, turned = self.body.state_dict(), self.body.turned
        sizes = [weight.numel() for weight in weights.values()]
        self._flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        direct = device.type == "cpu" and dtype == STORED
        self._read = self._flat if direct else torch.empty(sum(sizes), dtype=STORED, pin_memory=device.type == "cuda")
        own = {
            name: part.view(weight.shape[::-1]).t() if name in turned else part.view(weight.shape)
            for (name, weight), part in zip(weights.items(), self._flat.split(sizes), strict=True)
        }
        self.body.load_state_dict(own, assign=True)
        self.body.eval().requires_grad_(False)
        self.head: dict[str, Tensor] = {}

    def fill(self, body: Path, head: Path) -> None:
        """Reads a model into the slot."""
        if not body.exists():  # earlier exports have other files
            raise Broken(f"{body} is missing: export the scheme again")
        room = self._read.numpy().view(np.uint8).data
        with open(body, "rb", buffering=0) as file:
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
