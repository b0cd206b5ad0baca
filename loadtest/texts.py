"""Real texts to send: the user's own, or docstrings of Python's standard library, whole or cut to random lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo.docstrings import STANDARD_LIBRARY, Source, read_definitions
from hplm.errors import InvalidInput

PACKAGES = ("argparse", "asyncio", "collections", "email", "http", "json", "logging", "string", "threading", "unittest")
LEAST_WORDS = 3
SPECIAL = 2  # tokens around a text
LONGEST = 100_000  # words from which texts are cut
GOLDEN = 0.6180339887498949  # its multiples spread evenly


def standard_library() -> list[str]:
    """Returns the docstrings of some packages: sentences that people wrote for people."""
    files = Source(STANDARD_LIBRARY, PACKAGES).files()
    found = [definition.docstring for file in files for definition in read_definitions(STANDARD_LIBRARY, *file)]
    return [text for text in (" ".join(one.split()) for one in found) if len(text.split()) >= LEAST_WORDS]


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Reads files with one text a line, or JSONL with a field `text`."""
    texts = []
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                texts.append((json.loads(line)["text"] if path.suffix == ".jsonl" else line.decode()).strip())
                if not texts[-1]:
                    raise ValueError("an empty text")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                wanted = "JSON with a field `text`" if path.suffix == ".jsonl" else "text in UTF-8"
                raise InvalidInput(f"{path}, line {number} is not {wanted}: {error!r}") from None
    if not texts:
        raise InvalidInput(f"{', '.join(map(str, paths))} contains no texts: give one a line, or JSONL with a field `text`")
    return texts


class TextSource:
    def __init__(self, texts: Sequence[str], tokenizer: Path | None = None) -> None:
        """`tokenizer`: a backbone's `tokenizer.json`. Lengths are counted in its tokens, or without it in words."""
        self._texts = texts
        self._words = " ".join(texts).split()[:LONGEST]
        self._ends = np.arange(1, len(self._words) + 1)  # tokens up to the end of each word
        if tokenizer is not None:
            encodings = Tokenizer.from_file(str(tokenizer)).encode_batch(self._words, add_special_tokens=False)
            self._ends = np.cumsum([len(encoding.ids) for encoding in encodings])

    def whole(self, number: int) -> str:
        return self._texts[number % len(self._texts)]

    def of(self, tokens: int, number: int) -> str:
        """Returns a text of at most this number of tokens, with the special ones. It has whole words, at least one."""
        wanted, total = max(1, tokens - SPECIAL), int(self._ends[-1])
        if wanted > total:
            raise InvalidInput(f"a text of {tokens} tokens cannot be cut from texts with {total} in all: give more --texts")
        last = int(np.searchsorted(self._ends, total - wanted, "right"))  # the last word with enough tokens after it
        first = int(number * GOLDEN % 1 * (last + 1))  # each number has its own first word, the same in each call
        before = int(self._ends[first - 1]) if first else 0
        stop = int(np.searchsorted(self._ends, before + wanted, "right"))
        return " ".join(self._words[first : max(stop, first + 1)])
