"""Prompts through the model `hplm` in one process: who is forwarded next, and who may cancel them."""

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from builder.store.store import TenantFile
from hplm.server.probing import PROBE
from hplm.tenants.arrival import CANCEL, PROMPT
from testing.toy import make_chat
from tests.support.configurations import DECODER
from tests.support.fake_triton import FINAL, Inputs, Request, Tensor, model_of
from tests.support.servers import server_environment
from tests.support.wait import Hold, eventually

AT_ONCE = 16  # prompts that the alias forwards
MOST_WAITING = 20  # clients of the decoder's waiting prompts that are looked for at once
TENANTS = [TenantFile(name, 1, "root", 1, "generate", [], 0) for name in ("plain", "other")]
LONG = 10_000  # tokens


def to(decoder, forwarded):
    """Returns the class of requests of one model to another. `forwarded` is called with the parameters of each prompt."""

    class Nested(Request):
        def __init__(self, request_id, model_name, inputs, requested_output_names, parameters, timeout):
            super().__init__({}, parameters)
            self.inputs, self.timeout = Inputs({one.name(): one for one in inputs}), lambda: timeout
            self.given = parameters

        def exec(self, decoupled):
            if "tenant" in self.given:
                forwarded(self.given)
            decoder.execute([self])
            tensors = [Tensor(name, values) for name, values in self.next().items()]
            yield SimpleNamespace(has_error=lambda: False, output_tensors=lambda: tensors)

    return Nested


class Alias:
    """Its prompts are held while `hold` is closed."""

    def __init__(self, decoder):
        self.model: Any = None
        self.decoder, self.prompts, self.hold = decoder, [], Hold()
        self.counted: Counter[str] = Counter()  # requests, by outcome

    def forwarded(self, parameters):
        self.prompts.append(parameters)
        self.hold.pass_through()

    def count(self, tenant):
        return sum(own["tenant"] == tenant for own in self.prompts)

    def ask(self, tenant, most, timeout_us=0):
        inputs = {"text_input": "ab", "return_finish_reason": True}
        request = Request(inputs, {"tenant": tenant, "max_tokens": most, "ignore_eos": True})
        request.timeout, request.requested_output_names = lambda: timeout_us, lambda: ["text_output", "finish_reason"]
        self.model.execute([request])
        return request


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    repository = make_chat(tmp_path_factory.mktemp("lanes"), TENANTS, options=DECODER).repository
    with ExitStack() as stack:
        stack.enter_context(server_environment(stack.enter_context(pytest.MonkeyPatch.context())))
        alias = Alias(stack.enter_context(model_of(repository, "chat", "hplm_generate")))
        nested = to(alias.decoder, alias.forwarded)
        alias.model = stack.enter_context(model_of(repository, "hplm", "hplm_alias", InferenceRequest=nested))
        alias.model._meter = SimpleNamespace(add=lambda metric, amount, outcome: alias.counted.update([outcome]))
        yield alias


@pytest.fixture
def alias(loaded):
    loaded.hold = Hold()
    loaded.prompts.clear()
    loaded.counted.clear()
    with loaded.hold:
        yield loaded


def test_tenants_take_turns_and_who_is_late_or_has_gone_is_not_forwarded(alias):
    flood = [alias.ask("plain", 2) for _ in range(AT_ONCE + 24)]
    for _ in range(AT_ONCE):
        alias.hold.until_reached()
    assert alias.ask("other", 2, timeout_us=300_000).next().startswith("[deadline]")  # while all places are taken
    other = alias.ask("other", 2)
    for _ in range(2):
        alias.hold.let_one_go()
        alias.hold.until_reached()
    assert alias.count("other") == 1
    for one in flood[AT_ONCE + 1 :]:
        one.cancelled = True
    alias.hold.open()
    assert isinstance(other.next(), dict)
    assert [isinstance(one.next(), dict) for one in flood] == [True] * (AT_ONCE + 1) + [False] * 23
    assert alias.count("plain") == AT_ONCE + 1
    assert alias.counted == {"deadline": 1, "passed_on": AT_ONCE + 2}


def test_a_refusal_of_the_alias_is_counted_by_its_reason_and_no_probe(alias):
    alias.ask("nobody", 2).next()
    probe = Request({}, {PROBE: True})
    alias.model.execute([probe])
    probe.next()
    assert alias.counted == {"no_tenant": 1}


def test_a_client_can_cancel_no_prompt_of_another(alias):
    """Not even if it knows the name."""
    alias.hold.open()
    running = alias.ask("plain", 500)
    alias.hold.until_reached()
    name = alias.prompts[0][PROMPT]
    for model in (alias.model, alias.decoder):
        forged = Request({"text_input": "ab"}, {"tenant": "other", "max_tokens": 1, CANCEL: name})
        forged.requested_output_names = lambda: ["text_output"]
        model.execute([forged])
        assert isinstance(forged.next(), dict)
    assert running.next()["finish_reason"].tolist() == [[b"length"]]


class Looked(Request):
    """A stream that counts how often its client was looked for."""

    def __init__(self):
        super().__init__({"text_input": "ab", "stream": True}, {"tenant": "plain", "max_tokens": LONG, "ignore_eos": True})
        self.requested_output_names, self.looks, self.is_cancelled = lambda: ["text_output"], 0, self._look

    def _look(self):
        self.looks += 1
        return self.cancelled


def test_clients_of_growing_answers_are_looked_for_each_time_and_of_waiting_ones_in_turn(alias):
    """To look is a round trip to the server process, and thousands may wait."""
    asked = [Looked() for _ in range(5 * MOST_WAITING)]
    alias.decoder.execute(asked)
    eventually(lambda: all(one.looks >= 3 for one in asked))
    grows, waits = ([one.looks for one in asked if one.is_answered is answered] for answered in (True, False))
    assert len(waits) > 3 * MOST_WAITING and max(waits) - min(waits) <= 2 and max(grows) > 2 * max(waits), (waits, grows)
    for one in asked:
        one.cancelled = True
    eventually(lambda: all(FINAL in one.flags for one in asked))
