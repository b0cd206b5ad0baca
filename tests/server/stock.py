"""Plain `tritonclient`, as a user without `hplm_client` uses it."""

from __future__ import annotations

import threading

import numpy as np
import tritonclient.grpc
import tritonclient.http

from hplm.server import TritonServer

LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}
STATUS = {
    "http": {400: "400", 404: "404", 503: "503"},
    "grpc": {400: "StatusCode.INVALID_ARGUMENT", 404: "StatusCode.NOT_FOUND", 503: "StatusCode.UNAVAILABLE"},
}


class Stock:
    def __init__(self, server: TritonServer, protocol: str) -> None:
        self.protocol = protocol
        self._library = LIBRARIES[protocol]
        self._url = server.http_url if protocol == "http" else server.grpc_url
        self._of_thread = threading.local()  # the HTTP client belongs to the thread that made it

    @property
    def client(self):
        if not hasattr(self._of_thread, "client"):
            self._of_thread.client = self._library.InferenceServerClient(self._url)
        return self._of_thread.client

    def tensor(self, name: str, values: np.ndarray, datatype: str = "BYTES"):
        tensor = self._library.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        return tensor

    def ask(
        self,
        texts,
        tenant=None,
        pairs=None,
        outputs=("LABEL", "SCORE", "LOGITS", "SPAN", "VERSION"),
        model="toy",
        headers=None,
        **parameters,
    ):
        inputs = [
            self.tensor(name, np.array([[v if isinstance(v, bytes) else v.encode()] for v in values], dtype=object))
            for name, values in (("TEXT", texts), ("TEXT_PAIR", pairs))
            if values is not None
        ]
        wanted = [self._library.InferRequestedOutput(name) for name in outputs]
        timeout = parameters.pop("timeout", None)
        if tenant is not None:
            parameters["tenant"] = tenant
        headers = dict(headers) if headers else None  # the HTTP client adds its own to them
        result = self.client.infer(model, inputs, outputs=wanted, timeout=timeout, parameters=parameters, headers=headers)
        return {name: result.as_numpy(name) for name in outputs}
