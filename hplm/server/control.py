"""What the server room asks of its own running server, over HTTP."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping

_LIVE = {"READY", "LOADING", "UNLOADING"}


class Control:
    def __init__(self, host: str, http_port: int, metrics_port: int, server_id: str, admin: Mapping[str, str]) -> None:
        self._host, self._http_port, self._metrics_port = host, http_port, metrics_port
        self._server_id = server_id
        self._headers = {**admin, "Connection": "close"}

    def ready(self) -> bool:
        """Every model is loaded, and who answers is ours: until it listens, another server may have the port.

        Metrics come last: when they answer, none of the three services can fail to start any more.
        """
        try:
            return (
                self._ask(self._http_port, "GET", "/v2/health/ready") is not None
                and self._name() == self._server_id
                and self._ask(self._metrics_port, "GET", "/metrics") is not None
            )
        except (OSError, http.client.HTTPException):  # does not listen yet
            return False

    def drain(self, timeout: float) -> None:
        """Unload every model: each finishes what it has begun, ensembles to their last step, and takes nothing new.

        After SIGTERM Triton waits for idle keep-alive connections first, and then drops what is in flight.
        """
        deadline = time.monotonic() + timeout
        left: set[str] | None = None
        while left != set() and time.monotonic() < deadline:
            try:
                if left is None:
                    for model in self._live_models():
                        self._ask(self._http_port, "POST", f"/v2/repository/models/{model}/unload", "{}")
                left = self._live_models()
            except TimeoutError:  # a busy machine: ask again
                continue
            except (OSError, http.client.HTTPException):  # died: what is left for the caller is to kill it
                return
            time.sleep(0.05)

    def _name(self) -> str | None:
        answer = self._ask(self._http_port, "GET", "/v2")
        return json.loads(answer)["name"] if answer else None

    def _live_models(self) -> set[str]:
        index = json.loads(self._ask(self._http_port, "POST", "/v2/repository/index", "{}") or "[]")
        return {model["name"] for model in index if model.get("state") in _LIVE}

    def _ask(self, port: int, method: str, path: str, body: str | None = None) -> bytes | None:
        """The body of a good answer, None for any other."""
        connection = http.client.HTTPConnection(self._host, port, timeout=5)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read()
            return content if response.status == 200 else None
        finally:
            connection.close()
