"""Clients that ask a server without a pause while something happens to it."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tritonclient.utils import InferenceServerException

from tests.server.stock import Stock
from tests.support.wait import PATIENCE, eventually


class Asking:
    """Keeps all answers and errors, in their order."""

    def __init__(
        self,
        stock_of: Callable[[str], Stock],
        tenants: Sequence[str],
        texts: Sequence[str],
        clients: int = 4,
        model: str = "toy",
    ) -> None:
        """`stock_of` returns what asks over a protocol."""
        self._model = model
        self.answers: list[tuple[str, str, Any]] = []
        self._stock_of, self._tenants, self._texts = stock_of, tenants, texts
        self._end = threading.Event()
        self._pool, self._clients = ThreadPoolExecutor(clients), range(clients)
        self._running: list[Future[None]] = []

    def __enter__(self) -> Asking:
        self._running += [self._pool.submit(self._ask, number) for number in self._clients]
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._end.set()
        for one in self._running:
            one.result(PATIENCE)

    def failures(self) -> list[Exception]:
        return [answer for _, _, answer in self.answers if isinstance(answer, Exception)]

    def wait_for(self, seen: Callable[[str, str, Any], bool], times: int = 1) -> None:
        """Waits until so many later answers fulfil a condition."""
        start = len(self.answers)
        eventually(lambda: sum(seen(*answer) for answer in self.answers[start:]) >= times)

    def _ask(self, number: int) -> None:
        rng, stock = random.Random(number), self._stock_of(("http", "grpc")[number % 2])
        while not self._end.is_set():
            tenant, text = rng.choice(self._tenants), rng.choice(self._texts)
            try:
                answer = stock.ask([text], tenant, outputs=("LOGITS", "VERSION"), model=self._model)
            except (InferenceServerException, OSError, http.client.HTTPException) as error:
                answer = error
            self.answers.append((tenant, text, answer))
