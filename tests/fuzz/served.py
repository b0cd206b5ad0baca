"""The server that is fuzzed, and what its answers must be."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import BY_WORD
from hplm.server import TritonServer, process_group
from testing.toy import WORDS, make_toy
from tests.fuzz.mutations import dumped
from tests.fuzz.target import LONGEST_MESSAGE, PATIENCE, Found

TOGETHER = 20  # cases between two good requests
KEY = "a secret of the operator"
# Triton itself answers these with 500. They name nothing of ours.
OF_TRITON = (
    "failed to parse the request JSON buffer",
    "Unable to parse",
    "failed to get request params",
    "was not found in the JSON",
    "attempt to get members",
    "attempt to access JSON",
    "in ensemble 'toy', [request id: <id_unknown>] unexpected deadlock",  # no TEXT; the alias says what is missing
)
WORD = re.compile(rf"\[({'|'.join(BY_WORD)})\]")


class Served:
    """A server with the toy, its alias and its admin model. One process has one."""

    def __init__(self, folder: Path) -> None:
        os.environ["HPLM_ADMIN_KEY"] = KEY
        toy = make_toy(folder / "toy")
        export(toy.store, folder / "repository", ServingOptions(dtype="fp32", slots=4, batch_tokens=256, admin=True))
        self.server = TritonServer(folder / "repository", state=folder / "state")
        self.server.start()
        host, port = self.server.http_url.rsplit(":", 1)
        self._address = host, int(port)
        self._http = http.client.HTTPConnection(*self._address, timeout=PATIENCE)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(self.server.grpc_url))
        self._usual = {model: self._ask(model) for model in ("toy", "hplm")}
        self._recent: list[object] = []  # cases since the last good request

    def close(self) -> None:
        """Kills the server, because Triton takes seconds to end."""
        process_group.kill(self.server.pid)
        self.server.stop()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Sends a request, and checks its answer and the server."""
        try:
            status, answer = self._post(path, body, headers)
        except (ConnectionError, http.client.HTTPException) as error:  # the connection may be closed on bad HTTP
            status, answer = 400, repr(error).encode()
            self._http.close()
        except TimeoutError:
            self._http.close()
            raise Found(f"no answer after {PATIENCE} s") from None
        if status != 200:
            self._expect_refusal(status in (400, 404, 413, 503), str(status), answer, len(path) + len(body) + len(str(headers)))
        self._checked((path, body, headers))

    def infer(self, request: service_pb2.ModelInferRequest, metadata: list[tuple[str, str]]) -> None:
        """Sends a request over gRPC, and checks its answer and the server."""
        try:
            self._stub.ModelInfer(request, timeout=PATIENCE, metadata=metadata)
        except grpc.RpcError as error:
            code = error.code()
            right = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
            message = (error.details() or "").encode("utf-8", "surrogateescape")
            self._expect_refusal(code in right, code.name, message, request.ByteSize())
        self._checked((request, metadata))

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        self._http.request("POST", path, body, headers)
        response = self._http.getresponse()
        return response.status, response.read()

    def _ask(self, model: str) -> Any:
        body = dumped(good("acme", [WORDS[0], " ".join(WORDS[:9])]))
        status, answer = self._post(f"/v2/models/{model}/infer", body, {})
        found = json.loads(answer)
        return status, found.get("outputs", found)

    def expect_usual(self) -> None:
        """Sends good requests."""
        for model, usual in self._usual.items():
            try:
                answer = self._ask(model)
            except (OSError, http.client.HTTPException) as error:
                self._http.close()
                raise Found(f"a good request to {model} fails: {error!r}, after {self._recent}") from error
            if answer != usual:
                raise Found(f"a good request to {model} is answered with {str(answer)[:300]}, after {self._recent}")
        self._recent.clear()

    def _checked(self, case: object) -> None:
        self._recent.append(case)
        if len(self._recent) == TOGETHER:
            self.expect_usual()

    @staticmethod
    def _expect_refusal(right: bool, code: str, answer: bytes, sent: int) -> None:
        """`sent`: the bytes of the request. Triton's own messages may quote them; ours begin with a word in brackets."""
        message = answer.decode("utf-8", "replace")
        ours = WORD.search(message)
        if not ours and any(known in message for known in OF_TRITON):
            return
        if not right or (ours and ours[1] in ("broken", "internal")):
            raise Found(f"{code}: {message[:300]!r}")
        if len(message[ours.start() if ours else 0 :]) > LONGEST_MESSAGE + (0 if ours else sent):
            raise Found(f"{code} with {len(answer):,} bytes: {message[:100]!r}")


@cache
def served_by_all() -> Served:
    """Returns the server that all targets of a process share."""
    folder = tempfile.TemporaryDirectory(prefix="hplm-fuzz-served-")
    atexit.register(folder.cleanup)
    served = Served(Path(folder.name))
    atexit.register(served.close)
    return served


def good(tenant: str, texts: list[str], **parameters: Any) -> dict[str, Any]:
    """Returns a right request as JSON."""
    return {
        "id": "7",
        "inputs": [{"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}],
        "outputs": [{"name": "LABEL"}, {"name": "LOGITS"}],
        "parameters": {"tenant": tenant, **parameters},
    }


def add_input(
    request: service_pb2.ModelInferRequest,
    name: str,
    shape: list[int],
    typed: list[bytes],
    raw: bytes | None = None,
    datatype: str = "BYTES",
) -> None:
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    else:
        tensor.contents.bytes_contents.extend(typed)
