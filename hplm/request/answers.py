"""Answers as arrays, by the names of outputs on the wire, and the bytes in which they travel from the engine to upper."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from hplm.arrays import Array
from hplm.tasks import TextAnswer

Outputs = dict[str, Array]  # by name on the wire
_FIELDS = {"SCORE": "scores", "LOGITS": "logits", "SPAN": "spans"}  # of the answer to a text
CONFIDENCE = "CONFIDENCE"  # the output that is computed only for requests that want it
LEVEL = "LEVEL"
OUTPUTS = ("LABEL", "SCORE", "LOGITS", "SPAN", CONFIDENCE, LEVEL, "VERSION")
REQUESTS, FAILURE = "requests", "failure"  # of replies: number and texts of each request; status and message of a failure
_NAMES = (*OUTPUTS, REQUESTS, FAILURE)
_BITS = {name: 1 << number for number, name in enumerate(OUTPUTS)}
_KINDS = "Ofil"  # numpy's letters: strings, fp32, int32, int64
_COUNT = struct.Struct("<Q")  # arrays of a reply
# Name, kind, dimensions, shape, bytes of strings. Behind it is the array, or the strings' sizes and the strings; then zeros.
_ARRAY = struct.Struct("<BBHIIIQ")


def bits_of(wanted: Set[str]) -> int:
    """Returns requested outputs as a number."""
    return sum([_BITS[name] for name in wanted])


@lru_cache
def names_of(bits: int) -> frozenset[str]:
    return frozenset(name for number, name in enumerate(OUTPUTS) if bits >> number & 1)


def outputs_of(texts: Sequence[TextAnswer], wanted: Collection[str], versions: Sequence[int]) -> Outputs:
    """Returns the requested outputs of answers to texts as rectangles. `versions` has one for each text.

    Short answers are filled up with "", 0 and -1: JSON has no NaN.
    """
    outputs: Outputs = {}
    rows = 1
    if all(text.is_one_label for text in texts):
        for name, field in _FIELDS.items():
            if name in wanted:
                outputs[name] = np.concatenate([getattr(text, field) for text in texts])[:, None]
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
        outputs = {name: values for name, values in zip(_FIELDS, (scores, logits, spans), strict=True) if name in wanted}
    if "LABEL" in wanted:
        labels = [label.encode() for text in texts for label in (*text.labels, *[""] * (rows - len(text.labels)))]
        outputs["LABEL"] = strings(labels).reshape(-1, rows)
    if CONFIDENCE in wanted:
        outputs[CONFIDENCE] = np.array([[text.confidence] for text in texts], dtype=np.float32)
    if LEVEL in wanted:
        outputs[LEVEL] = np.array([[text.level] for text in texts], dtype=np.int32)
    if "VERSION" in wanted:
        outputs["VERSION"] = strings([b"%d" % version for version in versions]).reshape(-1, 1)
    return outputs


def strings(values: Sequence[bytes]) -> Array:
    """Returns an array of Python objects. In numpy's own type, every string would take the size of the longest."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def size_of(outputs: Mapping[str, Array]) -> int:
    """Returns the bytes of outputs on the way to the server process."""
    size = 0
    for values in outputs.values():
        size += 4 * values.size + sum(map(len, values.flat)) if values.dtype.hasobject else values.nbytes
    return size


def parts_of(reply: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yields the parts of the bytes of a reply."""
    yield _COUNT.pack(len(reply))
    for name, values in reply.items():
        head = _NAMES.index(name), _KINDS.index(values.dtype.char), values.ndim, *values.shape, *[0] * (3 - values.ndim)
        text, data = b"", values
        if values.dtype == object:
            text, data = b"".join(values.flat), np.array([len(one) for one in values.flat], np.uint32)
        yield _ARRAY.pack(*head, len(text))
        yield np.ascontiguousarray(data).data
        yield text
        yield bytes(-(data.nbytes + len(text)) % 8)


def replies_in(frame: bytearray) -> Iterator[dict[str, Array]]:
    """Yields replies. Their numbers are views of the frame."""
    at = 0
    while at < len(frame):
        reply: dict[str, Array] = {}
        (count,) = _COUNT.unpack_from(frame, at)
        at += _COUNT.size
        for _ in range(count):
            name, kind, dimensions, *shape, size = _ARRAY.unpack_from(frame, at)
            at += _ARRAY.size
            shape, has_strings = shape[:dimensions], not kind
            values = np.frombuffer(frame, np.uint32 if has_strings else _KINDS[kind], prod(shape), at)
            end = at + values.nbytes + size
            if has_strings:
                places = pairwise(accumulate(values.tolist(), initial=at + values.nbytes))
                values = strings([bytes(frame[start:stop]) for start, stop in places])
            reply[_NAMES[name]] = values.reshape(shape)
            at = end + -end % 8
        yield reply
