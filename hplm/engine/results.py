"""Reads the answers of a computed batch from its logits, those of like texts together: a call costs more than a text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

import numpy as np

from hplm.arrays import Array, joined, together
from hplm.calibration import Calibration
from hplm.engine.request import EncoderRequest, Text
from hplm.errors import Broken, HplmError
from hplm.model import faults
from hplm.tasks.answers import Answers, ReadEach, TextAnswer
from hplm.tenants.embedding import normalised

log = logging.getLogger(__name__)


def read_answers(
    texts: Sequence[Text], logits: Sequence[Array], exit: int | None = None
) -> Iterator[tuple[list[Text], Answers | HplmError]]:
    """Yields texts of one request each, in their order, with their answers.

    Of a text in windows, or with several students, it is the last one that is computed.

    `logits` of a text are rows x the size of its sheet's largest head. `exit`: where they come from; None: behind all layers.
    """
    alike: dict[tuple[ReadEach, int, bool], dict[EncoderRequest, list[int]]] = {}
    for request, run in groupby(range(len(texts)), lambda number: texts[number].request):
        read_each, numbers = request.tenant.task_object.read_each, [*run]
        has_one_row_each = all([texts[number].is_one_row and texts[number].windows == 1 for number in numbers])
        if read_each is not None and has_one_row_each and not request.top_k:
            key = read_each, request.outputs, request.is_normalised
            alike.setdefault(key, {}).setdefault(request, []).extend(numbers)
            continue
        for number in numbers:
            if (found := _answer(texts[number], logits[number], exit)) != []:
                yield [texts[number]], found
    for (read_each, outputs, is_normalised), by_request in alike.items():
        for numbers in by_request.values():
            numbers.sort(key=lambda number: texts[number].index)
        order = [number for numbers in by_request.values() for number in numbers]
        some = [texts[number] for number in order]
        own = np.ascontiguousarray(together([logits[number][:, :outputs] for number in order]))  # sheets have different widths
        if not np.isfinite(own).all():
            yield from (([texts[number]], _answer(texts[number], logits[number], exit)) for number in order)
            continue
        if is_normalised:
            own = normalised(own)
        names, calibrations, levels = list[Sequence[str]](), list[Calibration | None](), list[int]()
        for request, numbers in by_request.items():
            first, count = texts[numbers[0]], len(numbers)
            names += [request.tenant.labels] * count
            calibrations += [_calibration(first, exit)] * count
            levels += [_level(first, exit)] * count
        answers = read_each(own, joined([text.spans for text in some]), names, calibrations)
        answers.levels = levels
        answers.tokens = [text.request.form.lengths[text.index] for text in some]
        ends = accumulate(map(len, by_request.values()), initial=0)
        yield from [(some[start:stop], answers.part(start, stop)) for start, stop in pairwise(ends)]


def _calibration(text: Text, exit: int | None) -> Calibration | None:
    """Returns the calibration of a text's confidence; None if nobody asks for it, or the tenant has none."""
    own = text.request.calibration
    if own is None:
        return None
    return own if exit is None else text.exits.calibrations[exit]


def _level(text: Text, exit: int | None) -> int:
    """Returns the level of an answer: 1 is that of exit 0, and the last one is behind all layers. Of students, their number."""
    if text.depth:
        return text.windows
    if text.plan is None:
        return 1
    return 1 + (len(text.exits.calibrations) if exit is None else exit)


def _answer(text: Text, logits: Array, exit: int | None) -> list[TextAnswer] | HplmError:
    """Returns the answer to a text; none while other windows of it are to be computed."""
    request = text.request
    try:
        labels = request.tenant.labels
        own = text.rows(logits, request.outputs)
        if not np.isfinite(own).all():
            raise Broken(f"tenant {request.tenant.id!r} has logits that are not finite: train it again, with a lower rate")
        whole = request.joined(text, own)
        if whole is None:
            return []
        own, spans = normalised(whole[0]) if request.is_normalised else whole[0], whole[1]
        task = request.tenant.task_object
        answer = task.answer(own, spans, labels, request.top_k, text.passage)
        if (calibration := _calibration(text, exit)) is not None:
            answer.confidence = task.confidence(calibration, own, spans, labels)
        answer.level, answer.tokens = _level(text, exit), request.form.lengths[text.index]
        return [answer]
    except HplmError as error:
        log.error("%s", error)
        return error
    except Exception as error:
        return faults.failure("answering a batch", error)
