"""Plain `tritonclient`, as a user without `hplm_client` uses it."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from hplm.server import TritonServer
from tests.support.message import mentioning
from tests.support.wait import PATIENCE

LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}
STATUS = {
    "http": {400: "400", 404: "404", 503: "503"},
    "grpc": {400: "StatusCode.INVALID_ARGUMENT", 404: "StatusCode.NOT_FOUND", 503: "StatusCode.UNAVAILABLE"},
}


OUTPUTS = ("LABEL", "SCORE", "LOGITS", "SPAN", "VERSION")


def refused(word: str, *named: object):
    """Checks that a request in the block is refused by an error with this word, which names these things."""
    return pytest.raises(InferenceServerException, match=mentioning(f"[{word}]", *named))


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

    def wanted(self, names):
        return [self._library.InferRequestedOutput(name) for name in names]

    def ask(self, texts, tenant=None, pairs=None, outputs=OUTPUTS, model="toy", headers=None, timeout=None, **parameters):
        inputs = [
            self.tensor(name, np.array([[v if isinstance(v, bytes) else v.encode()] for v in values], dtype=object))
            for name, values in (("TEXT", texts), ("TEXT_PAIR", pairs))
            if values is not None
        ]
        if tenant is not None:
            parameters["tenant"] = tenant
        headers = dict(headers) if headers else None  # the HTTP client adds its own to them
        wanted = self.wanted(outputs)
        result = self.client.infer(model, inputs, outputs=wanted, timeout=timeout, parameters=parameters, headers=headers)
        return {name: result.as_numpy(name) for name in outputs}


def posted(server: TritonServer, way: tuple[str, str], body: bytes | str, **headers: str | bytes) -> tuple[int, str]:
    """Sends a plain HTTP request to a model. Returns the status and the text of its answer. `way`: the model, and `infer`."""
    connection = http.client.HTTPConnection(server.http_url, timeout=PATIENCE)
    with closing(connection):
        connection.request("POST", "/v2/models/{}/{}".format(*way), body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")


def names_in(result):
    """Returns the names of the outputs in an answer of either library."""
    answer = result.get_response()
    outputs = answer["outputs"] if isinstance(answer, dict) else answer.outputs
    return sorted(one["name"] if isinstance(one, dict) else one.name for one in outputs)
