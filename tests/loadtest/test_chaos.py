"""The chaos test counts what clients see, and a run of it on a real server ends well."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.chaos import history
from loadtest.chaos.faults import WrongAnswer, faults
from loadtest.chaos.history import OK, WRONG, Answer, History, Question, expected_answers
from testing.random_store import TOY
from tests.loadtest.small_server import SmallServer, answer
from tests.support.wait import eventually


def test_logits_agree_within_what_bf16_may_differ_by():
    expected = np.array([2.0, -1.0, 0.0])
    for logits, agree in ((expected + 0.08, True), (expected + 0.1, False), (expected[:2], False)):
        assert Answer(OK, logits=logits).agrees_with(expected) == agree


def test_another_answer_is_counted_as_wrong(monkeypatch):
    monkeypatch.setattr(history, "PAUSE", 0.0)
    said = [1.0, -1.0]
    with SmallServer(lambda *_: answer(body=json.dumps({"outputs": [{"name": "LOGITS", "data": said}]}).encode())) as server:
        address = f"127.0.0.1:{server.port}"
        asking = History(address, ["toy"], expected_answers(address, "toy", [Question("acme", "text")]), clients=2)
        eventually(lambda: asking.counts()[OK])
        said.reverse()
        eventually(lambda: asking.counts()[WRONG])
        asking.stop()
    counts = asking.counts()
    assert asking.in_flight == 0 and set(counts) == {OK, WRONG}
    assert asking.reasons() == {"wrong: acme": counts[WRONG]}


def test_the_upper_model_of_a_group_is_harmed_by_its_name(tmp_path):
    (tmp_path / "law+medicine-upper").mkdir()
    victim = SimpleNamespace(repository=tmp_path, backbone="medicine", models=["medicine", "hplm"])
    found = {fault.name for fault in faults(victim)}
    assert {"kill medicine-lookup", "kill law+medicine-upper", "stop law+medicine-upper", "kill hplm"} <= found
    assert "kill medicine-upper" not in found and "kill decoder" not in found
    (tmp_path / "chat" / "1").mkdir(parents=True)
    replace(TOY, start_id=2).save(tmp_path / "chat" / "1" / "backbone.json")
    assert {"kill decoder", "stop decoder"} <= {fault.name for fault in faults(victim)}


def test_a_new_tenant_that_is_never_answered_is_a_wrong_answer(tmp_path):
    (tmp_path / "toy-upper").mkdir()
    with SmallServer(lambda *_: answer(503)) as server:
        victim = SimpleNamespace(repository=tmp_path, backbone="toy", models=["toy"], add_guest=lambda: "acme")
        victim.address = f"127.0.0.1:{server.port}"
        (fault,) = (fault for fault in faults(victim) if fault.name == "tenant added and deleted")
        with pytest.raises(WrongAnswer, match="acme"), fault.begin(victim, random.Random(0)):
            pass


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
