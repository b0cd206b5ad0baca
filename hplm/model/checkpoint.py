"""Loads a model that Hugging Face can load, or a decoder in a `.gguf` file, and splits it into a lower and an upper stack."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.decoders import load_decoder, load_gguf
from hplm.model.encoders import ENCODERS, described, load_encoder
from hplm.model.families import FAMILIES, KINDS, Halves, Weights, part_of
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

    An encoder's lower stack was never trained on windows of a few tokens, so it needs adaptation afterwards.
    """
    config, weights = checkpoint.config, checkpoint.weights
    if config.is_decoder:
        below, above = _of_decoder(config, weights)
    elif checkpoint.skipbert:
        from hplm.model.skipbert import halves_of

        below, above = halves_of(config, weights)
    else:
        below, above = _of_encoder(config, weights)
    lower, upper = LowerStack(config), UpperStack(config)
    lower.load_state_dict(below | _named(weights, "words.", "norm.") | _layers(weights, 0, config.lower_layers))
    upper.load_state_dict(above | _layers(weights, config.lower_layers, config.upper_layers))
    return lower, upper


def _of_decoder(config: BackboneConfig, weights: Weights) -> Halves:
    below = {"places": weights["positions.weight"][: config.window.n + 1]} if config.has_places else {}
    return below, _named(weights, "positions.", "final_norm.", "next_token.")


def _of_encoder(config: BackboneConfig, weights: Weights) -> Halves:
    # Inside a window any short run of positions will do. It starts after the first, which is only used for [CLS].
    places = weights["positions.weight"][1 : config.window.n + 1] + weights["segments.weight"][0]
    gate_bias = torch.full((config.window.n,), -1.0)  # a token's own window counts most; its neighbours' windows add context
    gate_bias[config.window.centre] = 2.0
    below = {"places": places, "gate": torch.zeros(config.window.n, config.hidden), "gate_bias": gate_bias}
    above = {f"{name}.weight": torch.zeros_like(weights[f"{name}.weight"]) for name in ("positions", "segments")}
    for kind in KINDS:
        above[f"norm.{kind}"] = weights[f"layers.{config.lower_layers - 1}.ffn_norm.{kind}"]
    return below, above


def _named(weights: Weights, *begin: str) -> dict[str, Tensor]:
    return {name: own for name, own in weights.items() if name.startswith(begin)}


def _layers(weights: Weights, first: int, count: int) -> dict[str, Tensor]:
    """Returns the tensors of some layers, numbered from 0."""
    every = ((number, part_of(weights, f"layers.{first + number}.")) for number in range(count))
    return {f"layers.{number}.{name}": own for number, part in every for name, own in part.items()}


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
    layers.load_state_dict(part_of(checkpoint.weights, "layers."))
    return layers
