"""Plain `tritonclient` and HTTP, as users without `hplm_client` ask: texts, gRPC streams, and Triton's generate endpoints."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

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


def tensor_of(library, name: str, *values, dims: int = 2):
    """Returns a column of texts or flags, or an array as it is given. With one of `dims`, as models without batches take it."""
    array = values[0]
    if not isinstance(array, np.ndarray):
        kind = bool if isinstance(array, bool) else object
        array = np.array([one.encode() if isinstance(one, str) else one for one in values], kind)
        array = array.reshape([len(values), 1][:dims])
    tensor = library.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


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

    def tensor(self, name: str, *values, dims: int = 2):
        return tensor_of(self._library, name, *values, dims=dims)

    def wanted(self, names):
        return [self._library.InferRequestedOutput(name) for name in names]

    def ask(
        self, texts, tenant=None, pairs=None, outputs=OUTPUTS, model="toy", headers=None, timeout=None, made=None, **parameters
    ):
        """`made`: the parameter `outputs`."""
        inputs = [self.tensor(name, *values) for name, values in (("TEXT", texts), ("TEXT_PAIR", pairs)) if values is not None]
        if tenant is not None:
            parameters["tenant"] = tenant
        if made is not None:
            parameters["outputs"] = made
        headers = dict(headers) if headers else None  # the HTTP client adds its own to them
        wanted = self.wanted(outputs)
        result = self.client.infer(model, inputs, outputs=wanted, timeout=timeout, parameters=parameters, headers=headers)
        return {name: result.as_numpy(name) for name in outputs}


def body_of(texts: Sequence[str] = ("a",), text: Mapping[str, Any] | None = None, **more: Any) -> bytes:
    """Returns the body of a request in JSON to an encoder. `text`: other fields of its tensor."""
    tensor = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": list(texts), **(text or {})}
    return json.dumps({"parameters": {"tenant": "acme"}, "inputs": [tensor], **more}).encode()


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


GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
RETURN = {f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")}


class Asked:
    """A request on a gRPC stream of its own, by a plain tritonclient."""

    def __init__(self, server, prompt, tenant="", sampling=GREEDY, headers=None, timeout=None, parameters=None, **more):
        """`more`: further inputs. A prompt or sampling that is None is not sent."""
        self.said = queue.Queue()
        self.client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        self.client.start_stream(lambda result, error: self.said.put(error or result), headers=headers)
        given = {} if prompt is None else {"text_input": prompt}
        given |= {} if sampling is None else {"sampling_parameters": json.dumps(sampling)}
        self.client.async_stream_infer(
            "chat",
            [tensor_of(tritonclient.grpc, name, value, dims=1) for name, value in {**given, **more}.items()],
            timeout=timeout,
            parameters=({"tenant": tenant} if tenant else {}) | (parameters or {}),
            enable_empty_final_response=True,
        )

    def piece(self):
        """Returns the next part of the answer, or None at its end. Raises its error."""
        result = self.said.get(timeout=PATIENCE)
        if isinstance(result, Exception):
            raise result
        response = result.get_response()
        self.is_last = response.parameters["triton_final_response"].bool_param
        return {output.name: result.as_numpy(output.name) for output in response.outputs}

    def pieces(self):
        found = [self.piece()]
        while not self.is_last:
            found.append(self.piece())
        self.client.stop_stream()
        assert self.said.empty()
        return found

    def error(self):
        """Returns the message of the error with which the answer ends."""
        with pytest.raises(InferenceServerException) as caught:
            self.pieces()
        self.client.stop_stream()
        assert self.said.empty(), "something was said behind the end"
        return caught.value.message()


def post(server, way, model="chat", **body):
    """Returns the status and the answer of `generate` or `generate_stream`, whose events come as a list."""
    status, answer = posted(server, (model, way), json.dumps(body))
    if way == "generate":
        return status, json.loads(answer)
    return status, [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]


def text_of(pieces):
    return "".join(piece["text_output"][0].decode() for piece in pieces)


def ids_of(pieces):
    tokens = [token for piece in pieces for token in json.loads(piece["logprobs"][0])]
    return [int(id) for token in tokens for id in token]
