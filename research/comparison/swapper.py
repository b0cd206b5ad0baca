"""A gateway before Triton that loads the model of each request, as operators do today if they have more models than memory.

At most `budget` models are loaded. A new model replaces the least recently used one that has no request. Triton's model control
loads and unloads them, each in a process of its own.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hplm.errors import HplmError

LOADS_AT_ONCE = 2
PATIENCE = 600.0  # seconds that a load may take
PASSED_ON = ("Content-Type", "Inference-Header-Content-Length", "Authorization")


@dataclass
class Model:
    ready: bool = False
    users: int = 0


class Residency:
    """Decides which models are loaded. Calls `load` and `unload` without holding a lock, a few at a time."""

    def __init__(self, budget: int, load: Callable[[str], None], unload: Callable[[str], None]) -> None:
        self._budget = budget
        self._load, self._unload = load, unload
        self._models: OrderedDict[str, Model] = OrderedDict()  # loaded or loading, the least recently used first
        self._change = threading.Condition()
        self._loading = threading.Semaphore(LOADS_AT_ONCE)
        self.loads = 0

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        model = self._enter(name)
        try:
            yield
        finally:
            with self._change:
                model.users -= 1
                self._change.notify_all()

    def _enter(self, name: str) -> Model:
        with self._change:
            while True:
                model = self._models.get(name)
                if model is not None and model.ready:
                    model.users += 1
                    self._models.move_to_end(name)
                    return model
                if model is None:
                    full = len(self._models) >= self._budget
                    idle = (other for other, held in self._models.items() if held.ready and not held.users)
                    evicted = next(idle, None) if full else None
                    if evicted is not None:
                        del self._models[evicted]
                    if not full or evicted is not None:
                        model = self._models[name] = Model(users=1)
                        break
                self._change.wait()
        try:
            with self._loading:
                if evicted is not None:
                    self._unload(evicted)
                self._load(name)
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


class Swapper:
    """The gateway. It forwards `POST /v2/models/NAME/infer` when NAME is loaded."""

    def __init__(self, triton: str, admin: tuple[str, str], budget: int) -> None:
        self._triton = triton
        self._admin = dict([admin])
        self.residency = Residency(budget, lambda name: self._control(name, "load"), lambda name: self._control(name, "unload"))
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Swapper:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _control(self, name: str, what: str) -> None:
        connection = http.client.HTTPConnection(self._triton, timeout=PATIENCE)
        try:
            connection.request("POST", f"/v2/repository/models/{name}/{what}", "{}", {**self._admin, "Connection": "close"})
            response = connection.getresponse()
            said = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if response.status != 200:
            raise HplmError(f"Triton cannot {what} model {name!r}: {said}")

    def forward(self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> tuple:
        name = path.split("/")[3]
        with self.residency.use(name):
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = response.read()
        return response.status, {field: value for field, value in response.getheaders() if field in PASSED_ON}, content

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._triton, timeout=PATIENCE)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # closing does not wait for requests that still wait for a load

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores the error: either the client has gone, or it has got the error as its answer."""


def _handler(swapper: Swapper) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # head and body in one packet

        def setup(self) -> None:
            super().setup()
            self.triton = swapper.connect()

        def finish(self) -> None:
            self.triton.close()
            with suppress(OSError):
                super().finish()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {field: self.headers[field] for field in PASSED_ON if field in self.headers}
            try:
                status, fields, content = swapper.forward(self.triton, self.path, body, headers)
            except (HplmError, OSError, http.client.HTTPException) as error:
                status, fields, content = 503, {}, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
                self.triton.close()
            self.send_response(status)
            for field, value in {**fields, "Content-Length": str(len(content))}.items():
                self.send_header(field, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: a line for each request would take as long as the request."""

    return Handler
