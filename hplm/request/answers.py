"""Answers as arrays, by the names of outputs on the wire: their bytes from the engine to upper, and the memory to send them."""

from __future__ import annotations

import marshal
import os
import struct
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hplm.arrays import Array
from hplm.errors import BY_WORD, HplmError, Internal, InvalidInput, OutOfCapacity
from hplm.tasks.answers import EMBEDDING, Answers, LabelEach, TextAnswer
from hplm.tasks.tasks import Task

Outputs = dict[str, Array]  # by name on the wire
AnswersOrError = Answers | Exception  # to a request, before it is written as outputs
_FIELDS = {"SCORE": "scores", "LOGITS": "logits", "SPAN": "spans"}  # of the answer to a text
CONFIDENCE = "CONFIDENCE"  # the output that is computed only for requests that want it
LEVEL, TOKENS = "LEVEL", "TOKENS"
OUTPUTS = ("LABEL", "SCORE", "LOGITS", "SPAN", CONFIDENCE, LEVEL, "VERSION", EMBEDDING, TOKENS)
MOST_NAMES = 100  # characters of the parameter `outputs`
SHARED = "/dev/shm"
LARGE = 1 << 20  # bytes of an answer; smaller ones fit into the shared memory that a process already has
SPARE = 1 << 24
_SIZE = struct.Struct("<I")  # the bytes of a string, before it
_BITS = {name: 1 << number for number, name in enumerate(OUTPUTS)}
ALL = (1 << len(OUTPUTS)) - 1


def bits_of(wanted: Set[str]) -> int:
    """Returns requested outputs as a number."""
    return sum([_BITS[name] for name in wanted])


OF_VECTORS, OF_LABELS = bits_of({EMBEDDING}), bits_of({"LABEL", "SCORE", "LOGITS", "SPAN", CONFIDENCE})


@lru_cache
def bits_named(given: str) -> int:
    """Returns the outputs that the parameter `outputs` of a request names, such as "LABEL,SCORE", as a number."""
    named = {name.strip() for name in given[:MOST_NAMES].split(",")}  # the cache keeps no long ones
    if len(given) > MOST_NAMES or not named.issubset(OUTPUTS):
        raise InvalidInput(
            f"parameter 'outputs' is {given[:MOST_NAMES]!r}: send some of {', '.join(OUTPUTS)}, with commas between"
        )
    return bits_of(named)


def outputs_for(task: Task, named: int) -> int:
    """Returns which of the outputs that a request names are those of a task, all as bits. It names some, or none: 0."""
    own, others = (OF_VECTORS, OF_LABELS) if task.is_vector else (OF_LABELS, OF_VECTORS)
    if named & others and not named & own:
        of, wrong = (", ".join(name for name in OUTPUTS if name in names_of(bits)) for bits in (own, named & others))
        raise InvalidInput(f"the tenant has the task {task.name}, which answers with {of}: name that in outputs, not {wrong}")
    return (named or ALL) & ~others


@lru_cache
def names_of(bits: int) -> frozenset[str]:
    return frozenset(name for number, name in enumerate(OUTPUTS) if bits >> number & 1)


def outputs_of(texts: Sequence[TextAnswer] | LabelEach, wanted: Collection[str], versions: Sequence[int]) -> Outputs:
    """Returns the requested outputs of answers to texts as rectangles: EMBEDDING only of vectors. `versions`: of each text.

    Short answers are filled up with "", 0 and -1: JSON has no NaN.
    """
    alike = texts if isinstance(texts, LabelEach) else LabelEach.of(texts)
    if alike is not None:
        rows, own = 1, alike.own
        labels, tokens = alike.labels[own], alike.tokens[own]
        confidences, levels = alike.confidences[own], alike.levels[own]
        outputs = {name: getattr(alike, field)[own, None] for name, field in _FIELDS.items() if name in wanted}
        if EMBEDDING in wanted:
            outputs[EMBEDDING] = alike.logits[own]
    else:
        count, rows = len(texts), max(1, *(len(text.labels) for text in texts))  # a text may have no labels
        scores = np.zeros((count, rows), dtype=np.float32)
        logits = np.zeros((count, max(len(text.logits) for text in texts), texts[0].logits.shape[1]), dtype=np.float32)
        spans = np.full((count, rows, 2), -1, dtype=np.int32)
        for i, text in enumerate(texts):
            used = len(text.labels)
            scores[i, :used] = text.scores
            logits[i, : len(text.logits)] = text.logits
            spans[i, :used] = text.spans
        labels = [label for text in texts for label in (*text.labels, *[""] * (rows - len(text.labels)))]
        outputs = {name: values for name, values in zip(_FIELDS, (scores, logits, spans), strict=True) if name in wanted}
        confidences, levels = [text.confidence for text in texts], [text.level for text in texts]
        tokens = [text.tokens for text in texts]
    if "LABEL" in wanted:
        outputs["LABEL"] = strings([label.encode() for label in labels]).reshape(-1, rows)
    if CONFIDENCE in wanted:
        outputs[CONFIDENCE] = np.array(confidences, dtype=np.float32)[:, None]
    if LEVEL in wanted:
        outputs[LEVEL] = np.array(levels, dtype=np.int32)[:, None]
    if TOKENS in wanted:
        outputs[TOKENS] = np.array(tokens, dtype=np.int32)[:, None]
    if "VERSION" in wanted:
        outputs["VERSION"] = strings([b"%d" % version for version in versions]).reshape(-1, 1)
    return outputs


