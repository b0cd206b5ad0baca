"""Loads a model that Hugging Face can load, or a decoder in a `.gguf` file, and splits it into a lower and an upper stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import UNUSED, BackboneConfig
from hplm.model.families import DECODERS, WEIGHT_AND_BIAS, Halves, Weights, family_of, part_of
from hplm.model.gguf_files import SUFFIX, is_gguf, read_gguf
from hplm.model.layer import Layer, Layers
from hplm.model.original import Checkpoint, check_finite, configuration_of, silent_transformers, tokenizer_of, weights_of
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.windows import TRIGRAMS, Window

SPECIAL = ("cls", "sep", "unk", "mask")  # tokens of encoders: that begin and end a text, that are unknown, and that are masked


def load_checkpoint(
    model: str, name: str | None = None, lower: int | None = None, upper: int | None = None, window: Window = TRIGRAMS
) -> Checkpoint:
    """Loads a folder or a hub name (safetensors or bin, with or without a head or prefix), or a `.gguf` file.

    By default half of its layers are lower ones. A decoder's windows are always causal.
    """
    fixed = None
    if is_gguf(model):
        form, total, weights, tokenizer_json = read_gguf(Path(model))
        check_finite(model, weights)
    else:
        form, total, weights, tokenizer_json, fixed = _from_library(model, lower, upper, window)
    lower, upper = fixed or (lower, upper)
    is_decoder = "start_id" in form  # encoders have other special tokens
    lower = total // 2 if lower is None else lower
    upper = total - lower if upper is None else upper
    least = 0 if is_decoder else 1
    if lower < least or upper < 1 or lower + upper > total:
        raise InvalidInput(f"cannot split {total} layers into {lower} lower and {upper} upper: set other --lower and --upper")
    if is_decoder:
        _check_decoder(model, form, tokenizer_json)
        if lower == 0 and window.n > 1:
            raise InvalidInput(f"--lower 0 makes a table of single tokens, not of windows of {window.n}: leave out --window")
        window = Window(window.n, causal=True)
        form = dict[str, Any](segments=0, **dict.fromkeys([f"{kind}_id" for kind in SPECIAL], UNUSED)) | form
    name = name or Path(model).name.lower().removesuffix(SUFFIX)
    config = BackboneConfig(name=name, lower_layers=lower, upper_layers=upper, window=window, **form)
    return Checkpoint(config, total, weights, tokenizer_json, skipbert=fixed is not None)


def _from_library(
    model: str, lower: int | None, upper: int | None, window: Window
) -> tuple[dict[str, Any], int, dict[str, Tensor], str, tuple[int, int] | None]:
    """Returns what `read_gguf` does, and the split of a SkipBERT."""
    from hplm.model.skipbert import BODY, ENTRY_EPS, SkipBertWeights, is_skipbert, own_split, refuse_disguised

    source, library = configuration_of(model), silent_transformers()
    family, is_decoder, skipbert = family_of(model, source), source.model_type in DECODERS, is_skipbert(source)
    fixed = own_split(model, source, lower, upper, window) if skipbert else None
    loader = SkipBertWeights if skipbert else library.AutoModelForCausalLM if is_decoder else library.AutoModel
    loaded, report = weights_of(model, loader, **({"add_pooling_layer": False} if family.has_pooler else {}))
    tokenizer = tokenizer_of(model)
    if not skipbert:
        refuse_disguised(model, report["unexpected_keys"])
    if missing := sorted(report["missing_keys"]):
        kind = "SkipBERT" if skipbert else source.model_type
        raise InvalidInput(
            f"{model!r} lacks {len(missing)} tensors of a {kind}, such as {', '.join(missing[:2])}: take a complete checkpoint"
        )
    total, names = source.num_hidden_layers, family.names
    if skipbert:
        names = replace(names, body={**names.body, **BODY})
    if family.counts_padding:
        names = replace(names, first_position=source.pad_token_id + 1)
    weights = names.ours(loaded.state_dict(), total)
    sizes = {"vocabulary": source.vocab_size, "hidden": source.hidden_size, "heads": source.num_attention_heads}
    form = sizes | family.form(source) | ({"entry_eps": ENTRY_EPS} if skipbert else {})
    if is_decoder:
        weights["next_token.weight"] = loaded.get_output_embeddings().weight.detach()
        form = {"positions": source.max_position_embeddings, "pre_norm": True} | form | _ends(source, loaded, tokenizer)
    else:
        if "segments" not in form:
            weights["segments.weight"] = segments = _segments(weights, tokenizer)
            if "positions.weight" not in weights:  # windows know no places that the first segment could be added to
                weights["words.weight"] = weights["words.weight"] + segments[0]
                weights["segments.weight"] = segments - segments[0]
        counts = {part: len(own) for part in ("positions", "segments") if (own := weights.get(f"{part}.weight")) is not None}
        form = {"positions": source.max_position_embeddings} | form | counts | _special_ids(model, tokenizer)
    return form, total, weights, tokenizer.backend_tokenizer.to_str(), fixed


def _check_decoder(model: str, form: dict[str, Any], tokenizer_json: str) -> None:
    if form["start_id"] is None:
        raise InvalidInput(f"{model!r} names no token that begins a text: set bos_token_id in its config.json")
    known = HuggingFaceTokenizer.from_str(tokenizer_json).get_vocab()
    if (highest := max(known.values(), default=0)) >= form["vocabulary"]:
        raise InvalidInput(
            f"{model!r} has {form['vocabulary']} tokens, but its tokenizer has a token {highest}: take the tokenizer that the "
            "model was trained with"
        )


def _ends(source: Any, loaded: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns what a decoder's configuration says of the ends of texts, and of chats."""
    named: int | list[int] | None = loaded.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [] if named is None else [named]
    templates: str | dict[str, str] | None = tokenizer.chat_template
    start: int | None = source.bos_token_id if source.bos_token_id is not None else tokenizer.bos_token_id
    return {
        "start_id": start,
        "starts": bool(first := tokenizer("a").input_ids) and first[0] == start,
        "end_ids": tuple(sorted(ends, key=lambda end: end != tokenizer.eos_token_id)),
        "chat_template": templates.get("default") if isinstance(templates, dict) else templates,
    }


