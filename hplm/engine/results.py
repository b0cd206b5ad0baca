"""Reads the answers of a computed batch from its logits, those of like texts together: a call costs more than a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hplm.arrays import Array
from hplm.engine.failures import failure
from hplm.engine.request import Text
from hplm.errors import Broken, HplmError
from hplm.tasks import ReadEach, TextAnswer

log = logging.getLogger(__name__)


def read_answers(texts: Sequence[Text], logits: Sequence[Array]) -> Iterator[tuple[Text, TextAnswer | HplmError]]:
    """Yields the texts with their answers, in any order; of a text in windows, the last one that is computed.

    `logits` of a text are rows x the size of the batch's largest head.
    """
    alike: dict[tuple[ReadEach, int], list[int]] = {}
    for index, text in enumerate(texts):
        tenant = text.request.tenant
        task = tenant.task_object
        if task.read_each is not None and not text.request.top_k and text.is_one_row:
            alike.setdefault((task.read_each, len(tenant.labels)), []).append(index)
        else:
            yield from _answer(text, logits[index])
    for (read_each, labels), indexes in alike.items():
        own = np.concatenate([logits[index][:, :labels] for index in indexes])
        if not np.isfinite(own).all():
            for index in indexes:
                yield from _answer(texts[index], logits[index])
            continue
        yield from _answer_each(read_each, [texts[index] for index in indexes], own)


def _answer_each(read_each: ReadEach, texts: Sequence[Text], own: Array) -> Iterator[tuple[Text, TextAnswer]]:
    """Yields the answers to texts with one row each."""
    spans = np.concatenate([text.spans for text in texts])
    labels = [text.request.tenant.labels for text in texts]
    yield from zip(texts, read_each(own, spans, labels, [text.request.calibration for text in texts]), strict=True)


def _answer(text: Text, logits: Array) -> Iterator[tuple[Text, TextAnswer | HplmError]]:
    """Yields the answer to a text, or nothing while other windows of it are to be computed."""
    request = text.request
    try:
        labels = request.tenant.labels
        own = np.zeros((len(text.spans), len(labels)), dtype=logits.dtype)  # zeros for rows without a token
        own[text.read] = logits[:, : len(labels)]
        if not np.isfinite(own).all():
            raise Broken(f"tenant {request.tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        joined = request.joined(text, own)
        if joined is None:
            return
        own, spans = joined
        task = request.tenant.task_object
        answer = task.answer(own, spans, labels, request.top_k, text.passage)
        if request.calibration is not None:
            answer = replace(answer, confidence=task.confidence(request.calibration, own, spans, labels))
        yield text, answer
    except HplmError as error:
        log.error("%s", error)
        yield text, error
    except Exception as error:
        yield text, failure("answering", error)
