"""Loads encoders: BERT, and families that differ from it in names, in where positions begin, or in having no segments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.families import Names
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV
from hplm.model.original import Checkpoint, halves, silent_transformers, tokenizer_of, weights_of
from hplm.model.windows import Window

BERT = "bert"
_BODY = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm",
}
_BERT = Names(
    body=_BODY | {"segments": "embeddings.token_type_embeddings"},
    layers="encoder.layer",
    layer={
        QKV: [f"attention.self.{part}" for part in ("query", "key", "value")],
        ATTENTION_OUT: ["attention.output.dense"],
        "attention_norm": ["attention.output.LayerNorm"],
        FFN_IN: ["intermediate.dense"],
        FFN_OUT: ["output.dense"],
        "ffn_norm": ["output.LayerNorm"],
    },
)
_DISTILBERT = Names(
    body=_BODY,
    layers="transformer.layer",
    layer={
        QKV: [f"attention.{part}_lin" for part in "qkv"],
        ATTENTION_OUT: ["attention.out_lin"],
        "attention_norm": ["sa_layer_norm"],
        FFN_IN: ["ffn.lin1"],
        FFN_OUT: ["ffn.lin2"],
        "ffn_norm": ["output_layer_norm"],
    },
)


@dataclass(frozen=True)
class Family:
    """The names that `transformers` gives to the parts of BERT, in the weights and in the configuration."""

    names: Names = _BERT
    inner: str = "intermediate_size"
    activation: str = "hidden_act"
    norm_eps: float | None = None  # None: its configuration says it
    has_pooler: bool = True
    counts_padding: bool = False  # positions begin behind the number of the padding token


_ROBERTA = Family(counts_padding=True)
ENCODERS = {
    BERT: Family(),
    "camembert": _ROBERTA,
    "distilbert": Family(_DISTILBERT, inner="hidden_dim", activation="activation", norm_eps=1e-12, has_pooler=False),
    "electra": Family(has_pooler=False),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}

# Why others are refused, by kind.
_BY_DISTANCE = (
    "whose attention needs the distances of tokens in every layer, while vectors of windows get their positions once, before "
    "the upper layers"
)
_BY_PLACE = "whose attention chooses tokens by their places in the whole text, which a window does not know"
REASONS = {
    "albert": "whose layers have the same weights, so that the lower ones cannot learn from windows alone",
    **dict.fromkeys(("big_bird", "longformer"), _BY_PLACE),
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet", "xlnet"), _BY_DISTANCE),
    **dict.fromkeys(("eurobert", "modernbert", "nomic_bert", "roformer"), _BY_DISTANCE),  # which they get by rotation
}


def described(kind: object) -> str:
    """Says what a model is, and why it is refused, if that is known."""
    return f"a {kind!r} model" + (f", {REASONS[str(kind)]}" if str(kind) in REASONS else "")


def load_encoder(model: str, name: str | None, lower: int | None, upper: int | None, window: Window, source: Any) -> Checkpoint:
    from hplm.model.skipbert import BODY, ENTRY_EPS, SkipBertWeights, is_skipbert, own_split, refuse_disguised

    family, skipbert = ENCODERS[source.model_type], source.model_type == BERT and is_skipbert(source)
    _check(model, source)
    if skipbert:
        lower, upper = own_split(model, source, lower, upper, window)
    library = silent_transformers()
    given = {"add_pooling_layer": False} if family.has_pooler else {}
    loaded, report = weights_of(model, SkipBertWeights if skipbert else library.AutoModel, **given)
    tokenizer = tokenizer_of(model)
    if not skipbert:
        refuse_disguised(model, report["unexpected_keys"])
    if missing := sorted(report["missing_keys"]):
        kind = "SkipBERT" if skipbert else source.model_type
        raise InvalidInput(
            f"{model!r} lacks {len(missing)} tensors of a {kind}, such as {', '.join(missing[:2])}: take a complete checkpoint"
        )
    total: int = source.num_hidden_layers
    names = replace(family.names, body={**family.names.body, **BODY}) if skipbert else family.names
    names = replace(names, first_position=source.pad_token_id + 1) if family.counts_padding else names
    weights = names.ours(loaded.state_dict(), total)
    weights["segments.weight"] = _segments(weights, tokenizer)
    cls_id, sep_id, unk_id, mask_id = _special_ids(model, tokenizer)
    lower, upper = halves(total, lower, upper, least=1)
    config = BackboneConfig(
        name=name or Path(model).name.lower(),
        vocabulary=source.vocab_size,
        hidden=source.hidden_size,
        heads=source.num_attention_heads,
        intermediate=getattr(source, family.inner),
        lower_layers=lower,
        upper_layers=upper,
        positions=len(weights["positions.weight"]),
        segments=len(weights["segments.weight"]),
        activation=getattr(source, family.activation),
        norm_eps=source.layer_norm_eps if family.norm_eps is None else family.norm_eps,
        window=window,
        entry_eps=ENTRY_EPS if skipbert else None,
        cls_id=cls_id,
        sep_id=sep_id,
        unk_id=unk_id,
        mask_id=mask_id,
    )
    return Checkpoint(config, total, weights, tokenizer.backend_tokenizer.to_str(), skipbert)


def _check(model: str, source: Any) -> None:
    """Refuses what hPLMs cannot compute."""
    if getattr(source, "is_decoder", False):
        raise InvalidInput(
            f"{model!r} is configured as a decoder: take an encoder's checkpoint, or a decoder of another family"
        )
    positions = getattr(source, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        raise InvalidInput(f"{model!r} has {positions!r} position embeddings: take a checkpoint with 'absolute' ones")
    width = getattr(source, "embedding_size", source.hidden_size)
    if width != source.hidden_size:
        raise InvalidInput(
            f"{model!r} has words of width {width} and layers of width {source.hidden_size}, which hPLMs cannot compute: take "
            "a checkpoint with one width, such as ELECTRA's base and large discriminators"
        )


def _special_ids(model: str, tokenizer: Any) -> list[int]:
    """Returns the ids of the tokens that begin and end a text, that are unknown, and that are masked."""
    kinds = ("cls", "sep", "unk", "mask")
    ids: list[int | None] = [getattr(tokenizer, f"{kind}_token_id") for kind in kinds]
    if missing := [kind for kind, id in zip(kinds, ids, strict=True) if id is None]:
        raise InvalidInput(
            f"the tokenizer of {model!r} has no token for {', '.join(missing)}: take the one it was trained with"
        )
    return [id for id in ids if id is not None]


def _segments(weights: dict[str, Tensor], tokenizer: Any) -> Tensor:
    """A tokenizer may number the segments of a pair although the model has one segment or none."""
    segments = weights.get("segments.weight", torch.zeros_like(weights["words.weight"][:1]))
    missing = max(tokenizer.backend_tokenizer.encode("a", "b").type_ids) + 1 - len(segments)
    return torch.cat([segments, segments[:1].expand(max(missing, 0), -1)])
