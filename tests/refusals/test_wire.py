"""Bad requests over the wire: a refusal with its code and word, and the server answers the next good one."""

import json
import re
import struct

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from hplm.errors import BY_WORD
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, STATUS, Stock, body_of, posted
from tests.support.message import mentions
from tests.support.wait import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]  # which asks for a good answer after each test
MODELS = ("toy", "hplm")
LONG, WORD = "x" * 3000, re.compile(rf"\[({'|'.join(BY_WORD)})\]")


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return Stock(server, request.param)


def refused(stock, code, words, ask):
    with pytest.raises(InferenceServerException) as caught:
        ask()
    assert caught.value.status() == STATUS[stock.protocol][code], caught.value
    assert mentions(caught.value.message(), *words)
    return caught.value.message()


@pytest.mark.parametrize(
    ("code", "words", "texts", "tenant", "parameters"),
    [
        *[(400, ["[invalid_input]", 1], [text], "city", {}) for text in ("", "\x00")],
        (400, ["[invalid_input]", 3, 4], [WORDS[0], WORDS[1], "", WORDS[2]], "city", {}),
        (400, ["[invalid_input]", 102, 64, "truncate=true"], [" ".join(WORDS[:100])], "city", {}),
        (400, ["[invalid_input]", "100,000"], ["wa " * 100_000], "city", {"truncate": True}),
        (400, ["[invalid_input]", "TEXT", 2, "UTF-8", 3], [b"fine", b"bad\xff\xfe"], "city", {}),
        *[(404, ["[no_tenant]"], [WORDS[0]], tenant, {}) for tenant in (None, "nobody", "../city", "toy/city")],
        (400, ["[invalid_input]", "tenant", 5], [WORDS[0]], 5, {}),
        (400, ["1024"], [WORDS[0]] * 1025, "city", {}),
        (400, ["[invalid_input]", "top_k"], [WORDS[0]], "beta", {"top_k": 2}),
        *[
            (400, ["[invalid_input]", "outputs"], [WORDS[0]], "city", {"made": one})
            for one in (5, "LABEL,", "label", "x" * 999)
        ],
        (400, [], [WORDS[0]] * 2, "city", {"pairs": [WORDS[1]]}),
        (503, ["[deadline]"], [WORDS[0]], "city", {"timeout": 1}),
    ],
)
def test_a_bad_text_tenant_or_parameter_is_refused(stock, code, words, texts, tenant, parameters):
    """By the model `hplm` with the same words. Which parameters are refused: tests/refusals/test_contract.py."""
    said = [refused(stock, code, words, lambda model=model: stock.ask(texts, tenant, model=model, **parameters))
            for model in MODELS]  # fmt: skip
    direct, alias = (one.replace("'hplm'", "'toy'").replace("in ensemble 'toy', ", "") for one in said)
    assert alias == direct or "[deadline]" in direct, "the alias says something else"


INFER, GENERATE = ("toy", "infer"), ("hplm", "generate")


@pytest.mark.parametrize(
    ("way", "body"),
    [
        *[(INFER, body) for body in (b"", b"{", b"[]", b'{"inputs": 7}', b'{"inputs": []}', b"\xff" * 1000)],
        *[(INFER, body_of(text={"shape": shape})) for shape in ([], [1], [1, -1], [2, 1], None, [1, 1024])],
        *[((model, "infer"), body_of(text={"shape": [0, 1], "data": []})) for model in MODELS],
        *[(INFER, body_of(text={"data": data})) for data in ([7], [[[]]], {}, None, [None])],
        *[(INFER, body_of(parameters=given)) for given in (7, [], {"tenant": 5}, {"tenant": {}}, {"tenant": LONG})],
        (INFER, body_of(outputs=[{"name": "NONE"}])),
        *[(GENERATE, body) for body in (b"", b"[]", b'{"TEXT": 7}', b'{"TEXT": [[]], "tenant": "city"}', b'{"tenant": 1}')],
        (("nothing", "infer"), body_of()),
    ],
)
def test_a_bad_body_is_refused(server, way, body):
    """Triton refuses some itself, with 500 what it cannot parse."""
    status, said = posted(server, way, body)
    word = WORD.search(said)
    assert status in ((400, 404) if word else (400, 404, 500)), said
    assert not word or word[1] not in ("broken", "internal"), said
    assert len(said) <= 1100 + (0 if word else len(body)), f"{len(said):,} characters: {said[:100]}"


@pytest.mark.parametrize(("timeout", "word"), [(1, "[deadline]"), (-1, "[invalid_input]"), ("1", "[invalid_input]")])
@pytest.mark.parametrize("model", MODELS)
def test_a_timeout_of_generate_is_read_from_its_parameters(server, model, timeout, word):
    for asked, expected in ((timeout, (400, word)), (60_000_000, (200, "LABEL")), (2**63 - 1, (200, "LABEL"))):
        body = {"TEXT": WORDS[0], "tenant": "city", "timeout": asked}
        status, said = posted(server, (model, "generate"), json.dumps(body).encode())
        assert status == expected[0] and expected[1] in said


TEXT = struct.pack("<I", len(WORDS[0])) + WORDS[0].encode()


@pytest.mark.parametrize(
    "wrong",
    [{"raw": raw} for raw in (b"", TEXT[:3], TEXT[:-1], TEXT * 2, b"\xff" * 4)]
    + [{"typed": typed} for typed in ([], [b"a", b"b"], [b"\xff"])]
    + [{"shape": shape} for shape in ([], [1], [-1, 1], [1, -1], [3, 1], [1, 1 << 20])]
    + [{"datatype": datatype} for datatype in ("UINT8", "", LONG)]
    + [
        {"parameters": given}
        for given in ({"top_k": float("nan")}, {"truncate": LONG}, {"hplm_priority": 2**63 - 1}, {"timeout": -1})
    ],
    ids=lambda wrong: repr(wrong)[:30],
)
def test_a_bad_request_over_grpc_is_refused(server, wrong):
    request = service_pb2.ModelInferRequest(model_name="toy", id=LONG)
    for name, value in {"tenant": "city", **wrong.get("parameters", {})}.items():
        kind = {int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    tensor = request.inputs.add(name="TEXT", datatype=wrong.get("datatype", "BYTES"), shape=wrong.get("shape", [1, 1]))
    if "typed" in wrong:
        tensor.contents.bytes_contents.extend(wrong["typed"])
    else:
        request.raw_input_contents.append(wrong.get("raw", TEXT))
    with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=PATIENCE)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert len(caught.value.details().partition("[invalid_input]")[2]) <= 1024
