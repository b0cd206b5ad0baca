"""An engine in a process of its own that is killed, fails or is ended by a request. `test_client_machine` fakes the process."""

import os
import signal
import sys

import numpy as np
import pytest

from hplm.engine import worker
from hplm.engine.channel import DEVICE_FAILED
from hplm.engine.in_flight import read
from hplm.errors import Broken, error_in
from hplm.metrics import names
from hplm.tenants import quarantine
from testing.toy import WORDS
from tests.engine.client import Client
from tests.support.message import mentioning, mentions
from tests.support.wait import eventually, stop

pytestmark = pytest.mark.slow


def word_in(answer):
    """Returns the word of an error, None for an answer."""
    return None if isinstance(answer, dict) else error_in(answer[1]).word


def test_requests_of_an_engine_that_is_killed_are_answered_and_the_next_engine_serves(toy):
    client = Client(toy.folder)
    texts = [[WORDS[number + more] for more in range(1 + number % 3)] for number in range(12)]
    alone = [client.wait(client.ask("acme", own))["LOGITS"] for own in texts]
    first = client.pid
    stop(first)
    held = [client.ask("acme", own) for own in texts]
    os.kill(first, signal.SIGKILL)
    assert {word_in(client.wait(answers)) for answers in held} == {"draining"}
    client.ask_until_served("acme", texts[0])
    assert client.pid != first and client.meter.take()[0][names.ENGINE_RESTARTS, ()] == 1
    stop(client.pid)  # they come together, and are answered together
    held = [client.ask("acme", own) for own in texts]
    os.kill(client.pid, signal.SIGCONT)
    for answers, expected in zip(held, alone, strict=True):
        np.testing.assert_allclose(client.wait(answers)["LOGITS"], expected, atol=1e-4)
    client.close()


def runs_instead(monkeypatch, folder, program):
    """Engines that are started from now on run this program."""
    path = folder / "engine"
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setattr(worker, "_python", lambda: str(path))


def test_an_engine_that_cannot_be_made_is_an_error_with_its_reason(toy, monkeypatch, tmp_path):
    with pytest.raises(Broken, match=mentioning("does not start", "'abacus'")):
        Client(toy.folder, device="abacus")
    runs_instead(monkeypatch, tmp_path, "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(worker, "START_SECONDS", 0.5)
    with pytest.raises(Broken, match=mentioning("does not start", "SIGKILL")):
        Client(toy.folder)


ENGINE = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path
from hplm.engine import child
from hplm.engine.engine import Engine

run = Engine.run

def run_or_fail(engine, batch):
    ids = {{{{text.request.id for text in batch.texts}}}}
    %s
    return run(engine, batch)

Engine.run = run_or_fail
sys.argv = sys.argv[2:]
child.main()
"""
FAILS_ONCE = (
    ENGINE
    % """if not Path("{marker}").exists():
        Path("{marker}").touch()
        raise RuntimeError("CUDA error: unspecified launch failure")"""
)
POISONED = (
    ENGINE
    % """if "poison" in ids:
        os.kill(os.getpid(), signal.SIGKILL)
    while "gate" in ids and not Path("{gate}").exists():
        time.sleep(0.01)"""
)


def test_an_engine_whose_device_fails_ends_and_the_next_engine_serves(toy, monkeypatch, tmp_path, caplog):
    """Without a GPU: its engine raises what torch raises for one."""
    runs_instead(monkeypatch, tmp_path, FAILS_ONCE.format(marker=tmp_path / "failed"))
    client = Client(toy.folder)
    assert word_in(client.wait(client.ask("acme", [WORDS[0]]))) == "crashed"
    client.ask_until_served("acme", [WORDS[0]])
    waiting = [client.ask("acme", [" ".join(WORDS[:20])] * 5) for _ in range(30)]
    client.close()
    assert all(isinstance(answers[0], dict) for answers in waiting)
    assert mentions(caplog.text, DEVICE_FAILED)
    assert client.meter.take()[0][names.ENGINE_RESTARTS, ()] == 1


def test_a_request_that_ends_the_engine_does_so_twice_and_others_are_served(toy, monkeypatch, tmp_path, caplog):
    """Takes seconds: four processes start."""
    gate = tmp_path / "gate"
    runs_instead(monkeypatch, tmp_path, POISONED.format(gate=gate))
    monkeypatch.setattr(quarantine, "FOLDER", tmp_path)
    client = Client(toy.folder)

    def computed():
        return {mark.tenant_id for mark in read(client.workers.current.batches)}

    # The engine ends while one batch is computed, one is staged, and one request waits.
    crashed = [client.ask("city", [WORDS[0]], id="gate")]
    eventually(lambda: computed() == {"city"})
    crashed.append(client.ask("acme", [WORDS[0]], id="poison"))
    eventually(lambda: computed() == {"city", "acme"})
    waited = client.ask("beta", [WORDS[0]])
    os.kill(client.pid, signal.SIGKILL)
    assert [word_in(client.wait(answers)) for answers in (*crashed, waited)] == ["crashed", "crashed", "draining"]
    gate.touch()

    # It is asked again and again, with others beside it.
    others = []
    words = [""]
    while words[-1] != "quarantined":
        client.ask_until_served("beta", [WORDS[0]])
        others += [client.ask(tenant, [WORDS[0]]) for tenant in ("beta", "city") for _ in range(5)]
        words.append(word_in(client.wait(client.ask("acme", [WORDS[0]], id="poison"))))
    assert words == ["", "crashed", "quarantined"]
    assert {word_in(client.wait(answers)) for answers in others} <= {None, "draining"}  # not one of them was computed beside it
    assert isinstance(client.wait(client.ask("beta", [WORDS[0]])), dict)
    counts, levels = client.meter.take()
    assert counts[names.ENGINE_RESTARTS, ()] == 2
    assert counts[names.LOST_REQUESTS, ("crashed",)] == 3
    assert levels[names.QUARANTINED_TENANTS, ()] == 1
    client.wait(client.ask("acme", [WORDS[0]]))
    eventually(lambda: (names.TENANT_REQUESTS, ("acme", "quarantined")) in client.counts())

    # Its file outlives the process.
    client.close()
    client = Client(toy.folder)
    assert word_in(client.wait(client.ask("acme", [WORDS[0]]))) == "quarantined"
    assert quarantine.release("acme", toy.repository) == ["toy"]
    client.ask_until_served("acme", [WORDS[0]])
    client.close()
