"""Clients that ask without a pause, and what became of each of their requests.

Every answer is compared with the answer that the same server gave to the same question before anything was broken.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hplm.arrays import Array
from hplm.errors import HplmError, error_in

OK, REFUSED, FAILED, UNANSWERED, WRONG = "ok", "refused", "failed", "unanswered", "wrong"
OUTCOMES = (OK, REFUSED, FAILED, UNANSWERED, WRONG)
PATIENCE = 30.0  # seconds; longer than a fault and the 20 seconds after it in which every request must end
CLOSE = 0.03  # of the range of a tenant's logits: what bf16 may differ by among other neighbours
PAUSE = 0.25  # seconds before a client that was not answered asks again


@dataclass(frozen=True)
class Question:
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
class Answer:
    outcome: str  # OK: with logits; they are not yet compared
    said: str = ""
    logits: Array | None = None

    def agrees_with(self, expected: Array) -> bool:
        near = CLOSE * float(np.ptp(expected)) + 1e-3
        return self.logits is not None and self.logits.shape == expected.shape and np.abs(self.logits - expected).max() <= near


class Asker:
    """One connection to a model. After a failure it connects anew."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._path = address, f"/v2/models/{model}/infer"
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, question: Question) -> Answer:
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
            self._connection.request("POST", self._path, question.body(), question.headers)
            response = self._connection.getresponse()
            status, content = response.status, response.read()
        except TimeoutError:
            self.close()
            return Answer(UNANSWERED, f"no answer within {PATIENCE:g} s")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(FAILED, type(error).__name__)
        if status == 200:
            return Answer(OK, logits=np.array(json.loads(content)["outputs"][0]["data"], dtype=np.float64))
        said = content.decode(errors="replace")
        known = error_in(said)
        return Answer(REFUSED, known.word) if known else Answer(FAILED, f"{status} {said[:200]}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def expected_answers(address: str, model: str, questions: Sequence[Question]) -> dict[Question, Array]:
    """Returns what the unharmed server answers."""
    asker = Asker(address, model)
    expected: dict[Question, Array] = {}
    for question in questions:
        answer = asker.ask(question)
        if answer.logits is None:
            raise HplmError(f"tenant {question.tenant!r} is not answered before any fault ({answer.said}): use others")
        expected[question] = answer.logits
    asker.close()
    return expected


class History:
    """Counts the outcomes of many clients' requests. Each client asks its next question when it has an answer."""

    def __init__(self, address: str, models: Sequence[str], expected: Mapping[Question, Array], clients: int) -> None:
        self._expected = expected
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._ending = threading.Event()
        self.in_flight = 0
        self.last_failure = 0.0  # on the monotonic clock
        askers = [Asker(address, models[number % len(models)]) for number in range(clients)]
        self._threads = [threading.Thread(target=self._ask_on, args=one, daemon=True) for one in enumerate(askers)]
        for thread in self._threads:
            thread.start()

    def counts(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()

    def reasons(self) -> dict[str, int]:
        """Returns why requests were not answered."""
        with self._lock:
            return dict(self._said.most_common())

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int, asker: Asker) -> None:
        questions = list(self._expected)
        for question in itertools.islice(itertools.cycle(questions), number % len(questions), None):
            if self._ending.is_set():
                break
            with self._lock:
                self.in_flight += 1
            answer = asker.ask(question)
            outcome = answer.outcome
            if outcome == OK and not answer.agrees_with(self._expected[question]):
                outcome = WRONG
            with self._lock:
                self.in_flight -= 1
                self._counts[outcome] += 1
                if outcome != OK:
                    self.last_failure = time.monotonic()
                    self._said[f"{outcome}: {answer.said or question.tenant}"] += 1
            if outcome != OK:
                time.sleep(PAUSE)  # else refused clients would ask thousands of times a second
        asker.close()
