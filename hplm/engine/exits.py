"""Exits: which texts of a batch are sure enough of their answers to leave, and whether exits keep what they have promised."""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from hplm.arrays import Array
from hplm.calibration import UNKNOWN, confidences
from hplm.engine.request import Guess, Text
from hplm.tasks.answers import TextAnswer
from hplm.tenants.snapshot import Tenant

log = logging.getLogger(__name__)
AUDITED = 100  # one of so many texts is audited
FEWEST, MOST = 60, 400  # audited texts of an exit before it is judged, and that are remembered
ERRORS = 3.0  # standard errors that the agreement may be below the promised one
EXITS = 4096  # that are watched at a time; of more, those that were audited longest ago are forgotten

Key = tuple[str, int, int, int, int]  # id, uid and version of the tenant, rung of the plan, its exit
CLOSED = 2.0  # a threshold: no answer is so sure


def confidences_of(texts: Sequence[Text], logits: Sequence[Array], number: int) -> Array:
    """Returns how sure each answer of an exit is; UNKNOWN where that cannot be told. `logits`: those of each text."""
    found = np.full(len(texts), UNKNOWN)
    alone: list[int] = []  # texts with one label
    for index, text in enumerate(texts):
        tenant = text.request.tenant
        task = tenant.task_object
        if task.read_each is not None and text.is_one_row:
            alone.append(index)
            continue
        rows = text.rows(logits[index], len(tenant.labels))
        if np.isfinite(rows).all():
            found[index] = task.confidence(text.exits.calibrations[number], rows, text.spans, tenant.labels)
    if alone:
        own = np.concatenate([logits[index] for index in alone])
        is_finite = np.isfinite(own).all(axis=1)
        labels = np.array([len(texts[index].request.tenant.labels) for index in alone])
        own[np.arange(own.shape[1]) >= labels[:, None]] = -np.inf
        with np.errstate(invalid="ignore"):
            sure = np.array(confidences([texts[index].exits.calibrations[number] for index in alone], own))
        found[alone] = np.where(is_finite, sure, UNKNOWN)
    return found


class ExitAudit:
    """Holds the exits of tenants to their promises.

    Some texts that could leave go on all the same, and show whether the full stack agrees with the exit. If too few do, the
    exit's threshold rises to where enough of them do; where there is no such threshold, the exit is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[Key, deque[tuple[float, bool]]] = OrderedDict()  # confidences, and whether they were right
        self._raised: dict[Key, float] = {}  # thresholds, where they are above those of the plan

    def __len__(self) -> int:
        """Returns how many exits have a raised threshold."""
        return len(self._raised)

    def leaving(self, texts: Sequence[Text], logits: Sequence[Array], number: int) -> Array:
        """Returns which texts leave at an exit, where their plans let them. Audited ones go on all the same.

        `logits` of a text are rows x the size of the largest head.
        """
        sure = confidences_of(texts, logits, number)
        leaves: Array = sure >= [_planned(text) for text in texts]
        chosen: list[int] = np.flatnonzero(leaves).tolist()
        for index in chosen:
            if is_audited(texts[index].addresses):
                texts[index].guess = Guess(float(sure[index]), np.array(logits[index]))
                leaves[index] = False
        if self._raised:
            leaves &= sure >= [self._raised.get(_key(text), 0.0) for text in texts]
        return leaves

    def keep(self, tenants: Iterable[Tenant]) -> None:
        """Forgets all versions but these."""
        if self._seen:
            kept = {(tenant.uid, tenant.version) for tenant in tenants}
            with self._lock:
                for key in [key for key in self._seen if key[1:3] not in kept]:
                    del self._seen[key]
                    self._raised.pop(key, None)

    def agreements(self) -> dict[tuple[str, int], float]:
        """Returns the share of audited texts on which the full stack agrees, by tenant and exit."""
        with self._lock:
            seen = {key: list(own) for key, own in self._seen.items()}
        shares: dict[tuple[str, int], list[bool]] = {}
        for (tenant, *_, exit), own in seen.items():
            shares.setdefault((tenant, exit), []).extend(agrees for _, agrees in own)
        return {key: sum(own) / len(own) for key, own in shares.items()}

    def audit(self, text: Text, guess: Guess, answer: TextAnswer) -> None:
        """Compares a guess with the full stack's answer."""
        tenant, task = text.request.tenant, text.request.tenant.task_object
        assert task.same is not None and text.plan is not None and text.plan.exit is not None  # as it could leave
        guessed = task.answer(text.rows(guess.logits, len(tenant.labels)), text.spans, tenant.labels, text.request.top_k)
        self.saw(text, guess.confidence, task.same(guessed, answer))

    def saw(self, text: Text, confidence: float, agrees: bool) -> None:
        key, plan = _key(text), text.plan
        assert plan is not None  # as it could leave
        with self._lock:
            own = self._seen.setdefault(key, deque(maxlen=MOST))
            self._seen.move_to_end(key)
            own.append((confidence, agrees))
            if len(self._seen) > EXITS:
                forgotten, _ = self._seen.popitem(last=False)
                self._raised.pop(forgotten, None)
            threshold = kept_threshold(own, plan.threshold, plan.agrees)
            before = _state(self._raised.get(key, plan.threshold), plan.threshold)
            if threshold > plan.threshold:
                self._raised[key] = threshold
            else:
                self._raised.pop(key, None)
        if (now := _state(threshold, plan.threshold)) != before:
            log.warning(
                "tenant %s: exit %d %s: of %d texts that could leave, %.1f %% have the full stack's answer, and %.1f %% were "
                "promised; `hplm tenant exits` with texts of today makes its exits again",
                text.request.tenant.id, plan.exit, now, len(own),
                100 * sum(right for _, right in own) / len(own), 100 * plan.agrees,
            )  # fmt: skip


def is_audited(addresses: Array) -> bool:
    """Whether a text with these rows is audited. A text always is, or never, so that it always has the same answer."""
    return zlib.crc32(addresses.tobytes()) % AUDITED == 0


def kept_threshold(seen: Sequence[tuple[float, bool]], threshold: float, promised: float) -> float:
    """Returns the least threshold, from the given one on, at which as many of the seen texts agree as was promised."""
    if len(seen) < FEWEST:
        return threshold
    surest_first = sorted(seen, key=lambda one: -one[0])
    sure = np.array([confidence for confidence, _ in surest_first])
    right = np.cumsum([agrees for _, agrees in surest_first])
    counts = np.arange(1, len(surest_first) + 1)
    shares = right / counts
    doubt = ERRORS * np.sqrt(np.maximum(promised * (1 - promised), 1 / MOST) / counts)
    may_end = np.append(sure[1:] < sure[:-1], True)  # texts that are equally sure leave together
    kept = np.flatnonzero((shares + doubt >= promised) & (counts >= FEWEST // 2) & may_end)
    if not len(kept):
        return CLOSED
    return threshold if kept[-1] == len(surest_first) - 1 else max(threshold, float(sure[kept[-1]]))


def _state(threshold: float, planned: float) -> str:
    if threshold >= CLOSED:
        return "is closed"
    return "has a higher threshold" if threshold > planned else "is as planned again"


def _planned(text: Text) -> float:
    return text.plan.threshold if text.plan is not None else CLOSED


def _key(text: Text) -> Key:
    assert text.plan is not None and text.plan.exit is not None  # as it could leave
    tenant = text.request.tenant
    return tenant.id, tenant.uid, tenant.version, text.request.rung, text.plan.exit
