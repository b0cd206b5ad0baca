"""The counts and verdicts of the isolation measurement and the chaos test. `tests/bench` runs them."""

from __future__ import annotations

import json
import os
import random
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.errors import HplmError
from loadtest import isolation
from loadtest.chaos import bucket
from loadtest.chaos.__main__ import made
from loadtest.chaos.faults import WrongAnswer, faults
from loadtest.chaos.growth import ProcessSize, growth, later, taken
from loadtest.chaos.history import OK, UNANSWERED, WRONG, Asker, Heard, History, Observation, TenantText, expected_answers
from loadtest.grpc_load import GrpcLoad
from loadtest.isolation import judged
from loadtest.load import send
from tests.support.fakes import SmallServer, answer
from tests.support.lent import LentCopy
from tests.support.message import mentions
from tests.support.wait import eventually


@pytest.mark.parametrize(
    ("in_time", "p99_ms", "by_server", "grown_mb", "of_tenant", "of_strangers"),
    [
        (100, 50.0, 100, (50.0, 50.0), True, True),
        (98, 50.0, 98, (0.0, 0.0), False, False),  # too few in time
        (100, 51.0, 100, (0.0, 0.0), False, False),  # too slow beside the others
        (100, 50.0, 102, (0.0, 0.0), False, False),  # the server counts too many
        (0, None, 0, (0.0, 0.0), False, False),
        (100, 10.0, 100, (50.1, 0.0), True, False),  # a tenant's requests may take memory
        (100, 10.0, 100, (0.0, 50.1), True, False),
    ],
)
def test_it_holds_only_if_the_tenant_the_counts_the_memory_and_the_log_do(
    in_time, p99_ms, by_server, grown_mb, of_tenant, of_strangers
) -> None:
    alone, beside = ({"in_time": n, "in_time_share": n / 100, "p99_ms": ms} for n, ms in ((100, 10.0), (in_time, p99_ms)))
    grown = dict(zip(("shared_memory", "log"), grown_mb, strict=True))
    found = [judged(alone, beside, {}, by_server, grown, strangers)["holds"] for strangers in (False, True)]
    assert found == [of_tenant, of_strangers]


@pytest.mark.slow
@pytest.mark.server("toy")
def test_failures_over_grpc_are_counted_and_are_no_throughput(server) -> None:
    (report,) = send(GrpcLoad(server.grpc_url, "toy", "nobody", ["ba"], in_flight=4, seconds=1.0))
    assert report.failed > 0 and report.answered == report.refused == report.cut_off == 0
    with pytest.raises(HplmError, match="toy"):
        report.expect_success("requests to toy")


@pytest.mark.slow
@pytest.mark.server("toy")
@pytest.mark.parametrize("tenants", [("nobody", "hugo"), ("echo", "nobody")])
def test_a_tenant_that_is_not_there_is_named(server, monkeypatch, capsys, tenants) -> None:
    """A noisy one would hold, as all of its requests are refused."""
    monkeypatch.setattr(isolation, "ServedCopy", lambda *_: LentCopy(server))
    quiet, noisy = tenants
    assert isolation.main(["--quiet", quiet, "--noisy", noisy, "--ways", "no_quota", "--seconds", "0.2"]) == 1
    assert mentions(capsys.readouterr().err, "nobody", "acme")


MEMORY = [50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 120, 120]  # MB after each window


def test_the_time_after_the_warm_up_is_compared_with_the_end() -> None:
    found = growth([{"engine": ProcessSize(1, memory * 10**6, 10 + at)} for at, memory in enumerate(MEMORY)])
    assert found["memory_growth"] == {"engine": 0.2} and found["memory_mb"] == {"engine": 120.0}
    assert found["files_growth"] == {"engine": 8}  # medians of the samples 2 and 3, and 10 and 11
    answers = [Heard(second, second + (0.1 if second < 90 else 0.2), OK, "") for second in range(100)]
    assert later([*answers, Heard(0, 60, UNANSWERED, "")])["p99_growth"] == 1.0
    assert later([])["p99_growth"] is None


def test_a_process_that_starts_again_is_compared_from_then_on() -> None:
    """One that has ended just now has no figures, and the run goes on."""
    before = [{"engine": ProcessSize(1, 500, 10), "lookup": ProcessSize(3, 100, 1)}, {"lookup": ProcessSize(3, 100, 1)}]
    found = growth([*before, *({"engine": ProcessSize(2, memory, 10)} for memory in (90, 100, 110)), {}])
    assert found["restarts"] == {"engine": 1, "lookup": 0} and found["memory_growth"] == {"engine": 0.1, "lookup": 0.0}
    with subprocess.Popen(["true"]) as ended:
        eventually(lambda: taken({"this": os.getpid(), "ended": ended.pid}).keys() == {"this"})
    assert taken({"ended": ended.pid}) == {}


def test_another_answer_is_counted_as_wrong_but_not_what_bf16_may_differ_by():
    expected = np.array([2.0, -1.0, 0.0])
    for logits, agree in ((expected + 0.08, True), (expected + 0.1, False), (expected[:2], False)):
        assert Observation(OK, logits=logits).agrees_with(expected) == agree
    said = [1.0, -1.0]
    with SmallServer(lambda *_: answer(body=json.dumps({"outputs": [{"name": "LOGITS", "data": said}]}).encode())) as server:
        address = server.url
        expected = expected_answers(address, "toy", [TenantText("acme", "text")])
        with History([Asker(address, "toy") for _ in range(2)], expected) as asking:
            eventually(lambda: asking.counts()[OK])
            said.reverse()
            eventually(lambda: asking.counts()[WRONG])
    counts = asking.counts()
    assert set(counts) == {OK, WRONG} and asking.last_failure > 0
    assert asking.reasons() == {"wrong: acme": counts[WRONG]}


def test_a_new_tenant_that_is_never_answered_or_cannot_be_added_is_a_wrong_answer(tmp_path):
    def refuse():
        raise HplmError("no room for acme")

    with SmallServer(lambda *_: answer(503)) as server:
        victim = SimpleNamespace(repository=tmp_path, state=tmp_path, backbone="toy", models=["toy"], address=server.url)
        (fault,) = [one for one in faults(victim) if one.name == "tenant added and deleted"]
        for victim.add_guest in (lambda: "acme", refuse):
            assert "acme" in made(fault, victim, [], random.Random(0))["wrong_answer"]


def test_an_answer_without_logits_is_a_wrong_one():
    for body in (b"no JSON", b'{"outputs": []}'):
        with SmallServer(lambda *_, body=body: answer(body=body)) as server:
            assert Asker(server.url, "toy").ask(TenantText("acme", "text")).outcome == WRONG


def test_a_key_that_opens_its_tenant_while_a_server_is_cut_off_is_a_wrong_answer():
    link, said = SimpleNamespace(state=bucket.OPEN), {"outputs": [{"name": "LOGITS", "data": [1.0]}]}
    manager = SimpleNamespace(add_key=lambda tenant: ("secret", SimpleNamespace(id="id")), revoke_key=lambda *_: 0.0)
    with SmallServer(lambda *_: answer(body=json.dumps(said).encode())) as server:
        victim = SimpleNamespace(address=server.url, backbone="toy", state=bucket.STATE, manager=lambda: manager)
        for fault in bucket.faults(link, TenantText("acme", "text", "key")):
            with pytest.raises(WrongAnswer, match="acme is answered"), fault.begin(victim, random.Random(0)):
                assert fault.name == "bucket away" and link.state == bucket.CLOSED
    assert link.state == bucket.OPEN
