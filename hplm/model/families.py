"""The families of models that hPLMs are built from: the names of their tensors, and what their configurations say.

Weights get our names: `layers.<i>.*` as in `Layer`, `words`, `positions` and `segments` where they are learned, `norm` of
normed words, and `final_norm` where layers begin with norms. A decoder has `next_token`, the matrix of the logits, beside, even
where it is that of the words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hplm.errors import InvalidInput
from hplm.model.config import LAYER_NORM, RMS, SCALED
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV

Weights = Mapping[str, Tensor]
Halves = tuple[dict[str, Tensor], dict[str, Tensor]]  # of a lower and an upper stack, beside words, first norm and layers
WEIGHT_AND_BIAS = ("weight", "bias")


@dataclass(frozen=True)
class PartNames:
    """A family's names of the parts that hPLMs have too."""

    body: Mapping[str, str]  # our names of parts outside of the layers -> the family's
    layers: str  # the family's list of layers
    layer: Mapping[str, Sequence[str]]  # our names of the parts of a layer -> the family's, of which several may be one of ours
    transposed: bool = False  # products are stored as inputs x outputs
    first_position: int = 0  # rows of `positions` before that of the first one
    from_one: bool = False  # norms are stored as what they have more than one
    scaled_words: bool = False  # words are multiplied by the root of their width
    gated: bool = False  # the first product of a feed-forward part has a gate, which comes first
    lacks: str = ""  # a layer's part that is not there

    def of_layer(self, number: int) -> dict[str, list[str]]:
        """Returns our names of the parts of a layer, and the whole names that the family has for each."""
        named = {ours: [f"{self.layers}.{number}.{name}" for name in theirs] for ours, theirs in self.layer.items()}
        return {ours: names for ours, names in named.items() if self.lacks not in names}

    def ours(self, weights: Weights, layers: int) -> dict[str, Tensor]:
        """Returns a model's tensors by our names."""
        found = {f"{ours}.{kind}": own for ours, name in self.body.items() for kind, own in self._joined(weights, [name])}
        for number in range(layers):
            for ours, theirs in self.of_layer(number).items():
                for kind, own in self._joined(weights, theirs):
                    found[f"layers.{number}.{ours}.{kind}"] = own.T if self.transposed and own.ndim > 1 else own
        if self.first_position:
            found["positions.weight"] = found["positions.weight"][self.first_position :]
        if self.from_one:
            found |= {name: own + 1 for name, own in found.items() if name.endswith("norm.weight")}
        if self.scaled_words:
            found["words.weight"] = (words := found["words.weight"]) * words.shape[1] ** 0.5
        return found

    @staticmethod
    def _joined(weights: Weights, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weight of some parts and, where they have one, the bias, as those of one part."""
        for kind in WEIGHT_AND_BIAS:
            if kind == "weight" or f"{names[0]}.{kind}" in weights:
                parts = [weights[f"{name}.{kind}"] for name in names]
                yield kind, parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class ModelFamily:
    names: PartNames
    form: Callable[[Any], dict[str, Any]]  # the fields of `BackboneConfig` that tell the form of the layers
    refusals: Callable[[Any], dict[str, bool]]  # what a model may have that hPLMs cannot compute, and whether this one has it
    way_out: str = "take another checkpoint"
    has_pooler: bool = False  # which is not loaded
    counts_padding: bool = False  # positions begin behind the number of the padding token


def _biases(source: Any, qkv_bias: bool = False) -> bool | tuple[str, ...]:
    of_attention = (QKV, ATTENTION_OUT) if getattr(source, "attention_bias", False) else (QKV,) if qkv_bias else ()
    biases = of_attention + ((FFN_IN, FFN_OUT) if getattr(source, "mlp_bias", False) else ())
    return biases if 0 < len(biases) < 4 else bool(biases)


def _scaled_positions(parameters: dict[str, Any]) -> dict[str, bool]:
    return {f"positions scaled by {parameters['rope_type']!r}": parameters["rope_type"] != "default"}


def _llama_form(source: Any, qkv_bias: bool = False, head_norms: bool = False) -> dict[str, Any]:
    near = getattr(source, "sliding_window", None)  # a text no longer than that is seen whole
    return {
        "intermediate": source.intermediate_size,
        "activation": source.hidden_act,
        "norm": RMS,
        "norm_eps": source.rms_norm_eps,
        "biases": _biases(source, qkv_bias),
        "gated": True,
        "kv_heads": source.num_key_value_heads,
        "head": getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        "rotary_base": float(source.rope_parameters["rope_theta"]),
        "positions": min(source.max_position_embeddings, near or source.max_position_embeddings),
        "head_norms": head_norms,
    }


LLAMA = ModelFamily(
    PartNames(
        body={"words": "model.embed_tokens", "final_norm": "model.norm"},
        layers="model.layers",
        layer={
            QKV: [f"self_attn.{part}_proj" for part in "qkv"],
            ATTENTION_OUT: ["self_attn.o_proj"],
            "attention_norm": ["input_layernorm"],
            FFN_IN: ["mlp.gate_proj", "mlp.up_proj"],
            FFN_OUT: ["mlp.down_proj"],
            "ffn_norm": ["post_attention_layernorm"],
        },
        gated=True,
    ),
    form=_llama_form,
    refusals=lambda source: {
        **_scaled_positions(source.rope_parameters),
        "attention to later tokens": bool(getattr(source, "use_bidirectional_attention", False)),
    },
)
QWEN3 = replace(
    LLAMA,
    names=replace(
        LLAMA.names, layer={**LLAMA.names.layer, "query_norm": ["self_attn.q_norm"], "key_norm": ["self_attn.k_norm"]}
    ),
    form=partial(_llama_form, head_norms=True),
)
GPT2 = ModelFamily(
    PartNames(
        body={"words": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"},
        layers="transformer.h",
        layer={
            QKV: ["attn.c_attn"],
            ATTENTION_OUT: ["attn.c_proj"],
            "attention_norm": ["ln_1"],
            FFN_IN: ["mlp.c_fc"],
            FFN_OUT: ["mlp.c_proj"],
            "ffn_norm": ["ln_2"],
        },
        transposed=True,
    ),
    form=lambda source: {
        "intermediate": source.n_inner or 4 * source.n_embd,
        "activation": source.activation_function,
        "norm_eps": source.layer_norm_epsilon,
    },
    refusals=lambda source: {
        "unscaled attention": not source.scale_attn_weights,
        "attention scaled by layer": source.scale_attn_by_inverse_layer_idx,
        "cross-attention": source.add_cross_attention,
    },
)
OPT = ModelFamily(
    PartNames(
        body={
            "words": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "final_norm": "model.decoder.final_layer_norm",
        },
        layers="model.decoder.layers",
        layer={
            QKV: [f"self_attn.{part}_proj" for part in "qkv"],
            ATTENTION_OUT: ["self_attn.out_proj"],
            "attention_norm": ["self_attn_layer_norm"],
            FFN_IN: ["fc1"],
            FFN_OUT: ["fc2"],
            "ffn_norm": ["final_layer_norm"],
        },
        first_position=2,
    ),
    form=lambda source: {
        "intermediate": source.ffn_dim,
        "activation": source.activation_function,
        "norm_eps": nn.LayerNorm(1).eps,
        "biases": source.enable_bias,
    },
    refusals=lambda source: {
        "norms behind its parts, as OPT-350M": not source.do_layer_norm_before,
        "no last norm": source._remove_final_layer_norm,
        "norms without weights": not source.layer_norm_elementwise_affine,
        "words of another width than its layers": source.word_embed_proj_dim != source.hidden_size,
    },
)
_BODY = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm",
}


def _encoder_refusals(source: Any) -> dict[str, bool]:
    positions = getattr(source, "position_embedding_type", None) or "absolute"
    width, layers = getattr(source, "embedding_size", source.hidden_size), source.hidden_size
    both = f"words of width {width} and layers of width {layers} (ELECTRA's base and large discriminators have one width)"
    return {
        "an encoder that is configured as a decoder": getattr(source, "is_decoder", False),
        f"{positions!r} position embeddings": positions != "absolute",
        both: width != layers,
    }


ENCODERS_WAY_OUT = "take an encoder's checkpoint with one width and 'absolute' positions, or a decoder of another family"
BERT = ModelFamily(
    PartNames(
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
    ),
    form=lambda source: {
        "intermediate": source.intermediate_size,
        "activation": source.hidden_act,
        "norm_eps": source.layer_norm_eps,
    },
    refusals=_encoder_refusals,
    way_out=ENCODERS_WAY_OUT,
    has_pooler=True,
)
ROBERTA = replace(BERT, counts_padding=True)
DISTILBERT = ModelFamily(
    PartNames(
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
    ),
    form=lambda source: {"intermediate": source.hidden_dim, "activation": source.activation, "norm_eps": 1e-12},
    refusals=_encoder_refusals,
    way_out=ENCODERS_WAY_OUT,
)
FULL, NEAR = "full_attention", "sliding_attention"  # kinds of layers, as configurations name them


def _global_every(source: Any) -> int:
    """Returns of how many neighbouring layers the first sees all tokens, if that is so everywhere."""
    return next((i for i, kind in enumerate(source.layer_types) if i and kind == FULL), source.num_hidden_layers)


def _modernbert_form(source: Any) -> dict[str, Any]:
    is_near, bases = NEAR in source.layer_types, source.rope_parameters
    return {
        "intermediate": source.intermediate_size,
        "activation": source.hidden_activation,
        "norm": LAYER_NORM if source.norm_bias else SCALED,
        "norm_eps": source.norm_eps,
        "pre_norm": True,
        "biases": _biases(source),
        "gated": True,
        "rotary_base": float(bases[FULL]["rope_theta"]),
        "near": source.local_attention // 2 if is_near else None,
        "global_every": _global_every(source) if is_near else 1,
        "near_base": float(bases[NEAR]["rope_theta"]) if is_near else None,
        "segments": 0,
    }


MODERNBERT = ModelFamily(
    PartNames(
        body={"words": "embeddings.tok_embeddings", "norm": "embeddings.norm", "final_norm": "final_norm"},
        layers="layers",
        layer={
            QKV: ["attn.Wqkv"],
            ATTENTION_OUT: ["attn.Wo"],
            "attention_norm": ["attn_norm"],
            FFN_IN: ["mlp.Wi"],
            FFN_OUT: ["mlp.Wo"],
            "ffn_norm": ["mlp_norm"],
        },
        gated=True,
        lacks="layers.0.attn_norm",
    ),
    form=_modernbert_form,
    refusals=lambda source: {
        "near layers that are not all but each n-th one": source.layer_types
        != [NEAR if i % _global_every(source) else FULL for i in range(source.num_hidden_layers)],
        **{what: so for kind in {*source.layer_types} for what, so in _scaled_positions(source.rope_parameters[kind]).items()},
    },
)
EUROBERT = ModelFamily(
    replace(LLAMA.names, body={"words": "embed_tokens", "final_norm": "norm"}, layers="layers"),
    form=lambda source: _llama_form(source) | {"pre_norm": True, "normed_words": False, "segments": 0},
    refusals=LLAMA.refusals,
)
NOMIC_BERT = ModelFamily(
    PartNames(
        body={part: name for part, name in BERT.names.body.items() if part != "positions"},
        layers="layers",
        layer={**LLAMA.names.layer, "attention_norm": ["post_attention_layernorm"], "ffn_norm": ["post_mlp_layernorm"]},
        gated=True,
    ),
    form=lambda source: {
        "intermediate": source.intermediate_size,
        "activation": source.hidden_act,
        "norm_eps": source.layer_norm_eps,
        "biases": False,
        "gated": True,
        "head": source.head_dim,
        "rotary_base": float(source.rope_parameters["rope_theta"]),
    },
    refusals=lambda source: _scaled_positions(source.rope_parameters),
)
ENCODERS = {
    "bert": BERT,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "electra": replace(BERT, has_pooler=False),
    "eurobert": EUROBERT,
    "modernbert": MODERNBERT,
    "nomic_bert": NOMIC_BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}
DECODERS = {
    "gemma": replace(LLAMA, names=replace(LLAMA.names, from_one=True, scaled_words=True)),
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "opt": OPT,
    "qwen2": replace(LLAMA, form=partial(_llama_form, qkv_bias=True)),
    "qwen3": QWEN3,
}

# Why others are refused, by kind.
_BY_DISTANCE = "all of whose layers add learned distances of tokens to their scores"
_BESIDE = "whose attention and feed-forward part read the same input"
_BOTH_NORMS = "which has norms behind attention and feed-forward part"
_EXPERTS = "whose tokens take different feed-forward parts"
_BY_PLACE = "whose attention chooses tokens by their places in the whole text, which a window does not know"
REASONS = {
    "albert": "whose layers have the same weights, so that the lower ones cannot learn from windows alone",
    **dict.fromkeys(("big_bird", "longformer"), _BY_PLACE),
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet", "xlnet"), _BY_DISTANCE),
    **dict.fromkeys(("cohere", "falcon", "gpt_neox", "gptj", "phi"), _BESIDE),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), f"{_BOTH_NORMS}, and layers that see only near tokens"),
    **dict.fromkeys(("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _EXPERTS),
    **dict.fromkeys(("olmo2", "olmo3"), _BOTH_NORMS),
    "phi3": "whose queries, keys and values are one matrix",
    "granite": "whose parts are scaled",
    "roformer": "whose rotation turns neighbouring numbers together",
}


def described(kind: object) -> str:
    """Says what a model is, and why it is refused, if that is known."""
    return f"a {kind!r} model" + (f", {REASONS[str(kind)]}" if str(kind) in REASONS else "")


def family_of(model: str, source: Any) -> ModelFamily:
    """Returns the family of a model, by Hugging Face's configuration. Refuses what hPLMs cannot compute."""
    family = {**ENCODERS, **DECODERS}.get(source.model_type)
    if family is None:
        raise InvalidInput(
            f"{model!r} is {described(source.model_type)}: take an encoder of another family ({', '.join(ENCODERS)}) or a "
            f"decoder ({', '.join(DECODERS)})"
        )
    for what, found in family.refusals(source).items():
        if found:
            raise InvalidInput(f"{model!r} has what hPLMs cannot compute, {what}: {family.way_out}")
    return family


def part_of(weights: Weights, begin: str) -> dict[str, Tensor]:
    """Returns the tensors whose names begin so, without this beginning."""
    return {name.removeprefix(begin): own for name, own in weights.items() if name.startswith(begin)}
