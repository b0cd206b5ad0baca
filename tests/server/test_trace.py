"""A request is found under the client's id in our journal and in Triton's own trace."""

import json

import numpy as np
import pytest
import tritonclient.http

from testing.toy import WORDS
from tests.server.stock import LIBRARIES
from tests.support.wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]


@pytest.fixture
def traced(server):
    with tritonclient.http.InferenceServerClient(server.http_url) as client:
        admin = dict([server.server.admin_header])
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}, headers=admin)
        yield
        client.update_trace_settings(settings={"trace_level": ["OFF"]}, headers=admin)


@pytest.mark.parametrize("protocol", LIBRARIES)
def test_a_request_is_in_the_journal_and_in_triton_s_trace(server, traced, protocol):
    stock, names = server.stock(protocol), {f"ours-{protocol}-17": "acme", f"ours-{protocol}-18": "beta"}
    text = stock.tensor("TEXT", np.array([[" ".join(WORDS[:5]).encode()]], dtype=object))
    for (name, tenant), model in zip(names.items(), ("toy", "hplm"), strict=True):
        stock.client.infer(model, [text], request_id=name, parameters={"tenant": tenant})
    journal = server.folder / "journal.jsonl"

    def written():
        """Returns the tenant and the outcome of each request in the journal. Its last line may be half written."""
        *lines, _ = journal.read_text("utf-8").split("\n")
        entries = [json.loads(line) for line in lines]
        return {entry["request"]: (entry["tenant"], entry["outcome"]) for entry in entries if entry.get("request") in names}

    eventually(lambda: written() == {name: (tenant, "answered") for name, tenant in names.items()})
    assert " ".join(WORDS[:5]) not in journal.read_text("utf-8")
    eventually(lambda: _models(server, next(iter(names))) == {"toy", "toy-lookup", "toy-upper"})


def _models(server, request):
    """Returns the models that Triton has traced for a request. It may write after the client has its answer."""
    found = set()
    for written in server.folder.glob("trace.json.*"):
        try:
            entries = json.loads(written.read_text("utf-8"))
        except json.JSONDecodeError:  # half written
            continue
        found |= {entry["model_name"] for entry in entries if entry.get("request_id") == request}
    return found
