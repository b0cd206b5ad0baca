"""API keys and other parameters reach neither the server's log nor another client, whatever a request looks like."""

import json

import pytest

from testing.toy import WORDS
from tests.server.stock import posted
from tests.support.fake_triton import fake_utilities, with_fake_triton
from tests.support.message import mentions

SECRET = "hplm_a-secret-of-a-client"
MODELS = {"toy": "TEXT", "toy-lookup": "TEXT", "hplm": "TEXT", "toy-admin": "COMMAND"}


def body(model, **more):
    text, shape = (json.dumps({"command": "tenant.list"}), [1]) if model == "toy-admin" else (WORDS[0], [1, 1])
    return {"inputs": [{"name": MODELS[model], "shape": shape, "datatype": "BYTES", "data": [text]}], **more}


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
    bearer = f"Bearer {SECRET}".encode() + b"\xff" * (where == "header")
    status, said = posted(server, (model, "infer"), sent, Authorization=bearer)
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
