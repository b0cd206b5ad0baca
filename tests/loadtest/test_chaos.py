"""The chaos test counts what clients see, and a run of it on a real server ends well."""

import http.server
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.chaos import history
from loadtest.chaos.faults import faults
from loadtest.chaos.history import FAILED, OK, REFUSED, UNANSWERED, WRONG, Answer, Asker, History, Question, expected_answers

QUESTION = Question("acme", "text")


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers as `said` tells it."""

    said = None
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = type(self).said()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def logits(*values):
    return 200, json.dumps({"outputs": [{"name": "LOGITS", "data": list(values)}]}).encode()


def close():
    raise ConnectionAbortedError


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(history, "PATIENCE", 0.5)
    monkeypatch.setattr(history, "PAUSE", 0.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.handle_error = lambda *arguments: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (lambda: logits(1.0, -1.0), OK),
        (lambda: (503, b'{"error": "in ensemble \'toy\', [draining] later"}'), REFUSED),
        (lambda: (500, b'{"error": "Stub process is not healthy."}'), FAILED),
        (close, FAILED),
        (lambda: time.sleep(2) or logits(1.0, -1.0), UNANSWERED),
    ],
)
def test_what_becomes_of_a_request(address, said, outcome):
    Fake.said = staticmethod(said)
    assert Asker(address, "toy").ask(QUESTION).outcome == outcome


def test_logits_agree_within_what_bf16_may_differ_by():
    expected = np.array([2.0, -1.0, 0.0])
    assert Answer(OK, logits=expected + 0.08).agrees_with(expected)
    assert not Answer(OK, logits=expected + 0.1).agrees_with(expected)
    assert not Answer(OK, logits=expected[:2]).agrees_with(expected)


def test_another_answer_is_counted_as_wrong(address):
    Fake.said = staticmethod(lambda: logits(1.0, -1.0))
    expected = expected_answers(address, "toy", [QUESTION])
    asking = History(address, ["toy"], expected, clients=2)
    while not asking.counts()[OK]:
        time.sleep(0.01)
    Fake.said = staticmethod(lambda: logits(-1.0, 1.0))
    while not asking.counts()[WRONG]:
        time.sleep(0.01)
    asking.stop()
    counts = asking.counts()
    assert asking.in_flight == 0 and set(counts) == {OK, WRONG}
    assert asking.reasons() == {"wrong: acme": counts[WRONG]}


def test_the_upper_model_of_a_group_is_harmed_by_its_name(tmp_path):
    (tmp_path / "law+medicine-upper").mkdir()
    victim = SimpleNamespace(repository=tmp_path, backbone="medicine", models=["medicine", "hplm"])
    found = {fault.name for fault in faults(victim)}
    assert {"kill medicine-lookup", "kill law+medicine-upper", "stop law+medicine-upper", "kill hplm"} <= found
    assert "kill medicine-upper" not in found


@pytest.mark.slow
def test_a_run_on_a_real_server_leaves_no_request_without_its_answer(toy):
    chosen = ["--faults", "kill toy-lookup", "tenant", "--clients", "4"]
    command = [sys.executable, "-m", "loadtest.chaos", "--repository", str(toy.repository), "--minutes", "0", *chosen, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["fault"] for one in found["faults"]} == {"kill toy-lookup", "tenant added and deleted"}
    assert found["recovered"] and found["unanswered"] == found["wrong"] == 0
    assert found["sent"] == found["ok"] + found["refused"] + found["failed"] and found["ok"] > 0
