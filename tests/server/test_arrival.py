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
LONG = [" ".join(np.random.default_rng(seed).choice(WORDS, 50)) for seed in range(1000)]
LONGS, QUIET = 5, 5


def test_a_request_that_waits_for_lookup_has_arrived(toy, tmp_path):
    journal = tmp_path / "journal.jsonl"
    export(toy.store, tmp_path / "repository", ServingOptions(dtype="fp32", slots=4, journal=str(journal)))
    sent = {}
    with TritonServer(tmp_path / "repository") as server:
        stock = Stock(server, "http")
        stock.ask([WORDS[0]], "acme")
        text = stock.tensor("TEXT", np.array([[WORDS[1].encode()]], dtype=object))

        texts = stock.tensor("TEXT", np.array([[text.encode()] for text in LONG], dtype=object))
        connected = threading.Barrier(LONGS + QUIET)

        def ask_long(name):
            stock.client.is_server_live()
            connected.wait()
            stock.client.infer("toy", [texts], request_id=name, parameters={"tenant": "acme"})

        def ask(name):
            stock.client.is_server_live()
            connected.wait()
            time.sleep(0.1)
            sent[name] = time.monotonic()
            stock.client.infer("toy", [text], request_id=name, parameters={"tenant": "beta"}, timeout=60_000_000)

        asking = [threading.Thread(target=ask_long, args=(f"long-{number}",)) for number in range(LONGS)]
        asking += [threading.Thread(target=ask, args=(f"quiet-{number}",)) for number in range(QUIET)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    entries = map(json.loads, journal.read_text("utf-8").splitlines())
    found = {entry["request"]: entry for entry in entries if "request" in entry}
    looked_up = max(entry["taken"] for name, entry in found.items() if name.startswith("long"))
    assert min(sent.values()) < looked_up
    for name, at in sent.items():
        if at < looked_up:
            assert found[name]["arrived"] - at < (looked_up - at) / 2
            assert found[name]["taken"] < looked_up, "another tenant's request does not wait for all of the long ones"
        assert found[name]["outcome"] == ("on_time" if found[name]["answered"] <= found[name]["deadline"] else "late")
