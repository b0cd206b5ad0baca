"""Keys and quotas of a running server, which says and logs no secret: whoever has no valid key gets an unknown tenant's 404."""

import json

import pytest
from tritonclient.utils import InferenceServerException

from testing.toy import WORDS
from tests.server.stock import LIBRARIES, STATUS, posted, refused
from tests.support.message import mentions

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]
WAYS = [(protocol, model) for protocol in LIBRARIES for model in ("toy", "hplm")]


def refusal(stock, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(*args, **kwargs)
    return caught.value.status(), caught.value.message()


def test_a_key_opens_its_tenant_and_everything_else_is_refused_as_an_unknown_tenant_is(server):
    """Which headers are keys or name a tenant: `tests/tenants/test_keys.py`. That they arrive: `test_triton.py`."""
    own, other, manager = server.tenant(keyed=True), server.tenant(keyed=True), server.manager()
    second, digest = manager.add_key(own.id)
    assert manager.settle() == []
    for protocol, model in WAYS:
        stock = server.stock(protocol)
        for secret in (own.secret, second):
            answer = stock.ask([WORDS[0]], own.id, model=model, headers={"authorization": f"Bearer {secret}"})
            assert answer["LABEL"].shape == (1, 1)
        stranger = refusal(stock, [WORDS[0]], "nobody", model=model)
        assert stranger[0] == STATUS[protocol][404] and "[no_tenant]" in stranger[1]
        for headers in (None, other.headers, {"authorization": own.secret}):
            assert refusal(stock, [WORDS[0]], own.id, model=model, headers=headers) == stranger
            assert refusal(stock, [""], own.id, model=model, headers=headers, top_k="x") == stranger
        text = stock.tensor("TEXT", "x")
        with refused("no_tenant"):  # no ticket without a key
            stock.client.infer("toy-lookup", [text], parameters={"tenant": own.id})
    manager.revoke_key(own.id, digest.id)
    assert manager.settle() == []
    revoked = {"authorization": f"Bearer {second}"}
    assert refusal(server.stock(), [WORDS[0]], own.id, headers=revoked) == refusal(server.stock(), [WORDS[0]], "nobody")


@pytest.mark.parametrize(("protocol", "model"), WAYS)
def test_a_header_alone_names_the_tenant(server, protocol, model):
    stock, headers = server.stock(protocol), {"hplm-tenant": "beta"}
    named = stock.ask([WORDS[0]], "beta", model=model)
    for given in ({"headers": headers}, {"hplm-tenant": "beta"}):
        assert (stock.ask([WORDS[0]], model=model, **given)["LOGITS"] == named["LOGITS"]).all()
    with refused("invalid_input", "hplm-tenant"):
        stock.ask([WORDS[0]], "acme", model=model, headers=headers)
    for routed in ("acme", "-"):  # what a router has counted stays, whatever a parameter of the header's name says
        with refused("invalid_input", "hplm-tenant"):
            stock.ask([WORDS[0]], model=model, headers={"hplm-tenant": routed}, **{"hplm-tenant": "beta"})


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_an_encoder_lists_the_tenants_that_a_key_opens_and_the_labels_of_one(server, protocol):
    own, other, stock = server.tenant(keyed=True), server.tenant(keyed=True), server.stock(protocol)

    def found(texts=("",), **more):
        answer = stock.ask(texts, outputs=("LABEL",), hplm_tenants=True, **more)
        return json.loads(answer["LABEL"][0, 0])

    names = {one["tenant"] for one in found(headers=own.headers)}
    assert {own.id, "beta"} <= names and other.id not in names and own.id not in {one["tenant"] for one in found()}
    (one,) = found(headers={**own.headers, "hplm-tenant": own.id})
    assert one == {"tenant": own.id, "task": "classify", "labels": ["x", "y"]}
    vectors = {"tenant": "near", "task": "embed", "dimensions": 32, "prefixes": ["query", "passage"]}
    assert vectors in found(model="tasks") and found(model="tasks", tenant="near") == [{**vectors, "labels": []}]
    with refused("no_tenant"):
        found(tenant=own.id)
    with refused("invalid_input", "hplm_tenants", 2):
        found(["a", "b"])


def test_a_quota_is_503_with_a_waiting_time_before_texts_are_tokenised_and_others_are_served(server):
    tenant, stock = server.tenant(rate=0.01, burst=3.0).id, server.stock()
    for _ in range(3):
        stock.ask([WORDS[0]], tenant)
    for protocol, model in WAYS:
        for text in (WORDS[0], ""):  # no model reads the second one
            status, message = refusal(server.stock(protocol), [text], tenant, model=model)
            assert status == STATUS[protocol][503], message
            assert mentions(message, "[quota]", f"'{tenant}'", 0.01, "requests", "retry after")
    assert stock.ask([WORDS[0]], "beta")["LABEL"].shape == (1, 1)


SECRET = "hplm_a-secret-of-a-client"
MODELS = ("toy", "toy-lookup", "hplm")


def body(**more):
    return {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [WORDS[0]]}], **more}


@pytest.mark.parametrize(
    ("model", "where"),
    [(model, where) for model in MODELS for where in ("header", "name", "value")] + [("toy", "id"), ("hplm", "id")],
)
def test_what_is_not_utf8_is_refused_and_neither_said_nor_logged(server, model, where):
    odd = {"name": {"ODD": SECRET}, "value": {"note": f"{SECRET}ODD"}}.get(where, {"note": SECRET})
    more = {"id": "ODD"} if where == "id" else {}
    sent = json.dumps(body(parameters={"tenant": "city", **odd}, **more)).encode().replace(b"ODD", b"\xff")
    bearer = f"Bearer {SECRET}".encode() + b"\xff" * (where == "header")
    status, said = posted(server, (model, "infer"), sent, Authorization=bearer)
    assert status == 400 and mentions(said, "[invalid_input]", "UTF-8"), said
    assert SECRET not in said and SECRET not in server.server.log_file.read_text("utf-8", "replace")
