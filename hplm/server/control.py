"""HTTP calls to our own running server: whether it is ready, and unloading its models."""

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
        """Whether every model is loaded and the answering server is ours. Another server may still have the port.

        Metrics are asked last: once they answer, none of the three services can fail to start.
        """
        try:
            return (
                self._ask(self._http_port, "GET", "/v2/health/ready") is not None
                and self._name() == self._server_id
                and self._ask(self._metrics_port, "GET", "/metrics") is not None
            )
        except (OSError, http.client.HTTPException):  # it does not listen yet
            return False

    def drain(self, timeout: float) -> None:
        """Unloads every model. Each finishes its requests, ensembles with all steps, and takes no new ones.

        SIGTERM alone is not enough: Triton first waits for idle keep-alive connections, then drops requests in flight.
        """
        deadline = time.monotonic() + timeout
        left: set[str] | None = None
        while left != set() and time.monotonic() < deadline:
            try:
                if left is None:
                    for model in self._live_models():
                        self._ask(self._http_port, "POST", f"/v2/repository/models/{model}/unload", "{}")
                left = self._live_models()
            except TimeoutError:  # the machine is busy
                continue
            except (OSError, http.client.HTTPException):  # the server died; the caller kills what is left
                return
            time.sleep(0.05)

    def _name(self) -> str | None:
        answer = self._ask(self._http_port, "GET", "/v2")
        return json.loads(answer)["name"] if answer else None

    def _live_models(self) -> set[str]:
        index = json.loads(self._ask(self._http_port, "POST", "/v2/repository/index", "{}") or "[]")
        return {model["name"] for model in index if model.get("state") in _LIVE}

    def _ask(self, port: int, method: str, path: str, body: str | None = None) -> bytes | None:
        """Returns the body of an answer with status 200, else None."""
        connection = http.client.HTTPConnection(self._host, port, timeout=5)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read()
            return content if response.status == 200 else None
        finally:
            connection.close()
