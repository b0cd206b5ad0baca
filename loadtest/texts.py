"""Real texts to send: one's own, or what Python's standard library says of itself; as they are, or cut to drawn lengths."""

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
LONGEST = 100_000  # words that are cut from
GOLDEN = 0.6180339887498949  # its multiples spread evenly


def standard_library() -> list[str]:
    """Docstrings: sentences that somebody wrote for somebody to read."""
    files = Source(STANDARD_LIBRARY, PACKAGES).files()
    found = [definition.docstring for file in files for definition in read_definitions(STANDARD_LIBRARY, *file)]
    return [text for text in (" ".join(one.split()) for one in found) if len(text.split()) >= LEAST_WORDS]


def read_texts(paths: Sequence[Path]) -> list[str]:
    """A text a line, or JSONL with `text`."""
    texts = []
    for path in paths:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                texts.append(json.loads(line)["text"] if path.suffix == ".jsonl" else line.strip())
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(f"{path}, line {number}: not JSON with a text ({error!r})") from None
    if not texts:
        raise InvalidInput(f"{', '.join(map(str, paths))}: no texts in there")
    return texts


class Texts:
    def __init__(self, texts: Sequence[str], tokenizer: Path | None = None) -> None:
        """With a backbone's `tokenizer.json` lengths are counted in its tokens, without in words."""
        self._texts = texts
        self._words = " ".join(texts).split()[:LONGEST]
        self._ends = np.arange(1, len(self._words) + 1)  # tokens up to the end of each word
        if tokenizer is not None:
            encodings = Tokenizer.from_file(str(tokenizer)).encode_batch(self._words, add_special_tokens=False)
            self._ends = np.cumsum([len(encoding.ids) for encoding in encodings])

    def whole(self, number: int) -> str:
        return self._texts[number % len(self._texts)]

    def of(self, tokens: int, number: int) -> str:
        """So many tokens, special ones included, or a word's rest less; at least one word."""
        wanted, total = max(1, tokens - SPECIAL), int(self._ends[-1])
        if wanted > total:
            raise InvalidInput(f"texts of {tokens} tokens cannot be cut from {total} in all: give more --texts")
        last = int(np.searchsorted(self._ends, total - wanted, "right"))  # from where there is still enough
        first = int(number * GOLDEN % 1 * (last + 1))  # another place for each, the same whenever it is asked for
        before = int(self._ends[first - 1]) if first else 0
        stop = int(np.searchsorted(self._ends, before + wanted, "right"))
        return " ".join(self._words[first : max(stop, first + 1)])
