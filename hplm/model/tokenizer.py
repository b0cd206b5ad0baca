"""Turns texts into token ids, and tokens into code points of the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from hplm.arrays import Array
from hplm.errors import InvalidInput
from hplm.model.prompts import read_tokenizer, unlimited, with_start_id
from hplm.model.words import ITEM, Words

CHARACTERS_A_TOKEN = 8  # more than nearly all texts have: a long text is first read as far as this reaches
GROWTH = 4  # how much more is read if that was too little
MOST_IN_WINDOWS = 32_768  # characters of a pair that is read in windows: while they are tokenised, other requests wait
OVERLAP = 128  # tokens that a window of a passage shares with the next one, as in the usual recipe for SQuAD


class TokenizerInput(NamedTuple):
    text: str
    pair: str | None = None
    truncate: bool = False  # cut what the model does not take
    # Neither refuse nor cut a pair that is too long, if it has MOST_IN_WINDOWS characters or fewer and the text leaves it half
    # of the positions.
    in_windows: bool = False
    limit: int | None = None  # tokens that are read instead of as many as the model takes

    @property
    def whole(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


class Encoded:
    """One text as the model sees it. Fields that only some tasks need are computed on first use."""

    def __init__(
        self, encoding: Encoding, read: Sequence[str], kept: Array | slice = slice(None), lengths: Sequence[int] = ()
    ) -> None:
        """`read`: the text, and its pair if it has one. `kept`: the tokens that the model reads.

        `lengths`: of windows; none: the tokens are one window.
        """
        self._encoding = encoding
        self._read = read
        self._kept = kept
        self.tokens: Array = np.array(encoding.ids, dtype=np.int64)[kept]  # including special tokens
        self.segments: Array = np.array(encoding.type_ids, dtype=np.uint8)[kept]
        self.lengths = np.array(lengths or [len(self.tokens)], dtype=np.int64)  # the model reads each window for itself

    @cached_property
    def offsets(self) -> Array:
        """tokens x 2, int32: the first and the last code point of each token, in the text or its pair.

        A token does not begin with the space before its word, of which some tokenizers make a part of it.
        """
        every = [
            (start + len(own) - len(own.lstrip()), end)
            for (start, end), part in zip(self._encoding.offsets, self._encoding.sequence_ids, strict=True)
            for own in ["" if part is None else self._read[part][start:end]]
        ]
        return np.array(every, dtype=np.int32).reshape(-1, 2)[self._kept]

    @cached_property
    def parts(self) -> Array:
        """Has for each token 0 if it is of the text, 1 if it is of the pair, and -1 if it is a special one."""
        return _parts(self._encoding)[self._kept]


class Tokenizer:
    def __init__(self, tokenizer_json: str, positions: int, start_id: int | None = None) -> None:
        """`start_id`: of a decoder, whose documents begin with it and have no other special tokens."""
        self.positions = positions
        self._start_id = start_id
        self._tokenizer = unlimited(tokenizer_json)
        added = _found_before_words(tokenizer_json)
        self._added_length = None if added is None else max((len(token["content"]) for token in added), default=0)
        takes_spaces = any(" " in token["content"] or token["lstrip"] or token["rstrip"] for token in added or ())
        self._words = None if added is None or takes_spaces else Words(self._tokenizer)
        self._special_tokens = {pair: self._tokenizer.num_special_tokens_to_add(is_pair=pair) for pair in (False, True)}

    @classmethod
    def load(cls, path: Path, positions: int, start_id: int | None = None) -> Tokenizer:
        return read_tokenizer(path, lambda tokenizer_json: cls(tokenizer_json, positions, start_id))

    def encode(
        self, text: str, pair: str | None = None, truncate: bool = False, in_windows: bool = False, limit: int | None = None
    ) -> Encoded:
        (encoded,) = self.encode_all([TokenizerInput(text, pair, truncate, in_windows, limit)])
        if isinstance(encoded, InvalidInput):
            raise encoded
        return encoded

    def encode_all(self, given: Sequence[TokenizerInput]) -> list[Encoded | InvalidInput]:
        """Encodes texts. Returns for each what is wrong with it, if it cannot be encoded."""
        results: list[Encoded | InvalidInput] = [InvalidInput("the text is empty: send at least one word") for _ in given]
        right = [index for index, one in enumerate(given) if one.text and not one.text.isspace()]
        read = [tuple(map(self._beginning, given[index].whole)) for index in right]
        inputs = [own[0] if given[index].pair is None else own for index, own in zip(right, read, strict=True)]
        encodings = self._tokenizer.encode_batch(inputs)
        for index, own, encoding in zip(right, read, encodings, strict=True):
            results[index] = self._encoded(given[index], own == given[index].whole, encoding)
        return results

    def by_words(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the tokens of each text, as bytes of int64. All are of segment 0.

        None at all: read the text with `encode_all`. It has no token, or may have too many, or the tokenizer reads no words.
        """
        if self._words is None:
            return [b""] * len(texts)
        longest = CHARACTERS_A_TOKEN * self.positions
        tokens = self._words.tokens([text if len(text) <= longest else "" for text in texts])
        least, most = ITEM * self._special_tokens[False], ITEM * self.positions
        return [own if least < len(own) <= most else b"" for own in tokens]

    def _encoded(self, given: TokenizerInput, is_whole: bool, encoding: Encoding) -> Encoded | InvalidInput:
        """Returns a text with its tokens, or what is wrong with it. `is_whole`: all of the text and its pair was tokenised."""
        whole, pair = given.whole, given.pair
        length, most = len(encoding), min(given.limit or self.positions, self.positions)
        if length == self._special_tokens[pair is not None]:
            return InvalidInput("the text contains no token that the model can read: send other text")
        if length <= most:
            return Encoded(encoding, whole)
        if given.in_windows and pair is not None:
            around = np.count_nonzero(_parts(encoding) < 1)  # more than half if of a long text only the beginning was read
            if len(pair) <= MOST_IN_WINDOWS and self.positions - around >= self.positions // 2:
                return self._windows(encoding if is_whole else self._tokenizer.encode(given.text, pair), whole)
            if len(pair) > MOST_IN_WINDOWS and not given.truncate:
                return InvalidInput(
                    f"the passage has {len(pair):,} characters, but one that is read in windows may have {MOST_IN_WINDOWS:,}: "
                    "shorten it, or send the parameter truncate=true"
                )
        if not given.truncate:
            count = length if is_whole else f"more than {most}"
            return InvalidInput(
                f"the text has {count} tokens, but the model takes {most}: shorten it, or send the parameter truncate=true"
            )
        return Encoded(encoding, whole, self._kept(encoding, whole, most))

    def _windows(self, encoding: Encoding, whole: Sequence[str]) -> Encoded:
        """Returns windows of the pair end to end, each with the whole text."""
        part = _parts(encoding)
        around, pair = np.flatnonzero(part < 1), np.flatnonzero(part == 1)
        room = self.positions - len(around)
        step = room - min(OVERLAP, room // 2)
        starts = range(0, max(len(pair) - room, 0) + step, step)
        windows = [np.sort(np.concatenate([around, pair[start : start + room]])) for start in starts]
        return Encoded(encoding, whole, np.concatenate(windows), [len(window) for window in windows])

    def _beginning(self, text: str) -> str:
        """Returns a beginning of the text that has the same first tokens, at least as many as the model takes; or the text."""
        size = CHARACTERS_A_TOKEN * self.positions
        while self._added_length is not None and 2 * size < len(text):  # a beginning is read twice
            if self._final_tokens(text[:size], self._added_length) >= self.positions:
                return text[:size]
            size *= GROWTH
        return text

    def _final_tokens(self, beginning: str, added_length: int) -> int:
        """Returns how many tokens of a text's beginning are tokens of the text, whatever follows.

        What follows may be more of the last word, or of a token such as [MASK], which is found before words are.
        """
        encoding = self._tokenizer.encode(beginning, add_special_tokens=False)
        words, ends = encoding.word_ids, [end for _, end in encoding.offsets]
        final, open_word = len(words), words[-1] if words else None
        while final and (words[final - 1] == open_word or ends[final - 1] > len(beginning) - added_length):
            open_word = words[final - 1]
            final -= 1
        return final

    def _kept(self, encoding: Encoding, whole: Sequence[str], most: int) -> Array:
        """Returns the special tokens and as many tokens of text and pair as are read. The longer one is cut first.

        If each of them is too long by itself, the one with more characters keeps the odd token: not all tokens were counted.
        The library's own truncation is not used: it keeps the parts that it cuts off, for a pair in all combinations.
        """
        part = _parts(encoding)
        text, pair = np.flatnonzero(part == 0), np.flatnonzero(part == 1)
        limit = most - self._special_tokens[len(whole) > 1]
        shorter = min(len(text), len(pair), limit // 2)
        first, *second = map(len, (text, pair) if min(len(text), len(pair)) <= limit else whole)
        keep = min(len(text), limit - shorter) if first >= sum(second) else shorter
        return np.sort(np.concatenate([np.flatnonzero(part < 0), text[:keep], pair[: limit - keep]]))

    def encode_documents(self, texts: list[str]) -> list[Array]:
        """Returns the token ids of documents of a corpus. A document that is too long for the model is cut into pieces."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._start_id is None)
        return [piece for encoding in encodings for piece in self._pieces(np.array(encoding.ids, dtype=np.int32))]

    def _pieces(self, ids: Array) -> list[Array]:
        """Cuts a document into pieces. Each begins and ends with the special tokens of the whole."""
        if self._start_id is not None:
            limit = self.positions - 1
            return [with_start_id(ids[start : start + limit], self._start_id) for start in range(0, max(len(ids), 1), limit)]
        if len(ids) <= self.positions:
            return [ids]
        limit = self.positions - 2
        starts = range(1, len(ids) - 1, limit)
        return [np.concatenate([ids[:1], ids[start : min(start + limit, len(ids) - 1)], ids[-1:]]) for start in starts]


def _parts(encoding: Encoding) -> Array:
    """Returns for each token 0 if it is of the text, 1 if it is of the pair, and -1 if it is a special one."""
    return np.array([-1 if of is None else of for of in encoding.sequence_ids])


def _found_before_words(tokenizer_json: str) -> list[dict[str, Any]] | None:
    """Returns the tokens that are found before words are. None if a text cannot be cut at all.

    A beginning of a text has the text's own words, but for the last one, if nothing looks farther than one word: so it is with
    BERT's normalizer and its splitting into words. Of other tokenizers this is not known.
    """
    parts: dict[str, Any] = json.loads(tokenizer_json)
    steps: list[dict[str, Any]] = [parts.get(part) or {} for part in ("normalizer", "pre_tokenizer")]
    kinds = [step.get("type") for step in steps]
    added: list[dict[str, Any]] = parts.get("added_tokens") or []
    is_bert = kinds == ["BertNormalizer", "BertPreTokenizer"]
    return added if is_bert and not any(token["normalized"] for token in added) else None
