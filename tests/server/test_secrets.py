"""API keys and other parameters reach neither the server's log nor another client, whatever a request looks like."""

import http.client
import json

import pytest

from testing.toy import WORDS
from tests.support.fake_triton import fake_utilities, with_fake_triton
from tests.support.message import mentions

SECRET = "hplm_a-secret-of-a-client"
MODELS = {"toy": "TEXT", "toy-lookup": "TEXT", "hplm": "TEXT", "toy-admin": "COMMAND"}


def body(model: str, **more: object) -> dict:
    text = json.dumps({"command": "tenant.list"}) if model == "toy-admin" else WORDS[0]
    shape = [1] if model == "toy-admin" else [1, 1]
    return {"inputs": [{"name": MODELS[model], "shape": shape, "datatype": "BYTES", "data": [text]}], **more}


def post(server, model: str, sent: bytes, **headers: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", sent, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.server("toy")
@pytest.mark.parametrize(
    ("model", "where"),
    [(model, where) for model in MODELS for where in ("header", "name", "value")] + [("toy", "id"), ("hplm", "id")],
)
def test_what_is_not_utf8_is_refused_and_neither_said_nor_logged(server, model, where):
    odd = {"name": {"ODD": SECRET}, "value": {"note": f"{SECRET}ODD"}}.get(where, {"note": SECRET})
    more = {"id": "ODD"} if where == "id" else {}
    sent = json.dumps(body(model, parameters={"tenant": "city", **odd}, **more)).encode().replace(b"ODD", b"\xff")
    status, said = post(server, model, sent, Authorization=f"Bearer {SECRET}".encode() + b"\xff" * (where == "header"))
    assert status == 400 and mentions(said, "[invalid_input]", "UTF-8"), said
    assert SECRET not in said and SECRET not in server.server.log_file.read_text("utf-8", "replace")


def test_an_unexpected_error_shows_where_it_was_raised_and_not_what_it_holds(caplog):
    def broken_code():
        raise KeyError(f"Bearer {SECRET}")

    with with_fake_triton(fake_utilities(), "backends.replies") as (replies,):
        try:
            broken_code()
        except KeyError as error:
            said = replies.failure(error, "lookup")
    assert mentions(said, "[internal]", "lookup", "KeyError") and SECRET not in said
    assert mentions(caplog.text, "lookup", "KeyError", "broken_code") and SECRET not in caplog.text
