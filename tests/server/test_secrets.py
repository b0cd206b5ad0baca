"""API keys and other parameters reach neither the server's log nor another client, whatever a request looks like."""

import http.client
import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import backends
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from testing.toy import WORDS
from tests.support.message import mentions
from tests.support.servers import serving

SECRET = "hplm_a-secret-of-a-client"
KEY = "a secret of the operator"
MODELS = {"toy": "TEXT", "toy-lookup": "TEXT", "hplm": "TEXT", "toy-admin": "COMMAND"}


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    export(toy.store, folder / "repository", ServingOptions(dtype="fp32", admin=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HPLM_ADMIN_KEY", KEY)
        with serving(folder / "repository", state=folder / "state", log_file=folder / "log") as server:
            yield server


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


def logged(server) -> str:
    return server.log_file.read_text("utf-8", "replace")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_header_that_is_not_utf8_is_refused_and_not_logged(server, model):
    sent = json.dumps(body(model, parameters={"tenant": "city", "note": SECRET})).encode()
    status, said = post(server, model, sent, Authorization=f"Bearer {SECRET}".encode() + b"\xff")
    assert status == 400 and mentions(said, "[invalid_input]", "UTF-8"), said
    assert SECRET not in said and SECRET not in logged(server)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("where", ["name", "value"])
def test_a_parameter_that_is_not_utf8_is_refused_and_not_logged(server, model, where):
    odd = {"name": {"ODD": SECRET}, "value": {"note": f"{SECRET}ODD"}}[where]
    sent = json.dumps(body(model, parameters={"tenant": "city", **odd})).encode().replace(b"ODD", b"\xff")
    status, said = post(server, model, sent, Authorization=f"Bearer {SECRET}".encode())
    assert status == 400 and mentions(said, "[invalid_input]", "UTF-8"), said
    assert SECRET not in said and SECRET not in logged(server)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_an_id_that_is_not_utf8_is_refused(server, model):
    sent = json.dumps(body(model, id="ODD", parameters={"tenant": "city"})).encode().replace(b"ODD", b"\xff")
    status, said = post(server, model, sent)
    assert status == 400 and mentions(said, "[invalid_input]", "UTF-8"), said


def test_an_unexpected_error_shows_where_it_was_raised_and_not_what_it_holds(monkeypatch, caplog):
    class Response:
        def __init__(self, error):
            self.error = error

    class TritonError(str):
        INTERNAL = 13

        def __new__(cls, message, code):
            return super().__new__(cls, message)

    pb_utils = SimpleNamespace(InferenceResponse=Response, TritonError=TritonError)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    spec = importlib.util.spec_from_file_location("replies", Path(backends.__file__).with_name("replies.py"))
    replies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replies)

    def broken_code():
        raise KeyError(f"Bearer {SECRET}")

    with caplog.at_level(logging.ERROR):
        try:
            broken_code()
        except KeyError as error:
            said = str(replies.failure(error, "lookup").error)
    assert mentions(said, "[internal]", "lookup", "KeyError") and SECRET not in said
    assert mentions(caplog.text, "lookup", "KeyError", "broken_code") and SECRET not in caplog.text
