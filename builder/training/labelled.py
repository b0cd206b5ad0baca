"""Reads labelled data and corpora. Its errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from builder.tables.text_files import Progress, content_suffix, raw_lines
from hplm.errors import InvalidInput
from hplm.model.tokenizer import words_of

LARGEST = 1e300  # of a value to learn; larger whole numbers would overflow


@dataclass(frozen=True)
class Example:
    """One line of a labelled file."""

    line: int
    text: str
    pair: str | None = None
    labels: tuple[str, ...] = ()  # one for `classify`, all true ones for `multilabel`, one a word for `tag`
    value: float = 0.0  # for `regress`
    answers: tuple[tuple[int, int], ...] = ()  # for `span`: code points of the pair, all right; empty: unanswerable


@dataclass(frozen=True)
class Labelled:
    path: Path
    examples: list[Example]


def key_of(example: Example) -> tuple[str, ...]:
    """Returns the texts of an example, by which it is found in other files: without differences in spaces."""
    return tuple(" ".join(text.split()) for text in (example.text, example.pair or ""))


ReadLine = Callable[[dict, str, int], Example]  # a line's JSON object, its file and line for errors, the line's number


def read_labelled(path: Path, read_line: ReadLine) -> Labelled:
    examples = [read_line(_object(line, f"{path}:{number}"), f"{path}:{number}", number) for number, line in _lines(path)]
    if not examples:
        raise InvalidInput(f"{path} is empty: it needs one JSON object a line")
    return Labelled(path, examples)


def read_corpus(paths: Iterable[Path], progress: Progress | None = None) -> Iterator[str]:
    """Yields the documents of a file: one a line, or JSONL with `text`. Plain, .gz or .zst; blank lines are skipped."""
    for path in paths:
        lines = _lines(path, progress)
        first = next(lines, None)
        if first is None:
            raise InvalidInput(f"corpus {path} is empty: it needs one document a line")
        if content_suffix(path) == ".jsonl" or _is_object(first[1]):
            yield _document(path, *first)
            for number, line in lines:
                yield _document(path, number, line)
        else:
            yield first[1]
            for _, line in lines:
                yield line


def _lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number, line) of the lines that are not blank, counted from 1."""
    for number, raw in enumerate(raw_lines(path, progress), start=1):
        if b"\0" in raw:
            raise InvalidInput(f"{path}:{number}: a zero byte: this is a binary file, not text")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}:{number}: not valid UTF-8 (byte {error.start + 1}): convert the file") from None
        if line:
            yield number, line


def _object(line: str, where: str) -> dict:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{where}: not JSON ({error}): the file needs one JSON object a line") from None
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where}: not a JSON object but a {type(entry).__name__}")
    return entry


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _document(path: Path, number: int, line: str) -> str:
    where = f"{path}:{number}"
    return _text(_object(line, where), "text", where)


def _field(entry: dict, key: str, where: str) -> object:
    if key not in entry:
        raise InvalidInput(f"{where}: no key {key!r}; it has {', '.join(map(repr, entry)) or 'none'}")
    return entry[key]


def _text(entry: dict, key: str, where: str) -> str:
    text = _field(entry, key, where)
    if not isinstance(text, str):
        raise InvalidInput(f"{where}: {key!r} is not a string but a {type(text).__name__}")
    if not text.strip():
        raise InvalidInput(f"{where}: {key!r} is empty")
    return _encodable(text, where)


def _encodable(text: str, where: str) -> str:
    """Refuses half of a surrogate pair: JSON can write it, but it has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{where}: character {error.start + 1} of {text[:20]!r}... is half a surrogate pair") from None
    return text


def _label(label: object, where: str) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if not isinstance(label, str) or not label:
        raise InvalidInput(f"{where}: label {label!r} is neither a name nor a whole number")
    return _encodable(label, where)


def _list(entry: dict, key: str, where: str) -> list:
    values = _field(entry, key, where)
    if not isinstance(values, list):
        raise InvalidInput(f"{where}: {key!r} is not a list but a {type(values).__name__}")
    return values


def _texts(entry: dict, where: str) -> tuple[str, str | None]:
    pair = _text(entry, "text_pair", where) if entry.get("text_pair") is not None else None
    return _text(entry, "text", where), pair


def read_label(entry: dict, where: str, line: int) -> Example:
    return Example(line, *_texts(entry, where), labels=(_label(_field(entry, "label", where), where),))


def read_text(entry: dict, where: str, line: int) -> Example:
    """Reads a text without its labels, if it has any. A tagged one is its words, joined by single spaces."""
    if "tokens" in entry:
        return Example(line, " ".join(map(str, _list(entry, "tokens", where))))
    return Example(line, *_texts(entry, where))


def has_labels(path: Path) -> bool:
    """Whether a file of texts has labels: those of its first line speak for all."""
    number, line = next(_lines(path), (1, "{}"))
    return bool(_object(line, f"{path}:{number}").keys() & {"label", "labels", "tags", "answers"})


def read_labels(entry: dict, where: str, line: int) -> Example:
    labels = [_label(label, where) for label in _list(entry, "labels", where)]
    return Example(line, *_texts(entry, where), labels=tuple(dict.fromkeys(labels)))


def read_value(entry: dict, where: str, line: int) -> Example:
    value = _field(entry, "label", where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST:
        raise InvalidInput(f"{where}: label {value!r} is not a number")
    return Example(line, *_texts(entry, where), value=float(value))


def read_answers(entry: dict, where: str, line: int) -> Example:
    """Reads answers as in SQuAD 2: each with its text and its start in the passage, or none."""
    passage, given = _text(entry, "text_pair", where), _field(entry, "answers", where)
    if not isinstance(given, dict):
        raise InvalidInput(f"{where}: 'answers' is not an object with 'text' and 'answer_start' but a {type(given).__name__}")
    texts, starts = _list(given, "text", where), _list(given, "answer_start", where)
    if len(texts) != len(starts):
        raise InvalidInput(f"{where}: {len(texts)} answers but {len(starts)} starts")
    spans = []
    for answer, start in zip(texts, starts, strict=True):
        if not isinstance(answer, str) or not answer.strip():
            raise InvalidInput(f"{where}: answer {answer!r} is not a text")
        if not isinstance(start, int) or start < 0 or passage[start : start + len(answer)] != answer:
            raise InvalidInput(f"{where}: the passage does not have {answer[:40]!r} at character {start!r}")
        spans.append((start, start + len(answer)))
    return Example(line, _text(entry, "text", where), passage, answers=tuple(spans))


def read_tags(entry: dict, where: str, line: int) -> Example:
    """Reads words and tags. The text is the words joined by single spaces, and a client must send it like this."""
    tokens, tags = _field(entry, "tokens", where), _field(entry, "tags", where)
    if not isinstance(tokens, list) or not isinstance(tags, list):
        raise InvalidInput(f"{where}: 'tokens' and 'tags' must be lists")
    if len(tokens) != len(tags):
        raise InvalidInput(f"{where}: {len(tokens)} tokens but {len(tags)} tags")
    if not tokens:
        raise InvalidInput(f"{where}: 'tokens' is empty")
    for number, token in enumerate(tokens, start=1):
        if not isinstance(token, str) or words_of(token) != [(0, len(token))]:
            raise InvalidInput(f"{where}: token {number}, {token!r}, is not one word without white space")
        _encodable(token, where)
    return Example(line, " ".join(tokens), labels=tuple(_label(tag, where) for tag in tags))
