"""Remembers the tokens of words, so that most words of a text are not tokenised again: a library call takes 2 us a word.

It holds for tokenizers that read each word between spaces for itself, as BERT's does. Tokens are bytes of int64, because bytes
are put end to end without a step of Python for each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer

MOST = 1 << 16  # words that are remembered; when there are more, all are forgotten: frequent ones come back at once
LONGEST = 32  # characters of a word that is remembered
ITEM = 8  # bytes of a token


class Words:
    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}
        whole, word = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
        start = next(at for at in range(len(whole)) if whole[at : at + len(word)] == word)
        self._before, self._after = _bytes_of(whole[:start]), _bytes_of(whole[start + len(word) :])  # the special tokens

    def tokens(self, texts: Iterable[str]) -> list[bytes]:
        """Returns the tokens of each text, including special ones, as the library does. All of them are of segment 0."""
        parts, known = [text.split(" ") for text in texts], self._known
        try:
            return self._joined(parts, known)
        except KeyError:  # a new word
            words = set[str]().union(*parts)
            new = self._read([word for word in words if word not in known])
            self._remember(new)
            return self._joined(parts, {word: new[word] if word in new else known[word] for word in words})

    def _joined(self, parts: Iterable[list[str]], found: Mapping[str, bytes]) -> list[bytes]:
        before, after, of = self._before, self._after, found.__getitem__
        return [b"".join([before, *map(of, words), after]) for words in parts]

    def _read(self, words: Sequence[str]) -> dict[str, bytes]:
        encodings = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return {word: _bytes_of(encoding.ids) for word, encoding in zip(words, encodings, strict=True)}

    def _remember(self, new: Mapping[str, bytes]) -> None:
        if len(self._known) + len(new) > MOST:
            self._known = {}  # another thread may still read the old ones
        self._known.update({word: tokens for word, tokens in new.items() if len(word) <= LONGEST})


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype=np.int64).tobytes()
