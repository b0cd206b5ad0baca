"""Clients that load the model of each request through Triton's model control, as operators do with more models than memory.

At most `budget` models are loaded, each in a process of its own. A new model replaces the least recently used one that has no
request.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hplm.errors import HplmError
from loadtest.generator import Load
from loadtest.load import Report

LOADS_AT_ONCE = 2
LOAD_S = 600.0  # seconds that a load may take


@dataclass
class Model:
    ready: bool = False
    users: int = 0


class ModelControl:
    """Decides which models are loaded. It loads and unloads without holding a lock, a few models at a time."""

    def __init__(self, url: str, admin: tuple[str, str], budget: int) -> None:
        self.budget, self.loads = budget, 0
        self._url, self._admin = url, dict([admin])
        self._models: OrderedDict[str, Model] = OrderedDict()  # loaded or loading, the least recently used first
        self._change = threading.Condition()
        self._loading = threading.Semaphore(LOADS_AT_ONCE)

    def load(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(LOADS_AT_ONCE) as pool:
            list(pool.map(self._loaded, names))

    def _loaded(self, name: str) -> None:
        with self.use(name):
            pass

    @contextmanager
    def use(self, name: str, until: float = float("inf")) -> Iterator[None]:
        """Loads the model and keeps it. Raises TimeoutError if that would begin after `until`, on the monotonic clock."""
        model = self._enter(name, until)
        try:
            yield
        finally:
            with self._change:
                model.users -= 1
                self._change.notify_all()

    def _enter(self, name: str, until: float) -> Model:
        with self._change:
            while True:
                model = self._models.get(name)
                if model is not None and model.ready:
                    model.users += 1
                    self._models.move_to_end(name)
                    return model
                if model is None:
                    full = len(self._models) >= self.budget
                    idle = (other for other, held in self._models.items() if held.ready and not held.users)
                    evicted = next(idle, None) if full else None
                    if evicted is not None:
                        del self._models[evicted]
                    if not full or evicted is not None:
                        model = self._models[name] = Model(users=1)
                        break
                if not self._change.wait(min(LOAD_S, until - time.monotonic())):
                    raise TimeoutError(f"model {name!r} was not loaded in time")
        try:
            with self._loading:
                if evicted is not None:
                    self._control(evicted, "unload")
                self._control(name, "load")
        except BaseException:
            with self._change:
                del self._models[name]
                self._change.notify_all()
            raise
        with self._change:
            model.ready = True
            self.loads += 1
            self._change.notify_all()
        return model

    def _control(self, name: str, what: str) -> None:
        connection = http.client.HTTPConnection(self._url, timeout=LOAD_S)
        try:
            connection.request("POST", f"/v2/repository/models/{name}/{what}", "{}", {**self._admin, "Connection": "close"})
            response = connection.getresponse()
            answer = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if response.status != 200:
            raise HplmError(f"Triton cannot {what} model {name!r}: {answer}")


class Clients:
    """Sends the requests of a load, each when its model is loaded. `models`: the model of each request."""

    def __init__(self, control: ModelControl, load: Load, models: Sequence[str]) -> None:
        self._control, self._load, self._models = control, load, models
        self._due = load.due
        self._planned = load.count if self._due is None else len(self._due)
        self._numbers = iter(range(self._planned))  # shared by all clients: each number is taken once
        self._answers: list[tuple[float, ...]] = []  # number, status, latency, when it came, and the delay before sending
        self._failed: list[str] = []

    def run(self) -> Report:
        cpu, self._begin = time.process_time(), time.monotonic()
        self._patient_until = self._begin + self._load.seconds + self._load.patience
        self._until = self._patient_until if self._due is not None else self._begin + self._load.seconds
        with ThreadPoolExecutor(self._load.connections) as pool:
            for client in [pool.submit(self._client) for _ in range(self._load.connections)]:
                client.result()
        errors = Counter(self._failed)
        if self._due is not None and (unsent := self._planned - len(self._answers) - len(self._failed)):
            errors["unsent"] = unsent
        number, status, seconds, came, lag = np.array(self._answers).reshape(-1, 5).T
        wall, lag = max(came, default=self._begin) - self._begin, 0.0 if self._due is None else max(lag, default=0.0)
        return Report(wall, time.process_time() - cpu, number.astype(int), status.astype(int), seconds, lag, errors)

    def _client(self) -> None:
        for number in self._numbers:
            due = time.monotonic() if self._due is None else self._begin + float(self._due[number])
            time.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            if sent >= self._until:
                return
            try:
                status = self._ask(number % len(self._load.requests))
            except HplmError:  # a model cannot be loaded: no other client sends a request
                self._until = 0.0
                raise
            except (OSError, http.client.HTTPException) as error:
                self._failed.append(type(error).__name__)
                continue
            came = time.monotonic()
            self._answers.append((number, status, came - due, came, sent - due))

    def _ask(self, number: int) -> int:
        """Returns the HTTP status of the answer."""
        with self._control.use(self._models[number], self._patient_until):
            left = max(0.001, min(self._load.patience, self._patient_until - time.monotonic()))
            host, _, port = self._load.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=left) as connection:
                connection.sendall(self._load.requests[number])
                response = http.client.HTTPResponse(connection, method="POST")
                response.begin()
                response.read()
                return response.status
