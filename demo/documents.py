"""Turns docstrings into documents of plain words, and splits them by source file. No text is in two splits."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from demo.docstrings import Definition

# Shares of the documents. A source file is in one split only, so that a model cannot learn a test file's style in training.
SPLITS = {"train": 0.62, "dev": 0.12, "test": 0.26}
SHORTEST, LONGEST = 6, 100  # words of a document
SHINGLE = 5
# Headings of sections, whose content is in a fixed form and not in sentences.
SECTION = re.compile(
    r"\s*(:(param|arg|type|returns?|rtype|raises)\b.*"
    r"|\**(parameters|params|args|arguments|keyword arguments|other parameters|attributes|returns?|yields?|raises"
    r"|examples?|notes?|see also|references|usage|warnings?|shape|inputs?|outputs?|explanation)\**\s*:{0,2})",
    re.IGNORECASE,
)
ROLE = re.compile(r":[a-zA-Z][\w:+-]*:(?=`)")  # :func:`name` -> `name`
CODE_LIKE = re.compile(r"[_.]|.[A-Z]")
NOT_LETTERS = re.compile(r"[\W\d_]+")
MARKS = "`*\"'()[]{}<>,.;:!?~|"


@dataclass(frozen=True)
class Docstring:
    definition: Definition
    area: str
    paragraphs: tuple[str, ...]  # the docstring without code examples and ruled lines, one space between words
    description: str  # the text before the first section with a heading

    @property
    def text(self) -> str:
        return " ".join(self.paragraphs)


def bare(word: str) -> str:
    """Returns a word without the quotes, markup and punctuation around it."""
    return word.strip(MARKS)


def read_document(definition: Definition, area: str) -> Docstring:
    lines = list(_prose(definition.docstring))
    first_section = next((index for index, line in enumerate(lines) if SECTION.fullmatch(line)), len(lines))
    blocks = groupby(lines, key=lambda line: bool(line.strip()))
    paragraphs = tuple(_joined(block) for is_text, block in blocks if is_text)
    return Docstring(definition, area, paragraphs, _joined(lines[:first_section]))


def _prose(docstring: str) -> Iterator[str]:
    """Yields the lines of text, without console sessions, ruled lines and directives, which are code."""
    in_code = False
    for line in docstring.splitlines():
        stripped = line.strip()
        in_code = stripped.startswith((">>>", "$ ", "```")) or (in_code and bool(stripped))
        is_ruler = stripped and not any(character.isalnum() for character in stripped)
        if not (in_code or is_ruler or stripped.startswith(".. ")):
            yield ROLE.sub("", line)


def _joined(lines: Iterable[str]) -> str:
    return " ".join(word for line in lines for word in line.split() if word.isprintable())


def split_documents(documents: Sequence[Docstring]) -> dict[str, list[Docstring]]:
    """Returns train, dev and test: each area in the shares of SPLITS, each file in one split, no text twice."""
    files: dict[tuple[str, str], list[Docstring]] = defaultdict(list)
    for document in documents:
        if len(document.text.split()) >= SHORTEST:
            files[document.definition.package, document.definition.module].append(document)
    chosen: dict[str, list[Docstring]] = {split: [] for split in SPLITS}
    filled: Counter[tuple[str, str]] = Counter()
    # Large files first, so that the small files after them balance the shares.
    for _, members in sorted(files.items(), key=lambda item: (-len(item[1]), item[0])):
        area = members[0].area
        split = min(SPLITS, key=lambda name: filled[area, name] / SPLITS[name])
        filled[area, split] += len(members)
        chosen[split] += members
    seen: set[str] = set()
    return {split: _unseen(members, seen) for split, members in chosen.items()}


class Asked:
    """Texts of dev and test files, which corpora must not contain."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._where: dict[str, list[int]] = defaultdict(list)  # the texts that contain a shingle
        for number, text in enumerate(dict.fromkeys(texts)):
            held = shingles(text)
            self._sizes.append(len(held))
            for shingle in held:
                self._where[shingle].append(number)

    def is_told_by(self, text: str) -> bool:
        """Whether half of `text` is in these texts, or half of one of them is in `text`."""
        own = shingles(text)
        found = [self._where[shingle] for shingle in own if shingle in self._where]
        shared = Counter(number for numbers in found for number in numbers)
        return 2 * len(found) >= len(own) or any(2 * count >= self._sizes[number] for number, count in shared.items())


def readable(documents: Iterable[Docstring], asked: Asked) -> list[Docstring]:
    """Returns the documents that are not similar to a dev or test text, without repeated texts."""
    long_enough = (one for one in documents if len(one.text.split()) >= SHORTEST)
    return _unseen((one for one in long_enough if not asked.is_told_by(one.text)), set())


def _unseen(documents: Iterable[Docstring], seen: set[str]) -> list[Docstring]:
    """Returns documents of which less than half was seen before, here or in an earlier split. Adds all shingles to `seen`."""
    kept = []
    for document in documents:
        held = shingles(document.text)
        if not is_seen(held, seen):
            kept.append(document)
        seen |= held
    return kept


def is_seen(held: set[str], seen: set[str]) -> bool:
    """Whether at least half of a text's shingles were seen before."""
    return 2 * len(held & seen) >= len(held)


def shingles(text: str) -> set[str]:
    """Returns all runs of SHINGLE words. Only letters count, and code-like names are equal, so copies of a template match."""
    plain = [_plain(word) for word in text.split()[:LONGEST]]
    spoken = [word for word in plain if word]
    return {" ".join(spoken[start : start + SHINGLE]) for start in range(max(1, len(spoken) - SHINGLE + 1))}


@lru_cache(maxsize=1 << 16)  # a few words are most of a text
def _plain(word: str) -> str:
    core = bare(word)
    return "#" if CODE_LIKE.search(core) else NOT_LETTERS.sub("", core).lower()
