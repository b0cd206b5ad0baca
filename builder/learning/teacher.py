"""The teacher: the whole original model, which the two halves learn to match."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from builder.hardware import OpaqueAttention
from builder.training.bodies import WholeBody
from hplm.model.checkpoint import Checkpoint
from hplm.model.layer import Layers
from hplm.model.stacks import through


class Teacher(nn.Module):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._whole = WholeBody(checkpoint).requires_grad_(False)
        self._split = checkpoint.config.lower_layers

    @property
    def layers(self) -> Layers:
        return self._whole.layers

    @property
    def positions(self) -> Tensor:
        return self._whole.positions.weight

    @property
    def segments(self) -> Tensor:
        return self._whole.segments.weight

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of packed texts of one segment: at the split, and after the last layer."""
        attend = OpaqueAttention(lengths, self._whole.heads, tokens.device)
        x = self._whole.embedded(tokens, positions, torch.zeros_like(positions))
        at_split = through(self.layers[: self._split], x, attend)
        return at_split, through(self.layers[self._split :], at_split, attend)
