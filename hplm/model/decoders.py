"""Loads decoders: from what Hugging Face can load, and from `.gguf` files. Their windows are always causal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import UNUSED, BackboneConfig
from hplm.model.families import FAMILIES, form_of
from hplm.model.gguf_files import SUFFIX, read_gguf
from hplm.model.original import Checkpoint, check_finite, halves, silent_transformers, tokenizer_of, weights_of
from hplm.model.windows import Window


def load_decoder(model: str, name: str | None, lower: int | None, upper: int | None, window: Window, source: Any) -> Checkpoint:
    form = form_of(model, source)
    loaded, report = weights_of(model, silent_transformers().AutoModelForCausalLM)
    tokenizer = tokenizer_of(model)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise InvalidInput(f"{model!r} lacks {len(missing)} tensors, such as {missing[0]}: take a complete checkpoint")
    named: int | list[int] | None = loaded.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [] if named is None else [named]
    templates: str | dict[str, str] | None = tokenizer.chat_template
    form |= {
        "start_id": source.bos_token_id if source.bos_token_id is not None else tokenizer.bos_token_id,
        "end_ids": tuple(sorted(ends, key=lambda end: end != tokenizer.eos_token_id)),
        "chat_template": templates.get("default") if isinstance(templates, dict) else templates,
    }
    total = source.num_hidden_layers
    weights = FAMILIES[source.model_type].names.ours(loaded.state_dict(), total)
    weights["next_token.weight"] = loaded.get_output_embeddings().weight.detach()
    return _decoder(model, name, total, lower, upper, window, form, weights, tokenizer.backend_tokenizer.to_str())


def load_gguf(model: str, name: str | None, lower: int | None, upper: int | None, window: Window) -> Checkpoint:
    form, total, weights, tokenizer_json = read_gguf(Path(model))
    check_finite(model, weights)
    return _decoder(model, name, total, lower, upper, window, form, weights, tokenizer_json)


def _decoder(
    model: str,
    name: str | None,
    total: int,
    lower: int | None,
    upper: int | None,
    window: Window,
    form: dict[str, Any],
    weights: dict[str, Tensor],
    tokenizer_json: str,
) -> Checkpoint:
    if form["start_id"] is None:
        raise InvalidInput(f"{model!r} names no token that begins a text: set bos_token_id in its config.json")
    lower, upper = halves(total, lower, upper, least=0)
    if lower == 0 and window.n > 1:
        raise InvalidInput(f"--lower 0 makes a table of single tokens, not of windows of {window.n}: leave out --window")
    known = HuggingFaceTokenizer.from_str(tokenizer_json).get_vocab()
    if (highest := max(known.values(), default=0)) >= form["vocabulary"]:
        raise InvalidInput(
            f"{model!r} has {form['vocabulary']} tokens, but its tokenizer has a token {highest}: take the tokenizer that the "
            "model was trained with"
        )
    config = BackboneConfig(
        name=name or Path(model).name.lower().removesuffix(SUFFIX),
        lower_layers=lower,
        upper_layers=upper,
        segments=0,
        window=Window(window.n, causal=True),
        cls_id=UNUSED,
        sep_id=UNUSED,
        unk_id=UNUSED,
        mask_id=UNUSED,
        **form,
    )
    return Checkpoint(config, total, weights, tokenizer_json)
