"""A model as it was before it was split: its configuration, weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig

# The files of tokenizers, one of which a model needs.
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")


@dataclass
class Checkpoint:
    config: BackboneConfig  # with the requested lower_layers and upper_layers
    total_layers: int
    weights: dict[str, Tensor]  # with our names (`hplm.model.families`)
    tokenizer_json: str
    skipbert: bool = False  # its halves were trained apart: no adaptation is needed, and there is no whole BERT to learn from


def silent_transformers() -> Any:
    """Returns the library `transformers`. Its types describe no model in particular."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def configuration_of(model: str) -> Any:
    return _pretrained(silent_transformers().AutoConfig, model, "configuration")


def tokenizer_of(model: str) -> Any:
    """Returns the tokenizer. Of a folder without one, `transformers` would make up an empty one."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in VOCABULARIES):
        raise InvalidInput(
            f"{folder} has no tokenizer ({', '.join(VOCABULARIES)}): copy the files of the tokenizer there that the model was "
            "trained with"
        )
    return _pretrained(silent_transformers().AutoTokenizer, model, "tokenizer", use_fast=True)


def weights_of(model: str, loader: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model of a class of `transformers`, and its report of missing and unexpected tensors."""
    loaded, report = _pretrained(loader, model, "weights", output_loading_info=True, dtype=torch.float32, **given)
    check_finite(model, loaded.state_dict())
    return loaded, report


def check_finite(source: object, tensors: Mapping[str, Tensor]) -> None:
    """Refuses weights that can give no answer. `source`: the model or the file that holds them."""
    if (wrong := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)) is not None:
        raise InvalidInput(
            f"the weights of {str(source)!r} hold numbers that are not finite, in tensor {wrong!r}: copy it again, or take one "
            "whose training did not diverge"
        )


def _pretrained(loader: Any, model: str, what: str, **given: Any) -> Any:
    """Loads a part of a model. Runs no code that lies beside it, nor lets the library ask at the terminal whether it may."""
    try:
        return loader.from_pretrained(model, trust_remote_code=False, **given)
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).partition("\n\n")[0].split())
        if "trust_remote_code" in said:
            said = "it needs code of its own, which hPLM never runs: save it with a class of transformers"
        elif "ignore_mismatched_sizes" in said:
            said = "a tensor has another shape than config.json says, perhaps for another number of labels: save it again"
        elif "Unrecognized configuration class" in said:
            said = f"transformers has no {loader.__name__.removeprefix('Auto')} of this kind"
        elif Path(model).is_absolute() and not Path(model).exists():  # which the library takes for an odd name
            said = "there is no such folder"
        raise InvalidInput(f"cannot load the {what} of {model!r}: {said}") from error
