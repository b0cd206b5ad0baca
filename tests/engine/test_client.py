"""An engine in a process of its own that does not start, or whose device fails.

`test_client_machine` fakes the process. `tests/server/test_engine_ends.py` kills it, and lets a tenant end it.
"""

import sys
import time
from queue import SimpleQueue

import pytest

from hplm.engine import worker
from hplm.engine.backbone import Backbone
from hplm.engine.channel import DEVICE_FAILED
from hplm.engine.encoder_client import EncoderClient, PendingTexts
from hplm.engine.lookup import MOST_CHARACTERS, Lookup, Reading
from hplm.errors import Broken, error_in
from hplm.metrics import names
from hplm.metrics.meter import Meter
from testing.toy import WORDS
from tests.engine.asker import PARAMETERS
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow


def client_of(toy, meter=None, **changes):
    return EncoderClient([toy.folder], {"backbone": "toy", **PARAMETERS, **changes}, None, [meter or Meter()])


def runs_instead(monkeypatch, folder, program):
    """Engines that are started from now on run this program."""
    path = folder / "engine"
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setattr(worker, "_python", lambda: str(path))


def test_an_engine_that_cannot_be_made_is_an_error_with_its_reason(toy, monkeypatch, tmp_path):
    with pytest.raises(Broken, match=mentioning("does not start", "'abacus'")):
        client_of(toy, device="abacus")
    runs_instead(monkeypatch, tmp_path, "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(worker, "START_SECONDS", 0.5)
    with pytest.raises(Broken, match=mentioning("does not start", "SIGKILL")):
        client_of(toy)


FAILS_ONCE = f"""#!{sys.executable}
import sys
from pathlib import Path
from hplm.engine import child
from hplm.engine.engine import Engine

run, marker = Engine.run, Path("{{marker}}")

def run_or_fail(engine, batch):
    if not marker.exists():
        marker.touch()
        raise RuntimeError("CUDA error: unspecified launch failure")
    return run(engine, batch)

Engine.run = run_or_fail
sys.argv = sys.argv[2:]
child.main()
"""


def test_an_engine_whose_device_fails_ends_and_the_next_engine_serves(toy, monkeypatch, tmp_path, caplog):
    """Without a GPU: its engine raises what torch raises for one. Takes seconds: two processes start."""
    runs_instead(monkeypatch, tmp_path, FAILS_ONCE.format(marker=tmp_path / "failed"))
    meter, backbone, asked = Meter(), Backbone(toy.folder), []
    client, lookup, acme = client_of(toy, meter), Lookup(backbone, b"secret"), backbone.view.snapshot.find("acme")

    def ask(*texts):
        (form,) = lookup.read([Reading(backbone.view, acme, texts, arrival_ns=time.monotonic_ns())], MOST_CHARACTERS)
        asked.append(SimpleQueue())
        client.submit([PendingTexts(form, "", 1, asked[-1].put, lambda: None)])
        return asked[-1]

    def word(answers):
        """Returns the word of an error, None for an answer."""
        answer = answers.get(timeout=PATIENCE)
        return None if isinstance(answer, dict) else error_in(answer[1]).word

    assert word(ask(WORDS[0])) == "crashed"
    eventually(lambda: word(ask(WORDS[0])) is None)
    waiting = [ask(*[" ".join(WORDS[:20])] * 5) for _ in range(30)]
    client.close()
    assert [word(answers) for answers in waiting] == [None] * 30 and all(answers.empty() for answers in asked)
    assert mentions(caplog.text, DEVICE_FAILED)
    assert meter.take()[0][names.ENGINE_RESTARTS, ()] == 1
