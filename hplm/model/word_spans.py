"""Where the words of a text are, and which tokens they begin with. It needs no library for tokens, whose import takes long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from hplm.arrays import Array

if TYPE_CHECKING:
    from hplm.model.tokenizer import Encoded

WORD = re.compile(r"\S+")


def words_of(text: str) -> list[tuple[int, int]]:
    """Returns the code-point spans of the words between whitespace."""
    return [match.span() for match in WORD.finditer(text)]


def first_tokens(encoded: Encoded, words: list[tuple[int, int]]) -> Array:
    """Returns for each word the index of its first token, or -1 if it has none.

    A word has no token if it was cut off or if the model cannot read it. A token belongs to the word in which it starts.
    """
    real = np.flatnonzero(encoded.parts == 0)
    starts = np.append(encoded.offsets[real, 0], np.iinfo(np.int64).max)  # behind the last token is none
    spans = np.array(words, dtype=np.int64).reshape(-1, 2)
    at = np.searchsorted(starts, spans[:, 0])
    return np.where(starts[at] < spans[:, 1], np.append(real, -1)[at], -1).astype(np.int32)
