"""Reads labelled data and corpora. Its errors name file and line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from builder.tables.text_files import Progress, content_suffix
from builder.tasks.columns import AS_TRAINED, Columns
from builder.tasks.rows import SAID, SAVE_AS, from_json, is_table, rows
from hplm.errors import InvalidInput
from hplm.lookup.lookup import check_length
from hplm.model.word_spans import words_of

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Label = Annotated[str, Meta(min_length=1, max_length=256)] | Whole
Value = Annotated[float, Meta(ge=-1e15, le=1e15)]  # the squares of larger numbers would overflow
T = TypeVar("T")
LABELS = {"label", "labels", "tags", "answers", "messages"}  # names of the fields that hold labels
FOREIGN = re.compile(r'"messages"\s*:|"labels"\s*:\s*\{')  # of other services
MOST_FAULTS = 20  # of a file, that are looked for


class Faults(InvalidInput):
    """Lines of a file are wrong. It says what is wrong with the first one."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__(faults[0] + f". Other lines are wrong too: `hplm check` names {len(faults)}" * (len(faults) > 1))
        self.faults = faults


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
    negative: str = ""  # for `embed`: a text that is farther than the pair
    is_rated: bool = False  # for `embed`: the value says how near text and pair are
    target: str = ""  # for `generate`: what follows the text, or the last message of a chat
    is_chat: bool = False  # its text is the messages before, in JSON

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
        for name in ("text", "text_pair", "positive", "negative", "pair"):
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


class Message(Struct):
    role: str
    content: str


class Foreign(Struct):
    """A line as OpenAI's fine-tuning takes it, whose last answer is the label, or Mistral's, with labels of one target."""

    text: str = ""
    labels: dict[str, Label | list[Label]] = {}
    messages: list[Message] = []

    def __post_init__(self) -> None:
        if len(self.labels) > 1:
            raise ValueError(f"'labels' has {len(self.labels)} targets: give each a file and a tenant of its own")
        if not self.labels and (not self.messages or self.messages[-1].role != "assistant"):
            raise ValueError("it needs 'labels', or 'messages' of which the last one, with the role assistant, has the label")

    def ours(self) -> dict[str, Any]:
        """Returns the same line as `Classified` and `ManyLabelled` have it."""
        asked = [message.content for message in self.messages if message.role == "user"] or [self.text]
        (own,) = self.labels.values() or [self.messages[-1].content.strip()]
        return {"text": asked[-1], "labels" if isinstance(own, list) else "label": own}


class Valued(Paired, kw_only=True):
    shape: ClassVar[str] = '{"text": "...", "label": 0.5}'

    label: Value

    def target(self) -> dict[str, Any]:
        return {"value": self.label}


class Near(Document):
    """A text, and one that is near to it, perhaps also one that is not; or a pair of texts and how near they are."""

    shape: ClassVar[str] = '{"text": "...", "positive": "..."} or {"text": "...", "pair": "...", "score": 0.5}'

    positive: str | None = None
    negative: str | None = None
    pair: str | None = None
    score: Value | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.pair is None) != (self.score is None) or (self.positive is None) == (self.pair is None):
            raise ValueError("it needs either 'positive', or 'pair' and 'score'")
        if self.pair is not None and self.negative is not None:
            raise ValueError("a rated pair has a 'negative': leave it out")

    def example(self, file: Path, number: int) -> Example:
        if self.score is not None:
            return Example(file, number, self.text, self.pair, value=self.score, is_rated=True)
        return Example(file, number, self.text, self.positive, negative=self.negative or "")


class Written(Struct):
    """A prompt as clients send it and the text that follows it, or a chat whose last message is to be written."""

    shape: ClassVar[str] = '{"text": "...", "target": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'

    text: str = ""
    target: str = ""
    messages: list[dict[str, str]] | None = None

    def __post_init__(self) -> None:
        if self.messages is None:
            if not self.target.strip():
                raise ValueError("'target' is empty")
        elif self.text or self.target:
            raise ValueError("it has 'messages' and 'text' or 'target': give one or the other")
        elif len(self.messages) < 2 or not self.messages[-1].get("content", "").strip():
            raise ValueError("'messages' need a question and, as the last one, its answer")

    def example(self, file: Path, number: int) -> Example:
        if self.messages is None:
            return Example(file, number, self.text, target=self.target)
        *before, last = self.messages
        return Example(file, number, json.dumps(before), target=last["content"], is_chat=True)


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