def _special_ids(model: str, tokenizer: Any) -> dict[str, int]:
    ids: dict[str, int | None] = {f"{kind}_id": getattr(tokenizer, f"{kind}_token_id") for kind in SPECIAL}
    for kind, other in (("cls", "bos"), ("sep", "eos")):  # as tokenizers of decoders call them
        if ids[f"{kind}_id"] is None:
            ids[f"{kind}_id"] = getattr(tokenizer, f"{other}_token_id")
    if ids["unk_id"] is None:  # a tokenizer of bytes knows all
        ids["unk_id"] = UNUSED
    if missing := [name.removesuffix("_id") for name, id in ids.items() if id is None]:
        raise InvalidInput(
            f"the tokenizer of {model!r} has no token for {', '.join(missing)}: take the one it was trained with"
        )
    return {name: id for name, id in ids.items() if id is not None}


def _segments(weights: Mapping[str, Tensor], tokenizer: Any) -> Tensor:
    """A tokenizer may number the segments of a pair although the model has one segment or none."""
    segments = weights.get("segments.weight", torch.zeros_like(weights["words.weight"][:1]))
    missing = max(tokenizer.backend_tokenizer.encode("a", "b").type_ids) + 1 - len(segments)
    return torch.cat([segments, segments[:1].expand(max(missing, 0), -1)])


def split(checkpoint: Checkpoint) -> tuple[LowerStack, UpperStack]:
    """Splits the model: the first K layers are the lower stack, the next M the upper stack, the rest is dropped (HMI, Table 7).

    An encoder's lower stack was never trained on windows of a few tokens, so it needs adaptation afterwards.
    """
    config, weights = checkpoint.config, checkpoint.weights
    if config.is_decoder:
        below = {"places": weights["positions.weight"][: config.window.n + 1]} if config.has_places else {}
        above = _named(weights, "positions.", "next_token.")
    elif checkpoint.skipbert:
        from hplm.model.skipbert import halves_of

        below, above = halves_of(config, weights)
    else:
        below, above = _of_encoder(config, weights)
    lower, upper = LowerStack(config), UpperStack(config)
    lower.load_state_dict(below | _named(weights, "words.", "norm.") | _layers(weights, 0, config.lower_layers))
    upper.load_state_dict(above | _named(weights, "final_norm.") | _layers(weights, config.lower_layers, config.upper_layers))
    return lower, upper


def _of_encoder(config: BackboneConfig, weights: Weights) -> Halves:
    n, centre = config.window.n, config.window.centre
    if config.enters_normed:
        gate_bias = torch.full((n,), -1.0)  # a token's own window counts most; its neighbours' windows add context
        gate_bias[centre] = 2.0
    else:  # no norm makes up for a sum that is too large, so all of a token's gates are about one together
        gates = torch.full((n,), 0.5 / max(1, n - 1))
        gates[centre] = 0.5 if n > 1 else 0.99
        gate_bias = gates.logit()
    below = {"gate": torch.zeros(n, config.hidden), "gate_bias": gate_bias}
    if config.has_places:
        # Inside a window any short run of positions will do. It starts after the first, which is only used for [CLS].
        below["places"] = weights["positions.weight"][1 : n + 1] + weights["segments.weight"][0]
    above = {name: torch.zeros_like(own) for name, own in _named(weights, "positions.", "segments.").items()}
    if config.enters_normed:
        for kind in WEIGHT_AND_BIAS:
            above[f"norm.{kind}"] = weights[f"layers.{config.lower_layers - 1}.ffn_norm.{kind}"]
    return below, above


def _named(weights: Weights, *begin: str) -> dict[str, Tensor]:
    return {name: own for name, own in weights.items() if name.startswith(begin)}


def _layers(weights: Weights, first: int, count: int) -> dict[str, Tensor]:
    """Returns the tensors of some layers, numbered from 0."""
    every = ((number, part_of(weights, f"layers.{first + number}.")) for number in range(count))
    return {f"layers.{number}.{name}": own for number, part in every for name, own in part.items()}


def full_stack(checkpoint: Checkpoint) -> Layers:
    """Returns all layers of the original model as our `Layer`s: the teacher of the adaptation."""
    if checkpoint.skipbert:
        raise InvalidInput(
            f"{checkpoint.config.name!r} is a SkipBERT: its lower layers never saw whole texts, so they cannot teach a domain. "
            "Build with --minutes 0: the domain then has its own n-grams and the root's lower layers"
        )
    config = replace(checkpoint.config, lower_layers=checkpoint.total_layers)
    layers = Layers(Layer(config, number) for number in range(checkpoint.total_layers))
    layers.load_state_dict(part_of(checkpoint.weights, "layers."))
    return layers
