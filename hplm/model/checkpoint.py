"""Loads any BERT that Hugging Face can load, and splits it into a lower and an upper stack."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.layer import Layer, Layers
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import TRIGRAMS, Window


@dataclass
class Checkpoint:
    config: BackboneConfig  # with the requested lower_layers and upper_layers
    total_layers: int
    weights: dict[str, Tensor]  # transformers' BertModel names, without prefix
    tokenizer_json: str
    skipbert: bool = False  # its halves were trained apart: no adaptation is needed, and there is no whole BERT to learn from


def load_checkpoint(
    model: str, name: str | None = None, lower: int | None = None, upper: int | None = None, window: Window = TRIGRAMS
) -> Checkpoint:
    """Loads a folder or a hub name: safetensors or bin, with or without a head or a `bert.` prefix."""
    import transformers
    from transformers.utils import logging

    from hplm.model.skipbert import ENTRY_EPS, SkipBertWeights, is_skipbert, own_split, refuse_disguised, refuse_incomplete

    library: Any = transformers  # its types describe no model in particular
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        source = library.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InvalidInput(f"cannot read a model from {model!r}: {first_line}") from error
    if source.model_type != "bert":
        raise InvalidInput(f"{model!r} is a {source.model_type!r} model, but hPLMs are built from 'bert' models")
    if getattr(source, "is_decoder", False):
        raise InvalidInput(f"{model!r} is a decoder, but hPLMs are built from encoders: take an encoder checkpoint")
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
    lower = total // 2 if lower is None else lower
    upper = total - lower if upper is None else upper
    if lower < 1 or upper < 1 or lower + upper > total:
        raise InvalidInput(f"cannot split {total} layers into {lower} lower and {upper} upper: set other --lower and --upper")
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
    if checkpoint.skipbert:
        raise InvalidInput(
            f"{checkpoint.config.name!r} is a SkipBERT: its lower layers never saw whole texts, so they cannot teach a domain. "
            "Build with --minutes 0: the domain then has its own n-grams and the root's lower layers"
        )
    config = replace(checkpoint.config, lower_layers=checkpoint.total_layers)
    layers = Layers(Layer(config) for _ in range(checkpoint.total_layers))
    for i, layer in enumerate(layers):
        _copy_layer(layer, checkpoint.weights, i)
    return layers


def _copy_norm(norm: nn.LayerNorm, weights: dict[str, Tensor], name: str) -> None:
    norm.weight.copy_(weights[f"{name}.weight"])
    norm.bias.copy_(weights[f"{name}.bias"])


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
