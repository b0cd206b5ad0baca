"""Reads labelled data and corpora. Its errors name file and line."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.json import Decoder

from builder.tables.text_files import Progress, content_suffix, raw_lines
from hplm.errors import InvalidInput
from hplm.model.word_spans import words_of

Label = Annotated[str, Meta(min_length=1)] | int
Value = Annotated[float, Meta(ge=-1e15, le=1e15)]  # the squares of larger numbers would overflow
T = TypeVar("T")
SAID = 40  # characters of a wrong value in an error


@dataclass(frozen=True)
class Example:
    """One line of a labelled file."""

    file: Path
    line: int
    text: str
    pair: str | None = None
    labels: tuple[str, ...] = ()  # one for `classify`, all true ones for `multilabel`, one a word for `tag`
    value: float = 0.0  # for `regress`
    answers: tuple[tuple[int, int], ...] = ()  # for `span`: code points of the pair, all right; empty: unanswerable

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def hash_of(example: Example, by: str = "both") -> int:
    """Returns a hash of an example's texts, or of its `text` or `pair` alone. Differences in spaces change nothing."""
    text, pair = (" ".join(own.split()) if own is not None else None for own in (example.text, example.pair))
    content = json.dumps({"both": (text, pair), "text": text, "pair": pair}[by])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


class Document(Struct):
    """A line of a file, as JSON has it. What is wrong with it is a ValueError."""

    shape: ClassVar[str] = '{"text": "..."}'  # for errors

    text: str

    def __post_init__(self) -> None:
        for name in ("text", "text_pair"):
            if (text := getattr(self, name, None)) is not None and not text.strip():
                raise ValueError(f"{name!r} is empty")

    def example(self, file: Path, number: int) -> Example:
        return Example(file, number, self.text, getattr(self, "text_pair", None), **self.target())

    def target(self) -> dict[str, Any]:
        """Returns what is to be learned, as an `Example` names it."""
        return {}


class Paired(Document):
    text_pair: str | None = None


class Classified(Paired, kw_only=True):
    shape: ClassVar[str] = '{"text": "...", "label": "..."}'

    label: Label

    def target(self) -> dict[str, Any]:
        return {"labels": (str(self.label),)}


class ManyLabelled(Paired, kw_only=True):
    shape: ClassVar[str] = '{"text": "...", "labels": ["...", "..."]}'

    labels: list[Label]

    def target(self) -> dict[str, Any]:
        return {"labels": tuple(dict.fromkeys(map(str, self.labels)))}


class Valued(Paired, kw_only=True):
    shape: ClassVar[str] = '{"text": "...", "label": 0.5}'

    label: Value

    def target(self) -> dict[str, Any]:
        return {"value": self.label}


class Tagged(Struct):
    """The text is the words joined by single spaces, and a client must send it like this."""

    shape: ClassVar[str] = '{"tokens": ["...", "..."], "tags": ["...", "..."]}'

    tokens: Annotated[list[str], Meta(min_length=1)]
    tags: list[Label]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tags):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tags)} tags")
        for number, token in enumerate(self.tokens, start=1):
            if words_of(token) != [(0, len(token))]:
                raise ValueError(f"token {number}, {token[:SAID]!r}, is not one word without white space")

    def example(self, file: Path, number: int) -> Example:
        return Example(file, number, " ".join(self.tokens), labels=tuple(map(str, self.tags)))


class Answers(Struct):
    text: list[str]
    answer_start: list[Annotated[int, Meta(ge=0)]]


class Question(Document):
    """Answers are as in SQuAD 2: each with its text and its start in the passage, or none."""

    shape: ClassVar[str] = '{"text": "...", "text_pair": "...", "answers": {"text": ["..."], "answer_start": [0]}}'

    text_pair: str
    answers: Answers

    def __post_init__(self) -> None:
        super().__post_init__()
        texts, starts = self.answers.text, self.answers.answer_start
        if len(texts) != len(starts):
            raise ValueError(f"{len(texts)} answers but {len(starts)} starts")
        for answer, start in zip(texts, starts, strict=True):
            if not answer.strip() or not self.text_pair.startswith(answer, start):
                raise ValueError(f"the passage does not have the answer {answer[:SAID]!r} at character {start}")

    def target(self) -> dict[str, Any]:
        pairs = zip(self.answers.text, self.answers.answer_start, strict=True)  # no token has the space around an answer
        return {"answers": tuple((start + len(text) - len(text.lstrip()), start + len(text.rstrip())) for text, start in pairs)}


