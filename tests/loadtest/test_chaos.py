"""The chaos test counts what clients see. `tests/bench` runs it on a real server."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.chaos import bucket
from loadtest.chaos.faults import WrongAnswer, faults
from loadtest.chaos.history import OK, WRONG, Answer, History, Question, expected_answers
from testing.random_store import TOY
from tests.loadtest.small_server import SmallServer, answer
from tests.support.wait import eventually


def test_another_answer_is_counted_as_wrong_but_not_what_bf16_may_differ_by():
    expected = np.array([2.0, -1.0, 0.0])
    for logits, agree in ((expected + 0.08, True), (expected + 0.1, False), (expected[:2], False)):
        assert Answer(OK, logits=logits).agrees_with(expected) == agree
    said = [1.0, -1.0]
    with SmallServer(lambda *_: answer(body=json.dumps({"outputs": [{"name": "LOGITS", "data": said}]}).encode())) as server:
        address = server.url
        with History(address, ["toy"], expected_answers(address, "toy", [Question("acme", "text")]), clients=2) as asking:
            eventually(lambda: asking.counts()[OK])
            said.reverse()
            eventually(lambda: asking.counts()[WRONG])
    counts = asking.counts()
    assert set(counts) == {OK, WRONG} and asking.last_failure > 0
    assert asking.reasons() == {"wrong: acme": counts[WRONG]}


def test_parts_are_harmed_by_their_names_and_a_new_tenant_that_is_never_answered_is_a_wrong_answer(tmp_path):
    (tmp_path / "law+medicine-upper").mkdir()
    victim = SimpleNamespace(
        repository=tmp_path, state=tmp_path, backbone="medicine", models=["medicine", "hplm"], add_guest=lambda: "acme"
    )
    found = {fault.name: fault for fault in faults(victim)}
    assert found.keys() >= {"kill medicine-lookup", "kill law+medicine-upper", "stop law+medicine-upper", "kill hplm"}
    assert not found.keys() & {"kill medicine-upper", "kill decoder"}
    (tmp_path / "chat" / "1").mkdir(parents=True)
    replace(TOY, start_id=2).save(tmp_path / "chat" / "1" / "backbone.json")
    assert {"kill decoder", "stop decoder"} <= {fault.name for fault in faults(victim)}
    with SmallServer(lambda *_: answer(503)) as server:
        victim.address = server.url
        with pytest.raises(WrongAnswer, match="acme"), found["tenant added and deleted"].begin(victim, random.Random(0)):
            pass


def test_a_key_that_opens_its_tenant_while_a_server_is_cut_off_is_a_wrong_answer():
    link, said = SimpleNamespace(state=bucket.OPEN), {"outputs": [{"name": "LOGITS", "data": [1.0]}]}
    manager = SimpleNamespace(add_key=lambda tenant: ("secret", SimpleNamespace(id="id")), revoke_key=lambda *_: 0.0)
    with SmallServer(lambda *_: answer(body=json.dumps(said).encode())) as server:
        victim = SimpleNamespace(address=server.url, backbone="toy", state=bucket.STATE, manager=lambda: manager)
        for fault in bucket.faults(link, Question("acme", "text", "key")):
            with pytest.raises(WrongAnswer, match="acme is answered"), fault.begin(victim, random.Random(0)):
                assert fault.name == "bucket away" and link.state == bucket.CLOSED
    assert link.state == bucket.OPEN
