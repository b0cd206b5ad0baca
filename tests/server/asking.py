"""Clients that ask a server without a pause while something happens to it."""

import http.client
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tritonclient.utils import InferenceServerException

from tests.support.wait import PATIENCE, eventually

CLIENTS = 4


class Asking:
    """Keeps all answers and errors, in their order. `stock_of` returns what asks over a protocol."""

    def __init__(self, stock_of, tenants, texts, model="toy"):
        self.answers = []
        self._stock_of, self._tenants, self._texts, self._model = stock_of, tenants, texts, model
        self._end, self._pool = threading.Event(), ThreadPoolExecutor(CLIENTS)

    def __enter__(self):
        self._running = [self._pool.submit(self._ask, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_):
        self._end.set()
        for one in self._running:
            one.result(PATIENCE)

    def failures(self):
        return [answer for _, _, answer in self.answers if isinstance(answer, Exception)]

    def wait_for(self, seen, times=1):
        """Waits until so many later answers fulfil a condition on their tenant, text and outputs."""
        start = len(self.answers)
        eventually(lambda: sum(seen(*answer) for answer in self.answers[start:]) >= times)

    def _ask(self, number):
        rng, stock = random.Random(number), self._stock_of(("http", "grpc")[number % 2])
        while not self._end.is_set():
            tenant, text = rng.choice(self._tenants), rng.choice(self._texts)
            try:
                answer = stock.ask([text], tenant, outputs=("LOGITS", "VERSION"), model=self._model)
            except (InferenceServerException, OSError, http.client.HTTPException) as error:
                answer = error
            self.answers.append((tenant, text, answer))