Line = Document | Tagged | Written


def read_labelled(path: Path, task: str, forms: Mapping[str, type[Line]], columns: Columns = AS_TRAINED) -> list[Example]:
    """Returns the lines or rows of a file, at least one. `forms`: of the lines of all tasks."""
    form, examples, faults = forms[task], list[Example](), list[str]()
    wanted = f"a line for task {task} is like {form.shape}"
    found = rows(path, form.__struct_fields__, columns, is_number=form is Valued)
    while len(faults) < MOST_FAULTS:
        try:
            if (row := next(found, None)) is None:
                break
            examples.append(own := _decoded(form, row[1], path, row[0], wanted, forms).example(path, row[0]))
            if form is not Written:  # a decoder drops the beginning of a prompt
                check_length(own.text, own.pair, f"{own.where}: ")
            if wrong := next((label for label in own.labels if "\0" in label), None):
                raise InvalidInput(f"{own.where}: label {wrong!r} has a NUL, at which many programs end a text: take it out")
        except InvalidInput as error:
            faults.append(str(error))
    if faults:
        raise Faults(faults)
    if not examples:
        raise InvalidInput(f"{path} is empty: it needs one JSON object a line, like {form.shape}")
    return examples


def first_line(path: Path, columns: Columns = AS_TRAINED, form: type[Line] = Classified) -> str:
    return next((line for _, line in rows(path, form.__struct_fields__, columns, has_label=False)), "{}")


def has_labels(path: Path, columns: Columns = AS_TRAINED, form: type[Line] = Classified) -> bool:
    """Whether a file of texts has labels: those of its first line speak for all. Plain text has none. `form`: with labels."""
    line = first_line(path, columns, form)
    return fits(dict[str, Any], line) and not LABELS.isdisjoint(from_json(line, dict[str, Any]))


def read_corpus(paths: Iterable[Path], progress: Progress | None = None) -> Iterator[str]:
    """Yields the documents of files: one a line, or JSONL, CSV or Parquet with `text`; blank lines are skipped."""
    for path in paths:
        yield from (example.text for example in _documents(path, Document, progress))


def read_unlabelled(path: Path, columns: Columns = AS_TRAINED, form: type[Line] = Paired) -> Iterator[Example]:
    """Yields texts: one a line, or JSONL, CSV or Parquet, whose labels are not looked at. `form`: whose text is named."""
    return _documents(path, Bare, None, columns, form)


def _documents(
    path: Path, read: type[Document | Bare], progress: Progress | None = None, columns: Columns = AS_TRAINED,
    form: type[Line] = Document,
) -> Iterator[Example]:  # fmt: skip
    found = rows(path, form.__struct_fields__, columns, progress=progress, has_label=False)
    if (first := next(found, None)) is None:
        raise InvalidInput(f"{path} is empty: it needs one text a line")
    is_json = is_table(path) or content_suffix(path) in (".jsonl", ".json") or fits(dict[str, Any], first[1])
    for number, line in chain([first], found):
        yield _decoded(read, line, path, number).example(path, number) if is_json else Example(path, number, line)


def _read(line: str, form: type[T]) -> T:
    """Returns a line in a task's form, also one of OpenAI's or Mistral's. Raises a MsgspecError."""
    try:
        return from_json(line, form)
    except msgspec.MsgspecError:
        if form not in (Classified, ManyLabelled) or not FOREIGN.search(line):
            raise
    return msgspec.convert(from_json(line, Foreign).ours(), form)


def fits(form: type, line: str) -> bool:
    """Whether a line has this form."""
    try:
        _read(line, form)
    except msgspec.MsgspecError:
        return False
    return True


def _decoded(
    form: type[T], line: str, path: Path, number: int, wanted: str = f"a line is like {Document.shape}",
    forms: Mapping[str, type[Line]] = {},
) -> T:  # fmt: skip
    """`wanted` says what would fit, for an object that does not. `forms`: of tasks, of which one may fit."""
    try:
        return _read(line, form)
    except msgspec.MsgspecError as error:
        if not fits(dict[str, Any], line):
            wanted = "the file needs one JSON object a line"
            wanted += f": `jq -c '.[]' {path}` writes those of an array" if line.startswith("[") else f", or {SAVE_AS}"
        elif found := next((task for task, other in forms.items() if fits(other, line)), None):
            wanted += f", and this one is for --task {found}"
        raise InvalidInput(f"{path}:{number}: {error}: {wanted}") from None
