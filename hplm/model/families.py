"""The families of decoders that hPLMs are built from: what their configurations say, and the names of their tensors.

Weights get our names: `words`, `positions` (of families that learn them), `layers.<i>.*` as in `Layer`, `final_norm`, and
`next_token`, the matrix of the logits, even where it is that of the words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hplm.errors import InvalidInput
from hplm.model.config import LAYER_NORM, RMS
from hplm.model.layer import ATTENTION_OUT, FFN_IN, FFN_OUT, QKV

Weights = Mapping[str, Tensor]
KINDS = ("weight", "bias")


class Family(ABC):
    body: dict[str, str]  # our names of tensors outside of the layers -> the family's

    @abstractmethod
    def refusals(self, source: Any) -> dict[str, bool]:
        """Returns what a model of the family may have that hPLMs cannot compute, and whether this one has it."""

    @abstractmethod
    def form(self, source: Any) -> dict[str, Any]:
        """Returns the fields of `BackboneConfig` that tell the form of the layers."""

    @abstractmethod
    def layer(self, weights: Weights, number: int) -> dict[str, Tensor]:
        """Returns the tensors of a layer."""

    def renamed(self, weights: Weights, layers: int, next_token: Tensor) -> dict[str, Tensor]:
        """Returns all tensors under our names."""
        renamed = {ours: weights[name] for ours, name in self.body.items() if name in weights}
        for number in range(layers):
            renamed |= {f"layers.{number}.{name}": tensor for name, tensor in self.layer(weights, number).items()}
        return renamed | {"next_token.weight": next_token}


class Llama(Family):
    body = {  # noqa: RUF012
        "words.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
    }

    def refusals(self, source: Any) -> dict[str, bool]:
        return {
            f"positions scaled by {source.rope_parameters['rope_type']!r}": source.rope_parameters["rope_type"] != "default",
            "biases in some of its projections only": source.attention_bias != source.mlp_bias,
        }

    def form(self, source: Any) -> dict[str, Any]:
        return {
            "intermediate": source.intermediate_size,
            "activation": source.hidden_act,
            "norm": RMS,
            "norm_eps": source.rms_norm_eps,
            "biases": source.attention_bias,
            "gated": True,
            "kv_heads": source.num_key_value_heads,
            "head": source.head_dim,
            "rotary_base": float(source.rope_parameters["rope_theta"]),
        }

    def layer(self, weights: Weights, number: int) -> dict[str, Tensor]:
        own = f"model.layers.{number}"
        return {
            **_joined(weights, QKV, [f"{own}.self_attn.{part}_proj" for part in "qkv"]),
            **_joined(weights, ATTENTION_OUT, [f"{own}.self_attn.o_proj"]),
            **_joined(weights, "attention_norm", [f"{own}.input_layernorm"]),
            **_joined(weights, FFN_IN, [f"{own}.mlp.{part}_proj" for part in ("gate", "up")]),
            **_joined(weights, FFN_OUT, [f"{own}.mlp.down_proj"]),
            **_joined(weights, "ffn_norm", [f"{own}.post_attention_layernorm"]),
        }


class Gpt2(Family):
    body = {  # noqa: RUF012
        "words.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }

    def refusals(self, source: Any) -> dict[str, bool]:
        return {
            "unscaled attention": not source.scale_attn_weights,
            "attention scaled by layer": source.scale_attn_by_inverse_layer_idx,
            "cross-attention": source.add_cross_attention,
        }

    def form(self, source: Any) -> dict[str, Any]:
        return {
            "intermediate": source.n_inner or 4 * source.n_embd,
            "activation": source.activation_function,
            "norm": LAYER_NORM,
            "norm_eps": source.layer_norm_epsilon,
            "biases": True,
        }

    def layer(self, weights: Weights, number: int) -> dict[str, Tensor]:
        own = f"transformer.h.{number}"
        products = {QKV: "attn.c_attn", ATTENTION_OUT: "attn.c_proj", FFN_IN: "mlp.c_fc", FFN_OUT: "mlp.c_proj"}
        layer: dict[str, Tensor] = {}
        for ours, theirs in products.items():  # stored as inputs x outputs
            layer |= {f"{ours}.weight": weights[f"{own}.{theirs}.weight"].T, f"{ours}.bias": weights[f"{own}.{theirs}.bias"]}
        return {
            **layer,
            **_joined(weights, "attention_norm", [f"{own}.ln_1"]),
            **_joined(weights, "ffn_norm", [f"{own}.ln_2"]),
        }


class Opt(Family):
    POSITIONS = 2  # rows before the first position
    body = {  # noqa: RUF012
        "words.weight": "model.decoder.embed_tokens.weight",
        "positions.weight": "model.decoder.embed_positions.weight",
        "final_norm.weight": "model.decoder.final_layer_norm.weight",
        "final_norm.bias": "model.decoder.final_layer_norm.bias",
    }

    def refusals(self, source: Any) -> dict[str, bool]:
        return {
            "norms behind its parts, as OPT-350M": not source.do_layer_norm_before,
            "no last norm": source._remove_final_layer_norm,
            "norms without weights": not source.layer_norm_elementwise_affine,
            "words of another width than its layers": source.word_embed_proj_dim != source.hidden_size,
        }

    def form(self, source: Any) -> dict[str, Any]:
        return {
            "intermediate": source.ffn_dim,
            "activation": source.activation_function,
            "norm": LAYER_NORM,
            "norm_eps": nn.LayerNorm(1).eps,
            "biases": source.enable_bias,
        }

    def layer(self, weights: Weights, number: int) -> dict[str, Tensor]:
        own = f"model.decoder.layers.{number}"
        return {
            **_joined(weights, QKV, [f"{own}.self_attn.{part}_proj" for part in "qkv"]),
            **_joined(weights, ATTENTION_OUT, [f"{own}.self_attn.out_proj"]),
            **_joined(weights, "attention_norm", [f"{own}.self_attn_layer_norm"]),
            **_joined(weights, FFN_IN, [f"{own}.fc1"]),
            **_joined(weights, FFN_OUT, [f"{own}.fc2"]),
            **_joined(weights, "ffn_norm", [f"{own}.final_layer_norm"]),
        }

    def renamed(self, weights: Weights, layers: int, next_token: Tensor) -> dict[str, Tensor]:
        renamed = super().renamed(weights, layers, next_token)
        return renamed | {"positions.weight": renamed["positions.weight"][self.POSITIONS :]}


FAMILIES: dict[str, Family] = {"gpt2": Gpt2(), "llama": Llama(), "opt": Opt()}


def form_of(model: str, source: Any) -> dict[str, Any]:
    """Returns the fields of `BackboneConfig` that Hugging Face's configuration of a decoder tells. Refuses what hPLMs lack."""
    family = FAMILIES[source.model_type]
    for what, found in family.refusals(source).items():
        if found:
            raise InvalidInput(f"{model!r} has {what}, which hPLMs cannot compute: take another checkpoint")
    return {
        "vocabulary": source.vocab_size,
        "hidden": source.hidden_size,
        "heads": source.num_attention_heads,
        "positions": source.max_position_embeddings,
        "pre_norm": True,
        **family.form(source),
    }


def _joined(weights: Weights, ours: str, theirs: Sequence[str]) -> dict[str, Tensor]:
    """Returns the weight and the bias, where there is one, of several products as those of one."""
    found = {kind: [weights[f"{name}.{kind}"] for name in theirs if f"{name}.{kind}" in weights] for kind in KINDS}
    return {f"{ours}.{kind}": torch.cat(parts) for kind, parts in found.items() if parts}
