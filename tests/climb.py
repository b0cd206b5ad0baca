"""A text that climbs from level to level as the paper says, slow and obvious: served answers must equal its answers."""

from __future__ import annotations

import math

import numpy as np

from hplm.levels.calibration import UNKNOWN
from hplm.levels.dispatch import draw
from hplm.tasks import TASKS
from tests.confidence import softmax

CLOSE = 2e-3  # to the probability at which a text goes on: rounding may decide


class Climb:
    """A text at the steps of a plan, in plain Python. It stops before a step in another backbone, with `words_left`."""

    def __init__(self, reference, tenant_id, text, pair, plan, lookup):
        view = reference.backbone.view
        tenant = view.snapshot.find(tenant_id)
        found = lookup.resolve(view, tenant, [text], pair and [pair])
        addresses, words = found.addresses, found.words
        task, labels = tenant.task_object, tenant.labels
        kept, before, self.is_close, self.pruned, self.words_left = None, None, False, 0, None
        for number, step in enumerate(plan.steps):
            if step.level == len(tenant.all_levels):
                self.words_left = None if kept is None else {int(words[i]) for i in kept if words[i] >= 0}
                self.goes_across = True
                return
            self.goes_across = False
            said, received = reference.at_level(text, tenant_id, step.level, kept, pair)
            logits = np.array([said[row].tolist() if row >= 0 else [0.0] * len(labels) for row in found.spans[:, 0]])
            if before is not None:
                logits = joined(tenant.task, before, logits, step.weight, found.spans)
            self.level, self.answer = step.level + 1, task.answer(logits, found.spans, labels, 0, pair or "")
            calibration = tenant.all_levels[step.level].calibration
            self.confidence = task.confidence(calibration, logits, found.spans, labels) if calibration else UNKNOWN
            if number == len(plan.steps) - 1:
                return
            goes, self.is_close = goes_on(self.confidence, step, draw(addresses, tenant.version, number), self.is_close)
            if not goes:
                return
            before = logits
            if step.alpha and words is not None:
                least = step.alpha * float(received.mean())
                self.is_close |= bool(((received - least).abs() < CLOSE * least).any())
                stay = {word for word, own in zip(words.tolist(), received.tolist(), strict=True) if own > least}
                kept = [i for i, word in enumerate(words.tolist()) if word < 0 or word in stay]
                self.pruned = len(set(words.tolist())) - len({words[i] for i in kept})


def goes_on(sure, step, drawn, was_close):
    """Eq. 4, and whether the decision is close."""
    if sure <= step.cutoff:
        return True, was_close or abs(sure - step.cutoff) < CLOSE
    probability = 1 / (1 + math.exp(step.slope * ((sure - step.cutoff) / (1 - step.cutoff) - 0.5)))
    return drawn < probability, was_close or abs(sure - step.cutoff) < CLOSE or abs(drawn - probability) < CLOSE


def joined(task, before, now, weight, spans):
    """Eq. 6, for the tasks whose rows are easily joined; the others are tested where they are defined."""
    if weight == 1:
        return now
    if task in ("classify", "tag"):
        return np.log(weight * softmax(now) + (1 - weight) * softmax(before))
    if task == "multilabel":
        holds = weight / (1 + np.exp(-now)) + (1 - weight) / (1 + np.exp(-before))
        return np.log(holds / (1 - holds))
    if task == "regress":
        return weight * now + (1 - weight) * before
    combined = TASKS[task].combined
    assert combined is not None
    return combined(before, now, weight, spans)
