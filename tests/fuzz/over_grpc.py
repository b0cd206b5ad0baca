"""Bad requests over gRPC."""

from __future__ import annotations

import struct

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from testing.toy import WORDS
from tests.fuzz.mutations import MAGIC, mutated
from tests.fuzz.served import add_input
from tests.fuzz.wire import MODELS, SHAPES, Wire

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
# Requests over gRPC may be wrong in these. `typed` is the content where `raw` is None.
WRONG = {
    "model": st.sampled_from(MODELS),
    "name": st.sampled_from(["TEXT_PAIR", "TICKET", "COMMAND", "", LONG]),
    "shape": st.one_of(SHAPES, st.just([-1, 1]), st.just([1, -1])),
    "datatype": st.sampled_from(["UINT8", "FP32", "INT64", "", LONG]),
    "raw": st.one_of(st.none(), mutated(TEXT)),
    "typed": st.lists(st.one_of(st.just(WORDS[0].encode()), st.sampled_from(MAGIC), st.binary(max_size=20)), max_size=3),
    "parameters": st.dictionaries(
        st.sampled_from(
            ["top_k", "truncate", "hplm_priority", "hplm_rung", "priority", "timeout", "tenant", "authorization", "any"]
        ),
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
        add_input(request, case["name"], case["shape"], case["typed"], case["raw"], case["datatype"])
        self.served.infer(request, case["metadata"])


TARGETS = {"grpc": Grpc}