def strings(values: Sequence[bytes]) -> Array:
    """Returns an array of Python objects. In numpy's own type, every string would take the size of the longest."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def serialized(values: Array) -> bytes | tuple[()]:
    """Returns strings, which are bytes, as Triton's server takes them: each behind its size. None at all are an empty tuple."""
    return b"".join([part for one in values.ravel().tolist() for part in (_SIZE.pack(len(one)), one)]) or ()


def deserialized(values: Array) -> Array:
    """Returns strings that Triton's server has sent. Raises if one is cut off."""
    given, found, at = values.tobytes(), list[bytes](), 0
    while at < len(given):
        start = at + _SIZE.size
        at = start + _SIZE.unpack_from(given, at)[0]
        found.append(given[start:at])
    if at > len(given):
        raise ValueError(f"the last of {len(found)} strings is cut off")
    return strings(found)


def size_of(outputs: Mapping[str, Array]) -> int:
    """Returns the bytes of outputs on the way to the server process."""
    size = 0
    for values in outputs.values():
        size += 4 * values.size + sum(map(len, values.flat)) if values.dtype.hasobject else values.nbytes
    return size


def free_bytes() -> int:
    """Returns the bytes of /dev/shm that are free."""
    system = os.statvfs(SHARED)
    return system.f_bavail * system.f_frsize


class SharedMemory:
    """Checks that /dev/shm has space for large answers. A process's part of it grows with the largest answer, and stays."""

    def __init__(self, free_bytes: Callable[[], int] = free_bytes) -> None:
        self._free_bytes = free_bytes
        self._one_at_a_time = threading.Lock()  # space that another answer is about to take must not count as free
        self._largest = 0

    @contextmanager
    def taken(self, size: int) -> Generator[None]:
        """Wraps the sending of a large answer of `size` bytes. Raises OutOfCapacity if /dev/shm has no space for it.

        Without this check the answer would be lost, and the error message too.
        """
        with self._one_at_a_time:
            free = self._free_bytes()
            if size > self._largest and size - self._largest + SPARE > free:
                raise OutOfCapacity(
                    f"the answer takes {size / 1e6:,.0f} MB, but {SHARED} has {free / 1e6:,.0f} MB left: send fewer texts, "
                    "or give the server more shared memory (Docker: --shm-size)"
                )
            yield
            self._largest = max(self._largest, size)


class AnswerEnd(NamedTuple):
    """How the answer of a decoder has ended."""

    reason: str
    prompt_tokens: int
    generated_tokens: int
    tenant: int  # its number in the line


class Reply(NamedTuple):
    """Answers requests with outputs of one shape, or one request with an error.

    That of a decoder has a part of an answer, which may be none yet. The last part has an `end`.
    """

    requests: list[tuple[int, int]]  # number and texts of each
    outputs: Outputs
    failure: HplmError | None = None
    end: AnswerEnd | None = None


def packed(replies: Sequence[Reply]) -> bytes:
    """Returns the bytes of replies. Only a process of ours may read them: others could end their reader."""
    return marshal.dumps(
        [
            (
                own.requests,
                [(name, *_packed(values)) for name, values in own.outputs.items()],
                own.failure and (own.failure.word, str(own.failure)),
                own.end and tuple(own.end),
            )
            for own in replies
        ]
    )


def replies_in(frame: bytearray) -> list[Reply]:
    """Returns the replies that were packed."""
    return [
        Reply(
            requests,
            {name: _unpacked(*values) for name, *values in outputs},
            failure and BY_WORD.get(failure[0], Internal)(failure[1]),
            end and AnswerEnd(*end),
        )
        for requests, outputs, failure, end in marshal.loads(frame)
    ]


def _packed(values: Array) -> tuple[str, tuple[int, ...], list[bytes] | Array]:
    """Returns kind, shape and the values in a row."""
    row = values.ravel()
    return values.dtype.char, values.shape, row.tolist() if values.dtype.hasobject else row


def _unpacked(kind: str, shape: tuple[int, ...], row: Any) -> Array:
    return (strings(row) if kind == "O" else np.frombuffer(row, kind)).reshape(shape)
