"""A model as it was before it was split: its configuration, weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig


@dataclass
class Checkpoint:
    config: BackboneConfig  # with the requested lower_layers and upper_layers
    total_layers: int
    weights: dict[str, Tensor]  # of an encoder with the names of transformers' BertModel, of a decoder with ours
    tokenizer_json: str
    skipbert: bool = False  # its halves were trained apart: no adaptation is needed, and there is no whole BERT to learn from


def silent_transformers() -> Any:
    """Returns the library `transformers`. Its types describe no model in particular."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def halves(total: int, lower: int | None, upper: int | None, least: int) -> tuple[int, int]:
    """Returns the lower and upper layers: the given ones, else half of them and the rest. `least`: of the lower ones."""
    lower = total // 2 if lower is None else lower
    upper = total - lower if upper is None else upper
    if lower < least or upper < 1 or lower + upper > total:
        raise InvalidInput(f"cannot split {total} layers into {lower} lower and {upper} upper: set other --lower and --upper")
    return lower, upper
