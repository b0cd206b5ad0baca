"""A decoder's model in one process: whose clients it looks for."""

from contextlib import ExitStack

import pytest

from builder.store.store import TenantFile
from testing.toy import make_chat
from tests.support.configurations import DECODER
from tests.support.fake_triton import FINAL, Request, model_of
from tests.support.servers import server_environment
from tests.support.wait import eventually

MOST_WAITING = 20  # clients of waiting prompts that are looked for at once
LONG = 10_000  # tokens


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    repository = make_chat(tmp_path, [TenantFile("plain", 1, "root", 1, "generate", [], 0)], options=DECODER).repository
    with ExitStack() as stack:
        stack.enter_context(server_environment(monkeypatch))
        yield stack.enter_context(model_of(repository, "chat", "hplm_generate"))


class Looked(Request):
    """A stream that counts how often its client was looked for."""

    def __init__(self):
        super().__init__({"text_input": "ab", "stream": True}, {"tenant": "plain", "max_tokens": LONG, "ignore_eos": True})
        self.requested_output_names, self.looks, self.is_cancelled = lambda: ["text_output"], 0, self._look

    def _look(self):
        self.looks += 1
        return self.cancelled


def test_clients_of_growing_answers_are_looked_for_each_time_and_of_waiting_ones_in_turn(decoder):
    """To look is a round trip to the server process, and thousands may wait."""
    asked = [Looked() for _ in range(5 * MOST_WAITING)]
    decoder.execute(asked)
    eventually(lambda: all(one.looks >= 3 for one in asked))
    grows, waits = ([one.looks for one in asked if one.is_answered is answered] for answered in (True, False))
    assert len(waits) > 3 * MOST_WAITING and max(waits) - min(waits) <= 2 and max(grows) > 2 * max(waits), (waits, grows)
    for one in asked:
        one.cancelled = True
    eventually(lambda: all(FINAL in one.flags for one in asked))
