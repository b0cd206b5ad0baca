"""Follows a lone request through both models and the engine, and holds it against `docs/architecture.md`.

`pytest tests/test_way.py -s` prints the files that it passes, and how many calls of functions each of them has.
"""

import os
import re
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hplm.engine import encoder_client
from hplm.engine.encoder_client import EncoderClient
from hplm.engine.service import open_service
from hplm.process import driver
from hplm.process.channel import Channel
from hplm.process.host import Host
from hplm.process.worker import Workers
from testing.toy import WORDS
from tests.support.fake_triton import Request, model_of
from tests.support.wait import eventually

ROOT = Path(__file__).parents[1]
OURS = f"{ROOT}/hplm/", f"{ROOT}/backends/"
WARM = 20  # requests before the one that is followed
TRIES = 5  # requests that are followed, until nothing else happens beside one of them
NOW_AND_THEN = {"watch", "engine", "keep", "metrics"}  # threads that work once a second: the heartbeat, what is published
THREADS = {"MainThread", "compute 1"}  # Triton's own, and one of the engine
MOST_FILES, MOST_CALLS = 64, 600  # a change that needs more lengthens every request


class Followed:
    """Notes each call of a function of ours, whichever thread makes it."""

    def __init__(self):
        self.files = []  # of the calls, in order
        self.threads = set()
        self.on = False

    def __call__(self, frame, event, given):
        file, thread = frame.f_code.co_filename, threading.current_thread().name
        if self.on and event == "call" and thread not in NOW_AND_THEN and file.startswith(OURS):
            self.files.append(str(Path(file).relative_to(ROOT)))
            self.threads.add(thread)


@pytest.fixture
def followed():
    own = Followed()
    threading.setprofile(own)  # for threads that are started from now on
    sys.setprofile(own)
    yield own
    sys.setprofile(None)
    threading.setprofile(None)


@pytest.fixture
def engine_in_a_thread(monkeypatch):
    """Lets the engine run in this process, where it can be followed, however slowly."""

    def started(command, **given):
        descriptor, shown = (os.dup(int(one)) for one in command[-2:])

        def run():
            channel = Channel(descriptor)
            Host(channel, shown, open_service, exit=lambda code: None).run()  # it is this process, which goes on
            channel.shut()

        thread = threading.Thread(target=run, name="engine", daemon=True)
        thread.start()
        return SimpleNamespace(pid=os.getpid(), kill=lambda: None, wait=lambda *given: thread.join() or 0, poll=lambda: None)

    client = partial(EncoderClient, soon_s=60.0, workers=partial(Workers, popen=started))
    monkeypatch.setattr(encoder_client, "EncoderClient", client)
    monkeypatch.setattr(driver, "HELP_SECONDS", 600.0)


def engine_waits():
    frames = sys._current_frames()
    return any(one.name == "compute 1" and frames[one.ident].f_code.co_name == "_attend" for one in threading.enumerate())


def ask(lookup, upper):
    """Where the machine pauses meanwhile, an answer comes later, by the request's sender."""
    request = Request({"TEXT": WORDS[0]}, {"tenant": "acme", "outputs": "LABEL,SCORE"})
    (ticket,) = lookup.execute([request])
    ticket = ticket or request.next()
    signed = Request({}, {})
    signed.inputs["TICKET"] = SimpleNamespace(as_numpy=lambda: ticket["TICKET"])
    signed.requested_output_names = lambda: ["LABEL", "SCORE"]
    (answer,) = upper.execute([signed])
    answer = answer or signed.next()
    assert answer["LABEL"].size == answer["SCORE"].size == 1
    eventually(engine_waits)


def test_a_lone_request_goes_the_way_that_the_page_draws(toy, followed, engine_in_a_thread):
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8").partition("## The life of a request")[2].partition("## ")[0]
    drawn = [
        file for line in re.findall(r"^\| \d+\. .*$", page, re.MULTILINE) for file in re.findall(r"`(hplm/[\w/]+\.py)`", line)
    ]
    with (
        model_of(toy.repository, "toy-lookup", "hplm_lookup") as lookup,
        model_of(toy.repository, "toy-upper", "hplm_upper") as upper,
    ):
        for number in range(WARM + TRIES):
            followed.files, followed.threads, followed.on = [], set(), number >= WARM
            ask(lookup, upper)
            followed.on = False
            passed = [file for file in dict.fromkeys(followed.files) if file in drawn]
            if passed == drawn and followed.threads == THREADS:
                break
    files = Counter(followed.files)
    print(f"\n{len(files)} files, {files.total()} calls, by {', '.join(sorted(followed.threads))}")
    for file, calls in files.most_common():
        print(f"{calls:6d} {file}")
    assert passed == drawn
    assert len(files) <= MOST_FILES and files.total() <= MOST_CALLS
    assert followed.threads == THREADS
