"""SkipBERT's published checkpoints (Wang et al., ACL 2022): a BERT whose lower layers were trained on tri-grams already.

What its lower half computes is what ours does: words and their place among three, token type 0 and a norm, the shallow layers
with absent neighbours masked, a sigmoid gate that all three positions share, the sum of what three windows say; then
positions and segments of their own, and a norm, whose epsilon alone is its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hplm.errors import InvalidInput
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import TRIGRAMS, Window

FULL_LAYERS = "num_full_hidden_layers"  # in its config.json: how many of the layers see the whole text
ENTRY_EPS = 1e-5  # of the norm before the full layers, whatever the configuration says of the others
OWN_TENSOR = "position_embeddings2"  # no plain BERT has it
SHALLOW_DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072}  # of the shallow layers, whatever the others have


class SkipBertWeights(BertModel):
    """Its tensors under their published names, for `from_pretrained` to fill; it computes nothing."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        self.embeddings.position_embeddings2 = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embeddings.token_type_embeddings2 = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attn = nn.Linear(config.hidden_size, 1)
        self.post_init()


def is_skipbert(source: Any) -> bool:
    return hasattr(source, FULL_LAYERS)


def own_split(model: str, source: Any, lower: int | None, upper: int | None, window: Window) -> tuple[int, int]:
    """Lower and upper layers as it was trained; what we cannot take as it is, and options that ask for another, are refused."""
    total, full = source.num_hidden_layers, getattr(source, FULL_LAYERS)
    if not isinstance(full, int) or not 0 < full < total:
        raise InvalidInput(f"{model!r} is a SkipBERT with {FULL_LAYERS} {full!r} of {total} layers: it has no two halves")
    for size, default in SHALLOW_DEFAULTS.items():
        shallow, whole = getattr(source, f"shallow_{size}", default), getattr(source, size)
        if shallow != whole:
            raise InvalidInput(
                f"{model!r} is a SkipBERT whose shallow layers have {size} {shallow} (shallow_{size} in its config.json, "
                f"{default} where it says nothing) and whose other layers have {whole}; here all layers are of one size: "
                "take one of one size, as 6+6, 6+4 and 6+2 are, or a plain BERT"
            )
    split = total - full, full
    if (split[0] if lower is None else lower, split[1] if upper is None else upper) != split:
        raise InvalidInput(
            f"{model!r} is a SkipBERT, trained as {split[0]} lower and {full} upper layers: leave out --lower and --upper"
        )
    if window != TRIGRAMS:
        raise InvalidInput(f"{model!r} is a SkipBERT, trained on windows of three tokens: leave out --window and --causal")
    return split


def refuse_incomplete(model: str, missing: set[str]) -> None:
    if missing:
        raise InvalidInput(
            f"{model!r} is a SkipBERT without {', '.join(sorted(missing))}: take a complete checkpoint, as published"
        )


def refuse_disguised(model: str, unexpected: set[str]) -> None:
    """Read as a plain BERT it would load without complaint, and its lower layers would be taken for what they are not."""
    if any(OWN_TENSOR in name for name in unexpected):
        raise InvalidInput(
            f"{model!r} holds a SkipBERT's tensors ({OWN_TENSOR}), but its config.json has no {FULL_LAYERS}: "
            "add it, 6 for a SkipBERT 6+6, 4 for 6+4, 2 for 6+2"
        )


@torch.no_grad()
def take_over(lower: LowerStack, upper: UpperStack, weights: dict[str, Tensor]) -> None:
    """What lies around the layers; the layers themselves, words and first norm are where a plain BERT has them."""
    places = weights["embeddings.position_embeddings.weight"][: len(lower.places)]
    lower.places.copy_(places + weights["embeddings.token_type_embeddings.weight"][0])
    lower.gate.copy_(weights["attn.weight"].expand_as(lower.gate))
    lower.gate_bias.copy_(weights["attn.bias"].expand_as(lower.gate_bias))
    upper.positions.weight.copy_(weights["embeddings.position_embeddings2.weight"])
    upper.segments.weight.copy_(weights["embeddings.token_type_embeddings2.weight"])
    upper.norm.weight.copy_(weights["norm.weight"])
    upper.norm.bias.copy_(weights["norm.bias"])
