"""Bad requests to a running server. Each is answered with what is wrong, and the next good request gets its usual answer.

Left out is what ends Triton 24.10 itself, which the front door keeps out: shapes of more than SIZE numbers, deep JSON, tiny
chunks, compressed bodies, and `class_count`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from testing.toy import WORDS
from tests.fuzz.mutations import dumped, mutated, mutated_json, scalars, values
from tests.fuzz.served import KEY, add_input, good, served_by_all
from tests.fuzz.target import Target

SIZE = 1 << 20
MODELS = ("toy", "hplm", "toy-lookup", "toy-upper", "toy-admin")
TENANTS = ("acme", "beta", "city", "nobody", "")
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


class Wire(Target):
    def __init__(self, folder: Path) -> None:
        self.served = served_by_all()

    def close(self) -> None:
        self.served.expect_usual()


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
        st.sampled_from(["tenant", "top_k", "truncate", "hplm_priority", "hplm_rung", "priority", "timeout", "authorization",
                         "sequence_id", "sequence_start", "binary_data_output", "triton_final_response", "headers"]),
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
            good("beta", [WORDS[0], "x"], truncate=True, hplm_priority=1, hplm_rung=1),
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
        self.served.post(f"/v2/models/{model}/infer", dumped(body), encoded(headers))


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
            is_harmless_body
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
        self.served.post(f"/v2/models/{model}/{endpoint}", body, encoded(headers))


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
        add_input(request, "COMMAND", [1], [case])
        self.served.infer(request, [("authorization", f"Bearer {KEY}")])


def encoded(headers: dict[str, str]) -> dict[str, str]:
    return {name: value.strip() for name, value in headers.items()}


def is_harmless_body(case: tuple[str, bytes, bytes, str | None]) -> bool:
    """Whether bytes that may be JSON name neither large sizes nor `classification`."""
    header = case[1]
    digits = max((len(number) for number in "".join(chr(b) if 48 <= b < 58 else " " for b in header).split()), default=0)
    return b"classification" not in header and (digits < 8 or b"shape" not in header)


TARGETS = {"http-json": HttpJson, "http-bytes": HttpBytes, "generate": Generate, "admin": Admin}
