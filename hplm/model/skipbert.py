"""Loads SkipBERT's published checkpoints (Wang et al., ACL 2022): BERTs whose lower layers were trained on tri-grams.

Its lower half computes what ours does:

1. words, their positions in the window, token type 0, and a norm;
2. the shallow layers, with absent neighbours masked;
3. a sigmoid gate that all three positions share;
4. for each token the sum over three windows;
5. separate positions and segments, and a norm. Only the epsilon of this norm differs from ours.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import BertConfig, BertModel

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.families import Halves, Weights, part_of
from hplm.model.windows import TRIGRAMS, Window

FULL_LAYERS = "num_full_hidden_layers"  # in its config.json: the number of layers that see the whole text
ENTRY_EPS = 1e-5  # epsilon of the norm before the full layers, independent of the configuration
OWN_TENSOR = "position_embeddings2"  # no plain BERT has it
UPPER = "upper."
BODY = {  # the names of what it has beside a BERT's parts
    "gate": "attn",
    f"{UPPER}positions": "embeddings.position_embeddings2",
    f"{UPPER}segments": "embeddings.token_type_embeddings2",
    f"{UPPER}norm": "norm",
}
SHALLOW_DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072}  # of the shallow layers, independent of the other layers


class SkipBertWeights(BertModel):
    """Has the tensors under their published names, for `from_pretrained` to fill. It computes nothing."""

    def __init__(self, config: BertConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        self.embeddings.position_embeddings2 = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embeddings.token_type_embeddings2 = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attn = nn.Linear(config.hidden_size, 1)
        self.post_init()


def is_skipbert(source: Any) -> bool:
    return source.model_type == "bert" and hasattr(source, FULL_LAYERS)


def own_split(model: str, source: Any, lower: int | None, upper: int | None, window: Window) -> tuple[int, int]:
    """Returns the lower and upper layers with which it was trained. Refuses other splits, and models that do not fit."""
    total, full = source.num_hidden_layers, getattr(source, FULL_LAYERS)
    if not isinstance(full, int) or not 0 < full < total:
        raise InvalidInput(
            f"{model!r} is a SkipBERT with {FULL_LAYERS} {full!r} of {total} layers, which leaves no two halves: "
            "take another checkpoint"
        )
    for size, default in SHALLOW_DEFAULTS.items():
        shallow, whole = getattr(source, f"shallow_{size}", default), getattr(source, size)
        if shallow != whole:
            raise InvalidInput(
                f"{model!r} is a SkipBERT with {size} {shallow} in its shallow layers (shallow_{size} in its config.json, "
                f"by default {default}) and {whole} in its other layers, but hPLMs need layers of one size: "
                "take a SkipBERT with layers of one size, such as 6+6, 6+4 or 6+2, or a plain BERT"
            )
    split = total - full, full
    if (split[0] if lower is None else lower, split[1] if upper is None else upper) != split:
        raise InvalidInput(
            f"{model!r} is a SkipBERT, trained as {split[0]} lower and {full} upper layers: leave out --lower and --upper"
        )
    if window != TRIGRAMS:
        raise InvalidInput(f"{model!r} is a SkipBERT, trained on windows of three tokens: leave out --window")
    return split


def refuse_disguised(model: str, unexpected: set[str]) -> None:
    """Refuses a SkipBERT that its config.json describes as a plain BERT. It would load, with a wrong lower half."""
    if any(OWN_TENSOR in name for name in unexpected):
        raise InvalidInput(
            f"{model!r} contains a SkipBERT's tensors ({OWN_TENSOR}), but its config.json has no {FULL_LAYERS}: "
            "add it: 6 for a SkipBERT 6+6, 4 for 6+4, 2 for 6+2"
        )


def halves_of(config: BackboneConfig, weights: Weights) -> Halves:
    n = config.window.n
    below = {
        "places": weights["positions.weight"][:n] + weights["segments.weight"][0],
        "gate": weights["gate.weight"].expand(n, -1),
        "gate_bias": weights["gate.bias"].expand(n),
    }
    return below, part_of(weights, UPPER)
