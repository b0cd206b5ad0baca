"""One thread that answers waiting requests in rounds. A round takes all requests that came during the last round.

The model has its own queue, as hPLMs have. While clients wait for answers, Triton's batcher sometimes sleeps for up to half a
second, which would make the baseline look worse than it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hplm.errors import Draining, HplmError, Internal, QueueFull
from hplm.tasks import TextAnswer
from research.baselines.models import Question, WholeModels

Respond = Callable[["list[TextAnswer] | HplmError"], None]


class Worker:
    def __init__(self, models: WholeModels, most: int) -> None:
        self._models = models
        self._most = most
        self._waiting: dict[Question, Respond] = {}
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)
        self._thread.start()

    def submit(self, question: Question, respond: Respond) -> None:
        """Takes the question, which is then answered once, or raises."""
        with self._change:
            if self._closed:
                raise Draining("the model is being unloaded: send the request again")
            if len(self._waiting) >= self._most:
                raise QueueFull(f"{self._most} requests are waiting: retry after 1 s")
            self._waiting[question] = respond
            self._change.notify()

    def close(self) -> None:
        """Refuses new questions, and waits until those it has taken are answered."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    if self._closed:
                        return
                    self._change.wait()
                waiting, self._waiting = self._waiting, {}
            try:
                for question, result in self._models.answer(list(waiting)):
                    waiting.pop(question)(result)
            except Exception as error:  # every waiting request must get an answer
                for respond in waiting.values():
                    respond(Internal(f"the batch failed: {error}"))
