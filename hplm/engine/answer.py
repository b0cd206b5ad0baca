"""Turns the answers to a request's texts into the outputs for a client: rectangles, with short rows filled up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.tasks import TextAnswer


@dataclass(frozen=True)
class Filled:
    """The answers to a request's texts as rectangles. Short answers are filled up with "", 0 and -1: JSON has no NaN."""

    labels: Array  # texts x rows, object
    scores: Array
    logits: Array
    spans: Array

    def outputs(self, wanted: Collection[str], version: int) -> dict[str, Array]:
        """Returns the requested outputs by their names on the wire, with strings as bytes."""
        versions = np.full((len(self.labels), 1), str(version), dtype=object)
        numbers = {"SCORE": self.scores, "LOGITS": self.logits, "SPAN": self.spans}
        strings = {name: _utf8(values) for name, values in (("LABEL", self.labels), ("VERSION", versions)) if name in wanted}
        return strings | {name: values for name, values in numbers.items() if name in wanted}


def size_of(outputs: Mapping[str, Array]) -> int:
    """Returns the bytes of outputs on the way to the server process."""
    return sum(
        sum(4 + len(one) for one in values.flat) if values.dtype == object else values.nbytes for values in outputs.values()
    )


def _utf8(strings: Array) -> Array:
    """Encodes strings as Python objects. In numpy's own type, every string would take the size of the longest."""
    encoded = np.empty(strings.size, dtype=object)
    encoded[:] = [one.encode() for one in strings.flat]
    return encoded.reshape(strings.shape)


def fill(texts: Sequence[TextAnswer]) -> Filled:
    count, rows = len(texts), max(1, *(len(text.labels) for text in texts))  # a text may have no labels
    logit_rows, classes = max(len(text.logits) for text in texts), texts[0].logits.shape[1]
    filled = Filled(
        labels=np.full((count, rows), "", dtype=object),
        scores=np.zeros((count, rows), dtype=np.float32),
        logits=np.zeros((count, logit_rows, classes), dtype=np.float32),
        spans=np.full((count, rows, 2), -1, dtype=np.int32),
    )
    for i, text in enumerate(texts):
        used = len(text.labels)
        filled.labels[i, :used] = text.labels
        filled.scores[i, :used] = text.scores
        filled.logits[i, : len(text.logits)] = text.logits
        filled.spans[i, :used] = text.spans
    return filled
