"""Loads a model that Hugging Face can load, or a decoder in a `.gguf` file, and splits it into a lower and an upper stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.decoders import load_decoder, load_gguf, split_decoder
from hplm.model.families import FAMILIES
from hplm.model.gguf_files import is_gguf
from hplm.model.layer import Layer, Layers
from hplm.model.original import Checkpoint, halves, silent_transformers
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
    library = silent_transformers()
    try:
        source = library.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InvalidInput(f"cannot read a model from {model!r}: {first_line}") from error
    if source.model_type in FAMILIES:
        return load_decoder(model, name, lower, upper, window, source)
    if source.model_type != "bert":
        raise InvalidInput(
            f"{model!r} is a {source.model_type!r} model, but hPLMs are built from 'bert' encoders and from decoders: "
            f"{', '.join(FAMILIES)}"
        )
    return _load_encoder(model, name, lower, upper, window, source)


def _load_encoder(
    model: str, name: str | None, lower: int | None, upper: int | None, window: Window, source: Any
) -> Checkpoint:
    from hplm.model.skipbert import ENTRY_EPS, SkipBertWeights, is_skipbert, own_split, refuse_disguised, refuse_incomplete

    library = silent_transformers()
    if getattr(source, "is_decoder", False):
        raise InvalidInput(
            f"{model!r} is a BERT that is configured as a decoder: take an encoder checkpoint, or a decoder of "
            f"{', '.join(FAMILIES)}"
        )
    positions = getattr(source, "position_embedding_type", "absolute")
    if positions != "absolute":
        raise InvalidInput(f"{model!r} has {positions!r} position embeddings: take a checkpoint with 'absolute' ones")
    skipbert = is_skipbert(source)
    if skipbert:
        lower, upper = own_split(model, source, lower, upper, window)
    loader: Any = SkipBertWeights if skipbert else library.AutoModel  # the type of `from_pretrained` knows no report
    try:
        loaded, report = loader.from_pretrained(model, add_pooling_layer=False, output_loading_info=True, dtype=torch.float32)
        tokenizer = library.AutoTokenizer.from_pretrained(model, use_fast=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"cannot load the weights or tokenizer of {model!r}: {error}") from error
    if skipbert:
        refuse_incomplete(model, report["missing_keys"])
    else:
        refuse_disguised(model, report["unexpected_keys"])
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InvalidInput(
            f"{model!r} lacks {len(missing)} tensors of a BERT, such as {missing[0]}: take a complete checkpoint"
        )

    total: int = source.num_hidden_layers
    lower, upper = halves(total, lower, upper, least=1)
    config = BackboneConfig(
        name=name or Path(model).name.lower(),
        vocabulary=source.vocab_size,
        hidden=source.hidden_size,
        heads=source.num_attention_heads,
        intermediate=source.intermediate_size,
        lower_layers=lower,
        upper_layers=upper,
        positions=source.max_position_embeddings,
        segments=source.type_vocab_size,
        activation=source.hidden_act,
        norm_eps=source.layer_norm_eps,
        cls_id=tokenizer.cls_token_id,
        sep_id=tokenizer.sep_token_id,
        unk_id=tokenizer.unk_token_id,
        mask_id=tokenizer.mask_token_id,
        window=window,
        entry_eps=ENTRY_EPS if skipbert else None,
    )
    return Checkpoint(config, total, dict(loaded.state_dict()), tokenizer.backend_tokenizer.to_str(), skipbert)


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
