"""The tasks of tenants: which tokens a head reads, how many outputs it has, and how an answer is read from its logits.

A task is one object here and one in `builder/tasks/tasks.py`. docs/extending.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from hplm.arrays import Array
from hplm.calibration import UNKNOWN, Calibration, Evidence, of_first_row, of_least_certain_label, of_least_certain_row
from hplm.errors import InvalidInput
from hplm.model.word_spans import first_tokens, words_of
from hplm.tasks import answers
from hplm.tasks.answers import ReadBest, ReadEach, TextAnswer, best_labels, window_heads

if TYPE_CHECKING:
    from hplm.model.config import BackboneConfig
    from hplm.model.tokenizer import Encoded

GENERATE = "generate"  # the task of a decoder's tenants


@dataclass(frozen=True)
class Task:
    """A task: how a tenant reads a text and answers it."""

    name: str
    find_rows: Callable[[str, str | None, Encoded], Array]  # text, pair, both as tokens -> see `rows`
    read_answer: Callable[[Array, Array, Sequence[str], str], TextAnswer]  # logits, spans, labels, passage
    fixed_labels: tuple[str, ...] = ()  # names of the head's outputs; empty: each tenant has its own labels
    read_each: ReadEach | None = None  # `read_answer`, many at once
    # Takes logits, spans and labels, and returns what the confidence rests on. None: answers have no confidence.
    evidence: Callable[[Array, Array, Sequence[str]], Evidence | None] | None = None
    further_label: str = ""  # the name of an output that only some tenants have, after the fixed ones
    needs_pair: bool = False  # the answer is a piece of the second text, the passage
    read_best: ReadBest | None = None  # reads the k best labels; None: a request cannot ask for them
    same: Callable[[TextAnswer, TextAnswer], bool] | None = None  # whether two answers agree; None: it has no exits
    is_number: bool = False  # an answer is a number
    generates: bool = False  # a decoder answers with new text: there is no head, and there are no labels
    is_vector: bool = False  # the states themselves are the answer, pooled as its record says: no head and no labels either

    @property
    def has_head(self) -> bool:
        return not (self.generates or self.is_vector)

    def head_size(self, labels: int) -> int:
        """Returns the number of outputs of a head, for a tenant with this number of labels."""
        if not self.has_head:
            return 0
        fixed = len(self.fixed_labels)
        return labels if not fixed or (self.further_label and labels == fixed + 1) else fixed

    @property
    def takes_students(self) -> bool:
        """Whether several students can answer together: with the logits of heads, and not of passages, read in windows."""
        return self.has_head and not self.needs_pair

    @property
    def reads_first_token(self) -> bool:
        """Whether there is one answer for the whole text."""
        return self.find_rows is first_token

    def rows(self, text: str, pair: str | None, encoded: Encoded) -> Array:
        """Returns for each row the token that a head reads (-1: none), and the row's code points: rows x 3, int32."""
        if self.needs_pair and pair is None:
            raise InvalidInput(
                "the tenant needs a passage: send the question as TEXT and the passage as TEXT_PAIR (in files: text, text_pair)"
            )
        if self.is_vector and pair is not None:
            raise InvalidInput("the tenant makes a vector of one text: leave TEXT_PAIR out, or send its texts as TEXT")
        return self.find_rows(text, pair, encoded)

    def answer(self, logits: Array, spans: Array, labels: Sequence[str], top_k: int = 0, passage: str = "") -> TextAnswer:
        """Turns logits into an answer. `logits` and `spans` have a row for each read row.

        With a task that needs a pair, `spans` are code points of `passage`.
        """
        if top_k and self.read_best is not None:
            return self.read_best(logits, spans, labels, top_k)
        return self.read_answer(logits, spans, labels, passage)

    def confidence(self, calibration: Calibration, logits: Array, spans: Array, labels: Sequence[str]) -> float:
        """Returns the probability that the answer to these logits is right; UNKNOWN if nothing was answered."""
        evidence = self.evidence(logits, spans, labels) if self.evidence is not None else None
        return calibration.confidence(evidence) if evidence is not None else UNKNOWN


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise InvalidInput(f"unknown task {name!r}: choose {', '.join(TASKS)}")
    return TASKS[name]


def check_backbone(name: str, config: BackboneConfig) -> None:
    """Refuses a task that the backbone cannot do: encoders do not generate, and decoders do nothing else."""
    if find_task(name).generates and not config.is_decoder:
        raise InvalidInput(f"backbone {config.name!r} is an encoder, which generates no text: choose a decoder for {name!r}")
    if config.is_decoder and not find_task(name).generates:
        raise InvalidInput(f"backbone {config.name!r} is a decoder, which only generates: choose an encoder for {name!r}")


def first_token(text: str, pair: str | None, encoded: Encoded) -> Array:
    """Returns one row for the whole text."""
    return np.array([[0, 0, len(text)]], dtype=np.int32)


def each_word(text: str, pair: str | None, encoded: Encoded) -> Array:
    """Returns a row for each word, which reads the word's first token."""
    words = words_of(text)
    return np.column_stack([first_tokens(encoded, words), np.array(words, dtype=np.int32)])


def passage_tokens(text: str, pair: str | None, encoded: Encoded) -> Array:
    """Returns for each window of the passage, which is the pair, a row for the window, then one for each token of the passage.

    The row for a window reads the window's first token and is about code points 0 to 0.
    """
    # Some tokenizers begin every word with a token for the space before it, even the first word.
    tokens = np.flatnonzero((encoded.parts == 1) & (encoded.offsets[:, 1] > 0)).astype(np.int32)
    if not len(tokens):
        raise InvalidInput("the passage contains no token that the model can read: send another passage as TEXT_PAIR")
    heads = np.zeros((len(encoded.lengths), 3), dtype=np.int32)
    heads[:, 0] = np.cumsum(encoded.lengths) - encoded.lengths
    rows = np.vstack([heads, np.column_stack([tokens, encoded.offsets[tokens]])])
    return rows[np.argsort(rows[:, 0], kind="stable")]


def only_generates(*_: object) -> NoReturn:
    """Stands for both functions of a task without a head."""
    raise InvalidInput("the tenant generates text, and has no head that could answer: ask its backbone to generate")


def windows_of(spans: Array, tokens: int) -> Iterator[tuple[slice, Array]]:
    """Yields the windows of a text that `passage_tokens` has read: the place of its tokens, and its spans in that place."""
    heads = window_heads(spans)
    starts: list[int] = spans[heads, 0].tolist()
    for start, end, own in zip(starts, [*starts[1:], tokens], np.split(spans, heads[1:]), strict=True):
        yield slice(start, end), own - np.array([start, 0, 0], dtype=np.int32)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "classify", first_token, answers.best_label, read_each=answers.best_label_of_each, evidence=of_first_row,
            same=answers.same_labels, read_best=best_labels,
        ),
        Task(
            "multilabel", first_token, answers.holding_labels, evidence=of_least_certain_label, same=answers.same_set,
            read_best=answers.likeliest_labels,
        ),
        Task("tag", each_word, answers.best_label, evidence=of_least_certain_row, same=answers.same_labels),
        Task("regress", first_token, answers.value, is_number=True, fixed_labels=("value",)),
        Task(
            "span", passage_tokens, answers.piece_of_passage, evidence=answers.of_ends, fixed_labels=("start", "end"),
            further_label="none", needs_pair=True,
        ),
        Task("embed", first_token, answers.vector, read_each=answers.vector_of_each, is_vector=True),
        Task(GENERATE, only_generates, only_generates, generates=True),
    )
}  # fmt: skip
