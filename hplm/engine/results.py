"""Reads the answers of a computed batch from its logits, those of like texts together: a call costs more than a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hplm.arrays import Array
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
        read_each = text.request.read_each
        if read_each is not None and text.is_one_row:
            alike.setdefault((read_each, len(text.request.tenant.labels)), []).append(index)
        else:
            answer = _answer(text, logits[index])
            if answer is not None:
                yield text, answer
    for (read_each, labels), indexes in alike.items():
        own = np.concatenate([logits[index][:, :labels] for index in indexes])
        if not np.isfinite(own).all():
            answers = ((texts[index], _answer(texts[index], logits[index])) for index in indexes)
            yield from ((text, answer) for text, answer in answers if answer is not None)
            continue
        some = [texts[index] for index in indexes]
        spans = np.concatenate([text.spans for text in some])
        labels_of, calibrations = [text.request.tenant.labels for text in some], [text.request.calibration for text in some]
        yield from zip(some, read_each(own, spans, labels_of, calibrations), strict=True)


def _answer(text: Text, logits: Array) -> TextAnswer | HplmError | None:
    """Returns the answer to a text, or None while other windows of it are to be computed."""
    request = text.request
    try:
        labels = request.tenant.labels
        own = np.zeros((len(text.spans), len(labels)), dtype=logits.dtype)  # zeros for rows without a token
        own[text.read] = logits[:, : len(labels)]
        if not np.isfinite(own).all():
            raise Broken(f"tenant {request.tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        joined = request.joined(text, own)
        if joined is None:
            return None
        task = request.tenant.task_object
        answer = task.answer(*joined, labels, request.top_k, text.passage)
        if request.calibration is None:
            return answer
        return replace(answer, confidence=task.confidence(request.calibration, *joined, labels))
    except HplmError as error:
        log.error("%s", error)
        return error
    except Exception as error:
        log.exception("answering failed")
        return Broken(f"answering failed: {error}")
