"""Joins the answers of a tenant with those of the tenant of another backbone that its link leads to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hplm.arrays import Array
from hplm.engine.answer import CONFIDENCE, LEVEL
from hplm.levels.calibration import UNKNOWN
from hplm.levels.pruning import without_words
from hplm.tasks import Task, TextAnswer
from hplm.tenants.link import ONWARD
from hplm.tenants.snapshot import Tenant

NEEDED = ("LABEL", "SCORE", "LOGITS", "SPAN", LEVEL, ONWARD)  # outputs from which answers are read back


def onward_of(onward: str, text: str, pair: str | None) -> tuple[str, str | None]:
    """Returns what the other backbone reads of a text, from what the first one has said of it."""
    runs: list[tuple[int, int]] = json.loads(onward)
    return without_words(text, pair, runs) if runs else (text, pair)


def answers_in(outputs: Mapping[str, Array], task: Task) -> list[TextAnswer]:
    """Reads answers back from the outputs that were made of them, which have short ones filled up."""
    counts: list[int] = (outputs["SPAN"][:, :, 0] >= 0).sum(axis=1).tolist()
    confidences = outputs.get(CONFIDENCE)
    return [
        TextAnswer(
            labels=[label.decode() for label in outputs["LABEL"][i, :count]],
            scores=outputs["SCORE"][i, :count],
            logits=outputs["LOGITS"][i, : 1 if task.reads_first_token else count],
            spans=outputs["SPAN"][i, :count],
            confidence=float(confidences[i, 0]) if confidences is not None else UNKNOWN,
            level=int(outputs[LEVEL][i, 0]),
            onward=outputs[ONWARD][i, 0].decode(),
        )
        for i, count in enumerate(counts)
    ]


def joined(
    tenant: Tenant, target: Tenant, before: TextAnswer, logits: Array, level: int, weight: float, text: str, top_k: int
) -> TextAnswer:
    """Returns the answer of both tenants together. `logits` and `level` are those of the target's answer."""
    task, labels = tenant.task_object, tenant.labels
    assert task.combined is not None  # links are made for such tasks only
    now = logits[: len(before.logits)]
    own = task.combined(before.logits, now, weight, before.spans)
    spans = np.array([[0, 0, len(text)]], dtype=np.int32)
    if not task.reads_first_token:  # a row for each word, with zeros where one of them could not read it
        read_before, read_now = before.logits.any(axis=1), now.any(axis=1)
        own = np.where((read_before & read_now)[:, None], own, before.logits + now)
        spans = np.column_stack([np.where(read_before | read_now, 0, -1), before.spans]).astype(np.int32)
    calibration = target.all_levels[level - 1].calibration
    return replace(
        task.answer(own, spans, labels, min(top_k, len(labels))),
        confidence=task.confidence(calibration, own, spans, labels) if calibration is not None else UNKNOWN,
        level=len(tenant.all_levels) + level,
    )
