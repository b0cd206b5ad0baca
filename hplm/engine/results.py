"""Reads the answers of a computed batch from its logits, those of like texts together: a call costs more than a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hplm.arrays import Array, together
from hplm.engine.failures import failure
from hplm.engine.request import Text
from hplm.errors import Broken, HplmError
from hplm.levels.calibration import Calibration
from hplm.tasks import ReadEach, TextAnswer

log = logging.getLogger(__name__)


def read_answers(
    texts: Sequence[Text], logits: Sequence[Array], exit: int | None = None
) -> Iterator[tuple[Text, TextAnswer | HplmError]]:
    """Yields the texts with their answers, in any order; of a text in windows, the last one that is computed.

    `logits` of a text are rows x the size of the batch's largest head. `exit`: where they come from; None: behind all layers.
    """
    alike: dict[tuple[ReadEach, int], list[int]] = {}
    for index, text in enumerate(texts):
        request = text.request
        read_each = request.tenant.task_object.read_each
        if read_each is not None and text.is_one_row and not request.top_k:
            alike.setdefault((read_each, len(request.tenant.labels)), []).append(index)
        else:
            yield from _answer(text, logits[index], exit)
    for (read_each, labels), indexes in alike.items():
        own = together([logits[index][:, :labels] for index in indexes])
        if not np.isfinite(own).all():
            for index in indexes:
                yield from _answer(texts[index], logits[index], exit)
            continue
        some = [texts[index] for index in indexes]
        names = [text.request.tenant.labels for text in some]
        answers = read_each(own, together([text.spans for text in some]), names, [_calibration(text, exit) for text in some])
        for text, answer in zip(some, answers, strict=True):
            yield text, _at(exit, text, answer)


def _calibration(text: Text, exit: int | None) -> Calibration | None:
    """Returns the calibration of a text's confidence; None if nobody asks for it, or the tenant has none."""
    own = text.request.calibration
    return own if own is None or exit is None else text.exits.calibrations[exit]


def _at(exit: int | None, text: Text, answer: TextAnswer) -> TextAnswer:
    """Returns an answer with its level: 1 is that of exit 0, and the last one is behind all layers."""
    if text.plan is None:
        return answer
    return replace(answer, level=1 + (len(text.exits.calibrations) if exit is None else exit))


def _answer(text: Text, logits: Array, exit: int | None) -> Iterator[tuple[Text, TextAnswer | HplmError]]:
    """Yields the answer to a text, or nothing while other windows of it are to be computed."""
    request = text.request
    try:
        labels = request.tenant.labels
        own = text.rows(logits, len(labels))
        if not np.isfinite(own).all():
            raise Broken(f"tenant {request.tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        joined = request.joined(text, own)
        if joined is None:
            return
        own, spans = joined
        task = request.tenant.task_object
        answer = task.answer(own, spans, labels, request.top_k, text.passage)
        if (calibration := _calibration(text, exit)) is not None:
            rows = own if exit is None else text.rows(logits, task.exit_outputs(labels))
            answer = replace(answer, confidence=task.confidence(calibration, rows, spans, labels))
        yield text, _at(exit, text, answer)
    except HplmError as error:
        log.error("%s", error)
        yield text, error
    except Exception as error:
        yield text, failure("answering", error)
