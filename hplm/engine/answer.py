"""Turns the answers to a request's texts into the outputs for a client: rectangles, with short rows filled up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.tasks import TextAnswer

CONFIDENCE = "CONFIDENCE"  # the output that is computed only for requests that want it
LEVEL = "LEVEL"


@dataclass(frozen=True)
class Filled:
    """The answers to a request's texts as rectangles. Short answers are filled up with "", 0 and -1: JSON has no NaN."""

    labels: Array  # texts x rows, object
    scores: Array
    logits: Array
    spans: Array
    texts: Sequence[TextAnswer] = ()  # for their confidences and levels

    def outputs(self, wanted: Collection[str], versions: Sequence[int]) -> dict[str, Array]:
        """Returns the requested outputs by their names on the wire, with strings as bytes. `versions` has one for each text."""
        numbers = {"SCORE": self.scores, "LOGITS": self.logits, "SPAN": self.spans}
        outputs = {name: values for name, values in numbers.items() if name in wanted}
        if "LABEL" in wanted:
            outputs["LABEL"] = _objects([label.encode() for label in self.labels.flat]).reshape(self.labels.shape)
        if CONFIDENCE in wanted:
            outputs[CONFIDENCE] = np.array([[text.confidence] for text in self.texts], dtype=np.float32)
        if LEVEL in wanted:
            outputs[LEVEL] = np.array([[text.level] for text in self.texts], dtype=np.int32)
        if "VERSION" in wanted:
            outputs["VERSION"] = _objects([b"%d" % version for version in versions]).reshape(-1, 1)
        return outputs


def size_of(outputs: Mapping[str, Array]) -> int:
    """Returns the bytes of outputs on the way to the server process."""
    return sum(
        sum(4 + len(one) for one in values.flat) if values.dtype == object else values.nbytes for values in outputs.values()
    )


def _objects(values: Sequence[object]) -> Array:
    """Returns an array of Python objects. In numpy's own type, every string would take the size of the longest."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def fill(texts: Sequence[TextAnswer]) -> Filled:
    if all(text.is_one_label for text in texts):
        return Filled(
            labels=_objects([text.labels[0] for text in texts])[:, None],
            scores=np.concatenate([text.scores for text in texts])[:, None],
            logits=np.concatenate([text.logits for text in texts])[:, None],
            spans=np.concatenate([text.spans for text in texts])[:, None],
            texts=texts,
        )
    count, rows = len(texts), max(1, *(len(text.labels) for text in texts))  # a text may have no labels
    logit_rows, classes = max(len(text.logits) for text in texts), texts[0].logits.shape[1]
    filled = Filled(
        labels=np.full((count, rows), "", dtype=object),
        scores=np.zeros((count, rows), dtype=np.float32),
        logits=np.zeros((count, logit_rows, classes), dtype=np.float32),
        spans=np.full((count, rows, 2), -1, dtype=np.int32),
        texts=texts,
    )
    for i, text in enumerate(texts):
        used = len(text.labels)
        filled.labels[i, :used] = text.labels
        filled.scores[i, :used] = text.scores
        filled.logits[i, : len(text.logits)] = text.logits
        filled.spans[i, :used] = text.spans
    return filled