class Bare(Struct):
    """A text without its labels, if it has any. A tagged one is its words, joined by single spaces."""

    text: str = ""
    text_pair: str | None = None
    tokens: list[str] | None = None

    def __post_init__(self) -> None:
        if self.tokens is None and not self.text.strip():
            raise ValueError("'text' is empty")

    def example(self, file: Path, number: int) -> Example:
        text = self.text if self.tokens is None else " ".join(self.tokens)
        return Example(file, number, text, self.text_pair)


Line = Document | Tagged


def read_labelled(path: Path, task: str, forms: Mapping[str, type[Line]]) -> list[Example]:
    """Returns the lines of a file, at least one. `forms`: of the lines of all tasks."""
    form = forms[task]
    decoder, wanted = Decoder(form), f"a line for task {task} is like {form.shape}"
    examples = [_decoded(decoder, line, path, number, wanted, forms).example(path, number) for number, line in _lines(path)]
    if not examples:
        raise InvalidInput(f"{path} is empty: it needs one JSON object a line, like {form.shape}")
    return examples


def has_labels(path: Path) -> bool:
    """Whether a file of texts has labels: those of its first line speak for all. Plain text has none."""
    _, line = next(_lines(path), (1, "{}"))
    return _fits(dict[str, Any], line) and bool(msgspec.json.decode(line).keys() & {"label", "labels", "tags", "answers"})


def read_corpus(paths: Iterable[Path], progress: Progress | None = None) -> Iterator[str]:
    """Yields the documents of a file: one a line, or JSONL with `text`. Plain, .gz or .zst; blank lines are skipped."""
    for path in paths:
        yield from (example.text for example in _documents(path, Decoder(Document), progress))


def read_unlabelled(path: Path) -> Iterator[Example]:
    """Yields texts: one a line, or JSONL, whose labels are not looked at."""
    return _documents(path, Decoder(Bare))


def _documents(path: Path, decoder: Decoder[Any], progress: Progress | None = None) -> Iterator[Example]:
    lines = _lines(path, progress)
    if (first := next(lines, None)) is None:
        raise InvalidInput(f"{path} is empty: it needs one text a line")
    is_json = content_suffix(path) == ".jsonl" or _fits(dict[str, Any], first[1])
    for number, line in chain([first], lines):
        yield _decoded(decoder, line, path, number).example(path, number) if is_json else Example(path, number, line)


def _fits(form: type, line: str) -> bool:
    try:
        msgspec.json.decode(line, type=form)
    except msgspec.MsgspecError:
        return False
    return True


def _lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number, line) of the lines that are not blank, counted from 1."""
    for number, raw in enumerate(raw_lines(path, progress), start=1):
        if number == 1 and raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise InvalidInput(f"{path} is in UTF-16: convert it to UTF-8, such as by `iconv -f UTF-16 -t UTF-8`")
        if b"\0" in raw:
            raise InvalidInput(f"{path}:{number}: a zero byte: this is a binary file, not text")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}:{number}: not valid UTF-8 (byte {error.start + 1}): convert the file") from None
        if line:
            yield number, line


def _decoded(
    decoder: Decoder[T], line: str, path: Path, number: int, wanted: str = f"a line is like {Document.shape}",
    forms: Mapping[str, type[Line]] = {},
) -> T:  # fmt: skip
    """`wanted` says what would fit, for an object that does not. `forms`: of tasks, of which one may fit."""
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        if not _fits(dict[str, Any], line):
            wanted = "the file needs one JSON object a line"
        elif fits := next((task for task, form in forms.items() if _fits(form, line)), None):
            wanted += f", and this one is for --task {fits}"
        raise InvalidInput(f"{path}:{number}: {error}: {wanted}") from None
