"""Loads a model that Hugging Face can load, or a decoder in a `.gguf` file, and splits it into a lower and an upper stack."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.decoders import load_decoder, load_gguf, split_decoder
from hplm.model.encoders import ENCODERS, described, load_encoder
from hplm.model.families import FAMILIES
from hplm.model.gguf_files import is_gguf
from hplm.model.layer import Layer, Layers
from hplm.model.original import Checkpoint, configuration_of
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import TRIGRAMS, Window


def load_checkpoint(
    model: str, name: str | None = None, lower: int | None = None, upper: int | None = None, window: Window = TRIGRAMS
) -> Checkpoint:
    """Loads a folder or a hub name (safetensors or bin, with or without a head or prefix), or a `.gguf` file.

    A decoder's windows are always causal.
    """
    if is_gguf(model):
        return load_gguf(model, name, lower, upper, window)
    source = configuration_of(model)
    if source.model_type in FAMILIES:
        return load_decoder(model, name, lower, upper, window, source)
    if source.model_type in ENCODERS:
        return load_encoder(model, name, lower, upper, window, source)
    raise InvalidInput(
        f"{model!r} is {described(source.model_type)}: hPLMs are built from encoders ({', '.join(ENCODERS)}) and from decoders "
        f"({', '.join(FAMILIES)})"
    )


def split(checkpoint: Checkpoint) -> tuple[LowerStack, UpperStack]:
    """Splits the model: the first K layers are the lower stack, the next M the upper stack, the rest is dropped (HMI, Table 7).

    The lower stack was never trained on windows of a few tokens, so it needs adaptation afterwards.
    """
    if checkpoint.config.is_decoder:
        return split_decoder(checkpoint)
    config, weights = checkpoint.config, checkpoint.weights
    lower, upper = LowerStack(config), UpperStack(config)
    with torch.no_grad():
        lower.words.weight.copy_(weights["embeddings.word_embeddings.weight"])
        # Inside a window any short run of positions will do. It starts after the first, which is only used for [CLS].
        places = weights["embeddings.position_embeddings.weight"][1 : config.window.n + 1]
        lower.places.copy_(places + weights["embeddings.token_type_embeddings.weight"][0])
        _copy_norm(lower.norm, weights, "embeddings.LayerNorm")
        lower.gate_bias.fill_(-1.0)  # a token's own window counts most; its neighbours' windows add context
        lower.gate_bias[config.window.centre] = 2.0
        upper.positions.weight.zero_()
        upper.segments.weight.zero_()
        last = f"encoder.layer.{config.lower_layers - 1}.output.LayerNorm"
        upper.norm.weight.copy_(weights[f"{last}.weight"])
        upper.norm.bias.copy_(weights[f"{last}.bias"])
    for i, layer in enumerate(lower.layers):
        _copy_layer(layer, weights, i)
    for i, layer in enumerate(upper.layers):
        _copy_layer(layer, weights, config.lower_layers + i)
    if checkpoint.skipbert:
        from hplm.model.skipbert import take_over

        take_over(lower, upper, weights)
    return lower, upper


def random_backbone(config: BackboneConfig, seed: int = 0) -> tuple[LowerStack, UpperStack]:
    """Returns stacks with weights of BERT's initial distribution, for tests and benchmarks of any size."""
    generator = torch.Generator().manual_seed(seed)
    lower, upper = LowerStack(config), UpperStack(config)
    with torch.no_grad():
        for stack in (lower, upper):
            for name, parameter in stack.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return lower, upper


def full_stack(checkpoint: Checkpoint) -> Layers:
    """Returns all layers of the original model as our `Layer`s: the teacher of the adaptation."""
    if checkpoint.config.is_decoder:
        raise InvalidInput(
            f"{checkpoint.config.name!r} is a decoder, whose lower layers do not learn yet. Build with --minutes 0: the domain "
            "then has its own n-grams and the root's lower layers"
        )
    if checkpoint.skipbert:
        raise InvalidInput(
            f"{checkpoint.config.name!r} is a SkipBERT: its lower layers never saw whole texts, so they cannot teach a domain. "
            "Build with --minutes 0: the domain then has its own n-grams and the root's lower layers"
        )
    config = replace(checkpoint.config, lower_layers=checkpoint.total_layers)
    layers = Layers(Layer(config, number) for number in range(checkpoint.total_layers))
    for i, layer in enumerate(layers):
        _copy_layer(layer, checkpoint.weights, i)
    return layers


def _copy_norm(norm: nn.LayerNorm | nn.RMSNorm, weights: dict[str, Tensor], name: str) -> None:
    for kind in ("weight", "bias"):
        getattr(norm, kind).copy_(weights[f"{name}.{kind}"])


@torch.no_grad()
def _copy_layer(layer: Layer, weights: dict[str, Tensor], index: int) -> None:
    prefix = f"encoder.layer.{index}"
    for kind in ("weight", "bias"):
        qkv = [weights[f"{prefix}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        getattr(layer.qkv, kind).copy_(torch.cat(qkv))
        getattr(layer.attention_out, kind).copy_(weights[f"{prefix}.attention.output.dense.{kind}"])
        getattr(layer.ffn_in, kind).copy_(weights[f"{prefix}.intermediate.dense.{kind}"])
        getattr(layer.ffn_out, kind).copy_(weights[f"{prefix}.output.dense.{kind}"])
    _copy_norm(layer.attention_norm, weights, f"{prefix}.attention.output.LayerNorm")
    _copy_norm(layer.ffn_norm, weights, f"{prefix}.output.LayerNorm")
