"""Bad requests to a running server. Each is answered with what is wrong, and the next good request gets its usual answer.

Left out is what ends Triton 24.10 itself, which the front door keeps out: shapes of more than SIZE numbers, deep JSON, tiny
chunks, compressed bodies, and `class_count`.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import BY_WORD
from hplm.server import TritonServer, process_group
from testing.toy import WORDS, make_toy
from tests.fuzz.mutations import MAGIC, dumped, mutated, mutated_json, scalars, values
from tests.fuzz.target import LONGEST_MESSAGE, PATIENCE, Found, Target

SIZE = 1 << 20
TOGETHER = 20  # cases between two good requests
KEY = "a secret of the operator"
MODELS = ("toy", "hplm", "toy-lookup", "toy-upper", "toy-admin")
TENANTS = ("acme", "beta", "city", "nobody", "")
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
SHAPES = st.lists(st.one_of(st.integers(0, 3), st.sampled_from([1, 1, 64, 1024, 1025, SIZE])), max_size=3)
FIELDS = ("authorization", "Authorization", "tenant", "traceparent", "X-Any", "Content-Type", "Accept", "Accept-Encoding")
HEADERS = st.dictionaries(
    st.sampled_from(FIELDS),
    st.one_of(
        st.sampled_from(["Bearer x", f"Bearer {KEY}", "", "x" * 3000, "ü", "\xff\xfe", "application/json"]),
        st.text("ab\xff:;, ", max_size=20),
    ),
    max_size=3,
)


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
        if not right or (ours and ours[1] == "broken"):
            raise Found(f"{code}: {message[:300]!r}")
        if len(message[ours.start() if ours else 0 :]) > LONGEST_MESSAGE + (0 if ours else sent):
            raise Found(f"{code} with {len(answer):,} bytes: {message[:100]!r}")


@cache
def _served() -> Served:
    """Returns the server that all targets of a process share."""
    folder = tempfile.TemporaryDirectory(prefix="hplm-fuzz-served-")
    atexit.register(folder.cleanup)
    served = Served(Path(folder.name))
    atexit.register(served.close)
    return served


class Wire(Target):
    def __init__(self, folder: Path) -> None:
        self.served = _served()

    def close(self) -> None:
        self.served.expect_usual()


def good(tenant: str, texts: list[str], **parameters: Any) -> dict[str, Any]:
    """Returns a right request as JSON."""
    return {
        "id": "7",
        "inputs": [{"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}],
        "outputs": [{"name": "LABEL"}, {"name": "LOGITS"}],
        "parameters": {"tenant": tenant, **parameters},
    }


def harmless(value: Any) -> Any:
    """Returns a request without what ends Triton: huge shapes and `classification`."""
    if isinstance(value, dict):
        return {key: harmless(one) if key != "shape" else _small(one) for key, one in value.items() if key != "classification"}
    return [harmless(one) for one in value] if isinstance(value, list) else value


def _small(shape: Any) -> Any:
    if not isinstance(shape, list):
        return shape
    return [size if not isinstance(size, int | float) or not abs(size) > SIZE else SIZE for size in shape][:3]


PARAMETERS = st.dictionaries(
    st.one_of(
        st.sampled_from(["tenant", "top_k", "truncate", "hplm_priority", "priority", "timeout", "authorization", "sequence_id",
                         "sequence_start", "binary_data_output", "triton_final_response", "headers"]),
        st.text(max_size=5),
    ),
    st.one_of(scalars, st.sampled_from(TENANTS), values),
    max_size=4,
)  # fmt: skip


class HttpJson(Wire):
    """Bodies of `infer`, to each model."""

    kept = (
        (
            "hplm",
            {"inputs": [{"name": "TEXT", "shape": [0, 1], "datatype": "BYTES", "data": []}], "parameters": {"tenant": "acme"}},
            {},
        ),
    )

    def cases(self):
        requests = [
            good("acme", [WORDS[0]]),
            good("beta", [WORDS[0], "x"], truncate=True, hplm_priority=1),
            good("city", ["é"], top_k=2, timeout=10**7),
        ]
        bodies = st.one_of(
            st.sampled_from(requests).flatmap(mutated_json),
            st.builds(
                lambda one, more: {**one, "parameters": {**one["parameters"], **more}}, st.sampled_from(requests), PARAMETERS
            ),
        )
        return st.tuples(st.sampled_from(MODELS), bodies.map(harmless), HEADERS)

    def check(self, case):
        model, body, headers = case
        self.served.post(f"/v2/models/{model}/infer", dumped(body), _encoded(headers))


class HttpBytes(Wire):
    """Bodies of any bytes, and tensors in binary with wrong lengths."""

    def cases(self):
        text = WORDS[0].encode()
        tensor = struct.pack("<I", len(text)) + text
        header = {
            "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(tensor)}}],
            "parameters": {"tenant": "acme", "binary_data_output": True},
        }
        sizes = st.one_of(
            st.just(None),
            st.integers(-2, 300).map(str),
            st.sampled_from(["", "x", "1e3", "99999999999999999999", "4294967296"]),
        )
        headers = st.one_of(
            st.just(dumped(header)), mutated_json(header).map(harmless).map(dumped), mutated(dumped(good("acme", ["x"])))
        )
        return st.tuples(st.sampled_from(MODELS), headers, st.one_of(st.just(tensor), mutated(tensor)), sizes).filter(
            _is_harmless
        )

    def check(self, case):
        model, header, tensor, size = case
        headers = {
            "Inference-Header-Content-Length": str(len(header)) if size is None else size,
            "Content-Type": "application/octet-stream",
        }
        self.served.post(f"/v2/models/{model}/infer", header + tensor, headers)


class Generate(Wire):
    """The generate endpoint."""

    def cases(self):
        body = {"TEXT": WORDS[0], "tenant": "acme", "truncate": True, "parameters": {"top_k": 1}}
        bodies = st.one_of(mutated_json(body).map(harmless).map(dumped), mutated(dumped(body)))
        return st.tuples(st.sampled_from(["toy", "hplm"]), st.sampled_from(["generate", "generate_stream"]), bodies, HEADERS)

    def check(self, case):
        model, endpoint, body, headers = case
        self.served.post(f"/v2/models/{model}/{endpoint}", body, _encoded(headers))


ADD = {
    "command": "tenant.add",
    "id": "new",
    "domain": "root",
    "domain_version": 1,
    "task": "classify",
    "labels": ["a", "b"],
    "adapter": {"kind": "bottleneck", "rank": 4, "places": ["ffn_out"], "function": "relu"},
    "tensors": "AAAA",
}


class Admin(Wire):
    """Commands of the admin model, with its key."""

    def cases(self):
        commands = [
            {"command": "tenant.list"},
            {"command": "tenant.show", "id": "acme"},
            {"command": "tenant.limit", "id": "city", "rate": 0, "burst": 0, "in_flight": 0, "deadline_us": 0},
            {"command": "tenant.key.add", "id": "dune", "days": 1},
            {"command": "tenant.key.revoke", "id": "dune", "key": "0"},
            {"command": "tenant.rollback", "id": "city"},
            {"command": "tenant.delete", "id": "nobody"},
            ADD,
            {"command": "domain.list"},
            {"command": "domain.add", "name": "bio", "version": 2},
            {"command": "domain.rollback", "name": "bio"},
            {"command": "domain.delete", "name": "none"},
            {"command": "log"},
        ]  # fmt: skip
        texts = st.one_of(
            st.sampled_from(commands).flatmap(mutated_json).map(dumped),
            st.sampled_from(commands).flatmap(lambda one: mutated(dumped(one))),
        )
        return texts.filter(
            lambda text: not (b'"acme"' in text and any(word in text for word in (b"delete", b"limit", b"key", b"update")))
        )

    def check(self, case):
        request = service_pb2.ModelInferRequest(model_name="toy-admin")
        _add(request, "COMMAND", [1], [case])
        self.served.infer(request, [("authorization", f"Bearer {KEY}")])


LONG = "x" * 3000
TEXT = struct.pack("<I", len(WORDS[0])) + WORDS[0].encode()
RIGHT = {
    "model": "toy",
    "name": "TEXT",
    "shape": [1, 1],
    "datatype": "BYTES",
    "raw": TEXT,
    "typed": [],
    "parameters": {},
    "id": "",
    "metadata": [],
}
# What may be wrong in a request over gRPC. `typed` is what it holds where `raw` is None.
WRONG = {
    "model": st.sampled_from(MODELS),
    "name": st.sampled_from(["TEXT_PAIR", "TICKET", "COMMAND", "", LONG]),
    "shape": st.one_of(SHAPES, st.just([-1, 1]), st.just([1, -1])),
    "datatype": st.sampled_from(["UINT8", "FP32", "INT64", "", LONG]),
    "raw": st.one_of(st.none(), mutated(TEXT)),
    "typed": st.lists(st.one_of(st.just(WORDS[0].encode()), st.sampled_from(MAGIC), st.binary(max_size=20)), max_size=3),
    "parameters": st.dictionaries(
        st.sampled_from(["top_k", "truncate", "hplm_priority", "priority", "timeout", "tenant", "authorization", "any"]),
        st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=9), st.just(LONG)),
        min_size=1,
        max_size=3,
    ),
    "id": st.one_of(st.text(max_size=9), st.just(LONG)),
    "metadata": st.lists(
        st.sampled_from([("authorization", "Bearer x"), ("any-bin", b"\xff"), ("x", LONG)]), min_size=1, max_size=2
    ),
}


class Grpc(Wire):
    """Requests over gRPC: shapes, types, raw and typed contents, parameters of every type."""

    kept = (
        {**RIGHT, "parameters": {"top_k": LONG}},  # the message quoted all of it
        {**RIGHT, "model": "hplm", "shape": [0, 1], "raw": b""},
        {**RIGHT, "model": "hplm", "name": "TEXT_PAIR"},  # the ensemble behind it called this a deadlock
    )

    def cases(self):
        return (
            st.lists(st.sampled_from([*WRONG]), min_size=1, max_size=3, unique=True)
            .flatmap(lambda names: st.fixed_dictionaries({name: WRONG[name] for name in names}))
            .map(lambda wrong: {**RIGHT, **({"raw": None} if "typed" in wrong else {}), **wrong})
        )

    def check(self, case):
        request = service_pb2.ModelInferRequest(model_name=case["model"], id=case["id"])
        request.parameters["tenant"].string_param = "acme"
        for name, value in case["parameters"].items():
            kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], kind, value)
        _add(request, case["name"], case["shape"], case["typed"], case["raw"], case["datatype"])
        self.served.infer(request, case["metadata"])


def _add(
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


def _encoded(headers: dict[str, str]) -> dict[str, str]:
    return {name: value.strip() for name, value in headers.items()}


def _is_harmless(case: tuple[str, bytes, bytes, str | None]) -> bool:
    """Whether bytes that may be JSON name neither large sizes nor `classification`."""
    header = case[1]
    digits = max((len(number) for number in "".join(chr(b) if 48 <= b < 58 else " " for b in header).split()), default=0)
    return b"classification" not in header and (digits < 8 or b"shape" not in header)


TARGETS = {"http-json": HttpJson, "http-bytes": HttpBytes, "generate": Generate, "admin": Admin, "grpc": Grpc}
