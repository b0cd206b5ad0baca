"""The teacher: the whole original model, which the two halves learn to match."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builder.hardware import OpaqueAttention
from hplm.model.checkpoint import Checkpoint, full_stack


class Teacher(nn.Module):
    embeddings_word_embeddings_weight: Tensor
    embeddings_position_embeddings_weight: Tensor
    embeddings_token_type_embeddings_weight: Tensor
    embeddings_LayerNorm_weight: Tensor
    embeddings_LayerNorm_bias: Tensor

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        config = checkpoint.config
        self._heads, self._split, self._eps = config.heads, config.lower_layers, config.norm_eps
        self.layers = full_stack(checkpoint)
        for part in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
            for name in (f"embeddings.{part}.weight", f"embeddings.{part}.bias"):
                if name in checkpoint.weights:
                    self.register_buffer(name.replace(".", "_"), checkpoint.weights[name])
        self.requires_grad_(False)

    @property
    def positions(self) -> Tensor:
        return self.embeddings_position_embeddings_weight

    @property
    def segments(self) -> Tensor:
        return self.embeddings_token_type_embeddings_weight

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of packed texts of one segment: at the split, and after the last layer."""
        x = self.embeddings_word_embeddings_weight[tokens] + self.positions[positions] + self.segments[0]
        x = F.layer_norm(x, x.shape[-1:], self.embeddings_LayerNorm_weight, self.embeddings_LayerNorm_bias, self._eps)
        attend = OpaqueAttention(lengths, self._heads, tokens.device)
        at_split = x
        for i, layer in enumerate(self.layers, start=1):
            x = layer(x, attend)
            if i == self._split:
                at_split = x
        return at_split, x
