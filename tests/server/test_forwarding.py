"""Texts through the model `hplm` in one process: what is forwarded when, and what a probe sees."""

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from hplm.parameters import LONGEST_MS
from hplm.server.probing import PROBE
from testing.toy import WORDS
from tests.support.fake_triton import Request, Tensor, model_of
from tests.support.servers import server_environment
from tests.support.wait import Hold

LABEL = SimpleNamespace(has_error=lambda: False, output_tensors=lambda: [Tensor("LABEL", [[b"a"]])])


class Backbone:
    """Answers what is forwarded to it, while `hold` is open."""

    def __init__(self):
        self.hold, self.forwarded = Hold(), []

    def request(self, **given):
        def exec():
            self.forwarded.append(given)
            self.hold.pass_through()
            return LABEL

        return SimpleNamespace(exec=exec)


@pytest.fixture
def backbone():
    with (backbone := Backbone()).hold:
        yield backbone


@pytest.fixture
def alias(toy, monkeypatch, backbone):
    with ExitStack() as stack:
        stack.enter_context(server_environment(monkeypatch))
        model = stack.enter_context(model_of(toy.repository, "hplm", "hplm_alias", InferenceRequest=backbone.request))
        stack.callback(backbone.hold.open)
        yield model


def ask(alias, tenant="acme", timeout_us=0):
    request = Request({"TEXT": [WORDS[0]]}, {"tenant": tenant})
    request.timeout, request.requested_output_names = lambda: timeout_us, lambda: ["LABEL"]
    alias.execute([request])
    return request


def probe(alias):
    request = Request({}, {PROBE: True})
    alias.execute([request])
    return request.next()


@pytest.mark.parametrize("timeout_us", [2**63 - 1, 10**18 - 1, 1000 * LONGEST_MS])
def test_the_longest_timeouts_are_forwarded_and_requests_beside_them(alias, backbone, timeout_us):
    backbone.hold.open()
    assert all(isinstance(ask(alias, timeout_us=allowed).next(), dict) for allowed in (timeout_us, 0, timeout_us))
    assert [given["timeout"] for given in backbone.forwarded] == [1000 * LONGEST_MS, 0, 1000 * LONGEST_MS]


def test_a_probe_passes_through_the_queue(alias, monkeypatch):
    assert isinstance(probe(alias), dict)
    monkeypatch.setattr(alias._line, "add", lambda texts: {}[0])
    assert probe(alias).startswith("[internal]")


def test_one_tenants_slow_requests_leave_forwarders_to_others(alias, backbone):
    slow = [ask(alias, "acme") for _ in range(40)]
    for _ in range(16):
        backbone.hold.until_reached()
    quick = [ask(alias, tenant) for tenant in ("city", "beta")]
    for _ in quick:
        backbone.hold.until_reached()
    assert Counter(given["parameters"]["tenant"] for given in backbone.forwarded) == {"acme": 16, "city": 1, "beta": 1}
    backbone.hold.open()
    assert all(isinstance(request.next(), dict) for request in slow + quick)


def test_who_is_late_or_has_gone_while_it_waits_is_not_forwarded_and_outcomes_are_counted_but_of_probes(alias, backbone):
    counted = Counter()
    alias._meter = SimpleNamespace(add=lambda metric, amount, outcome: counted.update([outcome]))
    asked = [ask(alias) for _ in range(16 + 8)]
    for _ in range(16):
        backbone.hold.until_reached()
    assert ask(alias, timeout_us=300_000).next().startswith("[deadline]")  # while it has no place
    for one in asked[17:]:
        one.cancelled = True
    assert ask(alias, "nobody").next().startswith("[no_tenant]")
    probe(alias)
    backbone.hold.open()
    assert [isinstance(one.next(), dict) for one in asked] == [True] * 17 + [False] * 7
    assert len(backbone.forwarded) == 17 and counted == {"deadline": 1, "no_tenant": 1, "passed_on": 17}
