"""Clients that ask without a pause while something fails, and what became of each of their requests."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import Self

from hplm.arrays import Array
from hplm.errors import MISFITS, HplmError, error_in

OK, REFUSED, FAILED, UNANSWERED, WRONG = "ok", "refused", "failed", "unanswered", "wrong"
OUTCOMES = (OK, REFUSED, FAILED, UNANSWERED, WRONG)
PATIENCE = 30.0  # seconds; longer than a fault and the 20 seconds after it in which every request must end
CLOSE = 0.03  # of the range of a tenant's logits: what bf16 may differ by among other neighbours


@dataclass(frozen=True)
class TenantText:
    tenant: str
    text: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    def body(self) -> bytes:
        text = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [self.text]}
        asked = {"inputs": [text], "outputs": [{"name": "LOGITS"}], "parameters": {"tenant": self.tenant}}
        return json.dumps(asked).encode()


@dataclass(frozen=True)
class Observation:
    outcome: str  # OK: with logits; they are not yet compared
    reason: str = ""
    logits: Array | None = None

    def agrees_with(self, expected: Array) -> bool:
        near = CLOSE * float(np.ptp(expected)) + 1e-3
        return self.logits is not None and self.logits.shape == expected.shape and np.abs(self.logits - expected).max() <= near


class Asker:
    """One connection to a model. After a failure it is closed, and the next question opens it again."""

    def __init__(self, address: str, model: str) -> None:
        self._connection, self._path = http.client.HTTPConnection(address, timeout=PATIENCE), f"/v2/models/{model}/infer"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, question: TenantText) -> Observation:
        try:
            self._connection.request("POST", self._path, question.body(), question.headers)
            response = self._connection.getresponse()
            status, said = response.status, response.read().decode(errors="replace")
        except TimeoutError:
            self.close()
            return Observation(UNANSWERED, f"no answer within {PATIENCE:g} s")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Observation(FAILED, type(error).__name__)
        if status == 200:
            try:
                return Observation(OK, logits=np.array(json.loads(said)["outputs"][0]["data"], dtype=np.float64))
            except MISFITS:
                return Observation(WRONG, f"no logits: {said[:200]}")
        known = error_in(said)
        return Observation(REFUSED, known.word) if known else Observation(FAILED, f"{status} {said[:200]}")

    def close(self) -> None:
        self._connection.close()


def expected_answers(address: str, model: str, questions: Sequence[TenantText]) -> dict[TenantText, Array]:
    """Returns what the unharmed server answers."""
    expected: dict[TenantText, Array] = {}
    with Asker(address, model) as asker:
        for question in questions:
            answer = asker.ask(question)
            if answer.logits is None:
                raise HplmError(f"tenant {question.tenant!r} is not answered before any fault ({answer.reason}): use others")
            expected[question] = answer.logits
    return expected


class Heard(NamedTuple):
    """A request: when it was sent and when it ended, its outcome, and why it is not OK."""

    sent: float  # on the monotonic clock
    ended: float
    outcome: str
    why: str


class History:
    """Clients that ask without a pause, each its next question when it has an answer, and what they have heard."""

    pauses = 0.0, 0.25  # seconds after an answer, and after none: refused clients would ask thousands of times a second

    def __init__(self, askers: Sequence[Asker], expected: Mapping[TenantText, Array | None]) -> None:
        """Starts the clients. Each asks the questions in turn, and begins with another one.

        `expected`: the answer that each question must get; None: any.
        """
        self.heard: list[list[Heard]] = [[] for _ in askers]  # of each client
        self._expected, self._ending = expected, threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=one, daemon=True) for one in enumerate(askers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def counts(self) -> Counter[str]:
        return Counter(one.outcome for own in self.heard for one in own)

    def reasons(self) -> dict[str, int]:
        """Returns why requests were not answered."""
        said = (f"{one.outcome}: {one.why}" for own in self.heard for one in own if one.outcome != OK)
        return dict(Counter(said).most_common())

    @property
    def last_failure(self) -> float:
        """When the last request ended that was not OK; 0: none."""
        return max((one.ended for own in self.heard for one in own if one.outcome != OK), default=0.0)

    def _ask_on(self, client: int, asker: Asker) -> None:
        turns = itertools.cycle(self._expected.items())
        with asker:
            for question, expected in itertools.islice(turns, client % len(self._expected), None):
                asked = time.monotonic()
                answer, ended = asker.ask(question), time.monotonic()
                outcome, why = answer.outcome, answer.reason
                if outcome == OK and expected is not None and not answer.agrees_with(expected):
                    outcome, why = WRONG, question.tenant
                self.heard[client].append(Heard(asked, ended, outcome, why))
                if self._ending.wait(self.pauses[outcome != OK]):
                    break
