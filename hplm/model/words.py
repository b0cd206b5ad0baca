"""Remembers the tokens of words, so that most words of a text are not tokenised again: a library call takes 2 us a word.

It holds for tokenizers that read each word between spaces for itself, as BERT's does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.arrays import Array

MOST = 1 << 16  # words that are remembered; when there are more, all are forgotten: frequent ones come back at once
LONGEST = 32  # characters of a word that is remembered


class Words:
    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        whole, word = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False).ids
        start = next(at for at in range(len(whole.ids)) if whole.ids[at : at + len(word)] == word)
        self._before, self._after = whole.ids[:start], whole.ids[start + len(word) :]  # the special tokens, all of segment 0

    def tokens(self, texts: Sequence[str]) -> list[Array]:
        """Returns the tokens of texts, including special ones, as the library does."""
        parts = [text.split(" ") for text in texts]
        known = self._known
        new = self._read({word for words in parts for word in words if word not in known})
        found = known if not new else {**{word: known[word] for words in parts for word in words if word in known}, **new}
        self._remember(new)
        return [self._joined(found[word] for word in words) for words in parts]

    def _read(self, words: set[str]) -> dict[str, list[int]]:
        if not words:
            return {}
        ordered = list(words)
        encodings = self._tokenizer.encode_batch(ordered, add_special_tokens=False)
        return {word: encoding.ids for word, encoding in zip(ordered, encodings, strict=True)}

    def _remember(self, new: dict[str, list[int]]) -> None:
        if len(self._known) + len(new) > MOST:
            self._known = {}  # another thread may still read the old ones
        self._known.update({word: tokens for word, tokens in new.items() if len(word) <= LONGEST})

    def _joined(self, words: Iterable[list[int]]) -> Array:
        tokens = self._before.copy()
        for word in words:
            tokens += word
        return np.array(tokens + self._after, dtype=np.int32)
