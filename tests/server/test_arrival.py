"""Deadlines count from the time at which Triton handed a request over, not from the time at which lookup got round to it."""

import json
import threading
import time

import numpy as np
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.server import TritonServer
from testing.toy import WORDS
from tests.server.stock import Stock

pytestmark = pytest.mark.slow
LONG = [" ".join(np.random.default_rng(seed).choice(WORDS, 300)) for seed in range(1000)]
LONGS, SHORTS = 7, 3


def test_a_request_that_waits_for_lookup_has_arrived(toy, tmp_path):
    """Requests of one tenant are looked up in order, so that nearly all of these wait for others."""
    journal = tmp_path / "journal.jsonl"
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, journal=str(journal)))
    sent, parameters = {}, {"tenant": "acme", "truncate": True}
    with TritonServer(tmp_path / "repository") as server:
        stock = Stock(server, "http")
        stock.ask([WORDS[0]], "acme")
        text = stock.tensor("TEXT", np.array([[WORDS[1].encode()]], dtype=object))
        texts = stock.tensor("TEXT", np.array([[text.encode()] for text in LONG], dtype=object))
        connected = threading.Barrier(LONGS + SHORTS)

        def ask(name, asked):
            stock.client.is_server_live()
            connected.wait()
            sent[name] = time.monotonic()
            stock.client.infer("toy", [asked], request_id=name, parameters=parameters, timeout=600_000_000)

        asking = [threading.Thread(target=ask, args=(f"long-{number}", texts)) for number in range(LONGS)]
        asking += [threading.Thread(target=ask, args=(f"short-{number}", text)) for number in range(SHORTS)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    entries = map(json.loads, journal.read_text("utf-8").splitlines())
    found = {entry["request"]: entry for entry in entries if "request" in entry}
    until_arrived = sum(found[name]["arrived"] - at for name, at in sent.items())
    until_looked_up = sum(found[name]["taken"] - at for name, at in sent.items())
    assert until_arrived < until_looked_up / 2, "of the time until a request is looked up, it has arrived for the most part"
    for entry in map(found.get, sent):
        assert entry["outcome"] == ("on_time" if entry["answered"] <= entry["deadline"] else "late")
