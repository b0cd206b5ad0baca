"""A request is found under the client's id in our journal and in Triton's own trace."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import tritonclient.http

from testing.toy import WORDS
from tests.server.stock import LIBRARIES
from tests.support.wait import PATIENCE, eventually

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


def test_a_request_that_waits_for_lookup_has_arrived(server):
    """Deadlines count from the time at which Triton handed a request over, not from the time at which lookup got round to it.

    Requests of one tenant are looked up in order, so that most of these have arrived before the one ahead is looked up.
    """
    stock, parameters = server.stock(), {"tenant": "acme", "truncate": True}
    long = [" ".join(np.random.default_rng(seed).choice(WORDS, 300)) for seed in range(400)]
    requests = {f"long-{number}": long for number in range(7)} | {f"short-{number}": long[:1] for number in range(3)}
    connected = threading.Barrier(len(requests))

    def ask(name):
        text = stock.tensor("TEXT", np.array([[text.encode()] for text in requests[name]], dtype=object))
        stock.client.is_server_live()
        connected.wait(PATIENCE)
        stock.client.infer("toy", [text], request_id=name, parameters=parameters, timeout=600_000_000)

    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(ask, requests))

    def entries():
        *lines, _ = (server.folder / "journal.jsonl").read_text("utf-8").split("\n")
        return [found for found in map(json.loads, lines) if found.get("request") in requests]

    eventually(lambda: len(entries()) == len(requests))
    in_order = sorted(entries(), key=lambda entry: entry["taken"])
    before = sum(entry["arrived"] < ahead["taken"] for ahead, entry in pairwise(in_order))
    assert before > len(requests) / 2, in_order
    for entry in in_order:
        assert entry["outcome"] == ("on_time" if entry["answered"] <= entry["deadline"] else "late")
