"""The body of a model: the words and layers that each tenant owns in a scheme without sharing."""

from __future__ import annotations

from collections.abc import Sequence
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
from hplm.model.weights import without_weights

CPU, STORED = torch.device("cpu"), torch.float32  # of files; a slot may compute in another dtype


class WholeModel(nn.Module):
    """All weights lie in `flat`, one after the other, as in a file.

    Those of products lie there as inputs x outputs: as in the engine, small products run up to 3 times as fast.
    """

    def __init__(self, config: BackboneConfig, device: torch.device = CPU, dtype: torch.dtype = STORED) -> None:
        super().__init__()
        self.config = config
        with without_weights():
            self.words = nn.Embedding(config.vocabulary, config.hidden)
            self.upper = UpperStack(config)
        weights = self.state_dict()
        turned = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        sizes = [weight.numel() for weight in weights.values()]
        self.flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        own = {
            name: part.view(weight.shape[::-1]).t() if name in turned else part.view(weight.shape)
            for (name, weight), part in zip(weights.items(), self.flat.split(sizes), strict=True)
        }
        self.load_state_dict(own, assign=True)
        self.eval().requires_grad_(False)

    def forward(self, tokens: Tensor, segments: Tensor, lengths: Sequence[int], rows: Tensor) -> Tensor:
        """Returns the vectors of the tokens in `rows`: rows x hidden. The texts lie end to end."""
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        attend = PackedAttention(lengths, self.upper.heads, tokens.device)
        return self.upper.leave(self.upper(self.words(tokens), positions, segments, attend, rows=rows))

    def save(self, path: Path) -> None:
        with open(path, "wb") as file:
            self.flat.numpy().tofile(file)


class Slot:
    """The memory of one model. It is allocated once, and each next model is read over the one before.

    A change of models costs only one read from the file: no allocation, no second copy, no new process.
    """

    def __init__(self, config: BackboneConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.body, self.head = WholeModel(config, device, dtype), dict[str, Tensor]()

    def fill(self, body: Path, head: Path, place: Tensor | None) -> None:
        """Reads a model into the slot. `place`: where its numbers are read first; None: into the slot at once."""
        flat = self.body.flat
        room, read = (flat if place is None else place).numpy().view(np.uint8).data, 0
        with open(body, "rb", buffering=0) as file:
            while got := file.readinto(room[read:]):
                read += got
        if read < len(room):
            raise Broken(f"{body} ends too early: export the scheme again")
        if place is not None:
            flat.copy_(place)
        self.head = {name: tensor.to(flat) for name, tensor in load_file(head).items()}

    def logits(self, x: Tensor, function: str | None) -> Tensor:
        if function is not None:
            x = activation(function)(x @ self.head["dense"].T + self.head["dense_bias"])
        return x @ self.head["weight"].T + self.head["bias"]
