"""From text to token ids and back to code points."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.errors import InvalidInput

WORD = re.compile(r"\S+")


class Encoded:
    """One text as the model sees it. What only some tasks read is made when it is read."""

    def __init__(self, encoding: Encoding, kept: np.ndarray | None = None) -> None:
        """`kept`: which of its tokens, where not all."""
        self._encoding = encoding
        self.tokens = np.array(encoding.ids, dtype=np.int32)  # special tokens included
        self.segments = np.array(encoding.type_ids, dtype=np.uint8)
        if kept is not None:
            self.tokens, self.segments = self.tokens[kept], self.segments[kept]
            self.offsets, self.special = self.offsets[kept], self.special[kept]
            del self._encoding  # it holds what was cut off

    @cached_property
    def offsets(self) -> np.ndarray:
        """tokens x 2, int32: code points of the text (or the pair) that a token belongs to."""
        return np.array(self._encoding.offsets, dtype=np.int32).reshape(-1, 2)

    @cached_property
    def special(self) -> np.ndarray:
        return np.array(self._encoding.special_tokens_mask, dtype=bool)


class Tokenizer:
    def __init__(self, tokenizer_json: str, positions: int) -> None:
        self.positions = positions
        self._tokenizer = HuggingFaceTokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._special_tokens = {pair: self._tokenizer.num_special_tokens_to_add(is_pair=pair) for pair in (False, True)}

    def encode(self, text: str, pair: str | None = None, truncate: bool = False) -> Encoded:
        if not text.strip():
            raise InvalidInput("the text is empty: send at least one word")
        encoding = self._tokenizer.encode(text, pair)
        if len(encoding.ids) == self._special_tokens[pair is not None]:
            raise InvalidInput("the text holds no token this model knows how to read")
        if len(encoding.ids) > self.positions:
            if not truncate:
                raise InvalidInput(
                    f"the text has {len(encoding.ids)} tokens, the model takes {self.positions}: "
                    "shorten it, or send the parameter truncate=true"
                )
            return Encoded(encoding, self._kept(encoding, pair is not None))
        return Encoded(encoding)

    def _kept(self, encoding: Encoding, paired: bool) -> np.ndarray:
        """Special tokens, and as much of text and pair as the model takes; the longer of the two gives way first.

        The library would keep what it cuts off, and of a pair every piece of the one with every piece of the other.
        """
        part = np.array([-1 if of is None else of for of in encoding.sequence_ids])
        text, pair = np.flatnonzero(part == 0), np.flatnonzero(part == 1)
        limit = self.positions - self._special_tokens[paired]
        shorter = min(len(text), len(pair), limit // 2)
        keep = min(len(text), limit - shorter) if len(text) >= len(pair) else shorter
        return np.sort(np.concatenate([np.flatnonzero(part < 0), text[:keep], pair[: limit - keep]]))

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Corpus documents, in bulk: ids only; a longer one than the model takes comes in pieces."""
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [piece for encoding in encodings for piece in self._pieces(np.array(encoding.ids, dtype=np.int32))]

    def _pieces(self, ids: np.ndarray) -> list[np.ndarray]:
        """Each begins and ends as the whole does."""
        if len(ids) <= self.positions:
            return [ids]
        limit = self.positions - 2
        starts = range(1, len(ids) - 1, limit)
        return [np.concatenate([ids[:1], ids[start : min(start + limit, len(ids) - 1)], ids[-1:]]) for start in starts]


def words_of(text: str) -> list[tuple[int, int]]:
    """Code-point spans of the whitespace-separated words."""
    return [match.span() for match in WORD.finditer(text)]


def first_tokens(encoded: Encoded, words: list[tuple[int, int]]) -> np.ndarray:
    """For each word the index of its first token; -1 where it has none (cut off, or nothing the model can read).

    A token belongs to the word in which it starts.
    """
    real = np.flatnonzero(~encoded.special & (encoded.segments == encoded.segments[0]))
    if not len(real):
        return np.full(len(words), -1, dtype=np.int32)
    starts = encoded.offsets[real, 0]
    begin = np.array([start for start, _ in words], dtype=np.int64)
    stop = np.array([stop for _, stop in words], dtype=np.int64)
    at = np.searchsorted(starts, begin)
    found = at < len(starts)
    clipped = np.minimum(at, len(starts) - 1)
    found &= starts[clipped] < stop
    return np.where(found, real[clipped], -1).astype(np.int32)
